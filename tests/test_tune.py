"""The search for tiles: that its classes hold what stands for them, what it takes for a gain, and what it writes."""

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxpaged.pallas import tuned_file
from jaxpaged.pallas.tuning import CallShape, DecodeTiles, Rule, ShapeClass, gpu_of

pytest.importorskip("torch")

import tune
import tune_classes
import tune_search

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TABLE, H200 = tuned_file.packaged(), "NVIDIA H200"
NEW = DecodeTiles(64, 1, 5, 7)


def test_cases_lie_in_their_classes():
    classes = tune_classes.CLASSES
    assert len({tuned.name for tuned in classes}) == len(classes)
    for tuned in classes:
        shapes = [tune_classes.call_shape(tuned.kernel, case) for case in tuned.cases]
        assert all(tuned.when.holds(shape) for shape in shapes), (tuned.name, shapes)
        for other in classes:
            if other is not tuned and other.kernel == tuned.kernel:
                assert not any(other.when.holds(shape) for shape in shapes), (tuned.name, other.name)


def test_candidates_can_be_compiled_for():
    for tuned in tune_classes.CLASSES:
        tiles = tune_classes.tiles_of(gpu_of(), tuned.kernel, tuned.cases[0])
        candidates = [c for attribute in tuned.attributes for c in tuned.candidates(tiles, attribute)]
        assert len(set(candidates)) == len(candidates) > 5
        for candidate in candidates:
            gpu = tune_classes.with_tiles(gpu_of(), tuned.kernel, candidate)
            for case in tuned.cases:
                assert tune_classes.kernel_shape(gpu, tuned.kernel, case).stages >= 2


def found(cost, minutes=1.0):
    """What a search from the last rule finds where the time of tiles is `cost(tiles)`, or None where they are wrong."""
    gpu = dataclasses.replace(gpu_of(), decode=gpu_of().decode[-1:])
    tuned = next(t for t in tune_classes.CLASSES if t.name == "decode: 33 to 64 requests")

    def times(candidates):
        costs = {tiles: cost(tiles) for tiles in candidates}
        right = {tiles: (us,) * len(tuned.cases) for tiles, us in costs.items() if us is not None}
        return right, [f"{tiles} is wrong" for tiles, us in costs.items() if us is None]

    return tune_search.search(tuned, gpu, times, time.monotonic() + 60 * minutes, lambda line: None)


def test_the_search_keeps_what_is_fastest():
    result = found(lambda t: 100 - 10 * (t.fewest_tiles == 2) + 5 * t.ctas_per_sm + (t.tile == 64))
    assert result.best == DecodeTiles(64, 1, 6, 2)
    assert result.gain == pytest.approx(111 / 96) and result.finished and not result.notes


def test_noise_is_no_gain():
    result = found(lambda t: 100 - (t.fewest_tiles == 2))
    assert result.best == result.before == TABLE.gpu(None).decode[-1].use
    times = iter([100, *[50] * 3, 100, *[100] * 100])  # what was fast once, and then no more
    assert found(lambda t: next(times)).best == result.before


def test_what_is_wrong_is_not_taken():
    result = found(lambda t: 50.0 if t.ctas_per_sm == 2 else None)
    assert result.best == result.before and len(result.notes) >= 1


def test_nothing_is_begun_after_the_deadline():
    result = found(lambda t: 100.0, minutes=0.0)
    assert (result.tried, result.finished, result.gain) == (0, False, 1.0)


def merged(table, kind, when, tiles=NEW):
    gpu = dataclasses.replace(table.gpu(kind), num_sms=99)
    table = tune.merged(table, gpu, "decode", when, tiles)
    assert tuned_file.parse(tuned_file.text_of(table)) == table
    return table


def test_what_is_found_comes_first():
    few, many = ShapeClass(num_reqs=(1, 2)), ShapeClass(num_reqs=(9, None))
    table = merged(TABLE, H200, many)
    assert table.gpus[H200].decode == (Rule(many, NEW), *TABLE.gpus[H200].decode)
    assert table.gpus[H200].num_sms == 132
    assert table.gpus["NVIDIA H20"].decode == table.gpus[H200].decode  # it is like that one
    table = merged(table, H200, few)
    newer = dataclasses.replace(NEW, most_stages=3)
    table = merged(table, H200, many, newer)
    assert table.gpus[H200].decode[:2] == (Rule(many, newer), Rule(few, NEW))
    assert len(table.gpus[H200].decode) == len(TABLE.gpus[H200].decode) + 2


def test_another_gpu_gets_its_own_rules():
    when = ShapeClass(rows=(9, None))
    for kind, num_sms in (("NVIDIA H20", 78), ("NVIDIA H300", 99)):
        table = merged(TABLE, kind, when)
        assert table.gpus[H200] == TABLE.gpus[H200] and kind not in table.like
        assert table.gpus[kind].num_sms == num_sms
        assert table.gpu(kind).decode_tiles(CallShape(16, 128, 9, 5)) == NEW
        assert table.gpu(kind).prefill == TABLE.gpus[H200].prefill


def test_smoke(tmp_path):
    path = tmp_path / "tuned.json"
    command = [sys.executable, str(BENCHMARKS / "tune.py"), "--smoke", "--write", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent), "COLUMNS": "150"}
    done = subprocess.run(command, env=environment, timeout=300, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "decode: 1 request" in done.stdout and "prefill: 4096 rows and more" in done.stdout
    assert tuned_file.load(path).gpus[H200] == TABLE.gpus[H200]
