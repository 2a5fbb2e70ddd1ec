"""The JAX engine: that it says what others say, leaks no block, and compiles nothing once it is warm."""

import sysconfig
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpaged.demo.config import DemoConfig
from jaxpaged.demo.jax_engine import Engine, StepSizes, dense_choices
from jaxpaged.demo.jax_model import load_jax_model
from jaxpaged.demo.sampling import choose_tokens, guess_by_lookup
from jaxpaged.demo.scheduler import Request, Status
from jaxpaged.demo.text import encode
from jaxpaged.testing.compilations import compilations

STEPS = 1000
SIZES = {"num_blocks": 40, "block_size": 8, "max_step_tokens": 32, "max_requests": 8, "num_guesses": 3}
PREFIXES = ("import os\nimport sys\n\n\n", "class Stack:\n    def __init__(self):\n", "")


@pytest.fixture(scope="module")
def model():
    return load_jax_model()


def copy_of(request: Request) -> Request:
    """The request as it came."""
    asked = ("name", "prompt", "max_new_tokens", "stop_token", "temperature", "seed")
    return Request(**{name: getattr(request, name) for name in asked})


def alone(model: tuple[DemoConfig, dict], request: Request) -> list[int]:
    """What an engine of its own generates for a request."""
    engine, request = Engine(*model, **SIZES), copy_of(request)
    engine.add(request)
    for _ in engine.run():
        pass
    return request.generated


class Trace:
    """Requests that come, fork and are cancelled at random, in an engine too small for all of them."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.rng = np.random.default_rng(0)
        self.source = Path(sysconfig.get_paths()["stdlib"], "textwrap.py").read_text()
        self.seen: Counter[str] = Counter()
        self.finished: list[Request] = []
        self.requests = 0

    def new_request(self, prompt: list[int]) -> Request:
        self.requests += 1
        drawn = float(self.rng.choice([0.0, 0.0, 0.7, 1.2]))
        new = int(self.rng.integers(1, 50))
        return Request(str(self.requests), prompt, new, stop_token=0, temperature=drawn, seed=self.requests)

    def events(self) -> None:
        scheduler = self.engine.scheduler
        if len(scheduler.waiting) < 4 and self.rng.random() < 0.25:
            begin = int(self.rng.integers(len(self.source) - 100))
            text = str(self.rng.choice(PREFIXES)) + self.source[begin : begin + int(self.rng.integers(1, 60))]
            self.engine.add(self.new_request(encode(text)))
            self.seen["arrivals"] += 1
        if scheduler.running and self.rng.random() < 0.05:
            parent = scheduler.running[self.rng.integers(len(scheduler.running))]
            self.engine.fork(parent, self.new_request(list(parent.tokens)))
            self.seen["forks"] += 1
        if scheduler.busy and self.rng.random() < 0.04:
            everyone = scheduler.running + scheduler.waiting
            self.engine.cancel(everyone[self.rng.integers(len(everyone))])
            self.seen["cancellations"] += 1

    def step(self) -> None:
        self.events()
        running = {r.name: r.num_preemptions for r in self.engine.scheduler.running}
        result = self.engine.step()
        self.finished += result.finished
        self.seen["copies"] += len(self.engine.scheduler.copies)
        self.seen["preemptions"] += sum(r.name in running for r in self.engine.scheduler.waiting)
        for part in result.parts:
            kept = len(result.new_tokens.get(part.request.name, [])) - 1
            self.seen["guesses kept"] += max(0, kept)
            self.seen["guesses rejected"] += max(0, len(part.draft) - kept)
        if {min(len(p.tokens), 2) for p in result.parts} == {1, 2}:
            self.seen["mixed"] += 1
        self.check_owners()

    def check_owners(self) -> None:
        """Every block has as many owners as the pool counts."""
        scheduler = self.engine.scheduler
        owners = Counter(block for request in scheduler.running for block in request.blocks)
        owners.update(scheduler.prefixes._blocks)
        assert {b: scheduler.pool.ref_count(b) for b in range(SIZES["num_blocks"])} == {
            b: owners[b] for b in range(SIZES["num_blocks"])
        }


def test_a_long_trace_leaks_nothing_compiles_nothing_and_says_what_each_request_says_alone(model):
    engine = Engine(*model, **SIZES)
    with compilations() as warm_up:
        engine.warm_up()
    assert warm_up.count <= 3
    trace = Trace(engine)
    with compilations() as after:
        for _ in range(STEPS):
            trace.step()
    assert after.count == 0
    rare = {name: trace.seen[name] for name in trace.seen if trace.seen[name] < 10}
    assert rare == {}, trace.seen
    assert len(trace.seen) == 8
    for request in list(engine.scheduler.running) + engine.scheduler.waiting:
        engine.cancel(request)
    engine.scheduler.prefixes.evict(SIZES["num_blocks"])
    assert engine.scheduler.pool.num_used == 0
    assert len(trace.finished) > 50
    assert {r.status for r in trace.finished} == {Status.FINISHED}
    for request in trace.finished:
        assert request.generated == alone(model, request), request.name


def test_tokens_equal_those_of_the_torch_engine(model):
    torch_engine = pytest.importorskip("jaxpaged.demo.engine")
    from jaxpaged.demo.model import load_demo_model

    texts = ["def read_lines(path):\n", "class Stack:\n    def __init__(self", "import os\n\n\ndef main(argv=None):\n"]
    told = []
    for engine in (torch_engine.Engine(load_demo_model()), Engine(*model)):
        requests = [Request(str(i), encode(text), 48, arrival=i, stop_token=0) for i, text in enumerate(texts)]
        for request in requests:
            engine.add(request)
        assert sum(len(step.parts) for step in engine.run()) > 0
        told.append([request.generated for request in requests])
    assert told[0] == told[1]
    assert [len(generated) for generated in told[0]] == [48] * 3


@pytest.mark.parametrize("num_guesses", [0, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_guesses_change_no_token(model, num_guesses, temperature):
    engine = Engine(*model, **{**SIZES, "num_guesses": num_guesses})
    request = Request(
        "a", encode("def add(a, b):\n    return a + b\n\n\ndef add("), 40, temperature=temperature, seed=5
    )
    engine.add(request)
    steps = list(engine.run())
    assert request.generated == dense_choices(*model, request)
    decodes = [step for step in steps if step.new_tokens]
    assert len(decodes) == 40 if num_guesses == 0 else len(decodes) < 40


def test_a_fork_shares_blocks_until_it_writes(model):
    engine = Engine(*model, **SIZES)
    parent = Request("parent", encode("class Stack:\n    def push(self, item):\n    "), 20)
    engine.add(parent)
    while not parent.generated:
        engine.step()
    child = Request("child", list(parent.tokens), 8, temperature=1.0, seed=3)
    engine.fork(parent, child)
    assert child.blocks == parent.blocks
    assert child.num_computed % SIZES["block_size"] != 0
    last = parent.blocks[parent.num_computed // SIZES["block_size"]]
    engine.step()
    assert [source for source, _ in engine.scheduler.copies] == [last]
    assert child.blocks[:-1] == parent.blocks[: len(child.blocks) - 1]
    for _ in engine.run():
        pass
    assert (parent.generated, child.generated) == (alone(model, parent), alone(model, child))


def test_a_missing_copy_would_be_noticed(model, monkeypatch):
    """The control of the comparisons above: a fork whose block isn't copied says something else."""
    inputs = StepSizes.inputs
    monkeypatch.setattr(StepSizes, "inputs", lambda self, parts, copies, **how: inputs(self, parts, [], **how))
    engine = Engine(*model, **SIZES)
    parent = Request("parent", encode("class Stack:\n    def push(self, item):\n    "), 20)
    engine.add(parent)
    while not parent.generated:
        engine.step()
    children = [Request(str(i), list(parent.tokens), 12, temperature=1.0, seed=i) for i in range(3)]
    for child in children:
        engine.fork(parent, child)
    for _ in engine.run():
        pass
    assert any(request.generated != dense_choices(*model, request) for request in [parent, *children])


