"""Prefill on 8-bit caches, whose numbers a warpgroup widens."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache, PagedBatch, paged_attention
from jaxpaged.pallas import attention
from jaxpaged.pallas.prefill_shape import PrefillShape
from jaxpaged.pallas.tuning import gpu_of, tuned_for
from jaxpaged.testing.cases import Case
from jaxpaged.testing.doors import DOORS
from jaxpaged.testing.verify import compare
from tests.pallas.agreement import check

ONE = dataclasses.replace(gpu_of(), num_sms=1)
"""With one multiprocessor no tile is split, and the rings go around many times."""
HEADS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "dtype": "bfloat16"}
CASES = [
    Case("int8", (40, 150), (300, 150), cache_dtype="int8", scales="tensor", **HEADS),
    Case("int8-128", (150,), (400,), cache_dtype="int8", scales="head", head_size=128, **HEADS),
    Case("e4m3", (150, 1), (300, 40), cache_dtype="float8_e4m3fn", scales="head", bad_blocks=True, **HEADS),
    Case("e5m2", (150,), (300,), cache_dtype="float8_e5m2", extra_tokens=3, **HEADS),
    Case("float16", (60,), (300,), cache_dtype="float8_e4m3fn", **HEADS | {"dtype": "float16"}),
    Case("packed", (20, 9, 30), (200, 9, 300), cache_dtype="int8", scales="head", block_size=8, **HEADS),
    Case("window", (150,), (400,), cache_dtype="int8", scales="head", options=(("window", (99, 0)),), **HEADS),
    Case("soft-cap", (70,), (200,), cache_dtype="int8", scales="head", options=(("soft_cap", 5.0),), **HEADS),
    Case(
        "alibi-sinks",
        (70,),
        (200,),
        cache_dtype="float8_e4m3fn",
        scales="tensor",
        options=(("alibi", None), ("sinks", None)),
        **HEADS,
    ),
    Case("mixed", (1, 1, 1, 90, 1, 1, 1, 1), (9, 90, 200, 90, 1, 64, 65, 30), cache_dtype="float8_e4m3fn", **HEADS),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_are_the_definitions(kernels: None, prefilled: list[PrefillShape], case: Case) -> None:
    with tuned_for(ONE):
        check(case)
    assert {shape.cache_dtype for shape in prefilled} == {jnp.dtype(case.cache_dtype)}


def test_tiles_that_are_split(kernels: None, prefilled: list[PrefillShape]) -> None:
    with tuned_for(dataclasses.replace(ONE, num_sms=4)):
        case = Case("parts", (30,), (900,), cache_dtype="int8", scales="head", **HEADS | {"num_kv_heads": 1})
        result = compare(case, "kernels", DOORS["kernels"])
    assert result.ok, result
    assert [shape.in_parts for shape in prefilled] == [True]


@pytest.mark.parametrize(("k_scale", "v_scale"), [(-0.02, 0.5), (0.02, -0.5), (0.0, 1.0)])
def test_scales_of_any_sign(kernels: None, k_scale: float, v_scale: float) -> None:
    rng = np.random.default_rng(0)
    rows = [jnp.asarray(rng.integers(-128, 128, (8, 16, 1, 64)), "int8") for _ in range(2)]
    cache = KVCache.from_arrays(*rows, k_scale=jnp.float32(k_scale), v_scale=jnp.float32(v_scale))
    batch = PagedBatch.create([[3, 0, 7, 1, 6]], [70], query_lens=[20])
    query = jnp.asarray(rng.standard_normal((20, 2, 64)), jnp.bfloat16)
    with tuned_for(ONE):
        out, expected = (
            np.asarray(paged_attention(query, cache, batch, implementation=which), np.float32)
            for which in ("mosaic_gpu", "reference")
        )
    np.testing.assert_allclose(out, expected, atol=0.02 * np.abs(expected).max())


def test_what_prefill_does_not_take_goes_in_chunks() -> None:
    """Scales per token and head, and heads for which shared memory has no room."""

    def takes(head_size: int, scales: Any) -> bool:
        cache = jax.eval_shape(lambda: KVCache.zeros(4, 16, 2, head_size, "int8", scales=scales))
        query = jax.ShapeDtypeStruct((100, 4, head_size), jnp.bfloat16)
        return attention.prefill_takes(query, cache, query.dtype)

    assert takes(128, "tensor") and takes(64, "head") and takes(192, "head")
    assert not takes(128, "token_head") and not takes(256, "tensor")
