"""vLLM's FlexAttention backend: batches against the oracle, masks and scores that users replace, what is refused."""

import dataclasses
import importlib.util
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from instances import LAYER, flex_builder, layer_scales
from small_engine import TOLERANCE, SmallEngine, assert_close
from torch.nn.attention.flex_attention import BlockMask, and_masks, flex_attention

from jaxpaged.backends.flex import (
    FlexAttentionBackend,
    FlexAttentionImpl,
    FlexAttentionMetadata,
    FlexAttentionMetadataBuilder,
    _offsets_to_doc_ids_tensor,
    causal_mask_mod,
    create_block_mask_compiled,
    flex_attention_compiled,
    physical_to_logical_mapping,
)
from jaxpaged.testing.compilations import compilations

MIXED = ([5, 1, 40, 1, 3], [5, 33, 150, 1, 70])
SLOPES = [0.5, 0.25, 0.1, 0.02]
OPTIONS = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 9}, {"window": (8, 0)}),
    "all": (
        {"sliding_window": 20, "alibi_slopes": SLOPES, "logits_soft_cap": 1.5},
        {"window": (19, 0), "alibi_slopes": np.array(SLOPES), "soft_cap": 1.5},
    ),
}


def impl(**changes):
    return FlexAttentionImpl(**{**LAYER, "scale": 32**-0.5, **changes})


def built(engine, common_prefix_len=0):
    common = SimpleNamespace(
        num_reqs=len(engine.lens), num_actual_tokens=int(engine.starts[-1]), max_query_len=max(engine.query_lens),
        query_start_loc=engine.starts, seq_lens=engine.lens,
    )  # fmt: skip
    return flex_builder(engine).build(common_prefix_len, common)


def run(layer, engine, metadata, *, padding=0, **changes):
    """The layer's output for the tokens of the batch; rows of padding hold NaN and their output stays untouched."""
    rows = {}
    for name, heads in (("query", 4), ("key", 2), ("value", 2)):
        x = getattr(engine, name).view(-1, heads, 32)
        rows[name] = torch.cat([x, torch.full((padding, heads, 32), torch.nan, dtype=x.dtype)]) if padding else x
    output = torch.full_like(rows["query"], 77.0, memory_format=torch.contiguous_format)
    given = {**rows, "kv_cache": engine.kv_cache, "output": output, **changes}
    out = layer.forward(layer_scales(), attn_metadata=metadata, **given)
    assert out is given["output"]
    n = len(engine.query)
    assert (out[n:] == 77.0).all()
    return out[:n]


def small():
    return SmallEngine(*MIXED, garbage=0)  # vLLM pads tables with block 0


@pytest.mark.parametrize("name", OPTIONS)
def test_mixed_batches_with_padding(name):
    ours, oracles = OPTIONS[name]
    engine = small()
    metadata = built(engine)
    pointers = [x.data_ptr() for x in (engine.kv_cache, engine.table, metadata.slot_mapping)]
    engine.check(run(impl(**ours), engine, metadata, padding=6), **oracles)
    assert pointers == [x.data_ptr() for x in (engine.kv_cache, metadata.block_table, metadata.slot_mapping)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype):
    engine = SmallEngine(*MIXED, dtype=dtype, garbage=0)
    engine.check(run(impl(), engine, built(engine)))


def test_a_cascade_has_the_same_results():
    """All requests begin with the blocks of the first."""
    engine = SmallEngine([1, 1, 1], [40, 50, 60], garbage=0)
    for i in (1, 2):
        engine.table[i, :2] = engine.table[0, :2]
        engine.keys[i][:32], engine.values[i][:32] = engine.keys[0][:32], engine.values[0][:32]
    metadata = built(engine, common_prefix_len=32)
    assert metadata.use_cascade
    assert metadata.cu_prefix_query_lens.tolist() == [0, 3]
    assert metadata.prefix_kv_lens.tolist() == [32]
    assert metadata.suffix_kv_lens.tolist() == [8, 18, 28]
    engine.check(run(impl(), engine, metadata))


