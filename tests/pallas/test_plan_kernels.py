"""The kernels that make plans: the same numbers as XLA's plans, for batches of every kind."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jaxpaged import KVCache, PagedBatch
from jaxpaged.attention import make_options
from jaxpaged.pallas import attention, batch_dims, decode_plan_kernel, plans, prefill_lists, prefill_plan_kernel
from jaxpaged.pallas.decode_plan import DAMAGED, Q_LEN, Q_START
from jaxpaged.pallas.mosaic import interpreter
from jaxpaged.pallas.prefill_plan import FIRST_ROW, ROWS, PrefillTiling
from jaxpaged.testing.cases import every_third

HEADS, KV_HEADS = 4, 2
OPTIONS: dict[str, Any] = {"scale": 1.0, "soft_cap": None, "alibi_slopes": None, "sinks": None}
OPTIONS |= {"mask_mod": None, "score_mod": None}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a program is compiled for."""

    num_reqs: int = 4
    width: int = 40
    block_size: int = 8
    num_blocks: int = 50
    num_tokens: int = 200
    heads: int = HEADS
    kv_heads: int = KV_HEADS

    def cache(self) -> KVCache:
        return jax.eval_shape(lambda: KVCache.zeros(self.num_blocks, self.block_size, self.kv_heads, 32, "bfloat16"))

    def struct(self) -> PagedBatch:
        shapes = ((self.num_reqs, self.width), (self.num_reqs,), (self.num_reqs + 1,))
        return PagedBatch(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes), None, None)

    def batch(self, query_lens: Any, seq_lens: Any, damaged: Any = ()) -> PagedBatch:
        """A batch whose blocks are there, but for those of these requests and columns."""
        table = np.arange(self.num_reqs * self.width, dtype=np.int32).reshape(self.num_reqs, -1) % self.num_blocks
        for request, column, block in damaged:
            table[request, column] = block
        starts = np.concatenate([[0], np.cumsum(query_lens)])
        return PagedBatch(*(jnp.asarray(x, jnp.int32) for x in (table, seq_lens, starts)), None, None)


@st.composite
def batches(draw: Any, sizes: Sizes, new: tuple[int, ...]) -> PagedBatch:
    """Batches with padding, lengths past the table's width or below that of the new tokens, and blocks out of range,
    some of which hold no token."""
    each = {"min_size": sizes.num_reqs, "max_size": sizes.num_reqs}
    query_lens = draw(st.lists(st.sampled_from(new), **each))
    longest = sizes.width * sizes.block_size + 50
    seq_lens = draw(st.lists(st.one_of(st.just(0), st.integers(0, longest)), **each))
    places = st.tuples(st.integers(0, sizes.num_reqs - 1), st.integers(0, sizes.width - 1))
    bad = st.sampled_from([-1, -(2**31), sizes.num_blocks, 2**31 - 1])
    damaged = draw(st.lists(st.tuples(places, bad).map(lambda x: (*x[0], x[1])), max_size=2))
    return sizes.batch(query_lens, seq_lens, damaged)


Planner = Callable[[PagedBatch], Any]


def planners(plan: Any, sizes: Sizes, **how: Any) -> tuple[Planner, Planner]:
    """A plan by XLA and by a kernel, compiled."""
    given = how.pop("options", {})
    options = make_options(
        num_heads=sizes.heads, num_reqs=sizes.num_reqs, **({"causal": True, "window": None} | OPTIONS | given)
    )
    how |= {"num_tokens": sizes.num_tokens, "num_heads": sizes.heads, "interpret": interpreter()}

    def planner(by_kernel: bool, batch: PagedBatch) -> Any:
        return plan(sizes.cache(), batch, options, by_kernel=by_kernel, **how)

    return jax.jit(functools.partial(planner, False)), jax.jit(functools.partial(planner, True))


def differences(expected: Any, got: Any) -> list[str]:
    """Names of the arrays of two plans that are not the same."""
    found = []
    for name, x, y in zip(expected._fields, expected, got, strict=True):
        if x is None or y is None:
            assert x is y
        elif x.dtype != y.dtype or x.shape != y.shape or not np.array_equal(x, y):
            found.append(name)
    return found


