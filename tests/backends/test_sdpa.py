"""vLLM's CPU backend: batches of each type of attention against the oracle, in-place writes, and what is refused."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from instances import LAYER, layer_scales
from small_engine import TOLERANCE, SmallEngine, assert_close

from jaxpaged.backends.sdpa import (
    AttentionType,
    TorchSDPABackend,
    TorchSDPABackendImpl,
    TorchSDPAMetadata,
    TorchSDPAMetadataBuilderV1,
    _make_alibi_bias,
    _make_sliding_window_bias,
)

MIXED = ([1, 1, 5, 40, 3], [33, 1, 5, 150, 70])  # two decodes, then prompts of which two continue cached ones
PROMPTS = ([7, 1, 30], [7, 1, 30])
SLOPES = [0.5, 0.25, 0.1, 0.02]


def impl(**changes):
    return TorchSDPABackendImpl(**{**LAYER, "scale": 32**-0.5, **changes})


def flat(engine):
    return engine.kv_cache.flatten(2)


def chunked(engine, num_decodes):
    """Metadata of a batch whose first requests are decodes and whose prompts attend to the cache."""
    d = num_decodes
    lens, starts = engine.lens, engine.starts
    return TorchSDPAMetadata(
        num_prefills=len(lens) - d, num_prefill_tokens=int(starts[-1]) - d, num_decode_tokens=d,
        slot_mapping=engine.slots, decode_seq_lens_tensor=lens[:d],
        decode_max_seq_len=max(engine.lens_list[:d], default=0),
        decode_block_tables=engine.table[:d], chunked_prefill=True, max_query_len=max(engine.query_lens),
        prefill_max_seq_len=int(lens[d:].max()),
        prefill_query_start_loc=starts[d:] - d,
        prefill_seq_start_loc=torch.nn.functional.pad(lens[d:].cumsum(0).int(), (1, 0)),
        prefill_block_tables=engine.table[d:], query_start_loc=starts,
    )  # fmt: skip


def whole(engine):
    """Metadata of whole prompts."""
    return TorchSDPAMetadata(
        num_prefills=len(engine.lens_list), num_prefill_tokens=int(engine.starts[-1]), num_decode_tokens=0,
        slot_mapping=engine.slots, decode_seq_lens_tensor=None, decode_max_seq_len=0, decode_block_tables=None,
        chunked_prefill=False, seq_lens=engine.lens_list,
    )  # fmt: skip


def run(layer, engine, metadata, **changes):
    given = {"query": engine.query, "key": engine.key, "value": engine.value, "kv_cache": flat(engine), **changes}
    return layer.forward(layer_scales(), attn_metadata=metadata, **given)


OPTIONS = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 9}, {"window": (8, 0)}),
    "all": (
        {"sliding_window": 20, "alibi_slopes": SLOPES, "logits_soft_cap": 1.5},
        {"window": (19, 0), "alibi_slopes": np.array(SLOPES), "soft_cap": 1.5},
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_decodes_and_chunks_in_one_batch(name):
    ours, oracles = OPTIONS[name]
    engine = SmallEngine(*MIXED)
    pointers = [x.data_ptr() for x in (engine.kv_cache, engine.table, engine.slots)]
    out = run(impl(**ours), engine, chunked(engine, 2))
    assert out.shape == engine.query.shape
    engine.check(out, **oracles)
    assert pointers == [x.data_ptr() for x in (engine.kv_cache, engine.table, engine.slots)]


@pytest.mark.parametrize("name", OPTIONS)
def test_whole_prompts(name):
    ours, oracles = OPTIONS[name]
    engine = SmallEngine(*PROMPTS)
    engine.check(run(impl(**ours), engine, whole(engine)), **oracles)


@pytest.mark.parametrize("dtype", TorchSDPABackend.get_supported_dtypes())
def test_dtypes(dtype):
    engine = SmallEngine(*MIXED, dtype=dtype)
    out = run(impl(), engine, chunked(engine, 2))
    assert out.dtype == dtype
    engine.check(out)


@pytest.mark.parametrize(("name", "stored"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_8_bit_caches_with_scales(name, stored):
    """What the seed refuses without IPEX: the cache holds float8, in bytes, as vLLM allocates it."""
    engine = SmallEngine(*MIXED, dtype=torch.bfloat16)
    scales = layer_scales(0.05, 0.02)
    known = torch.stack(
        [(engine.kv_cache[i].float() / s).to(stored).view(torch.uint8) for i, s in ((0, 0.05), (1, 0.02))]
    )
    out = impl(kv_cache_dtype=name).forward(
        scales, engine.query, engine.key, engine.value, known.flatten(2), chunked(engine, 2)
    )
    engine.keys = [((x.float() / 0.05).to(stored).float() * 0.05).double() for x in engine.keys]
    engine.values = [((x.float() / 0.02).to(stored).float() * 0.02).double() for x in engine.values]
    assert_close(out.view(-1, 4, 32), engine.expected(), TOLERANCE[torch.bfloat16])
    rows = known[0].view(stored).view(-1, 2, 32)[engine.slots].view(torch.uint8)
    want = (engine.key.float().view(-1, 2, 32) / torch.tensor(0.05)).to(stored).view(torch.uint8)
    assert torch.equal(rows, want)


def test_a_layer_that_shares_anothers_cache_reads_it_and_writes_nothing():
    engine = SmallEngine(*MIXED)
    engine.kv_cache.copy_(engine.written().view(torch.float32))
    before = engine.bits()
    junk = torch.full_like(engine.key, torch.nan)
    out = run(impl(kv_sharing_target_layer_name="layers.0"), engine, chunked(engine, 2), key=junk, value=junk)
    assert_close(out.view(-1, 4, 32), engine.expected())
    assert torch.equal(engine.bits(), before)


def encoder_fields(lens, **more):
    return {
        "encoder_seq_lens": lens, "encoder_seq_lens_tensor": torch.tensor(lens, dtype=torch.int32),
        "max_encoder_seq_len": max(lens), "num_encoder_tokens": sum(lens), **more,
    }  # fmt: skip


def test_an_encoder_sees_both_sides_and_keeps_nothing():
    engine = SmallEngine(*PROMPTS)
    metadata = dataclasses.replace(
        whole(engine), seq_lens=[1, 1, 1], num_prefill_tokens=3, **encoder_fields(PROMPTS[0])
    )
    out = run(impl(attn_type="encoder"), engine, metadata)
    assert_close(out.view(-1, 4, 32), engine.expected(causal=False))
    assert torch.equal(engine.bits(), engine.before)


def test_an_encoder_only_layer_writes_its_cache():
    engine = SmallEngine(*PROMPTS)
    out = run(impl(attn_type=AttentionType.ENCODER_ONLY, sliding_window=5), engine, whole(engine))
    engine.check(out, causal=False, window=(4, 4))


@pytest.mark.parametrize("how", ["prompts", "decodes", "prompts again"])
def test_cross_attention_has_lengths_slots_and_tables_of_its_own(how):
    """`SmallEngine`'s requests are the encoder's; the queries are the decoder's."""
    encoder = SmallEngine(*PROMPTS)
    query_lens = [1, 1, 1] if how == "decodes" else [2, 4, 1]
    total = sum(query_lens)
    query = torch.randn(total, 128)
    metadata = TorchSDPAMetadata(
        num_prefills=0 if how == "decodes" else 3, num_prefill_tokens=0 if how == "decodes" else total,
        num_decode_tokens=total if how == "decodes" else 0, slot_mapping=torch.full((total,), 10**9),
        decode_seq_lens_tensor=torch.full((3,), 10**6, dtype=torch.int32), decode_max_seq_len=10**6,
        decode_block_tables=torch.full((3, 2), 10**6, dtype=torch.int32), chunked_prefill=False, seq_lens=query_lens,
        **encoder_fields(PROMPTS[0], cross_slot_mapping=encoder.slots, cross_block_tables=encoder.table),
    )  # fmt: skip
    key, value = (encoder.key, encoder.value) if how == "prompts" else (None, None)
    if how != "prompts":
        encoder.kv_cache.copy_(encoder.written().view(torch.float32))
    out = run(impl(attn_type="encoder_decoder"), encoder, metadata, query=query, key=key, value=value)
    encoder.query, encoder.query_lens = query, query_lens
    encoder.check(out, causal=False)


