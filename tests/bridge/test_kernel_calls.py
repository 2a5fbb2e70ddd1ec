"""Our functions for PyTorch's stream consist of kernels alone, which is read from their StableHLO; needs no GPU."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache
from jaxpaged.bridge import kernel_functions
from jaxpaged.bridge.kernel_calls import CONFIG_NAMES, KERNEL, GlueError, KernelCalls, kernel_calls
from jaxpaged.pallas.block_pairs import BlockPairs
from jaxpaged.pallas.decode_plan import DecodePlan, plan_shapes
from jaxpaged.pallas.decode_plan_kernel import DecodeCut
from jaxpaged.pallas.mosaic import kernel
from jaxpaged.pallas.prefill_plan import NUM_FIELDS as PREFILL_FIELDS
from jaxpaged.pallas.prefill_plan import PrefillPlan, most_items, most_tiles
from jaxpaged.pallas.tuning import gpu_of
from jaxpaged.reference.attention import AttentionOptions

array = jax.ShapeDtypeStruct


def lowered(function: Any, *arguments: Any, **options: Any) -> KernelCalls:
    traced = jax.jit(functools.partial(function, **options), keep_unused=True).trace(*arguments)
    return kernel_calls(traced.lower(lowering_platforms=("cuda",)))


def cache_of(layout: str = "NHD", dtype: Any = "bfloat16", scales: Any = None, num_kv_heads: int = 2) -> KVCache:
    return jax.eval_shape(
        lambda: KVCache.zeros(40, 16, num_kv_heads, 64, dtype, layout=layout, scales=scales),
    )


CACHES: dict[str, dict[str, Any]] = {
    "NHD": {},
    "HND": {"layout": "HND"},
    "2NHD": {"layout": "2NHD"},
    "N2HD": {"layout": "N2HD"},
    "HN2D": {"layout": "HN2D"},
    "NH2D": {"layout": "NH2D"},
    "float32": {"dtype": "float32"},
    "float8": {"dtype": "float8_e4m3fn"},
    "float8 by tensor": {"dtype": "float8_e5m2", "scales": "tensor"},
    "float8 by head": {"dtype": "float8_e4m3fn", "scales": "head"},
    "int8 by token": {"dtype": "int8", "scales": "token_head"},
}


@pytest.mark.parametrize("words", [(), (2,)], ids=["int32", "int64"])
@pytest.mark.parametrize("name", CACHES)
def test_a_write_is_one_kernel_in_place(name: str, words: tuple[int, ...]) -> None:
    cache = cache_of(**CACHES[name])
    rows = array((24, 2, 64), jnp.bfloat16)
    calls = lowered(kernel_functions.write_rows, cache, rows, rows, array((24, *words), jnp.int32))
    buffers = len(jax.tree.leaves(cache))
    # Buffers are written, and scales only where tokens have their own.
    written = {i for i, x in enumerate(jax.tree.leaves(cache)) if x.ndim > 3 or name == "int8 by token"}
    assert calls.mutated == written
    assert calls.outputs == tuple(range(buffers))
    assert (len(calls.calls), calls.results, calls.intermediates, calls.constants) == (1, (), (), {})
    assert set(calls.calls[0].buffers) == set(range(buffers + 3))
    assert calls.sizes[buffers] == 24 * 2 * 64 * 2


@pytest.mark.parametrize("layout", ["NHD", "N2HD"])
def test_a_copy_sets_aside_and_then_writes_in_place(layout: str) -> None:
    cache, each = cache_of(layout), array((8,), jnp.int32)
    calls = lowered(kernel_functions.copy_blocks, cache, BlockPairs(each, each, each, array((), jnp.int32)))
    buffers = tuple(range(len(jax.tree.leaves(cache))))
    assert len(calls.calls) == 2
    assert calls.mutated == set(buffers)
    assert calls.outputs == buffers
    aside = calls.calls[0].written
    assert calls.intermediates == aside
    assert [calls.sizes[b] for b in aside] == [8 * calls.sizes[b] // 40 for b in buffers]
    assert set(aside) <= set(calls.calls[1].buffers)


def test_a_swap_is_one_kernel() -> None:
    cache, each = cache_of("N2HD"), array((8,), jnp.int32)
    calls = lowered(kernel_functions.swap_blocks, cache, cache, BlockPairs(each, each, None, None))
    assert (len(calls.calls), calls.mutated, calls.outputs) == (1, {1}, (1,))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": (99, 0)},
    "soft cap": {"soft_cap": 30.0},
    "not causal": {"causal": False},
}


def decode_calls(
    options: AttentionOptions,
    *,
    slopes: bool = False,
    sinks: bool = False,
    lse: bool = False,
    num_reqs: int = 4,
    overlaps: bool = False,
    **given: Any,
) -> tuple[KernelCalls, Any]:
    cache = cache_of(**given)
    shape = kernel_functions.decode_shape(
        cache, query_dtype="bfloat16", num_tokens=num_reqs, num_heads=8, num_reqs=num_reqs, columns=6,
        max_query_len=1, batch_invariant=False, gpu=gpu_of(),
    )  # fmt: skip
    shape = dataclasses.replace(shape, overlaps=overlaps)
    rows = array((num_reqs, 8, 64), jnp.bfloat16)
    plan = DecodePlan(*(array(size, jnp.int32) for size in plan_shapes(num_reqs, shape.num_shares)))
    per_head = array((1, 1, 8 + 8), jnp.float32)
    arguments = (rows, cache, array((num_reqs, 6), jnp.int32), plan, per_head if slopes else None)
    lses = array((num_reqs, 8), jnp.float32) if lse else None
    arguments = (*arguments, per_head if sinks else None, rows, lses)
    return lowered(kernel_functions.decode, *arguments, options=options, shape=shape), shape


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("layout", ["NHD", "N2HD", "HN2D"])
def test_decode_is_one_kernel_and_writes_its_output_alone(name: str, layout: str) -> None:
    calls, shape = decode_calls(AttentionOptions(0.125, **OPTIONS[name]), layout=layout)
    out = calls.num_inputs - 1
    (decode,) = calls.calls
    assert calls.mutated == {out}
    assert calls.outputs == (out,)
    assert not calls.constants
    parts, flags, lse = calls.intermediates
    assert decode.written == (parts, flags, lse, out)
    shares = shape.num_shares * shape.head_groups
    assert [calls.sizes[b] for b in (parts, flags, lse)] == [shares * 72 * 8 * 4, shares * 8, 4 * 2 * 8 * 4]


@pytest.mark.parametrize("name", [n for n in CACHES if "8" in n])
def test_8_bit_caches_need_no_glue(name: str) -> None:
    given = CACHES[name] | ({"num_kv_heads": 8} if name == "int8 by token" else {})
    calls, _ = decode_calls(AttentionOptions(0.125), **given)
    scales = {3, 4} if "by" in name else set()
    (decode,) = calls.calls
    assert (calls.mutated, calls.constants) == ({calls.num_inputs - 1}, {})
    assert {0, 1, 2} | scales <= set(decode.buffers)


def test_lses_are_written_where_they_are_wanted() -> None:
    calls, _ = decode_calls(AttentionOptions(0.125), lse=True)
    out, lse = calls.num_inputs - 2, calls.num_inputs - 1
    (decode,) = calls.calls
    assert calls.mutated == {out, lse}
    assert calls.outputs == decode.written[3:] == (out, lse)
    without, _ = decode_calls(AttentionOptions(0.125))
    sizes = [[c.sizes[b] for b in c.intermediates] for c in (calls, without)]
    assert sizes[0] == sizes[1]  # so that one workspace serves both


def test_slopes_and_sinks_come_ready() -> None:
    plain, _ = decode_calls(AttentionOptions(0.125))
    calls, _ = decode_calls(AttentionOptions(0.125), slopes=True, sinks=True)
    assert calls.num_inputs == plain.num_inputs + 2
    slopes, sinks, out = range(calls.num_inputs - 3, calls.num_inputs)
    (decode,) = calls.calls
    assert {slopes, sinks, out} <= set(decode.buffers)


def test_a_layers_kernels_may_start_early() -> None:
    """Programmatic dependent launch is an attribute of the kernel's module, and so reaches the launch without XLA."""
    rows = array((4, 2, 64), jnp.bfloat16)
    write = lowered(kernel_functions.write_rows, cache_of(), rows, rows, array((4,), jnp.int32))
    attend, _ = decode_calls(AttentionOptions(0.125))
    assert [b"mosaic_gpu.uses_pdl" in call.module for call in (*write.calls, *attend.calls)] == [True, True]


