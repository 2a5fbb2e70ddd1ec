"""Tests that need 8 devices; `test_sharding.py` runs this file in a process that has as many."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from kinds import BLOCK_SIZE, HEADS, KINDS, compare, make_partition, make_step, spread_arguments

from jaxpaged import KVCache, PagedBatch, copy_blocks, gather_kv, paged_attention, swap_blocks, write_kv
from jaxpaged.attention import _mosaic_gpu, make_options, split_options
from jaxpaged.metadata.head_sharding import head_sharding
from jaxpaged.metadata.layout import _PRESETS
from jaxpaged.pallas.mosaic import interpreted
from jaxpaged.pallas.tuning import gpu_of
from jaxpaged.sharding import Partition, context_attention, own_blocks
from jaxpaged.testing.collectives import collectives

P = PartitionSpec
TOLERANCE = {"float32": 2e-6, "bfloat16": 2.0**-5}  # two roundings of numbers up to 4


@pytest.mark.parametrize(("dtype", "explicit"), [("float32", False), ("bfloat16", True)])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_equals_one_device(kind, dtype, explicit):
    differences = compare(kind, dtype=dtype, explicit=explicit, per_head=("sinks",))
    assert max(differences[:2]) < TOLERANCE[dtype]
    assert differences[2:] == [0, 0]


@pytest.mark.parametrize("options", [{"window": (6, 0)}, {"per_head": ("alibi_slopes",)}, {"causal": False}], ids=str)
def test_options_by_position_equal_one_device(options):
    """Within a context axis these see logical positions, wherever a block lies."""
    assert max(compare("tensor and context", dtype="float32", **options)) < 4e-6


def test_wrong_blocks_are_noticed(monkeypatch):
    """The comparison's own control: with each device attending to its neighbour's blocks it fails."""
    import jaxpaged.sharding as sharding

    def neighbours(batch, cache, *, axis_name):
        own = own_blocks(batch, cache, axis_name=axis_name)
        return dataclasses.replace(own, block_table=jnp.roll(own.block_table, 1, 1))

    monkeypatch.setattr(sharding, "own_blocks", neighbours)
    assert compare("context", dtype="float32")[0] > 0.1


def compiled_attention(kind, extra=lambda out: out):
    """Attention alone, compiled for a kind of parallelism."""
    partition = make_partition(KINDS[kind])
    steps = [make_step(kind, seed, "float32") for seed in range(partition.size("data"))]
    arguments, specs = spread_arguments(partition, steps, {})
    (cache, query, _, _, batch), specs = arguments[:5], (specs[0], specs[1], specs[4])

    def attend(cache, query, batch):
        if partition.context is None:
            return extra(paged_attention(query, cache, batch))
        return extra(context_attention(query, cache, batch, axis_name=partition.context))

    mapped = jax.shard_map(attend, mesh=partition.mesh, in_specs=specs, out_specs=partition.rows)
    return jax.jit(mapped).lower(cache, query, batch).compile()


@pytest.mark.parametrize("kind", KINDS)
def test_attention_holds_only_the_collectives_it_needs(kind):
    assert collectives(compiled_attention(kind)) == ({"all-gather": 1} if "context" in kind else {})


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("all-reduce", lambda out: out + lax.pmean(out, "tensor_axis")),
        ("all-gather", lambda out: out + lax.all_gather(out, "tensor_axis").sum(0)),
        ("collective-permute", lambda out: lax.ppermute(out, "tensor_axis", [(0, 1), (1, 0)])),
        (
            "reduce-scatter",
            lambda out: jnp.tile(lax.psum_scatter(out, "tensor_axis", tiled=True), (8, 1, 1)),
        ),
        ("all-to-all", lambda out: lax.all_to_all(out, "tensor_axis", 0, 0, tiled=True)),
    ],
)
def test_a_planted_collective_is_counted(name, extra):
    assert collectives(compiled_attention("tensor", extra))[name] >= 1


def spread_over_heads(layout, scales, dtype, explicit):
    types = (AxisType.Explicit if explicit else AxisType.Auto,)
    partition = Partition(jax.make_mesh((4,), ("model",), axis_types=types), tensor="model")
    cache = KVCache.zeros(16, 8, 4, 32, dtype, layout=layout, scales=scales)
    return partition, cache, partition.put(cache, partition.cache(cache))


def public_functions(cache, query, key, value, batch, slopes):
    cache = write_kv(cache, key, value, batch.slot_mapping)
    cache = copy_blocks(cache, np.array([[1, 7]], np.int32))
    dense = gather_kv(cache, batch.block_table, batch.seq_lens, total_tokens=19)
    bias = lambda s, b, h, q, kv: s + 0.1 * h  # noqa: E731
    out = paged_attention(query, cache, batch, alibi_slopes=slopes, sinks=slopes, score_mod=bias, return_lse=True)
    return cache, out, dense


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(("layout", "scales", "dtype"), [("NHD", None, "float32"), ("HN2D", "head", "float8_e5m2")])
def test_public_functions_take_caches_with_sharded_heads(layout, scales, dtype, jit, explicit):
    partition, cache, spread = spread_over_heads(layout, scales, dtype, explicit)
    batch = PagedBatch.create([[3, 5], [1]], [14, 5], query_lens=[4, 5], block_size=8)
    rng = np.random.default_rng(0)
    query, slopes = rng.standard_normal((9, 8, 32), np.float32), rng.standard_normal(8).astype(np.float32)
    arguments = (query, query[:, :4] * 2, query[:, 4:], batch, slopes)
    expected = public_functions(cache, *arguments)
    replicated = partition.put(arguments, P())
    call = jax.jit(public_functions, donate_argnums=0) if jit else public_functions
    if jit:
        assert collectives(call.lower(spread, *replicated).compile()) == {}
    got = call(spread, *replicated)
    assert got[1][0].sharding.is_equivalent_to(NamedSharding(partition.mesh, P(None, "model")), 3)
    assert got[2][0].sharding.is_equivalent_to(NamedSharding(partition.mesh, P(None, "model")), 3)
    for ours, want in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(want, np.float32), atol=1e-5, rtol=1e-5)


def test_a_sharded_cache_is_written_in_place():
    _, _, spread = spread_over_heads("NHD", None, "float32", explicit=False)
    pointers = [shard.data.unsafe_buffer_pointer() for shard in spread.key.addressable_shards]
    rows, slots = np.ones((3, 4, 32), np.float32), np.arange(3, dtype=np.int32)
    after = jax.jit(write_kv, donate_argnums=0)(spread, rows, rows, slots)
    assert [shard.data.unsafe_buffer_pointer() for shard in after.key.addressable_shards] == pointers
    assert float(after.key.sum()) == rows.size


@pytest.mark.parametrize("layout", _PRESETS)
@pytest.mark.parametrize("scales", [None, "tensor", "head", "token_head"])
def test_caches_of_every_layout_are_made_where_they_belong(layout, scales):
    partition = make_partition({"data": 2, "tensor": 2, "context": 2})
    dtype = "float32" if scales is None else "float8_e4m3fn"
    cache = partition.zeros(32, BLOCK_SIZE, 4, 32, dtype, layout=layout, scales=scales)
    part = dataclasses.replace(
        cache,
        **{
            n: getattr(cache, n).addressable_shards[0].data
            for n in ("key", "value", "k_scale", "v_scale")
            if getattr(cache, n) is not None
        },
    )
    assert (part.num_blocks, part.num_kv_heads, part.head_size, part.block_size) == (8, 2, 32, BLOCK_SIZE)
    if scales == "token_head":
        assert part.k_scale.shape == (8, BLOCK_SIZE, 2)


@pytest.mark.parametrize(("dtype", "scales"), [("float32", None), ("float8_e4m3fn", "head"), ("int8", "token_head")])
def test_blocks_are_swapped_between_meshes(dtype, scales):
    """As to other devices' memory and back; heads stay where they are among the devices."""
    meshes = [jax.make_mesh((4,), ("model",), devices=jax.devices()[i : i + 4]) for i in (0, 4)]
    sizes = (BLOCK_SIZE, 4, 16, dtype)
    source, target = (Partition(mesh, tensor="model").zeros(8, *sizes, scales=scales) for mesh in meshes)
    rows = np.random.default_rng(0).standard_normal((BLOCK_SIZE, 4, 16), np.float32)
    source = write_kv(source, rows, rows * 2, np.arange(BLOCK_SIZE, dtype=np.int32))
    swapped = swap_blocks(source, target, [[0, 3]])
    assert swapped.key.sharding == target.key.sharding
    table, length = np.array([[3]], np.int32), np.array([BLOCK_SIZE], np.int32)
    wanted = gather_kv(source, table * 0, length)
    for ours, want in zip(gather_kv(swapped, table, length), wanted, strict=True):
        np.testing.assert_array_equal(ours, want)
        np.testing.assert_allclose(want, rows * (1 if want is wanted[0] else 2), rtol=0.07, atol=0.05)