DECODE: dict[str, Any] = {"max_query_len": 4, "tile": 64, "num_shares": 5, "min_tiles": 2}
DECODE |= {"others_elsewhere": False, "batch_invariant": False}
DECODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"options": {"window": (50, 0)}},
    "not causal": {"options": {"causal": False, "window": (20, 30)}},
    "others elsewhere": {"others_elsewhere": True},
    "batch-invariant": {"batch_invariant": True},
    "more shares than tiles": {"num_shares": 130, "min_tiles": 1},
}
SMALL = Sizes()
PREFILLS: dict[str, dict[str, Any]] = {
    "unpacked": {"tiling": PrefillTiling(64, False, 64, 3, most_parts=1, l2_bytes=1 << 14)},
    "packed": {"tiling": PrefillTiling(32, True, 128, 3, most_parts=1, l2_bytes=1 << 14), "shortest": 2},
    "in parts": {
        "tiling": PrefillTiling(64, True, 64, 8, most_parts=3, l2_bytes=1 << 14),
        "options": {"causal": False, "window": (20, 30)},
    },
    "window": {
        "tiling": PrefillTiling(32, False, 64, 5, most_parts=1, l2_bytes=1 << 30),
        "options": {"window": (50, 0)},
        "shortest": 9,
    },
}
FEWEST = 1
"""CTAs for each list, of which each has more to do, and the interpreter less."""
few_examples = settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def check(by_xla: Planner, by_kernel: Planner, batch: PagedBatch) -> None:
    assert differences(by_xla(batch), by_kernel(batch)) == [], batch


@pytest.mark.parametrize("kind", DECODES)
def test_decode_plans_are_the_same(kernels: None, kind: str) -> None:
    both = planners(plans.plan_decode, SMALL, **DECODE | DECODES[kind])

    @few_examples
    @example(SMALL.batch([0, 0, 0, 0], [0, 0, 0, 0]))
    @example(SMALL.batch([1, 1, 1, 1], [320, 1, 0, 7]))
    @given(batches(SMALL, (0, 1, 1, 2, 4, 5, 50)))
    def run(batch: PagedBatch) -> None:
        check(*both, batch)

    run()


