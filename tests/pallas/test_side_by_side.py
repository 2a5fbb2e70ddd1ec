"""Multiprocessors divided between decode and prefill."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache, PagedBatch
from jaxpaged.attention import make_options
from jaxpaged.pallas import attention
from jaxpaged.pallas.config import decode_config, prefill_config
from jaxpaged.pallas.side_by_side import Division, Sides, divide, sides_of
from jaxpaged.pallas.tuning import DecodeTiles, Rule, ShapeClass, gpu_of, tuned_for
from jaxpaged.testing.cases import Case
from jaxpaged.testing.doors import DOORS
from jaxpaged.testing.verify import compare

GPU = gpu_of()
OPTIONS: dict[str, Any] = {"scale": 1.0, "soft_cap": None, "alibi_slopes": None, "sinks": None}
OPTIONS |= {"mask_mod": None, "score_mod": None, "window": None, "causal": True}


def division(query_lens: list[int], seq_lens: list[int], heads: int = 1) -> tuple[int, int]:
    """CTAs of decode and lists of prefill for 32 query and 8 kv heads of 128, so many of which share a tile."""
    gpu = dataclasses.replace(GPU, decode=(Rule(ShapeClass(), DecodeTiles(64, 2, 6, 4, 1, heads)),))
    num_tokens, width = sum(query_lens), -(-max(seq_lens) // 16)
    cache = jax.eval_shape(lambda: KVCache.zeros(width, 16, 8, 128, "bfloat16"))
    table = np.zeros((len(seq_lens), width), np.int32)
    batch = PagedBatch.create(table, np.array(seq_lens, np.int32), query_lens=np.array(query_lens, np.int32))
    query = jax.ShapeDtypeStruct((num_tokens, 32, 128), jnp.bfloat16)
    options = make_options(num_heads=32, num_reqs=batch.num_reqs, **OPTIONS)
    decode = decode_config(query, cache, batch, query.dtype, False, 1, gpu)
    prefill = prefill_config(query, cache, batch, options, query.dtype, False, False, GPU)
    sides = sides_of(cache, decode, prefill, GPU)
    if sides is None:
        return ALL
    sizes = {"num_tokens": num_tokens, "num_heads": 32, "shortest": 2}
    found = divide(cache, batch, options, sides, prefill.tiling, **sizes)
    return int(found.shares) * decode.head_groups, int(found.lists)


ALL = (264, 132)
"""CTAs and lists where one kernel follows the other."""


@pytest.mark.parametrize("heads", [1, 2])
def test_as_many_as_let_both_end_together(heads: int) -> None:
    # Prefill of 229,000 steps for 1.7 ms of all, decode of 1.06 GB: two CTAs on each of 8 multiprocessors take 1.5 ms.
    assert division([1] * 63 + [2048], [4096] * 63 + [34816], heads) == (16, 124)
    # Prefill of 16,384 steps, 0.2 ms of all, and decode of 0.5 GB: 24 multiprocessors take 0.25 ms, and the rest 0.26.
    assert division([1] * 32 + [128] * 32, [4096] * 32 + [2048] * 32, heads) == (48, 108)


@pytest.mark.parametrize(
    "lens",
    [
        ([1] * 64, [4096] * 64),
        ([512] * 8, [4096] * 8),
        ([1] * 8 + [0], [1] * 8 + [0]),
        ([1] * 8 + [2048], [9] * 8 + [2048]),
    ],
)
def test_nothing_is_divided_for_one_of_them(lens: Any) -> None:
    assert division(*lens) == ALL


def test_prefill_keeps_half() -> None:
    assert division([1] * 63 + [40], [8192] * 63 + [8192])[1] >= 66


@pytest.mark.parametrize("plan_by_kernel", [False, True])
@pytest.mark.parametrize(("shares", "lists"), [(1, 1), (1, 2), (2, 1)])
def test_results_do_not_depend_on_it(
    kernels: None, monkeypatch: pytest.MonkeyPatch, shares: int, lists: int, plan_by_kernel: bool
) -> None:
    # Not constants: of a list known to be the only one, Mosaic's compiler makes code that it then refuses.
    monkeypatch.setattr(
        Sides, "best", lambda self, tiles, steps: Division(jnp.minimum(tiles, shares), jnp.minimum(steps, lists))
    )
    jax.clear_caches()
    by = functools.partial(attention.paged_attention, plan_by_kernel=plan_by_kernel)
    monkeypatch.setattr(attention, "paged_attention", by)
    case = Case("mixed", (1, 1, 1, 150, 1, 1, 1, 1, 90), (9, 190, 200, 150, 1, 64, 65, 30, 300), dtype="bfloat16")
    with tuned_for(dataclasses.replace(GPU, num_sms=2)):
        result = compare(case, "kernels", DOORS["kernels"])
    assert result.skipped is None
    assert result.ok, result