def test_8_bit_caches_with_scales():
    engine = SmallEngine(*MIXED, dtype=torch.bfloat16, garbage=0)
    stored = torch.float8_e4m3fn
    cache = torch.stack([engine.kv_cache[0].float() / 0.05, engine.kv_cache[1].float() / 0.02]).to(stored)
    x = engine.query.view(-1, 4, 32)
    out = impl(kv_cache_dtype="fp8").forward(
        layer_scales(0.05, 0.02), x, engine.key.view(-1, 2, 32), engine.value.view(-1, 2, 32), cache.view(torch.uint8),
        built(engine), output=torch.empty_like(x, memory_format=torch.contiguous_format),
    )  # fmt: skip
    engine.keys = [((x.float() / 0.05).to(stored).float() * 0.05).double() for x in engine.keys]
    engine.values = [((x.float() / 0.02).to(stored).float() * 0.02).double() for x in engine.values]
    assert_close(out, engine.expected(), TOLERANCE[torch.bfloat16])


def test_a_layer_that_shares_anothers_cache_writes_nothing():
    engine = small()
    engine.kv_cache.copy_(engine.written().view(torch.float32))
    before = engine.bits()
    out = run(impl(kv_sharing_target_layer_name="layers.0"), engine, built(engine), key=None, value=None)
    assert_close(out, engine.expected())
    assert torch.equal(engine.bits(), before)


def test_encoders_see_both_sides():
    engine = SmallEngine([7, 1, 30], [7, 1, 30], garbage=0)
    engine.check(run(impl(attn_type="encoder_only"), engine, built(engine)), causal=False)


def test_outputs_in_8_bits():
    engine = small()
    output = torch.zeros(len(engine.query), 4 * 32, dtype=torch.float8_e4m3fn)
    layer = impl()
    x = [getattr(engine, name).view(-1, h, 32) for name, h in (("query", 4), ("key", 2), ("value", 2))]
    out = layer.forward(layer_scales(), *x, engine.kv_cache, built(engine), output, torch.tensor(0.02))
    assert_close(out.float().view(-1, 4, 32) * 0.02, engine.expected(), 0.04)


def test_a_profiling_run_returns_the_output():
    output = torch.zeros(3, 4, 32)
    assert impl().forward(None, output, None, None, None, None, output) is output


# What users replace.


def prefix_lm(b, h, q_idx, kv_idx):
    return (kv_idx <= q_idx) | (kv_idx < torch.tensor(12)) & (h != 1)


def same_in_numpy(b, h, q_pos, kv_pos):
    return (kv_pos <= q_pos) | (kv_pos < 12) & (h != 1)


@pytest.mark.parametrize("rebuilt", [False, True])
@pytest.mark.parametrize(
    "mask", [prefix_lm, lambda b, h, q, kv: (kv <= q) | jnp.logical_and(kv < 12, h != 1)], ids=["torch", "jax"]
)
def test_a_logical_mask_takes_effect(mask, rebuilt):
    engine = small()
    metadata = built(engine)
    metadata.logical_mask_mod = mask
    if rebuilt:
        metadata.mask_mod = metadata.get_mask_mod()
    engine.check(run(impl(), engine, metadata), causal=False, mask_mod=same_in_numpy)