def test_runs_without_metadata_or_cache():
    engine = SmallEngine(*PROMPTS)
    assert run(impl(), engine, None) is engine.query
    out = run(impl(), engine, whole(engine), kv_cache=torch.empty(0))
    assert_close(out.view(-1, 4, 32), engine.expected())
    assert torch.equal(engine.bits(), engine.before)


def test_biases_of_the_metadata_take_the_place_of_the_layers_mask():
    engine = SmallEngine(*PROMPTS)
    for biases, oracles in (
        (_make_alibi_bias(torch.tensor(SLOPES), torch.float32, PROMPTS[1]), {"alibi_slopes": np.array(SLOPES)}),
        (_make_sliding_window_bias(PROMPTS[1], 4, torch.float32), {"window": (3, 0)}),
        (_make_sliding_window_bias(PROMPTS[1], None, torch.bfloat16), {}),
        ([None, torch.zeros(1, 1), None], {}),
        ([torch.ones(n, n).tril().bool() for n in PROMPTS[1]], {}),
    ):
        metadata = whole(engine)
        metadata.set_attn_bias(biases, AttentionType.DECODER)
        assert metadata.get_attn_bias("decoder") is biases
        assert_close(run(impl(), engine, metadata).view(-1, 4, 32), engine.expected(**oracles))