def test_a_plan_is_one_kernel() -> None:
    cut = DecodeCut(AttentionOptions(0.125), 4, 1, 64, 132, 2, False, False)
    arguments = (cache_of(), array((4, 6), jnp.int32), array((4,), jnp.int32), array((5,), jnp.int32))
    calls = lowered(kernel_functions.plan_decode, *arguments, cut=cut)
    assert (len(calls.calls), calls.mutated, calls.intermediates, calls.constants) == (1, set(), (), {})
    assert calls.num_inputs == 5
    assert calls.calls[0].buffers[:3] == (2, 3, 4)  # of the cache sizes are enough
    assert [calls.sizes[b] for b in calls.results] == [4 * math.prod(size) for size in plan_shapes(4, 132)]
    assert calls.outputs == calls.results


PREFILLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"options": {"window": (99, 0)}},
    "not causal": {"options": {"causal": False}},
    "soft cap, slopes, sinks": {"options": {"soft_cap": 30.0}, "slopes": 1, "sinks": True},
    "slopes of each": {"slopes": 8},
    "lse": {"return_lse": True},
    "packed": {"rows": 64},
    "in parts": {"tokens": 64, "sinks": True},
    "in parts, lse": {"tokens": 64, "return_lse": True},
    "HN2D": {"layout": "HN2D"},
}