def bfloat16_call():
    cache = KVCache.zeros(32, 16, 8, 64, "bfloat16")
    batch = PagedBatch.create([[0, 1], [2, 3]], [20, 30], block_size=16)
    return jnp.ones((2, 16, 64), jnp.bfloat16), cache, batch


@pytest.mark.parametrize("direct", [False, True])
def test_kernels_lower_for_a_gpu_where_heads_are_spread(direct):
    """Each device's kernel gets its own head: of 8 kv heads one, of 16 query heads two."""
    partition = make_partition({"tensor": 8})
    query, cache, batch = bfloat16_call()
    given = dict.fromkeys(("window", "soft_cap", "alibi_slopes", "sinks", "mask_mod", "score_mod"))
    arrays, static = split_options(make_options(num_heads=2, num_reqs=2, scale=0.1, causal=True, **given))
    heads = head_sharding(partition.put(cache, partition.cache(cache))) if direct else None

    def attend(query, cache, batch):
        called = (query, cache, batch, arrays, static, heads, query.dtype, False, True)
        return _mosaic_gpu(*called, None, gpu_of(None))[0]

    if not direct:
        specs = (partition.rows, partition.cache(cache), partition.batch)
        attend = jax.shard_map(attend, mesh=partition.mesh, in_specs=specs, out_specs=partition.rows, check_vma=False)
    text = jax.jit(attend).trace(query, cache, batch).lower(lowering_platforms=("cuda",)).as_text()
    kernels = [line for line in text.splitlines() if "@mosaic_gpu_v2" in line]
    assert any("tensor<2x2x64xbf16>" in line and "tensor<32x16x1x64xbf16>" in line for line in kernels)
    assert not any("tensor<32x16x8x64xbf16>" in line for line in kernels)