def test_biases_hold_what_their_names_say():
    (alibi,) = _make_alibi_bias(torch.tensor([0.5, 0.0]), torch.float32, [3])
    inf = -torch.inf
    assert alibi.tolist() == [[[[0, inf, inf], [-0.5, 0, inf], [-1, -0.5, 0]], [[0, inf, inf], [0, 0, inf], [0, 0, 0]]]]
    (window,) = _make_sliding_window_bias([3], 2, torch.float16)
    assert window.tolist() == [[[0, inf, inf], [0, 0, inf], [inf, 0, 0]]]


@pytest.mark.parametrize("quantized", [torch.float8_e4m3fn, torch.int8, None])
def test_outputs_go_where_the_engine_wants_them(quantized):
    engine = SmallEngine(*MIXED)
    output = torch.zeros(engine.query.shape, dtype=quantized or torch.float32)
    scale = torch.tensor(0.02) if quantized else None
    out = run(impl(), engine, chunked(engine, 2), output=output, output_scale=scale)
    assert out is output
    found = output.float() * (0.02 if quantized else 1)
    tolerance = {torch.int8: 0.011, torch.float8_e4m3fn: 0.04, None: 2e-6}[quantized]
    assert_close(found.view(-1, 4, 32), engine.expected(), tolerance)


def test_shapes_and_head_sizes():
    assert TorchSDPABackend.get_kv_cache_shape(10, 16, 2, 80) == (2, 10, 16 * 2 * 80)
    assert TorchSDPABackend.get_kv_cache_shape(10, 16, 2, 80, "fp8") == (2, 10, 16 * 2 * 80)
    TorchSDPABackend.validate_head_size(96)
    with pytest.raises(ValueError, match=r"head_size: expected one of \[8, .* for TorchSDPA, got 100"):
        TorchSDPABackend.validate_head_size(100)
    assert TorchSDPABackend.get_name() == "TORCH_SDPA"
    assert TorchSDPABackend.get_impl_cls() is TorchSDPABackendImpl
    assert TorchSDPABackend.get_metadata_cls() is TorchSDPAMetadata
    assert TorchSDPABackend.get_builder_cls() is TorchSDPAMetadataBuilderV1
    assert TorchSDPABackend.use_cascade_attention(1, a=2) is False


def test_metadata_pick_by_attention_type():
    fields = encoder_fields([4, 5], cross_slot_mapping=torch.zeros(9), cross_block_tables=torch.zeros(2, 1))
    engine = SmallEngine(*PROMPTS)
    metadata = dataclasses.replace(whole(engine), seq_lens=[1, 2], **fields)
    assert metadata.is_all_encoder_attn_metadata_set
    assert metadata.is_all_cross_attn_metadata_set
    assert not whole(engine).is_all_encoder_attn_metadata_set
    assert metadata.prefill_metadata is metadata
    assert metadata.decode_metadata is None
    assert metadata.get_seq_lens("decoder") == ([1, 2], [1, 2]) == metadata.get_seq_lens("encoder_only")
    assert metadata.get_seq_lens("encoder") == ([4, 5], [4, 5])
    assert metadata.get_seq_lens("encoder_decoder") == ([1, 2], [4, 5])
    assert metadata.get_seq_len_block_table_args("decoder") == (None, 0, None)
    lens, longest, tables = metadata.get_seq_len_block_table_args("encoder_decoder")
    assert (lens is metadata.encoder_seq_lens_tensor, longest, tables is metadata.cross_block_tables) == (True, 5, True)
    assert metadata.get_seq_len_block_table_args("encoder")[1:] == (5, None)
    for call in (metadata.get_seq_lens, metadata.get_attn_bias, metadata.get_seq_len_block_table_args):
        with pytest.raises(AttributeError, match=r"attn_type: expected one of 'decoder'.*got 'both'"):
            call("both")
    with pytest.raises(ValueError, match="attn_type"):
        metadata.set_attn_bias([], "both")


