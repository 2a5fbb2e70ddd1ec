"""The attention kernels against the oracle: the whole suite on a GPU, and small cases in the interpreter, too."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache, PagedBatch, paged_attention
from jaxpaged.metadata.masks import AlibiScore, DocumentMask
from jaxpaged.pallas import prefill_step
from jaxpaged.pallas.prefill_state import Softmax
from jaxpaged.testing.cases import Case, named_cases
from jaxpaged.testing.doors import DOORS
from jaxpaged.testing.verify import compare
from tests.pallas.agreement import check

CASES = {case.name: case for case in named_cases()}
SMALL = [CASES[name] for name in ("decode", "speculative", "prefill", "mixed-many", "bad-blocks", "table-too-narrow")]
SMALL += [CASES[name] for name in ("empty-rows", "gqa-3", "head-size-40", "layout-HND", "layout-N2HD", "float16")]
SMALL += [CASES[name] for name in ("int8-float32", "float8_e4m3fn-tensor")]
SMALL += [CASES[name] for name in ("option-window", "option-everything", "decode-everything")]
BY_HEAD = (("sinks", True), ("alibi", True))
SMALL += [Case("mixed-by-head", (1, 20, 1, 0, 1, 1, 1, 1, 1), (33, 50, 1, 0, 64, 17, 128, 70, 3), options=BY_HEAD)]
# Two multiprocessors make few CTAs, which each have much to do; with twenty, requests are split among CTAs.
MANY_CTAS = [
    Case("decode-in-parts", (1, 1), (600, 20)),
    Case("prefill-in-parts", (20, 3), (300, 40), options=(("sinks", True),)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("door", ["kernels", "kernels-jit"])
@pytest.mark.parametrize("name", CASES)
def test_suite_on_a_gpu(hopper, name, door):
    result = compare(CASES[name], door, DOORS[door])
    if result.skipped:
        pytest.skip(result.skipped)
    assert result.ok, result


@pytest.mark.parametrize(
    ("num_sms", "case"), [(2, c) for c in SMALL] + [(20, c) for c in MANY_CTAS], ids=lambda x: getattr(x, "name", x)
)
def test_small_cases(kernels, set_multiprocessors, num_sms, case):
    set_multiprocessors(num_sms)
    check(case)


def test_batch_invariant(kernels, set_multiprocessors):
    """The plan of decode is another then, and prefill takes whole tiles."""
    set_multiprocessors(2)
    case = Case("batch-invariant", (1, 1, 20), (130, 3, 50), options=(("batch_invariant", True),), layout="HN2D")
    result = compare(case, "kernels", DOORS["kernels"])
    assert result.ok, result


MODS = {
    "mask_mod": DocumentMask(np.repeat(np.arange(4, dtype=np.int32), 16)[None]),
    "score_mod": AlibiScore(np.linspace(0.1, 1, 4, dtype=np.float32)),
}


@pytest.mark.parametrize("name", MODS)
def test_functions_that_hold_arrays(kernels, name):
    """They are computed with, or else refused, so that the default falls back to the reference."""
    rng = np.random.default_rng(0)
    cache = KVCache.zeros(4, 16, 2, 64, "bfloat16")
    cache = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), cache)
    batch = PagedBatch.create([[3, 0, 1, 2]], [50])
    query = jnp.asarray(rng.standard_normal((1, 4, 64)), jnp.bfloat16)
    out, expected = (
        paged_attention(query, cache, batch, **{name: MODS[name]}, implementation=implementation)
        for implementation in (None, "reference")
    )
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(expected, np.float32), atol=0.02)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("head_size", [64, 128])
def test_queries_of_any_size_with_eight_bit_caches(kernels, set_multiprocessors, dtype, head_size):
    """Each row is brought into float16's range, whatever the others are."""
    set_multiprocessors(2)
    rng = np.random.default_rng(0)
    sizes = np.array([1e6, 1, 0, 1e-30, 1e-39, 3e5], np.float32)
    query = jnp.asarray(rng.uniform(-1, 1, (len(sizes), 2, head_size)) * sizes[:, None, None], jnp.bfloat16)
    rows = [jnp.asarray(rng.uniform(-100, 100, (len(sizes), 16, 1, head_size)), dtype) for _ in range(2)]
    cache = KVCache.from_arrays(*rows, k_scale=jnp.float32(1e-6), v_scale=jnp.full(1, 0.5, jnp.float32))
    batch = PagedBatch.create(np.arange(len(sizes), dtype=np.int32)[:, None], np.full(len(sizes), 9, np.int32))
    out = np.asarray(paged_attention(query, cache, batch, implementation="mosaic_gpu"), np.float64)
    q, k, v = (np.asarray(x).astype(np.float64) for x in (query, *rows))
    scores = np.einsum("bhd,bsd->bhs", q, k[:, :9, 0]) * 1e-6 * head_size**-0.5
    np.testing.assert_allclose(out, np.einsum("bhs,bsd->bhd", softmax(scores), v[:, :9, 0]) * 0.5, atol=0.3, rtol=0.01)


