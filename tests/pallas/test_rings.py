"""Rings of tiles in shared memory that go around several times: all is read before TMA writes there anew."""

import dataclasses

import pytest

from jaxpaged.pallas.tuning import DecodeTiles, Rule, ShapeClass, gpu_of, tuned_for
from jaxpaged.testing.cases import Case
from tests.pallas.agreement import check

FEW = dataclasses.replace(gpu_of(), num_sms=2)
"""With few multiprocessors, CTAs have many tiles."""
QUANTIZED = {"num_heads": 8, "num_kv_heads": 8, "dtype": "bfloat16"}
CASES = [
    Case("decode", (1, 1), (600, 1)),
    Case("int8", (1,), (600,), cache_dtype="int8", scales="token_head", **QUANTIZED),
    Case("float8", (1,), (600,), cache_dtype="float8_e4m3fn", scales="head", **QUANTIZED),
]


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decode(kernels, case, stages):
    with tuned_for(dataclasses.replace(FEW, decode=(Rule(ShapeClass(), DecodeTiles(64, 2, stages, 4)),))):
        check(case)


def test_decode_of_large_tiles(kernels):
    with tuned_for(dataclasses.replace(FEW, decode=(Rule(ShapeClass(), DecodeTiles(128, 1, 2, 1)),))):
        for case in CASES:
            check(case)


def test_prefill(kernels):
    with tuned_for(FEW):
        check(Case("prefill", (140,), (700,), num_heads=2, num_kv_heads=1))
