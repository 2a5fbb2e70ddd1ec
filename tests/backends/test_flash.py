"""Aphrodite's FlashAttention backend: batches against the oracle, the builder, in-place writes, what is refused."""

import enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from instances import LAYER, input_builder
from small_engine import TOLERANCE, SmallEngine, assert_close

from jaxpaged.backends.flash import (
    PAD_SLOT_ID,
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

MIXED = ([5, 40, 3, 1, 1], [5, 150, 70, 33, 1])  # a whole prompt, two chunks, two decodes
PROMPTS = ([7, 1, 30], [7, 1, 30])
DECODES = ([1, 1, 1], [50, 17, 1])
SLOPES = [0.5, 0.25, 0.1, 0.02]
OPTIONS = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 9}, {"window": (8, 0)}),
    "alibi": ({"alibi_slopes": SLOPES}, {"alibi_slopes": np.array(SLOPES)}),
    "soft cap": ({"logits_soft_cap": 0.7}, {"soft_cap": 0.7}),
}


def impl(**changes):
    return FlashAttentionImpl(**{**LAYER, "scale": 32**-0.5, **changes})


def metadata(engine, num_prefills, *, cached=True, pad=0):
    """Metadata as Aphrodite's builder makes them; `pad` decodes at the end pad a CUDA graph."""
    lens = torch.cat([engine.lens, torch.ones(pad, dtype=torch.int32)])
    query_lens = torch.tensor(engine.query_lens)
    split = int(engine.starts[num_prefills])
    tables = (
        torch.nn.functional.pad(engine.table, (0, 0, 0, pad)) if cached else torch.zeros(len(lens), 0, dtype=torch.int)
    )
    return FlashAttentionMetadata(
        num_prefills=num_prefills, num_prefill_tokens=split, num_decode_tokens=int(engine.starts[-1]) - split + pad,
        slot_mapping=torch.nn.functional.pad(engine.slots, (0, pad), value=PAD_SLOT_ID), seq_lens=lens.tolist(),
        seq_lens_tensor=lens, max_query_len=max(engine.query_lens), max_prefill_seq_len=0, max_decode_seq_len=0,
        query_start_loc=engine.starts, seq_start_loc=torch.nn.functional.pad(lens.cumsum(0).int(), (1, 0)),
        context_lens_tensor=engine.lens - query_lens, block_tables=tables, use_cuda_graph=pad > 0,
    )  # fmt: skip


def run(layer, engine, meta, **changes):
    given = {"query": engine.query, "key": engine.key, "value": engine.value, "kv_cache": engine.kv_cache, **changes}
    return layer.forward(attn_metadata=meta, **given)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("lens", "num_prefills"), [(MIXED, 3), (PROMPTS, 3), (DECODES, 0)], ids=["mixed", "prompts", "decodes"]
)
def test_batches_that_attend_to_the_cache(name, lens, num_prefills):
    ours, oracles = OPTIONS[name]
    engine = SmallEngine(*lens)
    pointers = [x.data_ptr() for x in (engine.kv_cache, engine.table, engine.slots)]
    out = run(impl(**ours), engine, metadata(engine, num_prefills))
    assert out.shape == engine.query.shape
    engine.check(out, **oracles)
    assert pointers == [x.data_ptr() for x in (engine.kv_cache, engine.table, engine.slots)]


@pytest.mark.parametrize("name", OPTIONS)
def test_whole_prompts_without_tables(name):
    ours, oracles = OPTIONS[name]
    engine = SmallEngine(*PROMPTS)
    engine.check(run(impl(**ours), engine, metadata(engine, 3, cached=False)), **oracles)


def test_a_profile_run_has_no_cache():
    engine = SmallEngine(*PROMPTS)
    out = run(impl(), engine, metadata(engine, 3, cached=False), kv_cache=None)
    assert_close(out.view(-1, 4, 32), engine.expected())
    assert torch.equal(engine.bits(), engine.before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype):
    engine = SmallEngine(*MIXED, dtype=dtype)
    engine.check(run(impl(), engine, metadata(engine, 3)))


def test_decodes_that_pad_a_cuda_graph_write_nothing():
    engine = SmallEngine(*DECODES)
    padded = [torch.cat([x, torch.full((2, x.shape[1]), 3.0)]) for x in (engine.query, engine.key, engine.value)]
    out = run(impl(), engine, metadata(engine, 0, pad=2), **dict(zip(("query", "key", "value"), padded, strict=True)))
    assert out.shape == (5, 128)
    engine.check(out[:3])