def test_kernels_say_that_they_need_check_vma_off():
    partition = make_partition({"tensor": 8})
    query, cache, batch = bfloat16_call()
    specs = (partition.rows, partition.cache(cache), partition.batch)
    attend = functools.partial(paged_attention, implementation="mosaic_gpu")
    mapped = jax.shard_map(attend, mesh=partition.mesh, in_specs=specs, out_specs=partition.rows)
    with interpreted(), pytest.raises(ValueError, match=r"in jax.shard_map Pallas' kernels need check_vma=False"):
        jax.jit(mapped)(query, cache, batch)


def test_blocks_spread_over_devices_need_shard_map():
    partition = make_partition({"context": 8})
    cache = partition.zeros(64, BLOCK_SIZE, 4, 16, "float32")
    batch = PagedBatch.create([[0]], [1])
    with pytest.raises(
        ValueError, match=r"cache: expected no axis of NHD .* but kv heads to be sharded.*jax.shard_map"
    ):
        paged_attention(np.zeros((1, HEADS, 16), np.float32), cache, batch)


def test_what_does_not_fit_says_what_would():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match=r"tensor: expected None or an axis of the mesh, \('a', 'b'\), got 'model'"):
        Partition(mesh, tensor="model")
    with pytest.raises(ValueError, match=r"data: expected an axis of its own, got 'a' for 2 of them"):
        Partition(mesh, data="a", context="a")
    partition = Partition(mesh, context="a", tensor="b")
    assert [partition.kv_head_copies(8, n) for n in (8, 4, 2, 1)] == [1, 1, 2, 4]
    with pytest.raises(
        ValueError, match=r"12 query heads and 6 kv heads can't .* 4 devices; expected one of \[1, 2, 3, 6, 12\]"
    ):
        partition.kv_head_copies(12, 6)
    with pytest.raises(
        ValueError, match=r"num_kv_heads: expected a multiple of the 4 devices along 'b', got 2.*repeat_kv_heads"
    ):
        partition.zeros(64, 16, 2, 64, "float32")
    with pytest.raises(ValueError, match=r"num_blocks: expected a multiple of the 2 devices .* such as 64, got 63"):
        partition.zeros(63, 16, 4, 64, "float32")
