"""Bad arguments raise an error that names the argument, what came and what was expected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import (
    KVCache,
    PagedBatch,
    copy_blocks,
    gather_kv,
    merge_attention_states,
    paged_attention,
    swap_blocks,
    write_kv,
)

CACHE = KVCache.zeros(4, 8, 2, 16, "float32")
BATCH = PagedBatch.create([[0, 1], [2, 3]], [9, 3])
QUERY = np.zeros((2, 4, 16), np.float32)
ROWS = np.zeros((3, 2, 16), np.float32)
SLOTS = np.arange(3, dtype=np.int32)
BF16_CACHE = KVCache.zeros(4, 8, 2, 16, "bfloat16")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": QUERY[0]}, ValueError, r"query: expected shape \[num_tokens, num_heads, 16\], got \[4, 16\]"),
        ({"query": QUERY[..., :8]}, ValueError, r"query: .*got \[2, 4, 8\]"),
        ({"query": QUERY[:, :3]}, ValueError, "query: num_heads must be a multiple of the cache's 2 kv heads, got 3"),
        (
            {"query": QUERY.astype(np.int32)},
            TypeError,
            "query: expected dtype float32 or bfloat16 or float16, got int32",
        ),
        ({"query": QUERY.tolist()}, TypeError, "query: expected a JAX or NumPy array, got list"),
        ({"cache": (CACHE.key, CACHE.value)}, TypeError, "cache: expected a KVCache, got tuple"),
        ({"cache": BF16_CACHE}, TypeError, "cache: expected dtype float32 .*got bfloat16"),
        ({"batch": BATCH.block_table}, TypeError, "batch: expected a PagedBatch"),
        ({"scale": float("nan")}, ValueError, "scale: expected a finite Python number or None, got nan"),
        ({"scale": jnp.ones(())}, ValueError, "scale: "),
        ({"window": 4}, ValueError, r"window: expected \(left, right\) or None, got 4"),
        ({"window": (-1, 0)}, ValueError, "window: expected 0 or more, or None"),
        ({"window": (1.5, 0)}, TypeError, "window: expected an int or None on each side"),
        ({"soft_cap": 0.0}, ValueError, "soft_cap: expected a number above 0 or None, got 0.0"),
        (
            {"alibi_slopes": np.ones(3, np.float32)},
            ValueError,
            r"alibi_slopes: expected shape \[4\] or \[2, 4\], got \[3\]",
        ),
        ({"alibi_slopes": np.ones(4)}, TypeError, "alibi_slopes: expected dtype float32, got float64"),
        ({"alibi_slopes": [1.0] * 4}, TypeError, "alibi_slopes: expected a JAX or NumPy array, got list"),
        ({"sinks": np.ones(2, np.float32)}, ValueError, r"sinks: expected shape \[4\], got \[2\]"),
        ({"mask_mod": np.ones((2, 9), bool)}, TypeError, "mask_mod: expected a function or None, got ndarray"),
        ({"score_mod": 1}, TypeError, "score_mod: expected a function or None, got int"),
        ({"out_dtype": "int8"}, TypeError, "out_dtype: expected dtype .*got int8"),
        (
            {"implementation": "cuda"},
            ValueError,
            "implementation: expected None or one of reference, mosaic_gpu, got 'cuda'",
        ),
    ],
)
def test_paged_attention(changes, error, message):
    arguments = {"query": QUERY, "cache": CACHE, "batch": BATCH} | changes
    with pytest.raises(error, match=message):
        paged_attention(arguments.pop("query"), arguments.pop("cache"), arguments.pop("batch"), **arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"key": ROWS[:, :1]}, ValueError, r"key: expected shape \[num_tokens, 2, 16\], got \[3, 1, 16\]"),
        ({"value": ROWS[:2]}, ValueError, r"value: expected shape \[3, 2, 16\], got \[2, 2, 16\]"),
        ({"value": ROWS.astype(np.float16)}, TypeError, "value: expected dtype float32, got float16"),
        ({"key": ROWS.astype(np.int8)}, TypeError, "key: expected dtype .*got int8"),
        (
            {"slot_mapping": SLOTS.astype(np.float32)},
            TypeError,
            "slot_mapping: expected dtype int32 or int64, got float32",
        ),
        ({"slot_mapping": SLOTS[None]}, ValueError, r"slot_mapping: expected shape \[num_slots\], got \[1, 3\]"),
        ({"slot_mapping": [0, 1, 2]}, TypeError, "slot_mapping: expected a JAX or NumPy array, got list"),
        ({"cache": BF16_CACHE}, TypeError, "key: a cache of bfloat16 takes bfloat16 keys and values, got float32"),
        ({"cache": None}, TypeError, "cache: expected a KVCache, got NoneType"),
    ],
)
def test_write_kv(changes, error, message):
    arguments = {"cache": CACHE, "key": ROWS, "value": ROWS, "slot_mapping": SLOTS} | changes
    before = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(CACHE)]
    with pytest.raises(error, match=message):
        write_kv(**arguments)
    with pytest.raises(error, match=message):
        jax.jit(lambda: write_kv(**arguments))()
    assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(CACHE)] == before


def test_block_copies():
    with pytest.raises(ValueError, match=r"src_to_dst: expected shape \[n, 2\], got \[3\]"):
        copy_blocks(CACHE, [0, 1, 2])
    with pytest.raises(TypeError, match="src_to_dst: expected dtype int32 or int64, got float64"):
        copy_blocks(CACHE, np.zeros((1, 2)))
    with pytest.raises(ValueError, match="dst: expected the layout of src, NHD, got HND"):
        swap_blocks(CACHE, KVCache.zeros(4, 8, 2, 16, "float32", layout="HND"), [[0, 0]])
    with pytest.raises(ValueError, match="dst: expected the dtype of src"):
        swap_blocks(CACHE, BF16_CACHE, [[0, 0]])
    with pytest.raises(
        ValueError, match=r"dst: expected the block shape of src, \(8, 2, 16, 16\), got \(16, 2, 16, 16\)"
    ):
        swap_blocks(CACHE, KVCache.zeros(4, 16, 2, 16, "float32"), [[0, 0]])


def test_gather_kv():
    with pytest.raises(TypeError, match="block_table: expected dtype int32, got int64"):
        gather_kv(CACHE, np.zeros((2, 2), np.int64), np.ones(2, np.int32))
    with pytest.raises(ValueError, match=r"seq_lens: expected shape \[2\], got \[3\]"):
        gather_kv(CACHE, np.zeros((2, 2), np.int32), np.ones(3, np.int32))
    with pytest.raises(ValueError, match="total_tokens: under jit"):
        jax.jit(gather_kv)(CACHE, np.zeros((2, 2), np.int32), np.ones(2, np.int32))


def test_merge_attention_states():
    out, lse = np.zeros((3, 4, 16), np.float32), np.zeros((4, 3), np.float32)
    with pytest.raises(ValueError, match="lses: expected as many as outputs, at least one, got 1 and 2 outputs"):
        merge_attention_states([out, out], [lse])
    with pytest.raises(ValueError, match="at least one, got 0"):
        merge_attention_states([], [])
    with pytest.raises(ValueError, match=r"outputs\[1\]: expected shape \[3, 4, 16\], got \[2, 4, 16\]"):
        merge_attention_states([out, out[:2]], [lse, lse])
    with pytest.raises(ValueError, match=r"lses: expected shape \[1, 4, 3\], got \[1, 3, 4\]"):
        merge_attention_states(out[None], lse.T[None])
    with pytest.raises(TypeError, match="lses: expected dtype float32, got float16"):
        merge_attention_states(out[None], lse[None].astype(np.float16))