def test_a_logical_mask_goes_with_a_layers_window():
    engine = small()
    metadata = built(engine)
    metadata.logical_mask_mod = prefix_lm
    out = run(
        impl(
            sliding_window=30,
            blocksparse_params={"block_size": 8, "local_blocks": 1, "vert_stride": 2, "homo_head": True},
        ),
        engine,
        metadata,
    )

    def both(b, h, q_pos, kv_pos):
        sparse = ((kv_pos // 8 + 1) % 2 == 0) | (kv_pos // 8 > q_pos // 8 - 1)
        return same_in_numpy(b, h, q_pos, kv_pos) & sparse

    engine.check(out, causal=False, window=(29, None), mask_mod=both)


def in_physical_terms(engine, metadata):
    """A score function of rows and physical indices, and the oracle's of positions: a bias for each slot and row."""
    slots = torch.randn(metadata.total_cache_tokens)
    rows = torch.randn(len(engine.query))

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + slots[kv_idx] * (h + 1) + rows[q_idx] * torch.where(kv_idx % 2 == 0, 1.0, b - 1.0)

    def in_numpy(score, b, h, q_pos, kv_pos):
        block = engine.table[b].numpy()[kv_pos // 16]
        index = block * 16 + kv_pos % 16
        row = q_pos - (engine.lens_list[b] - engine.query_lens[b]) + int(engine.starts[b])
        even = np.where(index % 2 == 0, 1.0, -1.0)
        return score + slots.numpy()[index] * (h + 1) + rows.numpy()[row] * even

    return score_mod, in_numpy


def test_a_score_function_takes_effect():
    engine = small()
    metadata = built(engine)
    metadata.score_mod, in_numpy = in_physical_terms(engine, metadata)
    out = run(impl(logits_soft_cap=2.0), engine, metadata)
    engine.check(out, soft_cap=2.0, score_mod=in_numpy)


def test_a_mask_function_takes_effect():
    """Of rows and physical indices: the batch's own and one more condition."""
    engine = small()
    metadata = built(engine)
    metadata.mask_mod = and_masks(metadata.get_mask_mod(), lambda b, h, q_idx, kv_idx: (kv_idx + q_idx) % 3 != 0)

    def in_numpy(b, h, q_pos, kv_pos):
        index = engine.table[b].numpy()[kv_pos // 16] * 16 + kv_pos % 16
        row = q_pos - (engine.lens_list[b] - engine.query_lens[b]) + int(engine.starts[b])
        return (index + row) % 3 != 0

    metadata.score_mod, score_in_numpy = in_physical_terms(engine, metadata)
    engine.check(run(impl(), engine, metadata), mask_mod=in_numpy, score_mod=score_in_numpy)


def test_a_mask_function_may_reach_other_requests():
    """As in PyTorch's FlexAttention: the mask alone says what is attended to, in the whole cache."""
    engine = SmallEngine([3, 2], [3, 20], garbage=0)
    metadata = built(engine)
    first, later = engine.table[0, 0].item() * 16, engine.slots[3:]
    metadata.mask_mod = lambda b, h, q_idx, kv_idx: (kv_idx >= first) & (kv_idx < first + 3)
    out = run(impl(), engine, metadata)
    keys, values = engine.keys[0], engine.values[0]
    engine.keys, engine.values, engine.query_lens = [keys], [values], [5]
    assert_close(out, engine.expected(causal=False))
    assert not torch.isnan(engine.kv_cache[0].flatten(0, 1)[later]).any()


@pytest.mark.parametrize("dtype", [torch.float32])
def test_a_block_mask_takes_effect(dtype):
    """Its lists of tiles count, not its mask function alone."""
    engine = SmallEngine(*MIXED, dtype=dtype, garbage=0)
    metadata = built(engine)
    assert metadata.block_mask is metadata.block_mask
    assert metadata.block_mask.shape == (1, 1, 50, metadata.total_cache_tokens)
    engine.check(run(impl(), engine, metadata))  # to read it changes nothing
    own = metadata.block_mask
    keep = own.kv_num_blocks.clone()
    keep[..., 0] = keep[..., 0] // 2  # leave out some of the tiles that the batch needs
    metadata.block_mask = BlockMask.from_kv_blocks(
        keep, own.kv_indices, mask_mod=own.mask_mod, seq_lengths=own.seq_lengths
    )
    kept = own.kv_indices[0, 0, 0, : keep[0, 0, 0]].tolist()
    assert 0 < len(kept) < own.kv_num_blocks[0, 0, 0]

    def in_numpy(b, h, q_pos, kv_pos):
        return np.isin((engine.table[b].numpy()[kv_pos // 16] * 16 + kv_pos % 16) // 128, kept)

    engine.kv_cache.copy_(engine.before.view(dtype))
    engine.check(run(impl(), engine, metadata), mask_mod=in_numpy)


def test_block_masks_that_are_built_again_are_no_replacement():
    engine = small()
    metadata = built(engine)
    metadata.block_mask = metadata.build_block_mask()
    assert metadata.replaced_block_mask is None
    metadata.logical_mask_mod = prefix_lm
    copy = dataclasses.replace(metadata, num_input_tokens=64)
    assert copy.replaced_block_mask is None
    assert copy.replaced_mask_mod is None
    engine.check(run(impl(), engine, copy), causal=False, mask_mod=same_in_numpy)
    other = dataclasses.replace(metadata, mask_mod=causal_mask_mod)
    assert other.replaced_mask_mod is causal_mask_mod


def test_steps_with_new_functions_compile_nothing_anew():
    def step(limit):
        engine = small()
        metadata = built(engine)
        metadata.logical_mask_mod = lambda b, h, q, kv: kv < limit
        run(impl(), engine, metadata)

    step(torch.tensor(20))
    with compilations() as compiled:
        step(torch.tensor(30))
    assert compiled.count == 0


def test_the_mask_function_agrees_with_block_tables():
    engine = small()
    metadata = built(engine)
    rows, slots = torch.arange(50)[:, None], torch.arange(metadata.total_cache_tokens)[None]
    kept = metadata.mask_mod(torch.tensor(0), torch.tensor(0), rows, slots)
    for i in range(5):
        position = torch.arange(engine.lens_list[i])
        own = engine.table[i][position // 16].long() * 16 + position % 16
        for j in range(engine.query_lens[i]):
            last = engine.lens_list[i] - engine.query_lens[i] + j
            row = kept[int(engine.starts[i]) + j]
            assert sorted(row.nonzero()[:, 0].tolist()) == sorted(own[: last + 1].tolist())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("masked", [False, True])
def test_flex_attention_agrees_with_pytorchs(masked):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 30, 32), torch.randn(2, 2, 50, 32), torch.randn(2, 2, 50, 32)
    bias = torch.randn(2, 4)

    def mask(b, h, q_idx, kv_idx):
        return (q_idx + 20 >= kv_idx) & ((kv_idx + h + b) % 3 != 0)

    def score(s, b, h, q_idx, kv_idx):
        return s + bias[b, h] * (q_idx - kv_idx)

    block_mask = create_block_mask_compiled(mask, 2, 4, 30, 50, device="cpu", BLOCK_SIZE=16) if masked else None
    options = {"score_mod": score, "block_mask": block_mask, "scale": 0.3, "enable_gqa": True}
    expected = flex_attention(
        query.double(),
        key.double(),
        value.double(),
        **{**options, "score_mod": lambda s, b, h, q, k: s + bias.double()[b, h] * (q - k)},
    )
    out = flex_attention_compiled(query, key, value, **options, kernel_options={"anything": True})
    assert out.shape == query.shape
    assert_close(out, expected.numpy(), 1e-5)
    with pytest.raises(ValueError, match="enable_gqa"):
        flex_attention_compiled(query, key, value)
    with pytest.raises(NotImplementedError, match="return_lse"):
        flex_attention_compiled(query, query, query, return_lse=True)


# Helpers and shapes.


def test_helpers():
    offsets = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    assert _offsets_to_doc_ids_tensor(offsets).tolist() == [0, 0, 0, 2, 2]
    assert _offsets_to_doc_ids_tensor(offsets).dtype == torch.int32
    assert causal_mask_mod(0, 0, torch.tensor([1, 2]), torch.tensor([2, 2])).tolist() == [False, True]
    table = torch.tensor([[3, 5, 1, 7, 4, 2, 0, 6], [2, 2, -1, 99, 0, 0, 0, 0]], dtype=torch.int32)
    mapping = physical_to_logical_mapping(table, 9)
    assert mapping.dtype == torch.int64
    assert mapping.tolist() == [[-1, 2, 5, 0, 4, 1, 7, 3, -1], [-1, -1, 1, -1, -1, -1, -1, -1, -1]]
    assert physical_to_logical_mapping(table[:1]).shape == (1, 8)
    x = torch.zeros(2, 3, 4)
    assert FlexAttentionImpl.view_as_4d(x).shape == (1, 2, 3, 4)
    assert FlexAttentionImpl.view_as_4d(x[None])._base is x
    with pytest.raises(ValueError, match=r"tensor: expected 3 or 4 axes, got shape \[3, 4\]"):
        FlexAttentionImpl.view_as_4d(x[0])


def test_shapes_and_names():
    assert FlexAttentionBackend.get_kv_cache_shape(10, 8, 2, 64) == (2, 10, 8, 2, 64)
    assert FlexAttentionBackend.get_name() == "FLEX_ATTENTION"
    assert FlexAttentionBackend.get_impl_cls() is FlexAttentionImpl
    assert FlexAttentionBackend.get_metadata_cls() is FlexAttentionMetadata
    assert FlexAttentionBackend.get_builder_cls() is FlexAttentionMetadataBuilder
    assert FlexAttentionBackend.use_cascade_attention(1, a=2) is False
    assert FlexAttentionBackend.get_supported_head_sizes()[0] == 16


def test_the_builder_fills_its_slots_and_asks_the_model():
    engine = small()
    builder = flex_builder(engine)
    assert (builder.num_heads_q, builder.num_heads_kv, builder.headdim, builder.block_size) == (4, 2, 32, 16)
    metadata = built(engine)
    assert torch.equal(metadata.slot_mapping, engine.slots)
    assert metadata.decode_offset.tolist() == [0, 32, 110, 0, 67]
    assert metadata.num_blocks == engine.kv_cache.shape[1]
    assert metadata.max_seq_len == 150
    assert not metadata.use_cascade
    assert metadata.prefix_kv_lens is None


BAD = {
    "no output": ({}, {}, {"output": None}, ValueError, "output: expected a tensor"),
    "a small output": ({}, {}, {"output": torch.zeros(3, 4, 32)}, ValueError, "output: expected 50 rows"),
    "too few tokens": ({}, {"num_actual_tokens": 51}, {}, ValueError, "query: expected 51 tokens"),
    "offsets": ({}, {"decode_offset": torch.zeros(5, dtype=torch.int32)}, {}, ValueError, "decode_offset"),
    "blocks": ({}, {"block_size": 8}, {}, ValueError, "kv_cache: expected blocks of 8"),
    "a window": ({"sliding_window": 4}, {"mask_mod": causal_mask_mod}, {}, ValueError, "logical_mask_mod"),
    "another cache": ({}, {"mask_mod": causal_mask_mod, "total_cache_tokens": 9}, {}, ValueError, "expected 9 tokens"),
    "no function": ({}, {"logical_mask_mod": 3}, {}, TypeError, "logical_mask_mod: expected a function"),
    "a small block mask": (
        {}, {"block_mask": create_block_mask_compiled(causal_mask_mod, None, None, 64, 128, device="cpu")}, {},
        ValueError, r"block_mask: expected one for scores of shape \[1, 4, 50, \d+\], got one for \[1, 1, 64, 128\]",
    ),
    "no score": ({}, {"score_mod": lambda *_: "x"}, {}, TypeError, "score_mod"),
    "no key": ({}, {}, {"key": None, "value": None}, ValueError, "key, value"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_wrong_use_is_refused_and_writes_nothing(name):
    layer, fields, arguments, error, match = BAD[name]
    engine = small()
    metadata = built(engine)
    engine.check_refused(lambda: run(impl(**layer), engine, metadata, **arguments), metadata, fields, error, match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"head_size": 80}, r"head_size: expected one of \[16, .*got 80"),
        ({"attn_type": "encoder_decoder"}, "attn_type: FlexAttentionMetadata have no lengths"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype"),
    ],
)
def test_wrong_settings_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        impl(**changes)


def test_a_cascade_without_a_prefix_is_refused():
    with pytest.raises(ValueError, match="use_cascade, common_prefix_len"):
        dataclasses.replace(built(small()), use_cascade=True)


def test_engines_are_not_installed():
    """So what these tests ran needs none of them."""
    assert importlib.util.find_spec("vllm") is None
    assert importlib.util.find_spec("aphrodite") is None
