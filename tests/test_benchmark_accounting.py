"""What the GPU benchmark counts: operations, bytes, and the records of a profiler."""

import dataclasses
import sys

import attention_cases as cases
import attention_results as results
import attention_table as table
import gpu_timing as timing
import layer_times as layers
import numpy as np
import pages
import pytest
from ceilings import Ceilings


def brute_force(case):
    """Pairs that are attended to, and tokens of the cache that some query attends to."""
    pairs, tokens = 0, set()
    left, right = case.window or (None, None)
    for request, (query_len, seq_len) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        for position in range(seq_len - query_len, seq_len):
            for kv in range(seq_len):
                if case.causal and kv > position:
                    continue
                if (left is not None and position - kv > left) or (right is not None and kv - position > right):
                    continue
                pairs += 1
                tokens.add((0 if kv < case.shared_prefix else request + 1, kv))
    return pairs, len(tokens)


SMALL = [
    cases.Case("decode", (1, 1, 1), (7, 1, 12)),
    cases.Case("several", (3, 3), (9, 17)),
    cases.Case("prefill", (5, 8), (5, 8)),
    cases.Case("full", (5, 8), (5, 11), causal=False),
    cases.Case("window", (2, 6, 1), (9, 6, 3), window=(3, 0)),
    cases.Case("both sides", (4, 2), (9, 4), window=(2, 1), causal=False),
    cases.Case("right side alone", (4,), (9,), window=(None, 2), causal=False),
    cases.Case("prefix", (1, 2, 1), (8, 9, 6), shared_prefix=4),
    cases.Case("prefix outside a window", (1, 1), (9, 8), shared_prefix=4, window=(5, 0)),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_operations_and_tokens(case):
    pairs, tokens = brute_force(case)
    assert cases.operations(case) == 4 * pairs * case.num_heads * case.head_size
    assert cases.tokens_read(case) == tokens
    assert cases.bytes_read(case) == 2 * tokens * case.num_kv_heads * case.head_size * 2


def test_bytes_of_8_bit_caches():
    case = SMALL[0]
    size = case.num_kv_heads * cases.tokens_read(case) * 2
    assert cases.bytes_read(dataclasses.replace(case, cache="float8_e4m3fn")) == size * 128
    assert cases.bytes_read(dataclasses.replace(case, cache="int8")) == size * (128 + 4)


def test_cases():
    names = [case.name for case in cases.CASES]
    assert len(set(names)) == len(names)
    lens = cases.lognormal_lens()
    assert (len(lens), sum(lens), max(lens)) == (64, 175932, 8192)
    for case in cases.CASES:
        assert len(case.query_lens) == len(case.seq_lens)
        assert case.targets and case.num_heads % case.num_kv_heads == 0
        for target in case.targets:
            assert target.against in (*names, cases.FLASH, cases.TRITON, cases.READS, cases.PLAN)
        for some in (case, case.tiny()):
            assert all(1 <= q <= s for q, s in zip(some.query_lens, some.seq_lens, strict=True))
            assert some.shared_prefix % some.block_size == 0 and some.shared_prefix <= min(some.seq_lens)
    new, lens = cases.half_decode_lens()
    assert (len(new), new.count(1), sum(new)) == (64, 32, 8192)
    contexts = [length - n for n, length in zip(new[32:], lens[32:], strict=True)]
    assert (len(set(contexts)), min(contexts), max(contexts)) == (32, 0, 2048)
    plain = cases.CASES[0]
    assert cases.memory_bound(plain) and cases.bytes_read(plain) == 64 * 4096 * 8 * 128 * 2 * 2


def record(name, start, duration):
    return timing.Record(name, start, duration)


def test_cut_takes_what_lies_between_the_markers():
    records = [
        record("flush", 0, 5),
        record("begin", 6, 1),
        record("a", 10, 4),
        record("b", 15, 2),
        record("end", 20, 1),
        record("flush", 25, 5),
        record("begin", 31, 1),
        record("end", 40, 1),
        record("late", 50, 1),
    ]
    rng = np.random.default_rng(0)
    parts = timing.cut([records[i] for i in rng.permutation(len(records))], ("begin", "end"))
    assert [[r.name for r in part] for part in parts] == [["a", "b"], []]


def test_time_of_overlapping_kernels_counts_once():
    assert timing.busy_ns([record("a", 0, 10), record("b", 5, 10), record("c", 6, 2), record("d", 20, 1)]) == 16
    parts = [[record("a", 0, 1000), record("b", 3000, 2000)], [record("a", 0, 3000), record("b", 3000, 2000)]]
    summary = timing.summarize("call", parts)
    assert (summary.microseconds, summary.span_microseconds, summary.launches) == (4, 5, 2)
    assert summary.kernels == {"a": 2, "b": 2} and summary.counts == {"a": 1, "b": 1}
    assert summary.spread == pytest.approx(5 / 3)
    with pytest.raises(RuntimeError, match="launched nothing"):
        timing.summarize("call", [parts[0], []])


def program(*kernels):
    """A Timing of kernels that run one after the other, given by name and microseconds."""
    records, start = [], 0
    for name, duration in kernels:
        records.append(record(name, start, 1000 * duration))
        start += 1000 * duration
    return timing.summarize("program", [records])


def test_time_of_a_layer_and_of_the_plan():
    plan, layer = [("sort", 3), ("sum", 2)], [("paged_prefill", 50), ("paged_decode", 5)]
    one, two = program(*plan, *layer), program(*plan, *layer, *layer)
    assert layers.layer_time(one, two) == layers.LayerTime(55, 5)


def test_a_plan_that_is_not_shared_is_told():
    plan, layer = [("sort", 3), ("sum", 2)], [("paged_decode", 50)]
    split = layers.layer_time(program(*plan, *layer), program(*plan, *layer, *plan, *layer))
    assert (split.layer, split.plan) == (55, 0)
    assert split.notes == ("plan not wholly shared: a second layer adds 3 kernels, 1 of attention",)


def test_layers_that_run_at_once_are_told():
    one = program(("paged_decode", 50))
    two = timing.summarize("two", [[record("paged_decode", 0, 50e3), record("paged_decode", 40e3, 50e3)]])
    split = layers.layer_time(one, two)
    assert split.layer == 40 and "at once for 10.0 us" in split.notes[0]


def test_targets_are_of_the_layer_and_the_plan():
    decode, planned = cases.CASES[0], next(case for case in cases.CASES if case.targets[0].against == cases.PLAN)
    ours = results.Result(microseconds=100.0, first_microseconds=350.0, plan_microseconds=250.0)
    flash = results.Result(microseconds=106.0, prepare_microseconds=3.0)
    rows = [results.Row(case.name, {"jaxpaged": ours, cases.FLASH: flash}, 1.0) for case in (decode, planned)]
    report = results.Report({"date": "2026-01-01"}, rows=rows)
    assert table.reached(cases.Target(1.05, cases.FLASH), decode, report)
    assert not table.reached(cases.Target(1.07, cases.FLASH), decode, report)
    assert table.reached(planned.targets[0], planned, report)
    assert results.from_json(results.as_json(report, ["python"])).rows == rows
    text = table.markdown(table.render(report), report, [table.Source(report, 2, ["python", "x.py"])])
    assert "- 2026-01-01, 2 cases: `python x.py`" in text
    assert "| decode 64x4096 | 100.0 | 250.0 | 350.0 |" in text
    assert "Plan of mixed 64 requests, 8192 new: 250.0 µs of the device and 0 of the host" in text


def test_runs_are_joined_if_they_are_of_one_machine():
    def run(case, **machine):
        rows = [results.Row(case, {"jaxpaged": results.Result(microseconds=1.0)}, 1.0)]
        left_out = [results.not_measured(other) for other in "abc" if other != case]
        return results.Report(machine, None, rows, ["slow", *left_out])

    whole = results.joined([run("a", GPU="H200", date="1"), run("b", GPU="H200", date="2")])
    assert [row.case for row in whole.rows] == ["a", "b"]
    assert whole.machine == {"GPU": "H200", "date": "1"} and whole.notes == ["slow", "c: not measured"]
    assert results.joined([run("a", ejkernel="none"), run("b", ejkernel="1")]).machine == {"ejkernel": "none"}
    with pytest.raises(ValueError, match="other GPU"):
        results.joined([run("a", GPU="H200"), run("b", GPU="H100")])
    double = run("a")
    double.rows *= 2
    with pytest.raises(ValueError, match="twice: a"):
        results.joined([run("b"), double])


def test_cases_that_are_measured_anew_take_the_place_of_older_ones():
    def run(command, *names):
        rows = [results.Row(name, {"jaxpaged": results.Result(microseconds=len(command))}, 1.0) for name in names]
        return results.as_json(results.Report({}, None, rows), [command])

    runs = results.renewed([run("second", "a", "b"), run("first", "c")], run("newest", "b", "c"))
    assert [(x["command"], [row["case"] for row in x["rows"]]) for x in runs] == [
        (["newest"], ["b", "c"]),
        (["second"], ["a", "b"]),
    ]
    whole = results.joined([results.from_json(x) for x in runs])
    times = {row.case: row.results["jaxpaged"].microseconds for row in whole.rows}
    assert times == {"a": len("second"), "b": len("newest"), "c": len("newest")}


def test_a_case_is_compared_with_its_own_run():
    plain = cases.CASES[0]
    (reads, _), narrow = plain.targets, next(case for case in cases.CASES if case.cache == "float8_e4m3fn")
    (faster,) = narrow.targets

    def run(read, **times):
        rows = [results.Row(name, {"jaxpaged": results.Result(microseconds=t)}, 1.0) for name, t in times.items()]
        return results.Report({"date": "1"}, Ceilings(read, 4.0, 800.0, "sum"), rows)

    at_4 = cases.bytes_read(plain) / 4e6
    older = run(4.0, **{plain.name: at_4, narrow.name: 1.05 * at_4 / faster.ratio})
    newer = run(8.0, **{plain.name: 2 * at_4})
    whole = results.joined([newer, older])
    assert not table.reached(faster, narrow, whole)  # twice the time of the newer run would be enough
    assert table.reached(reads, plain, older) and not table.reached(reads, plain, whole)
    plainly, narrowly = table.render(whole).cells
    assert "25.0%" in plainly[4] and "%" in narrowly[4]
    assert not [note for note in table.render(whole).notes if "another run" in note]
    apart = results.joined([newer, run(4.0, **{narrow.name: at_4})])
    assert f"{narrow.name} is set against {plain.name} of another run" in table.render(apart).notes


def test_a_page_tells_no_places_of_files(monkeypatch):
    given = ["/x/sanitize.py", "all", "--logs", "/x/logs", "--write", "--json", "/x.json", "--only", "^a"]
    monkeypatch.setattr(sys, "argv", given)
    assert pages.command_of() == ["python", "benchmarks/sanitize.py", "all", "--write", "--only", "^a"]
