"""Rings of tiles in shared memory that go around several times: all is read before TMA writes there anew."""

import dataclasses

import pytest

from jaxpaged.attention import _mosaic_gpu
from jaxpaged.pallas import attention, config
from jaxpaged.testing.cases import Case
from jaxpaged.testing.doors import DOORS
from jaxpaged.testing.verify import compare

QUANTIZED = {"num_heads": 8, "num_kv_heads": 8, "dtype": "bfloat16"}
CASES = [
    Case("decode", (1, 1), (600, 1)),
    Case("int8", (1,), (600,), cache_dtype="int8", scales="token_head", **QUANTIZED),
    Case("float8", (1,), (600,), cache_dtype="float8_e4m3fn", scales="head", **QUANTIZED),
]


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decode(kernels, monkeypatch, case, stages):
    chosen = config.decode_config
    monkeypatch.setattr(config, "SM_COUNT", 2)
    monkeypatch.setattr(attention, "decode_config", lambda *a, **k: dataclasses.replace(chosen(*a, **k), stages=stages))
    _check(case)


def test_prefill(kernels, monkeypatch):
    monkeypatch.setattr(config, "SM_COUNT", 2)
    _check(Case("prefill", (140,), (700,), num_heads=2, num_kv_heads=1))


def _check(case):
    _mosaic_gpu.clear_cache()
    result = compare(case, "kernels", DOORS["kernels"])
    _mosaic_gpu.clear_cache()
    assert result.skipped is None
    assert result.ok, result