def prefill_calls(
    *,
    tokens: int = 4096,
    rows: int = 8,
    return_lse: bool = False,
    options: Any = None,
    layout: str = "NHD",
    slopes: int = 0,
    sinks: bool = False,
) -> tuple[KernelCalls, Any]:
    """
    Args:
      slopes: rows of slopes, 0 for none.
    """
    made, cache = AttentionOptions(0.125, **(options or {})), cache_of(layout)
    given_slopes = array((slopes, 8), jnp.float32) if slopes else None
    given_sinks = array((8,), jnp.float32) if sinks else None
    shape = kernel_functions.prefill_shape(
        cache, dataclasses.replace(made, alibi_slopes=given_slopes), query_dtype="bfloat16", num_tokens=tokens,
        num_heads=8, num_reqs=rows, return_lse=return_lse, batch_invariant=False, gpu=gpu_of(),
    )  # fmt: skip
    heads = 2 if shape.tiling.packed else 8
    work = (shape.tiling.num_ctas, most_items(tokens, rows, shape.tiling, heads), PREFILL_FIELDS)
    plan = PrefillPlan(*(array(s, jnp.int32) for s in (work, work[:1], (rows + 1,), ())))
    query = array((tokens, 8, 64), jnp.bfloat16)
    arguments = (query, cache, array((rows, 6), jnp.int32), plan, given_slopes, given_sinks, query)
    how = {"options": made, "shape": shape, "return_lse": return_lse}
    return lowered(kernel_functions.prefill, *arguments, **how), shape


@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_is_kernels_alone_and_writes_its_output(name: str) -> None:
    given = PREFILLS[name]
    tokens, rows, return_lse = given.get("tokens", 4096), given.get("rows", 8), given.get("return_lse", False)
    calls, shape = prefill_calls(**given)
    out = calls.num_inputs - 1
    assert len(calls.calls) == (2 if "in parts" in name else 1)
    assert shape.tiling.packed == (tokens <= 64 * rows)
    assert (calls.mutated, calls.outputs[0], calls.constants) == ({out}, out, {})
    assert len(calls.results) == return_lse
    assert len(calls.intermediates) == (2 if "in parts" in name else 0)
    tiles, heads = most_tiles(tokens, rows, shape.tiling), 2 if shape.tiling.packed else 8
    assert [calls.sizes[b] for b in calls.results] == [tiles * heads * 128 * 4] * return_lse


