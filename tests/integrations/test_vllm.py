"""vLLM's attention layers against the oracle, on objects that have vLLM's field names; vLLM itself isn't needed."""

import dataclasses

import numpy as np
import pytest
import torch
from small_engine import TOLERANCE, SmallEngine, assert_close
from vllm_batch import LAYER, LAYOUTS, Batch, module

from jaxpaged.integrations.vllm.layer import AttentionLayer
from jaxpaged.integrations.vllm.metadata import JaxpagedMetadata
from jaxpaged.integrations.vllm.version import check_version
from jaxpaged.testing.compilations import compilations

MIXED = ([1, 5, 1, 40, 3], [33, 5, 1, 150, 70])  # decodes, whole prompts and chunks in any order
SLOPES = [0.5, 0.25, 0.1, 0.02]
SINKS = [0.5, -2.0, 3.0, 0.0]
OPTIONS = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 9}, {"window": (8, 0)}),
    "all": (
        {
            "sliding_window": 20,
            "alibi_slopes": SLOPES,
            "logits_soft_cap": 1.5,
            "sinks": torch.nn.Parameter(torch.tensor(SINKS), requires_grad=False),
        },
        {"window": (19, 0), "alibi_slopes": np.array(SLOPES), "soft_cap": 1.5, "sinks": np.array(SINKS)},
    ),
}


