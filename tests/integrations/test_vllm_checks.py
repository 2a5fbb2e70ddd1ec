"""What the recorded runs of vLLM are judged by finds what is planted in them."""

import copy

import pytest
from vllm_checks import Way, faults
from vllm_environment import FAULT, NO_CONTEXT
from vllm_models import NUM_PROMPTS

ONE = Way("one", {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
SEVERAL = Way("two", {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, workers=2)
CONTROL = Way("control", {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", FAULT: NO_CONTEXT})


def runs(workers=1, own=1):
    """vLLM's run and ours, in process 1 and workers from process `own` on."""
    calls = {"layer.0": 9, "layer.1": 9}
    base = {"tokens": [[i, 1] for i in range(NUM_PROMPTS)], "embeddings": [[1.0, -2.0]], "pid": 1, "preemptions": 2}
    ours = copy.deepcopy(base)
    base["workers"] = [{"pid": 1, "calls": {}, "writes": {}}]
    ours["workers"] = [{"pid": own + i, "calls": calls, "writes": dict(calls)} for i in range(workers)]
    return base, ours


def test_runs_as_they_must_be():
    assert faults(ONE, "llama", *runs()) == []
    assert faults(SEVERAL, "llama", *runs(workers=2, own=5)) == []
    assert faults(ONE, "bert", *runs()) == []
    base, ours = runs()
    ours["tokens"] = [[7, 7]] * NUM_PROMPTS
    assert faults(CONTROL, "llama", base, ours) == []


PLANTED = {
    "only 19 of 20 answers": lambda base, ours: ours["tokens"][3].reverse(),
    "jaxpaged was called where": lambda base, ours: base["workers"][0]["calls"].update(x=1),
    "2 workers, expected 1": lambda base, ours: ours["workers"].append(ours["workers"][0]),
    "as many calls in each layer": lambda base, ours: ours["workers"][0]["calls"].update(x=1),
    "as many calls in each layer, got {}": lambda base, ours: ours["workers"][0]["calls"].clear(),
    "as many writes as calls": lambda base, ours: ours["workers"][0]["writes"].clear(),
    "wrong process": lambda base, ours: ours["workers"][0].update(pid=2),
    "nothing was preempted": lambda base, ours: ours.update(preemptions=0),
}


@pytest.mark.parametrize("sentence", PLANTED)
def test_what_is_planted_is_found(sentence):
    base, ours = runs()
    PLANTED[sentence](base, ours)
    assert any(sentence in fault for fault in faults(ONE, "llama", base, ours))


def test_other_things_that_are_found():
    assert any("in spite of the fault" in fault for fault in faults(CONTROL, "llama", *runs()))
    assert any("wrong process" in fault for fault in faults(SEVERAL, "llama", *runs(workers=2)))
    base, ours = runs()
    ours["embeddings"][0][1] = -2.001
    assert faults(ONE, "bert", base, ours) == ["embeddings are 5.0e-04 apart"]
