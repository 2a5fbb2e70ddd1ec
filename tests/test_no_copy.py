"""A compiled write into a donated cache, and a scan over layers that carries it, hold no copy of the cache.

On the CPU that is the reference. For a GPU the StableHLO of the kernels is read without one, and the optimised HLO
where there is one.
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache, PagedBatch, copy_blocks, paged_attention, write_kv
from jaxpaged.metadata.layout import _PRESETS
from jaxpaged.pallas import block_copy, cache_write
from jaxpaged.pallas.block_pairs import block_pairs

TOKENS = 5
DTYPES = [
    ("float32", None),
    ("bfloat16", None),
    ("float16", None),
    ("float8_e4m3fn", "tensor"),
    ("float8_e5m2", "head"),
    ("int8", "token_head"),
]
# An update in place is a scatter (or a fusion around it) on the buffer itself; the rest would be new buffers.
_IN_PLACE = {
    "parameter",
    "get-tuple-element",
    "bitcast",
    "tuple",
    "while",
    "scatter",
    "fusion",
    "dynamic-update-slice",
    "call",
    "custom-call",
    "optimization-barrier",
}
_OP = re.compile(r"= (\w+)\[([\d,]*)\]\S* ([\w-]+)\(")


def copies(compiled, num_elements: int) -> list[str]:
    """Operations in optimised HLO that make an array as large as the cache other than by an update in place."""
    found = []
    for dtype, shape, op in _OP.findall(compiled.as_text()):
        size = math.prod(int(n) for n in shape.split(",")) if shape else 1
        if size >= num_elements and op not in _IN_PLACE:
            found.append(f"{op} {dtype}[{shape}]")
    return found


def check_in_place(compiled, cache: KVCache) -> None:
    """No operation copies the cache, its buffers are aliased to the results, temporary memory is far smaller."""
    smallest = min(leaf.size for leaf in (cache.key, cache.value) if leaf is not None)
    assert copies(compiled, smallest) == []
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(cache) if leaf.ndim)
    assert memory.temp_size_in_bytes < cache.key.nbytes / 4


def new_tokens(dtype, tokens=TOKENS):
    rows = jax.ShapeDtypeStruct((tokens, 2, 32), dtype)
    return rows, rows, jax.ShapeDtypeStruct((tokens,), jnp.int32)


@pytest.mark.parametrize("layout", _PRESETS)
@pytest.mark.parametrize(("dtype", "scales"), DTYPES)
def test_a_donated_write_is_in_place(layout, dtype, scales):
    cache = KVCache.zeros(256, 16, 2, 32, dtype, layout=layout, scales=scales)
    tokens = new_tokens("bfloat16" if cache.quantized else dtype)
    check_in_place(jax.jit(write_kv, donate_argnums=0).lower(cache, *tokens).compile(), cache)


def test_a_donated_write_of_many_tokens_is_in_place():
    cache = KVCache.zeros(2048, 16, 2, 32, "float32")
    check_in_place(jax.jit(write_kv, donate_argnums=0).lower(cache, *new_tokens("float32", 2000)).compile(), cache)


def test_an_undonated_write_is_seen_to_copy():
    cache = KVCache.zeros(256, 16, 2, 32, "float32")
    compiled = jax.jit(write_kv).lower(cache, *new_tokens("float32")).compile()
    with pytest.raises(AssertionError):
        check_in_place(compiled, cache)


def test_a_donated_write_keeps_the_pointer():
    cache = KVCache.zeros(256, 16, 2, 32, "float32")
    pointer = cache.key.unsafe_buffer_pointer()
    rows = np.ones((TOKENS, 2, 32), np.float32)
    cache = jax.jit(write_kv, donate_argnums=0)(cache, rows, rows, np.arange(TOKENS, dtype=np.int32))
    assert cache.key.unsafe_buffer_pointer() == pointer
    assert float(cache.key.sum()) == rows.size


@pytest.mark.parametrize(("dtype", "scales"), DTYPES)
def test_attention_makes_no_array_as_large_as_the_cache(dtype, scales):
    cache = KVCache.zeros(512, 16, 2, 32, dtype, scales=scales)
    batch = PagedBatch.create(np.zeros((3, 8), np.int32), [7, 8, 9])
    query = jax.ShapeDtypeStruct((3, 4, 32), "bfloat16" if cache.quantized else dtype)
    compiled = jax.jit(paged_attention).lower(query, cache, batch).compile()
    assert copies(compiled, cache.key.size) == []
    assert compiled.memory_analysis().temp_size_in_bytes < cache.key.nbytes / 2


@pytest.mark.parametrize("layout", ["NHD", "2NHD", "HN2D", "VLLM_V0"])
def test_a_scan_over_layers_carries_the_cache_in_place(layout):
    """All layers' blocks lie in one cache, as a scan carries it: layer i owns blocks i * n to (i + 1) * n - 1."""
    layers, blocks = 4, 64
    cache = KVCache.zeros(layers * blocks, 16, 2, 32, "float32", layout=layout)
    batch = PagedBatch.create(np.arange(6).reshape(3, 2), [20, 7, 32], block_size=16)

    def step(cache, query, batch):
        def layer(carry, index):
            cache, hidden = carry
            slots = jnp.where(batch.slot_mapping < 0, -1, batch.slot_mapping + index * blocks * 16)
            cache = write_kv(cache, hidden[:, :2], hidden[:, :2] * 2, slots)
            table = batch.block_table + index * blocks
            mine = PagedBatch(table, batch.seq_lens, batch.query_start_loc, slots, batch.max_query_len)
            return (cache, hidden + paged_attention(hidden, cache, mine)), None

        (cache, hidden), _ = jax.lax.scan(layer, (cache, query), jnp.arange(layers, dtype=jnp.int32))
        return cache, hidden

    query = np.random.default_rng(0).standard_normal((3, 4, 32), dtype=np.float32)
    compiled = jax.jit(step, donate_argnums=0).lower(cache, query, batch).compile()
    check_in_place(compiled, cache)
    new_cache, hidden = compiled(cache, query, batch)
    assert np.isfinite(hidden).all()
    assert sum(int((np.asarray(x) != 0).sum()) for x in jax.tree.leaves(new_cache)) == 3 * 2 * 32 * 2 * layers