def test_8_bit_caches_with_scales():
    engine = SmallEngine(*MIXED, dtype=torch.bfloat16)
    stored = torch.float8_e4m3fn
    cache = torch.stack([engine.kv_cache[0].float() / 0.05, engine.kv_cache[1].float() / 0.02]).to(stored)
    cache = cache.view(torch.uint8)
    out = run(impl(kv_cache_dtype="fp8"), engine, metadata(engine, 3), kv_cache=cache, k_scale=0.05, v_scale=0.02)
    engine.keys = [((x.float() / 0.05).to(stored).float() * 0.05).double() for x in engine.keys]
    engine.values = [((x.float() / 0.02).to(stored).float() * 0.02).double() for x in engine.values]
    assert_close(out.view(-1, 4, 32), engine.expected(), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("homo", [{}, {"homo_head": True}, {"homo_head_group": True}])
def test_block_sparse_layers(homo):
    """The rule of vLLM's block-sparse kernels, in NumPy."""
    params = {
        "max_seqlen": 512,
        "num_heads": 4,
        "num_kv_heads": 2,
        "block_size": 8,
        "local_blocks": 2,
        "vert_stride": 8,
    }
    shift = {"": 2, "homo_head": 0, "homo_head_group": 4}[next(iter(homo), "")]

    def mask(b, h, q_pos, kv_pos):
        head = h // 2 if "homo_head_group" in homo else h
        block = kv_pos // 8
        return ((block + head * shift + 1) % 8 == 0) | (q_pos // 8 - block < 2)

    engine = SmallEngine(*MIXED)
    out = run(impl(blocksparse_params={**params, **homo}), engine, metadata(engine, 3))
    engine.check(out, mask_mod=mask)


class AphroditesType(enum.Enum):
    DECODER = enum.auto()
    ENCODER = enum.auto()
    ENCODER_DECODER = enum.auto()


def test_attention_types_of_the_engines_own_enum():
    engine = SmallEngine(*PROMPTS)
    meta = metadata(engine, 3)
    out = run(impl(sliding_window=4), engine, meta, attn_type=AphroditesType.ENCODER)
    assert_close(out.view(-1, 4, 32), engine.expected(causal=False, window=(3, 3)))
    assert torch.equal(engine.bits(), engine.before)
    with pytest.raises(ValueError, match="attn_type: FlashAttentionMetadata have no lengths"):
        run(impl(), engine, meta, attn_type=AphroditesType.ENCODER_DECODER)
    engine.check(run(impl(), engine, meta, attn_type=AphroditesType.DECODER))


def test_splits_are_views_made_once():
    engine = SmallEngine(*MIXED)
    meta = metadata(engine, 3)
    prefill, decode = meta.prefill_metadata, meta.decode_metadata
    assert meta.prefill_metadata is prefill is meta._cached_prefill_metadata
    assert meta.decode_metadata is decode is meta._cached_decode_metadata
    assert (prefill.num_prefills, prefill.num_prefill_tokens, prefill.num_decode_tokens) == (3, 48, 0)
    assert prefill.seq_lens == [5, 150, 70]
    assert prefill.query_start_loc.tolist() == [0, 5, 45, 48]
    assert prefill.seq_start_loc.tolist() == [0, 5, 155, 225]
    assert prefill.context_lens_tensor.tolist() == [0, 110, 67]
    assert not prefill.use_cuda_graph
    assert prefill.decode_metadata is None
    assert (decode.num_prefills, decode.num_decode_tokens, decode.seq_lens, decode.query_start_loc) == (
        0,
        2,
        None,
        None,
    )
    assert decode.seq_lens_tensor.tolist() == [33, 1]
    assert decode.block_tables.data_ptr() == meta.block_tables[3:].data_ptr()
    assert decode.slot_mapping.tolist() == engine.slots[48:].tolist()
    assert decode.prefill_metadata is None


# The builder.


def group(engine, rows, *, prompt, hit=False, tables=True, **changes):
    """Sequences of a batch as Aphrodite's input builder describes them."""
    lens = [engine.lens_list[i] for i in rows]
    new = [engine.query_lens[i] for i in rows]
    needed = [-(-n // 16) for n in lens]
    own = {f"s{i}": engine.table[i, :n].tolist() for i, n in zip(rows, needed, strict=True)}
    return SimpleNamespace(**{
        "seq_ids": list(own), "input_tokens": [[0] * n for n in new], "orig_seq_lens": lens, "seq_lens": lens,
        "query_lens": new, "context_lens": [n - m for n, m in zip(lens, new, strict=True)],
        "curr_sliding_window_blocks": [0] * len(rows), "is_prompt": prompt, "prefix_cache_hit": hit,
        "block_tables": own if tables else None, **changes,
    })  # fmt: skip


def built(engine, groups, *, pad=-1, batch_size=-1, **settings):
    builder = FlashAttentionMetadataBuilder(input_builder(groups, **settings))
    lens = engine.lens_list + [1] * max(pad, 0)
    return builder.build(lens, engine.query_lens + [1] * max(pad, 0), pad, batch_size)


def test_a_built_batch_of_chunks_and_decodes_attends():
    engine = SmallEngine(*MIXED, garbage=0)
    meta = built(
        engine,
        [group(engine, [0], prompt=True), group(engine, [1, 2], prompt=True), group(engine, [3, 4], prompt=False)],
    )
    assert (meta.num_prefills, meta.num_prefill_tokens, meta.num_decode_tokens) == (3, 48, 2)
    assert torch.equal(meta.slot_mapping, engine.slots)
    assert (meta.max_query_len, meta.max_prefill_seq_len, meta.max_decode_seq_len) == (40, 150, 33)
    assert meta.query_start_loc.tolist() == engine.starts.tolist()
    assert meta.context_lens_tensor.tolist() == [0, 110, 67, 32, 0]
    assert [x.dtype for x in (meta.slot_mapping, meta.seq_lens_tensor, meta.seq_start_loc, meta.block_tables)] == [
        torch.int64, torch.int32, torch.int32, torch.int32,
    ]  # fmt: skip
    engine.check(run(impl(), engine, meta))


def test_built_whole_prompts_have_no_tables_unless_a_prefix_is_cached():
    engine = SmallEngine(*PROMPTS)
    meta = built(engine, [group(engine, [0, 1, 2], prompt=True)], chunked=False)
    assert meta.block_tables.shape == (3, 0)
    engine.check(run(impl(), engine, meta))
    engine = SmallEngine([5, 9], [5, 25], garbage=0)
    groups = [group(engine, [0], prompt=True), group(engine, [1], prompt=True, hit=True)]
    meta = built(engine, groups, chunked=False)
    assert meta.block_tables.shape == (2, 2)
    engine.check(run(impl(), engine, meta))


def test_a_built_cuda_graph_is_padded():
    engine = SmallEngine(*DECODES)
    graph = np.zeros((8, 6), np.int32)
    meta = built(engine, [group(engine, [0, 1, 2], prompt=False)], pad=1, batch_size=4, graph_block_tables=graph)
    assert meta.use_cuda_graph
    assert meta.num_decode_tokens == 4
    assert meta.slot_mapping.tolist() == [*engine.slots.tolist(), PAD_SLOT_ID]
    assert meta.block_tables.shape == (4, 6)
    assert meta.block_tables.data_ptr() == graph.ctypes.data
    padded = [torch.cat([x, x[:1]]) for x in (engine.query, engine.key, engine.value)]
    engine.check(run(impl(), engine, meta, **dict(zip(("query", "key", "value"), padded, strict=True)))[:3])


def test_a_built_profile_run_keeps_nothing():
    engine = SmallEngine(*PROMPTS)
    meta = built(engine, [group(engine, [0, 1, 2], prompt=True, tables=False)])
    assert set(meta.slot_mapping.tolist()) == {PAD_SLOT_ID}
    assert meta.block_tables.numel() == 0
    assert_close(run(impl(), engine, meta, kv_cache=None).view(-1, 4, 32), engine.expected())


def test_the_first_block_manager_keeps_a_window():
    engine = SmallEngine([30], [30])
    meta = built(engine, [group(engine, [0], prompt=True)], sliding_window=8, v2=False, chunked=False)
    assert meta.slot_mapping[:22].tolist() == [PAD_SLOT_ID] * 22
    assert meta.slot_mapping[22:].tolist() == engine.slots[22:].tolist()
    decode = SmallEngine([1], [60])
    windowed = group(decode, [0], prompt=False, seq_lens=[28], curr_sliding_window_blocks=[2])
    meta = built(decode, [windowed], sliding_window=32, v2=False)
    assert meta.block_tables.tolist() == decode.table[:, 2:4].tolist()
    assert meta.max_decode_seq_len == 28


def test_wrong_steps_are_refused():
    engine = SmallEngine(*MIXED)
    with pytest.raises(ValueError, match=r"query_lens: expected 1 new token for decode 's1'.*got 40"):
        built(engine, [group(engine, [1], prompt=False)])
    with pytest.raises(ValueError, match="query_lens: expected a sequence with a new token"):
        FlashAttentionMetadataBuilder(input_builder()).build([0], [0], -1, 1)


# The backend.


def test_shapes_and_names():
    assert FlashAttentionBackend.get_kv_cache_shape(10, 32, 2, 64) == (2, 10, 32, 2, 64)
    with pytest.raises(ValueError, match="block_size: expected a multiple of 16, got 24"):
        FlashAttentionBackend.get_kv_cache_shape(10, 24, 2, 64)
    assert FlashAttentionBackend.get_name() == "flash-attn"
    assert FlashAttentionBackend.get_impl_cls() is FlashAttentionImpl
    assert FlashAttentionBackend.get_metadata_cls() is FlashAttentionMetadata
    assert FlashAttentionBackend.get_builder_cls() is FlashAttentionMetadataBuilder
    assert 64 in FlashAttentionBackend.get_supported_head_sizes()
    assert impl().sliding_window == (-1, -1)
    assert impl(sliding_window=8).sliding_window == (7, 0)
    assert impl().logits_soft_cap == 0


def test_blocks_are_copied_and_swapped():
    caches = [torch.randn(2, 5, 16, 2, 8) for _ in range(2)]
    before = [x.clone() for x in caches]
    pairs = torch.tensor([[0, 3], [3, 4], [9, 1]])
    FlashAttentionBackend.copy_blocks(caches, pairs)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[:, [3, 4]], old[:, [0, 3]])
        assert torch.equal(cache[:, :3], old[:, :3])
    other = torch.zeros(2, 7, 16, 2, 8)
    FlashAttentionBackend.swap_blocks(caches[0], other, torch.tensor([[4, 6]]))
    assert torch.equal(other[:, 6], caches[0][:, 4])
    assert not other[:, :6].any()
    with pytest.raises(ValueError, match="dst_kv_cache: expected shape"):
        FlashAttentionBackend.swap_blocks(caches[0], other[0], pairs)
    with pytest.raises(ValueError, match=r"kv_caches\[1\]: expected shape"):
        FlashAttentionBackend.copy_blocks([caches[0], other[:1]], pairs)


BAD = {
    "a query too many": ({"num_decode_tokens": 1}, {}, ValueError, "query: expected 48 tokens"),
    "no cache": (
        {"seq_start_loc": torch.tensor([0, 5, 45, 48, 49, 50])}, {"kv_cache": None}, ValueError,
        "kv_cache: expected a cache",
    ),
    "scale of none": ({}, {"k_scale": 0.5}, ValueError, "k_scale: it belongs to 8-bit caches"),
    "another cache": ({}, {"kv_cache": torch.zeros(2, 3, 16, 2, 64)}, ValueError, "kv_cache: expected shape"),
    "no lengths": ({"seq_lens_tensor": None}, {}, AttributeError, "seq_lens_tensor"),
    "no starts": ({"query_start_loc": None}, {}, AttributeError, "query_start_loc"),
    "half a table": ({"block_tables": torch.zeros(4, 2, dtype=torch.int)}, {}, ValueError, "block_tables"),
    "float slots": ({"slot_mapping": torch.zeros(50)}, {}, TypeError, "slot_mapping"),
    "dtypes": ({}, {"kv_cache": torch.zeros(2, 30, 16, 2, 32).half()}, TypeError, "kv_cache: expected torch.float32"),
    "no key": ({}, {"key": None, "value": None}, ValueError, "key, value"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_wrong_use_is_refused_and_writes_nothing(name):
    fields, arguments, error, match = BAD[name]
    engine = SmallEngine(*MIXED)
    meta = metadata(engine, 3)
    engine.check_refused(lambda: run(impl(), engine, meta, **arguments), meta, fields, error, match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"head_size": 80}, r"head_size: expected one of \[32, .*got 80"),
        ({"num_heads": 5}, "num_heads: expected a multiple"),
        ({"blocksparse_params": {"block_size": 8}}, "blocksparse_params: expected block_size, local_blocks"),
        ({"blocksparse_params": {"block_size": 8, "local_blocks": 1, "vert_stride": 0}}, "vert_stride"),
        (
            {"blocksparse_params": {"block_size": 8, "local_blocks": 1, "vert_stride": 4, "num_heads": 8}},
            "expected num_heads=4",
        ),
    ],
)
def test_wrong_settings_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        impl(**changes)