@pytest.mark.parametrize("kind", PREFILLS)
def test_prefill_plans_are_the_same(kernels: None, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind != "unpacked":
        monkeypatch.setattr(prefill_plan_kernel, "CTAS_PER_LIST", FEWEST)
    # With few rows, there are fewer tiles than CTAs.
    sizes = dataclasses.replace(SMALL, num_tokens=60) if kind == "in parts" else SMALL
    both = planners(plans.plan_prefill, sizes, **{"shortest": 1} | PREFILLS[kind])

    @few_examples
    @example(SMALL.batch([0, 0, 0, 0], [0, 0, 0, 0]))
    @example(SMALL.batch([64, 0, 64, 64], [64, 0, 264, 264]))  # as long as each other
    @example(SMALL.batch([0, 0, 60, 0], [320, 0, 300, 0]))
    @given(batches(SMALL, (0, 0, 0, 1, 30) if kind == "in parts" else (0, 0, 1, 8, 40, 50)))
    def run(batch: PagedBatch) -> None:
        check(*both, batch)

    run()


def test_rows_that_the_query_does_not_have(kernels: None) -> None:
    """Starts that promise more rows than there are give no tile to the rows of no request."""
    few = dataclasses.replace(SMALL, num_tokens=40)
    batch = few.batch([20, 30, 0, 7], [100, 40, 0, 7])
    check(*planners(plans.plan_decode, few, **DECODE), batch)
    check(*planners(plans.plan_prefill, few, **PREFILLS["packed"]), batch)


def test_decode_writes_no_row_that_there_is_not(kernels: None) -> None:
    """Whatever the starts are: a program may have room for more rows than an engine's tensor has."""
    few = dataclasses.replace(SMALL, num_tokens=10)
    batch = few.batch([1] * few.num_reqs, [100] * few.num_reqs)
    batch = dataclasses.replace(batch, query_start_loc=jnp.array([-5, 2, 9, 12, 2**31 - 1], jnp.int32))
    by_xla, by_kernel = planners(plans.plan_decode, few, **DECODE)
    check(by_xla, by_kernel, batch)
    requests = np.asarray(by_kernel(batch).requests)
    written = requests[:, Q_LEN] > 0
    assert (requests[:, Q_START] >= 0).all() and written.any()
    assert ((requests[:, Q_START] + requests[:, Q_LEN])[written] <= 10).all()


@pytest.mark.parametrize("there", [10, 0, 200])
def test_a_decode_plan_with_room_for_more_tokens(kernels: None, there: int) -> None:
    """It is that of a program for as many as there are, of which it learns on the device."""
    how = DECODE | DECODES["others elsewhere"]
    batch = SMALL.batch([1, 0, 30, 4], [100, 3, 90, 200])
    by_xla, _ = planners(plans.plan_decode, dataclasses.replace(SMALL, num_tokens=there), **how)
    options = make_options(num_heads=HEADS, num_reqs=batch.num_reqs, causal=True, window=None, **OPTIONS)
    cut = decode_plan_kernel.DecodeCut(options, num_tokens=200, **how)
    plan = functools.partial(decode_plan_kernel.plan_decode_by_kernel, interpret=interpreter())
    by_kernel = jax.jit(lambda batch, n: plan(SMALL.cache(), batch, cut, num_tokens=n))
    expected = by_xla(batch)
    assert differences(expected, by_kernel(batch, jnp.array([there], jnp.int32))) == []
    assert (np.asarray(expected.requests)[:, Q_LEN].max() > 0) == (there > 0)


WIDE = Sizes(num_reqs=2, width=2100, block_size=64, num_blocks=10_000)


@pytest.mark.parametrize("column", [0, 2047, 2048, 2098, 2099])
def test_a_block_out_of_range_anywhere_in_a_long_row(kernels: None, column: int) -> None:
    """The last request's tokens end in column 2098."""
    batch = WIDE.batch([1, 1], [64, 2099 * 64], [(1, column, -1)])
    by_xla, by_kernel = planners(plans.plan_decode, WIDE, **DECODE)
    check(by_xla, by_kernel, batch)
    assert np.asarray(by_kernel(batch).requests)[1, DAMAGED] == (column < 2099)


FAULTS: dict[str, tuple[Any, str, Any, dict[str, set[str]]]] = {
    "blocks out of range not seen": (
        batch_dims.BatchDims, "damaged", lambda *_: jnp.int32(0),
        {"decode": {"requests", "shares"}, "prefill": {"work"}},
    ),
    "all blocks out of range": (
        batch_dims.BatchDims, "damaged", lambda *_: jnp.int32(1),
        {"decode": {"requests", "shares"}, "prefill": {"work"}},
    ),
    "shares without tiles forgotten": (
        decode_plan_kernel, "_write_empty_shares", lambda *_: None, {"decode": {"shares"}},
    ),
    "turns always forwards": (
        prefill_lists, "_in_rest", lambda rest, _, first, target, n: jnp.where((target - first) % n < rest, 1, 0),
        {"prefill": {"work", "counts"}},
    ),
    "the first of each group first": (
        prefill_lists, "MOST_STEPS", 1, {"prefill": {"work"}},
    ),
    "what was there before": (prefill_plan_kernel, "_clear", lambda *_: None, {"prefill": {"work"}}),
}  # fmt: skip


@pytest.mark.parametrize("kernels", ["interpreted"], indirect=True)
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(kernels: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute, fault, found_in = FAULTS[name]
    monkeypatch.setattr(module, attribute, fault)
    calls = {
        "decode": (plans.plan_decode, DECODE | {"num_shares": 9}, [1, 4, 1, 0], [320, 300, 200, 0]),
        "prefill": (plans.plan_prefill, {"shortest": 1} | PREFILLS["unpacked"], [0, 130, 40, 30], [320, 320, 200, 30]),
    }
    for kind, arrays in found_in.items():
        plan, how, query_lens, seq_lens = calls[kind]
        by_xla, by_kernel = planners(plan, SMALL, **how)
        batch = SMALL.batch(query_lens, seq_lens, [(1, 3, -1)])
        assert set(differences(by_xla(batch), by_kernel(batch))) == arrays


TUNED = PrefillTiling(128, False, 128, 132, most_parts=1, l2_bytes=25165824)
LARGE: dict[str, tuple[Any, Sizes, dict[str, Any]]] = {
    "decode": (plans.plan_decode, Sizes(1024, 8192, 16, 10_000, 1100), {"num_shares": 33}),
    "decode 128k": (plans.plan_decode, Sizes(3, 16384, 8, 10_000, 3), {"num_shares": 264}),
    "prefill": (plans.plan_prefill, Sizes(64, 512, 16, 10_000, 8192, 32, 8), {"tiling": TUNED}),
    "prefill of 65536": (plans.plan_prefill, Sizes(512, 1024, 16, 10_000, 65536, 32, 8), {"tiling": TUNED}),
    "prefill of 1": (plans.plan_prefill, Sizes(1, 4096, 16, 10_000, 8192, 32, 8), {"tiling": TUNED}),
    "prefill, packed": (
        plans.plan_prefill, Sizes(512, 1024, 16, 10_000, 65536, 32, 8),
        {"tiling": dataclasses.replace(TUNED, tokens=32, packed=True)},
    ),
    "prefill, in parts": (
        plans.plan_prefill, Sizes(8, 8192, 16, 10_000, 100, 32, 8),
        {"tiling": dataclasses.replace(TUNED, tokens=32, packed=True, most_parts=16)},
    ),
}  # fmt: skip


def large(name: str) -> tuple[Any, Sizes, dict[str, Any]]:
    plan, sizes, how = LARGE[name]
    return plan, sizes, ({"shortest": 2} if plan is plans.plan_prefill else DECODE) | how


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_plans_of_large_batches_are_the_same(hopper: Any, name: str) -> None:
    plan, sizes, how = large(name)
    both = planners(plan, sizes, **how)
    rng = np.random.default_rng(0)
    longest = sizes.width * sizes.block_size
    for _ in range(10):
        weights = rng.random(sizes.num_reqs) * (rng.random(sizes.num_reqs) < 0.9)
        rows = rng.integers(0, sizes.num_tokens + 1)
        query_lens = (weights / max(weights.sum(), 1e-6) * rows).astype(np.int32)
        if plan is plans.plan_decode:
            query_lens = np.minimum(rng.integers(0, 6, sizes.num_reqs), 4)
        seq_lens = query_lens + (rng.random(sizes.num_reqs) ** 3 * longest).astype(np.int32)
        places = rng.integers(0, (sizes.num_reqs, sizes.width), (sizes.num_reqs // 4 + 1, 2))
        check(*both, sizes.batch(query_lens, seq_lens, [(*place, -1) for place in places]))


@pytest.mark.parametrize("name", LARGE)
def test_nothing_but_one_kernel_is_launched(name: str) -> None:
    """What XLA computes beside it could not be captured in a CUDA graph."""
    plan, sizes, how = large(name)
    _, by_kernel = planners(plan, sizes, **how)
    lowered = by_kernel.trace(sizes.struct()).lower(lowering_platforms=("cuda",))
    names = [operation_name(x) for x in operations(lowered.compiler_ir().operation)]
    assert names.count("mosaic_gpu_v2") == 1
    assert set(names) <= {"mosaic_gpu_v2", "stablehlo.reshape", "func.func", "func.call", "func.return"}


def operations(parent: Any) -> Any:
    """All operations within one of MLIR's."""
    for block in (block for region in parent.regions for block in region.blocks):
        for operation in block.operations:
            yield operation.operation
            yield from operations(operation.operation)


def operation_name(operation: Any) -> str:
    """An operation's name, or the name of what it calls outside of the program."""
    is_call = operation.name == "stablehlo.custom_call"
    return operation.attributes["call_target_name"].value if is_call else operation.name


def test_what_no_kernel_plans_is_left_to_xla() -> None:
    sizes, masked = SMALL, {"options": {"mask_mod": every_third}}
    for plan, how in ((plans.plan_decode, DECODE), (plans.plan_prefill, {"shortest": 1} | PREFILLS["packed"])):
        for more, kernels in ((masked, 0), ({}, 1)):
            _, by_kernel = planners(plan, sizes, **how | more)
            text = by_kernel.trace(sizes.struct()).lower(lowering_platforms=("cuda",)).as_text()
            assert text.count("@mosaic_gpu_v2") == kernels


def attend(batch: PagedBatch, query: Any, key: Any, plan_by_kernel: bool) -> Any:
    """Attention of decodes and prefills mixed, by the kernels."""
    options = make_options(num_heads=HEADS, num_reqs=batch.num_reqs, causal=True, window=None, **OPTIONS)
    how = {"out_dtype": query.dtype, "batch_invariant": False, "return_lse": True, "interpret": interpreter()}
    cache = KVCache.from_arrays(key, key)
    return attention.paged_attention(query, cache, batch, options, **how, plan_by_kernel=plan_by_kernel)


def test_attention_takes_either_plan(
    kernels: None, set_multiprocessors: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_multiprocessors(2)
    monkeypatch.setattr(prefill_plan_kernel, "CTAS_PER_LIST", FEWEST)
    sizes = Sizes(num_reqs=9, width=12, block_size=16, num_blocks=20, num_tokens=40)
    batch = sizes.batch([1, 0, 1, 20, 1, 1, 1, 1, 9], [100, 0, 190, 30, 1, 64, 65, 192, 150], [(2, 3, -1)])
    rng = np.random.default_rng(0)
    shapes = ((40, HEADS, 64), (20, 16, KV_HEADS, 64))
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    by_xla, by_kernel = (attend(batch, *arrays, plan_by_kernel) for plan_by_kernel in (False, True))
    for x, y in zip(by_xla, by_kernel, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("plan_by_kernel", [False, True])
def test_attention_plans_by_kernels_if_told_to(plan_by_kernel: bool) -> None:
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((200, HEADS, 64), (50, 16, KV_HEADS, 64))]
    sizes = Sizes(num_reqs=9, block_size=16)
    call = jax.jit(functools.partial(attend, plan_by_kernel=plan_by_kernel))
    text = call.trace(sizes.struct(), *arrays).lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("paged_decode_plan", "paged_prefill_plan"):
        assert (kernel in text) == plan_by_kernel


def test_refusals_say_why() -> None:
    options = make_options(num_heads=HEADS, num_reqs=4, causal=True, window=None, **OPTIONS)
    masked = dataclasses.replace(options, mask_mod=every_third)
    assert plans.decode_refusal(options) is None
    assert "mask_mod" in plans.decode_refusal(masked)
    assert "skip" in plans.decode_refusal(options, jnp.zeros((), jnp.int32))
    tiling = PREFILLS["packed"]["tiling"]
    how = {"num_tokens": 300, "num_heads": HEADS, "shortest": 1}
    assert plans.prefill_refusal(SMALL.cache(), SMALL.struct(), options, tiling, **how) is None
    assert "mask_mod" in plans.prefill_refusal(SMALL.cache(), SMALL.struct(), masked, tiling, **how)
    how["num_tokens"] = 10**6
    assert "shared memory" in plans.prefill_refusal(SMALL.cache(), SMALL.struct(), options, tiling, **how)


@pytest.mark.parametrize("kind", PREFILLS)
def test_a_program_with_room_for_more_plans_what_is_there(
    kernels: None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests of 300 tokens, by a program for eight of 512: nothing is read past the third's."""
    monkeypatch.setattr(prefill_plan_kernel, "CTAS_PER_LIST", FEWEST)
    how: dict[str, Any] = {"shortest": 1} | PREFILLS[kind]
    options = {"num_heads": HEADS, "num_reqs": 8} | (
        {"causal": True, "window": None} | OPTIONS | how.pop("options", {})
    )
    fits, room = (dataclasses.replace(SMALL, num_reqs=r, num_tokens=n) for r, n in ((3, 300), (8, 512)))
    more = {"num_tokens": 512, "num_heads": HEADS, "interpret": interpreter(), "options": make_options(**options)}

    @jax.jit
    def with_room(batch: PagedBatch, reqs: Any, tokens: Any) -> Any:
        return prefill_plan_kernel.plan_prefill_by_kernel(room.cache(), batch, **how, **more, there=(reqs, tokens))

    by_xla, _ = planners(plans.plan_prefill, fits, **{"shortest": 1} | PREFILLS[kind])
    for query_lens, seq_lens in (([64, 150, 8], [64, 300, 264]), ([0, 0, 1], [0, 50, 1]), ([100, 100, 100], [320] * 3)):
        batch = fits.batch(query_lens, seq_lens, [(2, 0, -1)])
        expected = by_xla(batch)
        table = jnp.full((8, room.width), -1, jnp.int32).at[:3].set(batch.block_table)
        lens = jnp.full((8,), 320, jnp.int32).at[:3].set(batch.seq_lens)
        starts = jnp.full((9,), 2**20, jnp.int32).at[:4].set(batch.query_start_loc)
        counts = (jnp.full((1,), n, jnp.int32) for n in (3, fits.num_tokens))
        got = with_room(PagedBatch(table, lens, starts, None, None), *counts)
        starts_of_tiles = np.append(got.tile_starts[:3], got.tile_starts[8:])
        work = got.work[:, : expected.work.shape[1]]
        assert not np.asarray(got.work[:, expected.work.shape[1] :]).any()
        assert differences(expected, got._replace(work=work, tile_starts=jnp.asarray(starts_of_tiles))) == []
    promised = PagedBatch(table, lens, starts.at[3].set(2**20), None, None)
    rows = with_room(promised, *(jnp.full((1,), n, jnp.int32) for n in (3, fits.num_tokens))).work
    assert int((rows[..., FIRST_ROW] + rows[..., ROWS]).max()) == fits.num_tokens