def layer(**changes):
    return AttentionLayer(**LAYER | changes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_mixed_batch_in_both_layouts(name, layout):
    ours, oracles = OPTIONS[name]
    batch = Batch(SmallEngine(*MIXED), layout)
    shared = (batch.kv_cache, batch.engine.table, batch.slots)
    pointers = [x.data_ptr() for x in shared]
    out = batch.run(layer(**ours))
    assert out is batch.output
    batch.check(out, **oracles)
    assert pointers == [x.data_ptr() for x in shared]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    batch = Batch(SmallEngine(*MIXED, dtype=dtype))
    batch.check(batch.run(layer()))


@pytest.mark.parametrize("block_size", [1, 8, 48, 128])
def test_block_sizes(block_size):
    batch = Batch(SmallEngine(*MIXED, block_size=block_size))
    batch.check(batch.run(layer()))


def test_metadata_are_views_of_vllms_tensors_without_its_padding():
    batch = Batch(SmallEngine(*MIXED))
    common = batch.common()
    meta = JaxpagedMetadata.of(common)
    assert meta.num_actual_tokens == 50
    assert meta.query_start_loc.tolist() == [0, 1, 6, 7, 47, 50]
    assert meta.seq_lens.tolist() == [33, 5, 1, 150, 70]
    assert meta.causal is True
    for ours, theirs in (
        (meta.query_start_loc, common.query_start_loc),
        (meta.seq_lens, common.seq_lens),
        (meta.block_table, common.block_table_tensor),
        (meta.slot_mapping, common.slot_mapping),
    ):
        assert ours.data_ptr() == theirs.data_ptr()


def test_metadata_move_to_another_group_of_caches():
    meta = JaxpagedMetadata.of(Batch(SmallEngine(*MIXED)).common())
    meta.note = "added by a builder of vLLM's"
    table, slots = torch.zeros(7, 3, dtype=torch.int32), torch.zeros(50, dtype=torch.int64)
    other = meta.with_blocks(table, slots)
    assert (other.block_table.shape, other.slot_mapping, other.note) == ((5, 3), slots, meta.note)
    assert other.seq_lens is meta.seq_lens
    assert meta.block_table is not other.block_table


def test_a_decoder_that_is_not_causal_sees_both_sides():
    batch = Batch(SmallEngine(*MIXED))
    meta = JaxpagedMetadata.of(batch.common(causal=False))
    batch.check(batch.run(layer(sliding_window=20), metadata=meta), causal=False, window=(19, 19))


@pytest.mark.parametrize("window", [None, 20])
def test_some_requests_are_causal_and_some_are_not(window):
    batch = Batch(SmallEngine(*MIXED))
    causal = torch.tensor([True, False, True, False, True, False])  # and one of padding
    meta = JaxpagedMetadata.of(batch.common(causal=causal))
    oracles = {"window": (19, 19)} if window else {}
    out = batch.run(layer(sliding_window=window), metadata=meta)
    kept = causal.numpy()
    batch.check(out, causal=False, mask_mod=lambda b, h, q, kv: (kv <= q) | ~kept[b], **oracles)
    with pytest.raises(TypeError, match=r"causal: expected shape \[num_reqs\] of torch.bool, got \[5\] torch.int64"):
        batch.run(layer(), metadata=JaxpagedMetadata.of(batch.common(causal=causal.long())))


@pytest.mark.parametrize(("name", "stored"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
@pytest.mark.parametrize("per_head", [False, True])
def test_8_bit_caches_with_scales(name, stored, per_head):
    batch = Batch(engine := SmallEngine(*MIXED, dtype=torch.bfloat16))
    k, v = ([0.05, 0.04], [0.02, 0.03]) if per_head else (0.05, 0.02)
    k_scale, v_scale = (torch.tensor(x).expand(2)[None, :, None] for x in (k, v))
    sides = batch.kv_cache.transpose(1, 2).split(32, -1)
    stored_sides = [
        (x.float() / s).to(stored).view(torch.uint8) for x, s in zip(sides, (k_scale, v_scale), strict=True)
    ]
    batch.kv_cache = torch.cat(stored_sides, -1).transpose(1, 2)  # bytes, as vLLM allocates them
    out = batch.actual(batch.run(layer(kv_cache_dtype=name), scales=module(k, v)))
    for xs, scale in ((engine.keys, k_scale), (engine.values, v_scale)):
        xs[:] = [((x.float() / scale).to(stored).float() * scale).double() for x in xs]
    assert_close(out, engine.expected(), TOLERANCE[torch.bfloat16])


def test_a_cache_of_the_models_dtype_by_its_name_takes_no_scales():
    batch = Batch(SmallEngine(*MIXED, dtype=torch.bfloat16))
    batch.check(batch.run(layer(kv_cache_dtype="bfloat16"), scales=module(0.5, 2.0)))


@pytest.mark.parametrize("attn_type", ["encoder_only", "encoder"])
def test_an_encoder_attends_to_the_calls_keys_and_keeps_nothing(attn_type):
    batch = Batch(SmallEngine([7, 1, 30], [7, 1, 30]))
    batch.kv_cache = torch.tensor([])  # as vLLM leaves it
    meta = JaxpagedMetadata.of(batch.common(causal=False))
    out = batch.run(layer(attn_type=attn_type, sliding_window=9), metadata=meta)
    assert_close(batch.actual(out), batch.engine.expected(causal=False, window=(8, 8)))
    with pytest.raises(ValueError, match="key, value: expected an encoder's keys and values, got None"):
        batch.run(layer(attn_type=attn_type), metadata=meta, key=None, value=None)
    with pytest.raises(ValueError, match=r"seq_lens: expected lengths of the 38 tokens there are, got \[8, 1, 30\]"):
        changed = JaxpagedMetadata.of(batch.common(causal=False, seq_lens=torch.tensor([8, 1, 30])))
        batch.run(layer(attn_type=attn_type), metadata=changed)


def test_cross_attention_reads_what_the_encoder_has_put_into_the_cache():
    engine = SmallEngine([20, 33], [20, 33])  # the encoder's tokens
    batch = Batch(engine)
    cross = layer(attn_type="encoder_decoder")
    cross.do_kv_cache_update(module(), batch.key, batch.value, batch.kv_cache, batch.slots)
    torch.manual_seed(1)
    query = torch.randn(4, 4, 32)  # three tokens of the first request's decoder, one of the second's
    common = batch.common(causal=False, num_actual_tokens=4, query_start_loc=torch.tensor([0, 3, 4], dtype=torch.int32))
    out = cross.forward(module(), query, None, None, batch.kv_cache, JaxpagedMetadata.of(common), torch.zeros(4, 4, 32))
    engine.query, engine.query_lens = query.flatten(1), [3, 1]
    assert_close(out, engine.expected(causal=False))
    with pytest.raises(ValueError, match=r"sliding_window.*expected None in cross-attention"):
        layer(attn_type="encoder_decoder", sliding_window=5)


def test_a_layer_reads_the_cache_of_the_one_that_it_shares():
    batch = Batch(SmallEngine(*MIXED))
    batch.run(layer())
    before = batch.kv_cache.clone()
    junk = torch.full_like(batch.key, torch.nan)
    out = batch.run(layer(kv_sharing_target_layer_name="layers.0"), key=junk, value=junk)
    assert torch.equal(batch.kv_cache.nan_to_num(), before.nan_to_num())
    batch.check(out)


def test_a_profiling_run_gives_zeros():
    output = torch.full((5, 4, 32), torch.nan)
    x = torch.zeros(5, 4, 32)
    assert layer().forward(module(), x, x, x, torch.tensor([]), None, output) is output
    assert not output.any()


def test_outputs_of_two_axes_and_of_8_bits():
    batch = Batch(SmallEngine(*MIXED))
    batch.output = batch.output.flatten(1)
    batch.check(batch.run(layer()))
    output = torch.full(batch.query.shape, 7.0).to(torch.float8_e4m3fn)
    out = batch.run(layer(), output=output, output_scale=torch.tensor(0.02))
    assert_close(batch.actual(out).float() * 0.02, batch.engine.expected(), 0.04)


REFUSED_LAYERS = {
    "head_size: expected one of .* for vLLM, got 100": {"head_size": 100},
    "num_heads: expected a multiple of the 2 kv heads, got 5": {"num_heads": 5},
    "kv_cache_dtype: expected one of .*, got 'int8_per_token_head'": {"kv_cache_dtype": "int8_per_token_head"},
    "attn_type: expected one of .*, got 'prefix'": {"attn_type": "prefix"},
    "sliding_window: .*got 0": {"sliding_window": 0},
    r"sinks: expected shape \[4\], got \[2\]": {"sinks": torch.zeros(2)},
}


@pytest.mark.parametrize("match", REFUSED_LAYERS)
def test_layers_that_are_refused(match):
    with pytest.raises(ValueError, match=match):
        layer(**REFUSED_LAYERS[match])


def test_latent_attention_is_refused():
    with pytest.raises(TypeError, match="q_lora_rank"):
        layer(q_lora_rank=4)


REFUSED_CALLS = {
    r"query: expected shape .*, got \[53, 4, 16\]": ({"query": lambda x: x[..., :16]}, {}),
    "query: expected 50 tokens or more, as in attn_metadata, got 49": ({"query": lambda x: x[:49]}, {}),
    "output: expected 50 rows or more of 128": ({"output": lambda x: x[:, :2]}, {}),
    "seq_lens: expected shape": ({}, {"seq_lens": torch.tensor([33, 5, 1])}),
    "query_start_loc: it ends at 60": ({}, {"query_start_loc": torch.tensor([0, 1, 6, 7, 47, 60])}),
}


@pytest.mark.parametrize("match", REFUSED_CALLS)
def test_calls_that_are_refused_write_nothing(match):
    batch = Batch(SmallEngine(*MIXED))
    batch.run(ours := layer())
    tensors, fields = REFUSED_CALLS[match]
    meta = dataclasses.replace(JaxpagedMetadata.of(batch.common()), **fields)
    before = batch.output.clone()
    given = {name: getattr(batch, name) for name in ("query", "key", "value", "output")}
    given |= {name: change(given[name]) for name, change in tensors.items()}
    with pytest.raises(ValueError, match=match):
        ours.forward(module(), kv_cache=batch.kv_cache, attn_metadata=meta, **given)
    assert torch.equal(batch.output, before)


def test_updates_that_are_refused_write_nothing():
    batch = Batch(SmallEngine(*MIXED))
    before = batch.kv_cache.clone()
    ours = layer()
    with pytest.raises(ValueError, match=r"kv_cache: expected shape \[num_blocks, 2, block_size, 64\], got \["):
        ours.do_kv_cache_update(module(), batch.key, batch.value, batch.kv_cache.transpose(1, 2), batch.slots)
    with pytest.raises(ValueError, match=r"key: expected shape \[num_tokens, 2, 32\], got"):
        ours.do_kv_cache_update(module(), batch.key.flatten(1), batch.value, batch.kv_cache, batch.slots)
    with pytest.raises(TypeError, match=r"slot_mapping: expected torch.int32 or torch.int64, got torch.float32"):
        ours.do_kv_cache_update(module(), batch.key, batch.value, batch.kv_cache, batch.slots.float())
    with pytest.raises(NotImplementedError, match="output_block_scale"):
        batch.run(ours, output_block_scale=torch.ones(1))
    assert torch.equal(batch.kv_cache[0].nan_to_num(), before[0].nan_to_num())


def test_steps_of_other_sizes_compile_nothing():
    def step(*lens):
        engine = SmallEngine(*lens, garbage=0)
        engine.kv_cache = torch.nn.functional.pad(engine.kv_cache, (0, 0) * 3 + (0, 40))[:, :40].contiguous()
        Batch(engine).run(layer())

    step([20, 9, 1], [40, 9, 70])
    with compilations() as compiled:
        step([18, 5, 1], [60, 50, 4])
        step([22, 1, 3, 1], [22, 33, 60, 2])
    assert compiled.count <= 1  # the reading of a table that lies on one page of memory, or on two


def test_versions():
    for version in ("0.32.0", "0.32.4", "0.32.0+cpu"):
        check_version(version)
    for version in ("0.31.2", "0.33.0", "1.32.0", "0.3.2", "dev"):
        with pytest.raises(ImportError, match=f"written for vLLM 0.32, got vLLM {version}"):
            check_version(version)
