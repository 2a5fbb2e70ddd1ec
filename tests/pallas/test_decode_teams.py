"""Decode by several warpgroups of a CTA, whose states are merged."""

import dataclasses
from typing import Any

import pytest

from jaxpaged.pallas.decode_shape import DecodeShape
from jaxpaged.pallas.mosaic import interpreter
from jaxpaged.pallas.tuning import DecodeTiles, Rule, ShapeClass, gpu_of, tuned_for
from jaxpaged.testing.cases import Case
from tests.pallas.agreement import check

FEW = dataclasses.replace(gpu_of(), num_sms=2)
"""With few multiprocessors, CTAs have many tiles and parts of several requests."""
HALF: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "dtype": "bfloat16"}
CASES = [
    Case("fewer tiles than warpgroups", (1, 1, 0, 1, 1), (60, 65, 0, 130, 1)),
    Case("parts of requests", (1, 1, 1), (600, 1, 900)),
    Case("new tokens", (4, 2, 4), (500, 66, 300)),
    Case("window", (1, 1), (500, 300), options=(("window", (99, 0)), ("sinks", None))),
    Case("blocks out of range", (1, 1, 1), (500, 300, 90), bad_blocks=True, options=(("alibi", None),)),
    Case("int8", (1, 1), (600, 70), cache_dtype="int8", scales="token_head", num_heads=8, num_kv_heads=8),
    Case("float8", (1, 1, 1), (600, 70, 9), cache_dtype="float8_e4m3fn", scales="head", bad_blocks=True),
    Case("float8 of 128", (1, 2), (400, 70), cache_dtype="float8_e5m2", scales="tensor", head_size=128),
]


INTERPRETED = {"parts of requests", "new tokens", "float8 of 128"}
"""With two warpgroups, too; they are compiled with all."""


@pytest.mark.parametrize("warpgroups", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_are_the_definitions(kernels: None, decoded: list[DecodeShape], case: Case, warpgroups: int) -> None:
    if interpreter() is not None and warpgroups < 3 and case.name not in INTERPRETED:
        pytest.skip("interpreted with three warpgroups alone, for the time that it takes")
    case = dataclasses.replace(case, **{k: v for k, v in HALF.items() if k == "dtype" or case.num_kv_heads == 2})
    tiles = DecodeTiles(64, 1, 6, 1, warpgroups)
    with tuned_for(dataclasses.replace(FEW, decode=(Rule(ShapeClass(), tiles),))):
        check(case)
    assert {(shape.warpgroups, shape.stages) for shape in decoded} == {(warpgroups, 6)}


SHARED = [
    Case("parts of requests", (1, 1, 1), (600, 1, 300)),
    Case("window", (1, 1), (300, 100), options=(("window", (49, 0)), ("sinks", None))),
    Case("slopes and a cap", (1, 0, 1), (300, 0, 20), options=(("alibi", None), ("soft_cap", 3.0))),
    Case("blocks out of range", (1, 1, 1), (100, 300, 90), bad_blocks=True),
    Case("blocks of 8", (1, 1), (100, 33), block_size=8),
]


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.name)
def test_heads_share_tiles_that_warpgroups_take_in_turn(kernels: None, decoded: list[DecodeShape], case: Case) -> None:
    case = dataclasses.replace(case, num_heads=16, num_kv_heads=4, head_size=128, dtype="bfloat16")
    with tuned_for(dataclasses.replace(FEW, decode=(Rule(ShapeClass(), DecodeTiles(64, 1, 6, 1, 3, 4)),))):
        check(case)
    assert {(shape.warpgroups, shape.stages, shape.heads, shape.rows) for shape in decoded} == {(3, 3, 4, 16)}