@pytest.mark.parametrize("tokens", [64, 4096])
def test_a_plan_of_prefill_is_one_kernel_for_any_number_of_requests(tokens: int) -> None:
    cache, options = cache_of(), AttentionOptions(0.125)
    shape = kernel_functions.prefill_shape(
        cache, options, query_dtype="bfloat16", num_tokens=tokens, num_heads=8, num_reqs=8, return_lse=False,
        batch_invariant=False, gpu=gpu_of(),
    )  # fmt: skip
    cut = kernel_functions.PrefillCut(options, shape.tiling, tokens, 8, 2)
    arrays = [array(s, jnp.int32) for s in ((8, 6), (8,), (9,), (1,), (1,))]
    calls = lowered(kernel_functions.plan_prefill, cache, *arrays, cut=cut)
    assert (len(calls.calls), calls.mutated, calls.intermediates, calls.constants) == (1, set(), (), {})
    assert calls.calls[0].buffers[:5] == (2, 3, 4, 5, 6)
    assert calls.outputs == calls.results
    items = most_items(tokens, 8, shape.tiling, 2 if shape.tiling.packed else 8)
    assert [calls.sizes[b] // 4 for b in calls.results] == [132 * items * PREFILL_FIELDS, 132, 9, 1]


def test_a_merge_of_states_is_one_kernel() -> None:
    calls = lowered(kernel_functions.merge_states, array((2, 64, 8, 64), jnp.bfloat16), array((2, 8, 64), jnp.float32))
    assert (len(calls.calls), calls.mutated, calls.intermediates, calls.constants) == (1, set(), (), {})
    assert calls.outputs == calls.results
    assert [calls.sizes[b] for b in calls.results] == [64 * 8 * 64 * 2, 8 * 64 * 4]


def copied(x: Any, y: Any) -> None:
    y[...] = x[...]


def doubled(x: Any) -> Any:
    return kernel(copied, interpret=None, out_type=array(x.shape, x.dtype))(x)


def in_place(x: Any, y: Any) -> Any:
    ref = jax.new_ref(y)
    kernel(copied, interpret=None)(x, ref)
    return jax.freeze(ref)


X = array((128,), jnp.float32)


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (lambda x: doubled(x + 1), "stablehlo.add"),
        (lambda x: doubled(x) * 2, "stablehlo.multiply"),
        (lambda x: doubled(x.reshape(2, 64).T.reshape(128)), "stablehlo.transpose"),
        (lambda x: doubled(x.astype(jnp.float16).astype(jnp.float32)), "stablehlo.convert"),
        (lambda x: doubled(jax.lax.iota(jnp.float32, 128)), "stablehlo.iota"),
        (lambda x: doubled(x)[:64], "stablehlo.slice"),
        (lambda x: jax.lax.cond(x[0] > 0, doubled, lambda x: x, x), "stablehlo.slice"),
        (lambda x: jnp.zeros(128), "returns a constant"),
        (lambda x: in_place(x, jnp.zeros(128)), "is a constant"),
        (lambda x: in_place(x, x), "given twice"),
        (lambda x: (in_place(doubled(x), x), doubled(x)), "has overwritten"),
        (lambda x: (in_place(doubled(x), x), x), "has overwritten"),
    ],
)
def test_what_is_no_kernel_is_refused(function: Any, word: str) -> None:
    with pytest.raises(GlueError, match=word):
        lowered(function, X)


def test_views_constants_and_inner_functions_are_followed() -> None:
    def function(x: Any) -> Any:
        ones = jax.jit(doubled)(jnp.full((2, 64), 3, jnp.float32).reshape(128))
        bits = jax.lax.bitcast_convert_type(jax.jit(doubled)(x), jnp.int32)
        return ones, bits.reshape(8, 16)

    calls = lowered(function, X)
    assert len(calls.calls) == 2
    assert calls.outputs == calls.results
    ((buffer, constant),) = calls.constants.items()
    np.testing.assert_array_equal(constant, np.full(128, 3, np.float32))
    assert sorted(call.buffers[0] for call in calls.calls) == [0, buffer]


def test_a_kernels_attributes_are_those_known() -> None:
    """A change of what Pallas says of a kernel would show here before it shows on a GPU."""
    traced = jax.jit(doubled).trace(X).lower(lowering_platforms=("cuda",))
    main = traced.compiler_ir("stablehlo").body.operations[0]
    (call,) = [op for op in main.regions[0].blocks[0].operations if op.operation.name == "stablehlo.custom_call"]
    config = call.attributes["mhlo.backend_config"]
    assert {config[i].name for i in range(len(config))} == CONFIG_NAMES
    names = {call.attributes[i].name for i in range(len(call.attributes))}
    assert names == {
        "api_version", "backend_config", "call_target_name", "called_computations", "has_side_effect",
        "mhlo.backend_config", "operand_layouts", "output_operand_aliases", "result_layouts",
    }  # fmt: skip
    assert call.attributes["call_target_name"].value == KERNEL
    assert call.attributes["api_version"].value == 1  # 4, in the words of a `backend_config` that is a dictionary