def test_a_step_updates_the_cache_in_place(model):
    engine = Engine(*model, **SIZES)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(engine.cache)]
    engine.add(Request("a", encode("import"), 3))
    assert len(list(engine.run())) > 0
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(engine.cache)] == pointers


def test_what_can_never_fit_is_refused(model):
    engine = Engine(*model, **SIZES)
    with pytest.raises(ValueError, match="max_new_tokens: the model has 2048 positions, request 'a' wants 1 \\+ 2048"):
        engine.add(Request("a", [0], 2048))
    parent = Request("parent", encode("import"), 3)
    engine.add(parent)
    with pytest.raises(ValueError, match="child: expected the prompt to be the tokens of request 'parent'"):
        engine.fork(parent, Request("child", [1], 3))


def test_draws_follow_the_softmax():
    logits = np.log(np.array([[0.5, 0.3, 0.2]], np.float32)).repeat(20000, 0)
    seeds = np.arange(20000, dtype=np.uint32)
    ones, positions = np.ones(20000, np.float32), np.full(20000, 7, np.int32)
    drawn = np.bincount(choose_tokens(logits, ones, seeds, positions), minlength=3) / 20000
    np.testing.assert_allclose(drawn, [0.5, 0.3, 0.2], atol=0.012)
    cold = np.bincount(choose_tokens(logits, ones / 2, seeds, positions), minlength=3) / 20000
    np.testing.assert_allclose(cold, np.array([25, 9, 4]) / 38, atol=0.012)
    assert not choose_tokens(logits, ones * 0, seeds, positions).any()


def test_guesses_are_what_followed_last_time():
    assert guess_by_lookup([1, 2, 3, 4, 9, 2, 3, 5, 2, 3], 4) == [5, 2, 3]
    assert guess_by_lookup([1, 2, 3, 4, 5, 1, 2, 3], 2) == [4, 5]
    assert guess_by_lookup([1, 2, 3], 4) == []