GROWTHS = np.array([0, 1e-2, 0.05, 0.2, 1, -1, -0.05, 3], np.float32)
"""Of rows' scores from one position to the next: they stay near each other, grow by little or by much, or fall."""


def attend_to_growing_scores() -> tuple[np.ndarray, np.ndarray]:
    """Prefill of scores that grow with the position, in each row otherwise; and what comes out by definition."""
    rng, seq_len, tokens, head_size = np.random.default_rng(0), 600, 48, 64
    key = rng.uniform(-1, 1, (seq_len // 8, 8, 1, head_size))
    key[..., 0] = np.arange(seq_len).reshape(-1, 8, 1) % 256  # so that peaks come again and are passed
    query = rng.uniform(-1, 1, (tokens, 4, head_size))
    query[..., 0] = GROWTHS[np.arange(tokens * 4).reshape(tokens, 4) % len(GROWTHS)]
    value = rng.uniform(-1, 1, key.shape)
    query, key, value = (jnp.asarray(x, jnp.bfloat16) for x in (query, key, value))
    table = np.arange(seq_len // 8, dtype=np.int32)[None]
    batch = PagedBatch.create(table, [seq_len], query_lens=[tokens])
    cache = KVCache.from_arrays(key, value)
    out = paged_attention(query, cache, batch, scale=1.0, implementation="mosaic_gpu")
    q, k, v = (np.asarray(x).astype(np.float64) for x in (query, key, value))
    scores = np.einsum("thd,sd->ths", q, k.reshape(-1, head_size))
    seen = np.arange(seq_len) <= np.arange(seq_len - tokens, seq_len)[:, None]
    scores = np.where(seen[:, None], scores, -np.inf)
    return np.asarray(out).astype(np.float64), np.einsum("ths,sd->thd", softmax(scores), v.reshape(-1, head_size))


def test_peaks_that_grow_from_step_to_step(kernels, set_multiprocessors):
    """Rows of one warp differ in when they do."""
    set_multiprocessors(1)
    out, expected = attend_to_growing_scores()
    np.testing.assert_allclose(out, expected, atol=0.01)


def test_growing_scores_show_peaks_that_are_not_those_of_the_output(kernels, set_multiprocessors, monkeypatch):
    def off_by_one(peak: Any, total: Any, acc: Any) -> Softmax:
        return Softmax(peak + 1.0, total, acc)

    set_multiprocessors(1)
    monkeypatch.setattr(prefill_step, "Softmax", off_by_one)
    jax.clear_caches()  # of the kernel without the fault, and then of the one with it
    out, expected = attend_to_growing_scores()
    jax.clear_caches()
    assert not np.allclose(out, expected, atol=0.01)
