"""Mask and score functions, against their definitions for one score at a time, and as pytrees."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache, PagedBatch, paged_attention
from jaxpaged.metadata.masks import (
    AlibiScore,
    AndMask,
    CausalMask,
    DocumentMask,
    FullMask,
    PrefixLMMask,
    SlidingWindowMask,
    SoftCapScore,
    StaticFunction,
    alibi_slopes,
    and_masks,
    as_pytree,
    compose_scores,
    not_mask,
    or_masks,
)

NUM_REQS, NUM_HEADS, LEN = 3, 4, 7
PREFIX_LENS = [0, 3, 7]
DOCUMENT_IDS = [[0, 0, 1, 1, 1, 2], [5, 5, 5, 5, 5, 5], [1, 0, 1, 0, 1, 0]]
SLOPES = [0.5, 0.25, 2.0, -1.0]


def grid():
    """Every combination of request, head and positions, as arrays that broadcast against each other."""
    sizes = (NUM_REQS, NUM_HEADS, LEN, LEN)
    return [
        np.arange(size, dtype=np.int32).reshape([size if i == axis else 1 for i in range(4)])
        for axis, size in enumerate(sizes)
    ]


def table(definition):
    """`definition(b, h, q, k)` of every combination."""
    shape = (NUM_REQS, NUM_HEADS, LEN, LEN)
    return np.array([definition(*(int(i) for i in index)) for index in np.ndindex(shape)]).reshape(shape)


def even_head(b, h, q_pos, kv_pos):
    return h % 2 == 0


def in_document(b, q, k):
    return q < 6 and k < 6 and DOCUMENT_IDS[b][q] == DOCUMENT_IDS[b][k]


prefix_mask = PrefixLMMask(np.array(PREFIX_LENS, np.int32))
document_mask = DocumentMask(np.array(DOCUMENT_IDS, np.int32))

MASKS = {
    "full": (FullMask(), lambda b, h, q, k: True),
    "causal": (CausalMask(), lambda b, h, q, k: k <= q),
    "window": (SlidingWindowMask(2, 1), lambda b, h, q, k: q - 2 <= k <= q + 1),
    "window left": (SlidingWindowMask(2, None), lambda b, h, q, k: q - 2 <= k),
    "window right": (SlidingWindowMask(None, 0), lambda b, h, q, k: k <= q),
    "window without bounds": (SlidingWindowMask(None, None), lambda b, h, q, k: True),
    "window to the ends": (SlidingWindowMask(2**31 - 1, 2**31 - 1), lambda b, h, q, k: True),
    "prefix": (prefix_mask, lambda b, h, q, k: k <= q or (q < PREFIX_LENS[b] and k < PREFIX_LENS[b])),
    "document": (document_mask, lambda b, h, q, k: in_document(b, q, k)),
    "not": (not_mask(CausalMask()), lambda b, h, q, k: k > q),
    "not full": (not_mask(FullMask()), lambda b, h, q, k: False),
    "and": (
        and_masks(CausalMask(), document_mask, even_head),
        lambda b, h, q, k: k <= q and in_document(b, q, k) and h % 2 == 0,
    ),
    "or": (or_masks(not_mask(CausalMask()), even_head), lambda b, h, q, k: k > q or h % 2 == 0),
    "nested": (
        and_masks(CausalMask(), or_masks(SlidingWindowMask(1, 0), lambda b, h, q, k: k < 2), not_mask(even_head)),
        lambda b, h, q, k: k <= q and (q - 1 <= k or k < 2) and h % 2 == 1,
    ),
    "and of one": (and_masks(CausalMask()), lambda b, h, q, k: k <= q),
    "and of Python bools": (and_masks(CausalMask(), lambda b, h, q, k: True), lambda b, h, q, k: k <= q),
    "not of a Python bool": (not_mask(lambda b, h, q, k: True), lambda b, h, q, k: False),
}


@pytest.mark.parametrize("name", MASKS)
def test_mask_keeps_what_its_definition_keeps(name):
    mask, definition = MASKS[name]
    got = jax.jit(lambda mask, *args: mask(*args))(mask, *grid())
    got = np.broadcast_to(got, (NUM_REQS, NUM_HEADS, LEN, LEN))
    assert got.dtype == bool
    np.testing.assert_array_equal(got, table(definition))


def test_masks_outside_of_jit_and_of_single_positions():
    for name, (mask, definition) in MASKS.items():
        for b, h, q, k in [(0, 0, 0, 0), (1, 1, 2, 5), (2, 3, 6, 4)]:
            assert bool(mask(*map(jnp.int32, (b, h, q, k)))) == definition(b, h, q, k), name


def test_document_mask_outside_its_positions():
    positions = jnp.arange(-2, 9)
    call = jax.jit(lambda mask, q_pos, kv_pos: mask(1, 0, q_pos, kv_pos))
    got = call(document_mask, positions[:, None], positions[None, :])
    known = (np.arange(-2, 9) >= 0) & (np.arange(-2, 9) < 6)
    np.testing.assert_array_equal(got, known[:, None] & known[None, :])
    empty = DocumentMask(jnp.zeros((2, 0), jnp.int32))
    assert not np.any(call(empty, positions[:, None], positions[None, :]))


def scale_by_head(score, b, h, q_pos, kv_pos):
    return score * (h + 1)


alibi_by_request = np.arange(12, dtype=np.float32).reshape(NUM_REQS, NUM_HEADS)

SCORES = {
    "alibi": (AlibiScore(np.array(SLOPES, np.float32)), lambda s, b, h, q, k: s + SLOPES[h] * (k - q)),
    "alibi by request": (
        AlibiScore(alibi_by_request),
        lambda s, b, h, q, k: s + (b * NUM_HEADS + h) * (k - q),
    ),
    "soft cap": (SoftCapScore(3.0), lambda s, b, h, q, k: 3 * np.tanh(s / 3)),
    "composed": (
        compose_scores(SoftCapScore(3.0), scale_by_head, AlibiScore(np.array(SLOPES, np.float32))),
        lambda s, b, h, q, k: 3 * np.tanh(s / 3) * (h + 1) + SLOPES[h] * (k - q),
    ),
    "composed the other way": (
        compose_scores(AlibiScore(np.array(SLOPES, np.float32)), scale_by_head, SoftCapScore(3.0)),
        lambda s, b, h, q, k: 3 * np.tanh((s + SLOPES[h] * (k - q)) * (h + 1) / 3),
    ),
}


@pytest.mark.parametrize("name", SCORES)
def test_score_is_what_its_definition_says(name):
    score_mod, definition = SCORES[name]
    scores = np.random.default_rng(0).normal(size=(NUM_REQS, NUM_HEADS, LEN, LEN)).astype(np.float32) * 4
    got = jax.jit(lambda score_mod, *args: score_mod(*args))(score_mod, scores, *grid())
    assert got.dtype == jnp.float32
    expected = table(lambda b, h, q, k: definition(float(scores[b, h, q, k]), b, h, q, k))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_alibi_slopes_of_powers_of_two():
    np.testing.assert_array_equal(alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    np.testing.assert_allclose(alibi_slopes(16), [2 ** (-i / 2) for i in range(1, 17)], rtol=1e-6)
    np.testing.assert_array_equal(alibi_slopes(1), np.float32([2.0**-8]))
    assert alibi_slopes(64).dtype == np.float32


def test_alibi_slopes_of_other_numbers_of_heads():
    # Press et al.: 8 slopes of 8 heads, then every second one of 16 heads.
    expected = [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    np.testing.assert_allclose(alibi_slopes(12), expected, rtol=1e-6)
    np.testing.assert_allclose(alibi_slopes(3), [2**-4, 2**-8, 2**-2], rtol=1e-6)
    for num_heads in (5, 20, 40, 71, 112):
        slopes = alibi_slopes(num_heads)
        assert slopes.shape == (num_heads,) and len(set(slopes.tolist())) == num_heads
        assert np.all((slopes > 0) & (slopes < 1))


def test_static_and_array_leaves():
    assert jax.tree.leaves(FullMask()) == jax.tree.leaves(CausalMask()) == jax.tree.leaves(SoftCapScore(2.0)) == []
    assert jax.tree.leaves(SlidingWindowMask(4, 0)) == []
    (leaf,) = jax.tree.leaves(and_masks(CausalMask(), prefix_mask, even_head))
    assert leaf is prefix_mask.prefix_lens
    nested = and_masks(document_mask, not_mask(or_masks(prefix_mask, even_head)))
    leaves, treedef = jax.tree.flatten(nested)
    assert leaves[0] is document_mask.document_ids and leaves[1] is prefix_mask.prefix_lens and len(leaves) == 2
    rebuilt = jax.tree.unflatten(treedef, leaves)
    assert rebuilt.masks[0].document_ids is document_mask.document_ids
    assert rebuilt.masks[1].mask.masks[1] == StaticFunction(even_head)


def test_equality_and_hash_follow_what_is_held():
    def make():
        return and_masks(SlidingWindowMask(4, None), or_masks(CausalMask(), not_mask(even_head)))

    assert make() == make() and hash(make()) == hash(make())
    assert jax.tree.structure(make()) == jax.tree.structure(make())
    assert SlidingWindowMask(4, 0) != SlidingWindowMask(5, 0)
    assert SlidingWindowMask(np.int64(4), 0) == SlidingWindowMask(4, 0)
    assert SoftCapScore(30) == SoftCapScore(30.0) == SoftCapScore(np.float32(30))
    assert SoftCapScore(30) != SoftCapScore(20) and type(SoftCapScore(30).cap) is float
    assert and_masks(CausalMask()) != or_masks(CausalMask())
    assert and_masks(even_head) != and_masks(lambda b, h, q, k: h % 2 == 0)
    assert compose_scores(scale_by_head, SoftCapScore(2)) == compose_scores(scale_by_head, SoftCapScore(2.0))


def test_masks_with_arrays_compare_by_identity_and_can_be_hashed():
    same_arrays = PrefixLMMask(prefix_mask.prefix_lens)
    assert prefix_mask == prefix_mask and prefix_mask != same_arrays
    assert len({prefix_mask, same_arrays, document_mask, AlibiScore(alibi_slopes(2))}) == 4
    assert and_masks(CausalMask(), prefix_mask) == and_masks(CausalMask(), prefix_mask)


def test_jit_compiles_once_for_equal_masks_and_for_new_array_values():
    traces = []

    @jax.jit
    def keep(mask, q_pos, kv_pos):
        traces.append(mask)
        return mask(1, 0, q_pos, kv_pos)

    positions = jnp.arange(5)[:, None], jnp.arange(5)[None, :]
    for prefix_len in (0, 2, 4):
        mask = and_masks(SlidingWindowMask(3, None), PrefixLMMask(jnp.array([9, prefix_len])), even_head)
        q, k = np.indices((5, 5))
        np.testing.assert_array_equal(keep(mask, *positions), (q - k <= 3) & ((k <= q) | (k < prefix_len)))
    assert len(traces) == 1
    keep(and_masks(SlidingWindowMask(2, None), PrefixLMMask(jnp.array([9, 2])), even_head), *positions)
    assert len(traces) == 2


def test_transformations_may_change_the_rank_of_the_arrays():
    masks = PrefixLMMask(jnp.array([[0, 1], [2, 3]]))
    got = jax.vmap(lambda mask: mask(1, 0, jnp.int32(0), jnp.arange(4)))(masks)
    np.testing.assert_array_equal(got, [[True, False, False, False], [True, True, True, False]])
    shapes = jax.tree.map(lambda x: x.shape, masks)
    assert shapes.prefix_lens == (2, 2)


def test_partial_and_registered_functions_stay_pytrees():
    slopes = jnp.array([1.0, 2.0])
    partial = jax.tree_util.Partial(lambda slopes, s, b, h, q, k: s * slopes[h], slopes)
    assert as_pytree("score_mod", partial) is partial
    composed = compose_scores(partial, SoftCapScore(5.0))
    assert jax.tree.leaves(composed)[0] is slopes
    assert float(composed(jnp.float32(1.5), 0, 1, 0, 0)) == pytest.approx(5 * np.tanh(3 / 5), rel=1e-6)
    plain_partial = functools.partial(even_head, 0)
    assert as_pytree("mask_mod", plain_partial) == StaticFunction(plain_partial)


def test_masks_in_paged_attention():
    """They say the same as the options, and equal ones with a plain function among them compile once."""
    rng = np.random.default_rng(1)
    key, value = (jnp.asarray(rng.normal(size=(6, 4, 2, 8)), jnp.float32) for _ in range(2))
    cache, batch = KVCache.from_arrays(key, value), PagedBatch.create([[4, 1], [0, 3, 2]], [5, 9])
    query = jnp.asarray(rng.normal(size=(2, 4, 8)), jnp.float32)
    slopes = alibi_slopes(4)
    expected = paged_attention(query, cache, batch, window=(3, None), soft_cap=2.0, alibi_slopes=slopes)
    traces, counts = [], []

    def counted(b, h, q_pos, kv_pos):
        traces.append(1)
        return kv_pos >= 0

    for cap in (2.0, 2):
        mask = and_masks(CausalMask(), SlidingWindowMask(3, None), counted)
        score = compose_scores(SoftCapScore(cap), AlibiScore(slopes))
        got = paged_attention(query, cache, batch, causal=False, mask_mod=mask, score_mod=score)
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
        counts.append(len(traces))
    assert counts[0] > 0 and counts[1] == counts[0]


class Unhashable:
    __hash__ = None

    def __call__(self, b, h, q_pos, kv_pos):
        return True


ARRAY_ERRORS = [
    (TypeError, "prefix_lens: expected an array, got list", PrefixLMMask([1, 2, 3])),
    (TypeError, "prefix_lens: expected integers, got float32", PrefixLMMask(np.zeros(3, np.float32))),
    (ValueError, r"prefix_lens: expected shape \[num_reqs\], got \[3, 1\]", PrefixLMMask(np.zeros((3, 1), np.int32))),
    (ValueError, r"document_ids: expected shape \[num_reqs, max_len\], got \[3\]", DocumentMask(np.zeros(3, np.int32))),
    (TypeError, "document_ids: expected integers, got bool", DocumentMask(np.zeros((3, 6), bool))),
]


@pytest.mark.parametrize(("error", "message", "mask"), ARRAY_ERRORS)
def test_wrong_arrays_in_masks(error, message, mask):
    with pytest.raises(error, match=message):
        mask(*grid())


def test_wrong_arrays_in_scores():
    with pytest.raises(TypeError, match="slopes: expected floats, got int32"):
        AlibiScore(np.zeros(4, np.int32))(1.0, *grid())
    with pytest.raises(ValueError, match=r"slopes: expected shape \[num_heads\] or \[num_reqs, num_heads\], got \[\]"):
        AlibiScore(np.float32(1))(1.0, *grid())


@pytest.mark.parametrize(
    ("error", "message", "make"),
    [
        (TypeError, "left: expected an int or None, got 2.5", lambda: SlidingWindowMask(2.5, 0)),
        (TypeError, "right: expected an int or None, got True", lambda: SlidingWindowMask(2, True)),
        (ValueError, "left: expected 0 to 2147483647, or None for no bound, got -1", lambda: SlidingWindowMask(-1, 0)),
        (ValueError, "right: expected 0 to 2147483647, .* got 2147483648", lambda: SlidingWindowMask(0, 2**31)),
        (TypeError, "cap: expected a number, got str", lambda: SoftCapScore("2")),
        (TypeError, "cap: expected a number, got bool", lambda: SoftCapScore(True)),
        (ValueError, "cap: expected a finite number above 0, got 0", lambda: SoftCapScore(0)),
        (ValueError, "cap: expected a finite number above 0, got inf", lambda: SoftCapScore(float("inf"))),
        (ValueError, "cap: expected a finite number above 0, got nan", lambda: SoftCapScore(float("nan"))),
        (ValueError, "masks: expected at least one function, got none", and_masks),
        (ValueError, "masks: expected at least one function, got none", or_masks),
        (ValueError, "scores: expected at least one function, got none", compose_scores),
        (TypeError, r"masks\[1\]: expected a function, got int", lambda: and_masks(CausalMask(), 3)),
        (TypeError, "mask: expected a function, got NoneType", lambda: not_mask(None)),
        (TypeError, r"masks\[0\]: expected a function that is hashable or a pytree", lambda: or_masks(Unhashable())),
        (ValueError, "num_heads: expected a positive int, got 0", lambda: alibi_slopes(0)),
        (TypeError, "num_heads: expected a positive int, got 2.0", lambda: alibi_slopes(2.0)),
    ],
)
def test_errors(error, message, make):
    with pytest.raises(error, match=message):
        make()


def test_masks_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SlidingWindowMask(1, 0).left = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        AndMask((CausalMask(),)).masks = ()
