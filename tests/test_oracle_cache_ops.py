"""Writes and copies of the cache, bit by bit against the oracle's, in every layout and dtype.

And in every order: XLA's scatter takes rows one after the other on a CPU, but in no order on a GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache, copy_blocks, swap_blocks, write_kv
from jaxpaged.metadata.kv_cache import CACHE_DTYPES, QUANTIZED_DTYPES
from jaxpaged.metadata.slots import PAIRWISE_LIMIT
from jaxpaged.testing import oracle
from jaxpaged.testing.cases import LAYOUTS, Case, build, stored_as_bits

KINDS = [
    (d.name, s) for d in CACHE_DTYPES for s in (("tensor", "head", "token_head") if d in QUANTIZED_DTYPES else (None,))
]


def drawn(layout, dtype, scales):
    case = Case("write", (3, 9), (20, 9), head_size=16, block_size=4, layout=layout, cache_dtype=dtype, scales=scales)
    inputs = build(case)
    # As bytes: XLA on the CPU converts arrays of float8 to work on them, and so may change how a NaN is encoded.
    key, value = stored_as_bits(inputs.key_buffer), stored_as_bits(inputs.value_buffer)
    cache = KVCache.from_arrays(
        jnp.asarray(key),
        None if value is None else jnp.asarray(value),
        layout=layout,
        k_scale=inputs.k_scale,
        v_scale=inputs.v_scale,
        dtype=inputs.key_buffer.dtype,
    )
    return inputs, cache


def logical(cache, which):
    """What a cache stores, as [num_blocks, block_size, num_kv_heads, head_size]."""
    x = np.asarray(cache.buffer(which))[cache.layout.index(which, cache.dims, np.arange(cache.num_blocks))]
    axes = ("n", *cache.layout.rest(which, "n"))
    x = x.transpose([axes.index(a) for a in ("n", "s", "h", "d", "x") if a in axes])
    return np.ascontiguousarray(x.reshape(*x.shape[:3], -1)).view(cache.dtype)


def same_bits(got, expected):
    np.testing.assert_array_equal(
        np.ascontiguousarray(got).view(np.uint8), np.ascontiguousarray(expected).view(np.uint8)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "scales"), KINDS)
def test_write(layout, dtype, scales):
    """Nothing but the slots named changes, the poison of the others included."""
    inputs, cache = drawn(layout, dtype, scales)
    rng = np.random.default_rng(1)
    tokens = len(inputs.slot_mapping)
    slots = inputs.slot_mapping.copy()
    slots[[1, 5, 6]] = -1, cache.num_slots, slots[3]
    source = dtype if dtype in ("bfloat16", "float16") else "float32"
    new = [rng.standard_normal((tokens, 2, 16)).astype(source) for _ in range(2)]
    written = write_kv(cache, *(jnp.asarray(x) for x in new), slots)
    for which, rows in zip(("key", "value"), new, strict=True):
        scale = None if cache.scale(which) is None else np.asarray(cache.scale(which))
        expected, expected_scale = oracle.write_kv(logical(cache, which), scale, rows, slots, dtype)
        same_bits(logical(written, which), expected)
        if expected_scale is not None:
            np.testing.assert_allclose(written.scale(which), expected_scale, rtol=2.5e-7)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "scales"), [("float32", None), ("float8_e5m2", "head"), ("int8", "token_head")])
def test_copy_and_swap(layout, dtype, scales):
    _, cache = drawn(layout, dtype, scales)
    last = cache.num_blocks - 1
    pairs = [[0, 1], [1, 0], [2, last], [-1, 3], [3, cache.num_blocks], [cache.num_blocks, 4], [3, last], [-1, last]]
    pairs = np.array(pairs, np.int32)
    _, other = drawn(layout, dtype, scales)
    for which in ("key", "value"):
        before = logical(cache, which)
        same_bits(logical(copy_blocks(cache, pairs), which), oracle.copy_blocks(before, pairs))
        same_bits(
            logical(swap_blocks(cache, other, pairs), which), oracle.swap_blocks(before, logical(other, which), pairs)
        )
        scale = cache.scale(which)
        if scale is not None and scale.ndim == 3:
            same_bits(copy_blocks(cache, pairs).scale(which), oracle.copy_blocks(np.asarray(scale), pairs))


def scattered(function, arguments, order_of):
    """What a function returns, op by op, with the rows of each of its scatters in an order of our own.

    Args:
      order_of: from a number of rows to their order.
    """
    scatters = 0

    def evaluate(jaxpr, consts, values):
        nonlocal scatters
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))
        for eqn in jaxpr.eqns:
            inputs = [x.val if hasattr(x, "val") else known[x] for x in eqn.invars]
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if inner is not None:
                outputs = evaluate(inner.jaxpr, inner.consts, inputs)
            else:
                if eqn.primitive.name == "scatter":
                    scatters += 1
                    inputs = reordered(*inputs, **eqn.params)
                outputs = eqn.primitive.bind(*inputs, **eqn.params)
                outputs = outputs if eqn.primitive.multiple_results else [outputs]
            known.update(zip(eqn.outvars, outputs, strict=True))
        return [x.val if hasattr(x, "val") else known[x] for x in jaxpr.outvars]

    def reordered(operand, indices, rows, *, dimension_numbers, unique_indices, **_):
        assert indices.ndim == 2
        if unique_indices:
            assert len(np.unique(indices, axis=0)) == len(indices)
        (axis,) = set(range(rows.ndim)) - set(dimension_numbers.update_window_dims)
        order = order_of(len(indices))
        return operand, indices[order], jnp.take(rows, order, axis)

    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    leaves = evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(arguments))
    assert scatters
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def check_any_order(function, *arguments):
    """The same bits in the order given, in reverse, and shuffled."""
    expected = scattered(function, arguments, np.arange)
    for order_of in (lambda n: np.arange(n)[::-1], np.random.default_rng(0).permutation):
        jax.tree.map(same_bits, scattered(function, arguments, order_of), expected)
    return expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "scales"), [("bfloat16", None), ("float8_e4m3fn", "head"), ("int8", "token_head")])
def test_write_in_any_order(layout, dtype, scales):
    """Of tokens with the same slot the last is kept."""
    _, cache = drawn(layout, dtype, scales)
    rng = np.random.default_rng(2)
    key, value = rng.standard_normal((2, 3 * cache.num_slots, 2, 16)).astype("bfloat16")
    slots = rng.integers(-3, cache.num_slots + 3, len(key)).astype(np.int32)
    written = check_any_order(write_kv, cache, key, value, slots)
    kept = [t for t, slot in enumerate(slots) if 0 <= slot < cache.num_slots and slot not in slots[t + 1 :]]
    assert 0 < len(kept) < len(key) / 2
    jax.tree.map(same_bits, written, scattered(write_kv, (cache, key[kept], value[kept], slots[kept]), np.arange))


@pytest.mark.parametrize("tokens", [PAIRWISE_LIMIT, PAIRWISE_LIMIT + 1])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_write_of_many_tokens_in_any_order(tokens, index):
    cache = KVCache.zeros(40, 4, 1, 8, "float32")
    rng = np.random.default_rng(3)
    key = rng.standard_normal((tokens, 1, 8)).astype("float32")
    slots = rng.integers(-9, 169, tokens).astype(index)
    slots[-1] = np.iinfo(index).min + 5  # with a low word of 5, if it has two
    with jax.enable_x64(index == "int64"):
        written = check_any_order(write_kv, cache, key, key, slots)
    same_bits(written.key, oracle.write_kv(np.asarray(cache.key), None, key, slots, "float32")[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "scales"), [("float32", None), ("int8", "token_head")])
def test_copy_and_swap_in_any_order(layout, dtype, scales):
    """Of pairs with the same target the last one counts."""
    _, cache = drawn(layout, dtype, scales)
    pairs = np.random.default_rng(4).integers(-1, cache.num_blocks + 1, (4 * cache.num_blocks, 2)).astype(np.int32)
    copied = check_any_order(copy_blocks, cache, pairs)
    swapped = check_any_order(swap_blocks, cache, cache, pairs)
    for which in ("key", "value"):
        expected = oracle.copy_blocks(logical(cache, which), pairs)
        same_bits(logical(copied, which), expected)
        same_bits(logical(swapped, which), expected)


def test_dequantize_undoes_quantize():
    x = np.random.default_rng(0).standard_normal((5, 2, 16)).astype(np.float32)
    for dtype, step in (("int8", 1 / 250), ("float8_e4m3fn", 1 / 15), ("float8_e5m2", 1 / 7)):
        scale = oracle.row_scales(x, dtype)[..., None]
        error = np.abs(oracle.dequantize(oracle.quantize(x, dtype, scale), scale) - x)
        assert (error <= np.abs(x).max(-1, keepdims=True) * step).all()