@pytest.mark.parametrize("layout", ["NHD", "N2HD"])
def test_copy_blocks_is_in_place(layout):
    cache = KVCache.zeros(256, 16, 2, 32, "bfloat16", layout=layout)
    pairs = jax.ShapeDtypeStruct((4, 2), jnp.int32)
    check_in_place(jax.jit(copy_blocks, donate_argnums=0).lower(cache, pairs).compile(), cache)


KERNEL_LAYOUTS = [name for name in _PRESETS if name != "VLLM_V0"]


def write_by_kernel(cache, key, value, slots):
    return cache_write.write_kv(cache, key, value, slots, interpret=None)


def copy_by_kernel(cache, pairs):
    planned = block_pairs(pairs, cache.num_blocks, cache.num_blocks, within=True)
    return block_copy.copy_blocks(None, cache, planned)


def kernel_call(name, dtype, scales, layout):
    """A function that updates a cache by a kernel, and its arguments, the cache first."""
    cache = KVCache.zeros(256, 16, 2, 32, dtype, layout=layout, scales=scales)
    if name == "copy":
        return copy_by_kernel, (cache, jax.ShapeDtypeStruct((4, 2), jnp.int32))
    return write_by_kernel, (cache, *new_tokens("bfloat16" if cache.quantized else dtype))


@pytest.mark.parametrize("name", ["write", "copy"])
@pytest.mark.parametrize("layout", KERNEL_LAYOUTS)
@pytest.mark.parametrize(("dtype", "scales"), DTYPES)
def test_kernels_are_lowered_in_place(name, layout, dtype, scales):
    """Each large buffer is donated, and enters and leaves the kernel as the same memory; nothing else is as large."""
    function, arguments = kernel_call(name, dtype, scales, layout)
    cache = arguments[0]
    lowered = jax.jit(function, donate_argnums=0).trace(*arguments).lower(lowering_platforms=("cuda",))
    buffers = [x for x in (cache.key, cache.value) if x is not None]
    check_lowered_in_place(lowered.as_text(), buffers)


def check_lowered_in_place(text, buffers):
    large = min(buffer.size for buffer in buffers)
    reshapes_and_kernels = {"stablehlo.reshape", "stablehlo.custom_call"}
    for line in text.splitlines():
        made = re.match(r"\s*%\S+ = (?:\")?([\w.]+)", line)
        sizes = [
            math.prod(map(int, dims.split("x")[:-1])) for dims in re.findall(r"tensor<(\d[\w]*)>", line.split("->")[-1])
        ]
        if made and max(sizes, default=0) >= large:
            assert made[1] in reshapes_and_kernels, line[:300]
    main = next(line for line in text.splitlines() if "func.func public @main" in line)
    assert main.count("tf.aliasing_output") + main.count("jax.buffer_donor") >= len(buffers)
    kernels = [line for line in text.splitlines() if "mosaic_gpu" in line]
    assert max(line.count("#stablehlo.output_operand_alias") for line in kernels) >= len(buffers)


def test_a_copy_is_seen_in_what_is_lowered():
    cache = KVCache.zeros(256, 16, 2, 32, "float32")

    def write(cache, *tokens):
        return jax.tree.map(lambda x: x * 2, write_by_kernel(cache, *tokens))

    lowered = jax.jit(write, donate_argnums=0).trace(cache, *new_tokens("float32")).lower(lowering_platforms=("cuda",))
    with pytest.raises(AssertionError):
        check_lowered_in_place(lowered.as_text(), [cache.key, cache.value])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["write", "copy"])
@pytest.mark.parametrize("layout", KERNEL_LAYOUTS)
@pytest.mark.parametrize(("dtype", "scales"), DTYPES)
def test_compiled_kernels_are_in_place(hopper, name, layout, dtype, scales):
    function, arguments = kernel_call(name, dtype, scales, layout)
    check_in_place(jax.jit(function, donate_argnums=0).lower(*arguments).compile(), arguments[0])


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "2NHD"])
def test_a_kernel_in_a_scan_is_in_place(hopper, layout):
    """As in a model whose layers share one cache."""
    cache = KVCache.zeros(256, 16, 2, 32, "bfloat16", layout=layout)

    def step(cache, key, value, slots):
        def layer(cache, index):
            return write_by_kernel(cache, key, value, slots + index * 64 * 16), None

        return jax.lax.scan(layer, cache, jnp.arange(4, dtype=jnp.int32))[0]

    check_in_place(jax.jit(step, donate_argnums=0).lower(cache, *new_tokens("bfloat16")).compile(), cache)
