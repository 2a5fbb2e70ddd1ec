"""Decode with tiles that several kv heads share."""

import dataclasses
from typing import Any

import pytest

from jaxpaged.pallas.decode_shape import DecodeShape
from jaxpaged.pallas.mosaic import interpreter
from jaxpaged.pallas.tuning import DecodeTiles, Rule, ShapeClass, gpu_of, tuned_for
from jaxpaged.testing.cases import Case
from tests.pallas.agreement import check

FEW, FEWER = (dataclasses.replace(gpu_of(), num_sms=n) for n in (4, 2))
"""With few multiprocessors, CTAs have many tiles and parts of several requests; the fewer are for the interpreter."""
SIZES: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 8, "dtype": "bfloat16"}
FEWER_HEADS: dict[str, Any] = SIZES | {"num_heads": 8, "num_kv_heads": 4}
"""Of which two groups share tiles two by two: enough for the interpreter."""
CASES = [
    Case("fewer positions than a tile", (1, 1, 0, 1, 1), (7, 17, 0, 33, 1)),
    Case("parts of requests", (1, 1, 1), (600, 1, 300)),
    Case("new tokens", (2, 1, 2), (300, 66, 90)),
    Case("heads of 96", (1, 1), (300, 66), head_size=96),
    Case("heads of two sizes", (1, 1), (200, 66), head_size=64, v_head_size=128),
    Case("blocks of 8", (1, 1), (100, 33), block_size=8),
    Case("blocks of 32", (1, 1), (100, 33), block_size=32),
    Case("window", (1, 1), (300, 100), options=(("window", (49, 0)), ("sinks", None))),
    Case("slopes and a cap", (1, 1, 2), (300, 100, 20), options=(("alibi", None), ("soft_cap", 3.0))),
    Case("blocks out of range", (1, 1, 1), (100, 300, 90), bad_blocks=True, options=(("alibi", None),)),
    Case("float8", (1, 1), (70, 9), cache_dtype="float8_e4m3fn", scales="tensor"),
    Case("float8 of 128", (1, 1), (100, 9), cache_dtype="float8_e5m2", scales="tensor", head_size=128, bad_blocks=True),
    Case("int8", (2, 1), (70, 9), cache_dtype="int8", scales="tensor", options=(("window", (29, 0)), ("sinks", None))),
    Case("int8 with scales by head", (1, 1), (70, 9), cache_dtype="int8", scales="head"),
    Case("int8 with scales by token", (1, 1), (150, 9), cache_dtype="int8", scales="token_head", block_size=16),
    Case(
        "int8 with scales by token, blocks of 64",
        (2, 1),
        (150, 9),
        cache_dtype="int8",
        scales="token_head",
        block_size=64,
    ),
    Case("HND", (1, 1), (150, 66), layout="HND"),
    Case("HN2D", (1, 1), (150, 66), layout="HN2D"),
    Case("a group of 3", (1, 1), (150, 66), num_heads=24, num_kv_heads=8),
]


INTERPRETED = {"fewer positions than a tile", "parts of requests", "new tokens", "heads of 96", "float8 of 128"}
"""With more heads than two; they are compiled with all."""


@pytest.mark.parametrize("heads", [2, 4, 8])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_are_the_definitions(kernels: None, decoded: list[DecodeShape], case: Case, heads: int) -> None:
    if interpreter() is not None and heads > 2 and case.name not in INTERPRETED:
        pytest.skip("interpreted with two heads alone, for the time that it takes")
    sizes = SIZES if interpreter() is None or heads > 2 else FEWER_HEADS
    case = dataclasses.replace(case, **{k: v for k, v in sizes.items() if k == "dtype" or case.num_heads != 24})
    gpu = FEW if interpreter() is None else FEWER
    with tuned_for(dataclasses.replace(gpu, decode=(Rule(ShapeClass(), DecodeTiles(64, 2, 6, 1, 1, heads)),))):
        check(case)
    rows = case.num_heads // case.num_kv_heads * max(case.query_lens)
    expected = 1 if case.scales == "head" else min(heads, next(n for n in (8, 4, 2) if n * rows <= 16))
    assert {(shape.heads, shape.tile * shape.heads) for shape in decoded} == {(expected, 64)}