def test_the_builder_splits_a_step_of_vllms():
    engine = SmallEngine(*MIXED)
    config = SimpleNamespace(scheduler_config=SimpleNamespace(chunked_prefill_enabled=False))
    builder = TorchSDPAMetadataBuilderV1(None, ["layers.0"], config, torch.device("cpu"))
    common = SimpleNamespace(
        num_reqs=5, num_actual_tokens=50, max_query_len=40, query_start_loc_cpu=engine.starts,
        seq_lens_cpu=engine.lens, slot_mapping=engine.slots, block_table_tensor=engine.table,
    )  # fmt: skip
    metadata = builder.build(0, common)
    # The second request's only token is its first one: a prompt, like all after it.
    assert (metadata.num_decode_tokens, metadata.num_prefills, metadata.num_prefill_tokens) == (1, 4, 49)
    assert metadata.chunked_prefill
    engine.check(run(impl(), engine, metadata))
    assert builder.reorder_batch_threshold == 1


BAD = {
    "no encoder lengths": ({"attn_type": "encoder"}, {}, {}, AttributeError, "encoder_seq_lens, .* got None"),
    "no cross tables": (
        {"attn_type": "encoder_decoder"}, encoder_fields([7, 1, 30]), {}, AttributeError,
        "cross_slot_mapping, cross_block_tables",
    ),
    "a query too many": ({}, {"num_prefill_tokens": 37}, {}, ValueError, "query: expected 37 tokens"),
    "lengths that don't add up": ({}, {"seq_lens": [7, 2, 30]}, {}, ValueError, "seq_lens: expected lengths of the 38"),
    "no lengths": ({}, {"seq_lens": None}, {}, ValueError, "seq_lens"),
    "half a key": ({}, {}, {"value": None}, ValueError, "key, value: expected both"),
    "another head size": ({"head_size": 16}, {}, {}, ValueError, "query: expected shape"),
    "another cache": ({}, {}, {"kv_cache": torch.zeros(2, 3, 100)}, ValueError, "kv_cache: expected shape"),
    "4-bit output": ({}, {}, {"output_block_scale": torch.ones(1)}, NotImplementedError, "output_block_scale"),
    "scaled output": ({}, {}, {"output_scale": torch.ones(1)}, TypeError, "output: with output_scale"),
    "bias of two heads": (
        {}, {"attn_bias": [torch.zeros(1, 2, n, n) for n in PROMPTS[1]]}, {}, ValueError,
        r"attn_bias\[0\]: expected shape \[1, 4 or 1, 7, 7\], got \[1, 2, 7, 7\]",
    ),
    "bias": ({}, {"attn_bias": [torch.zeros(3, 3)] * 3}, {}, ValueError, r"attn_bias\[0\]: expected shape"),
    "tokens of decodes": (
        {"attn_type": "encoder_only"}, {"num_decode_tokens": 1}, {}, ValueError, "num_decode_tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_wrong_use_is_refused_and_writes_nothing(name):
    layer, fields, arguments, error, match = BAD[name]
    engine = SmallEngine(*PROMPTS)
    metadata = whole(engine)
    engine.check_refused(lambda: run(impl(**layer), engine, metadata, **arguments), metadata, fields, error, match)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"num_heads": 5}, ValueError, "num_heads: expected a multiple of the 2 kv heads, got 5"),
        ({"alibi_slopes": [1.0]}, ValueError, "alibi_slopes"),
        ({"sliding_window": 0}, ValueError, "sliding_window"),
        ({"kv_cache_dtype": "fp4"}, ValueError, "kv_cache_dtype"),
        ({"logits_soft_cap": -1.0}, ValueError, "softcap"),
        ({"attn_type": "cross"}, AttributeError, "attn_type"),
        ({"attn_type": "encoder_decoder", "sliding_window": 4}, ValueError, "sliding_window"),
    ],
)
def test_wrong_settings_are_refused(changes, error, match):
    with pytest.raises(error, match=match):
        impl(**changes)
