"""No kernel writes out of bounds, whatever slots and tables hold: canaries between all the arrays stay as they were.

All arrays are pieces of one allocation of PyTorch's, imported without a copy. Caches that are written are donated,
which keeps their place. So are arrays that nothing reads, in whose places XLA then puts the outputs of attention.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache, PagedBatch, copy_blocks, gather_kv, paged_attention, write_kv
from jaxpaged.testing.cases import Case, Inputs, build, tolerance
from jaxpaged.testing.verify import relative_error

torch = pytest.importorskip("torch")

BAND, ALIGNMENT = 1 << 20, 1024
INT32 = np.iinfo(np.int32)


class Arena:
    """A buffer of canary bytes with arrays in it, at least `BAND` bytes apart."""

    def __init__(self, device: str, size: int = 64 << 20) -> None:
        canaries = torch.arange(size, dtype=torch.int64).mul_(2654435761).bitwise_right_shift_(7).to(torch.uint8)
        self.canaries = canaries.to(device)
        self.memory = self.canaries.clone()
        self.placed: dict[str, tuple[int, Any]] = {}
        self.end = BAND

    def place(self, name: str, x: Any) -> jax.Array:
        """`x` in the buffer, as JAX sees it there."""
        start, x = self.end, np.ascontiguousarray(x)
        stored = torch.from_numpy(np.frombuffer(x.tobytes(), np.uint8).copy()).to(self.memory.device)
        assert start + x.nbytes + BAND <= self.memory.numel()
        self.memory[start : start + x.nbytes] = stored
        self.placed[name] = (start, stored)
        self.end = -(-(start + x.nbytes + BAND) // ALIGNMENT) * ALIGNMENT
        return self.view(name, x.dtype, x.shape)

    def view(self, name: str, dtype: Any, shape: tuple[int, ...]) -> jax.Array:
        """What lies at an array's place, of any type and shape."""
        start, nbytes = self.placed[name][0], int(np.prod(shape)) * np.dtype(dtype).itemsize
        tensor = self.memory[start : start + nbytes].view(getattr(torch, np.dtype(dtype).name)).view(shape)
        self._settle()
        shared = jax.dlpack.from_dlpack(tensor)
        assert shared.unsafe_buffer_pointer() == tensor.data_ptr() == self.pointer(name)
        return shared

    def pointer(self, name: str) -> int:
        return self.memory.data_ptr() + self.placed[name][0]

    def check(self, *written: str) -> None:
        """AssertionError unless all canaries, and all arrays but those `written`, are as they were."""
        self._settle()
        expected = self.canaries.clone()
        for name, (start, stored) in self.placed.items():
            place = slice(start, start + stored.numel())
            expected[place] = self.memory[place] if name in written else stored
        (wrong,) = torch.nonzero(self.memory != expected, as_tuple=True)
        assert wrong.numel() == 0, f"{wrong.numel()} bytes changed, from {self.describe(int(wrong[0]))} on"

    def describe(self, offset: int) -> str:
        name = max((n for n in self.placed if self.placed[n][0] <= offset), key=lambda n: self.placed[n][0], default="")
        return f"byte {offset - self.placed[name][0]} of {name}" if name else f"byte {offset}"

    def _settle(self) -> None:
        if self.memory.is_cuda:
            torch.cuda.synchronize()


@pytest.fixture
def arena(hopper: Any) -> Arena:
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no CUDA here")
    return Arena("cuda")


def garbage(inputs: Inputs) -> Inputs:
    """A case with half of its tables' entries out of range, the used ones too, and a length far past its table."""
    rng, table = np.random.default_rng(3), inputs.block_table.copy()
    num_blocks = inputs.key_values.shape[0]
    bad = [-1, num_blocks, num_blocks + 1, num_blocks + 100, -num_blocks, 10**6, 2**30, INT32.min, INT32.max]
    table = np.where(rng.random(table.shape) < 0.5, rng.choice(bad, table.shape), table).astype(np.int32)
    lens = inputs.seq_lens.copy()
    longest = int(lens.argmax())
    # What is now attended to, besides the request's own, holds NaN.
    table[longest, int(lens[longest]) // inputs.case.block_size :] = INT32.max
    lens[longest] = INT32.max
    return dataclasses.replace(inputs, block_table=table, seq_lens=lens)


MIXED: dict[str, Any] = {"query_lens": (1, 40, 1, 3, 0, 1, 17, 1, 1), "seq_lens": (33, 150, 1, 70, 0, 64, 17, 128, 300)}
WHOLE = (("batch_invariant", True),)
CASES = [
    Case("decode", (1, 1, 1, 1), (50, 1, 0, 130)),
    Case("decode-in-parts", (1, 1), (3000, 20)),
    Case("speculative", (4, 4, 8), (64, 4, 200)),
    Case("prefill", (150, 300), (400, 300), options=WHOLE),
    Case("prefill-in-parts", (20,), (500,)),
    Case("prefill-packed", (40, 16), (200, 16), options=WHOLE),
    Case("mixed", **MIXED),
    Case("mixed-extra-tokens", **MIXED, extra_tokens=3),
    Case("head-size-40", **MIXED, head_size=40, num_heads=6),
    Case("head-sizes-256-80", **MIXED, head_size=256, v_head_size=80),
    *(Case(f"layout-{layout}", **MIXED, layout=layout) for layout in ("HND", "2NHD", "N2HD", "HN2D", "NH2D")),
]


def copies_output(compiled: Any, out: Any) -> bool:
    """Whether XLA moves the output to its place after the kernels wrote it elsewhere."""
    shape = ",".join(map(str, out.shape))
    return any(
        f"bf16[{shape}]" in line.split("copy(")[0] for line in compiled.as_text().splitlines() if "copy(" in line
    )


@pytest.mark.gpu
@pytest.mark.parametrize("broken", [False, True], ids=["valid", "garbage"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention(arena: Arena, case: Case, broken: bool) -> None:
    inputs = build(dataclasses.replace(case, dtype="bfloat16"))
    inputs = garbage(inputs) if broken else inputs
    known = PagedBatch.create(inputs.block_table, inputs.seq_lens, inputs.query_start_loc)
    value = None if inputs.value_buffer is None else arena.place("value", inputs.value_buffer)
    cache = KVCache.from_arrays(arena.place("key", inputs.key_buffer), value, layout=case.layout)
    batch = dataclasses.replace(
        known,
        block_table=arena.place("table", inputs.block_table),
        seq_lens=arena.place("lens", inputs.seq_lens),
        query_start_loc=arena.place("starts", inputs.query_start_loc),
    )
    query = arena.place("query", inputs.query)
    spare_out = arena.place("out", np.full((*query.shape[:2], cache.v_head_size), np.nan, jnp.bfloat16))
    spare_lse = arena.place("lse", np.full((query.shape[1], query.shape[0]), np.nan, np.float32))

    @functools.partial(jax.jit, donate_argnums=(3, 4), keep_unused=True)
    def call(query: Any, cache: Any, batch: Any, out: Any, lse: Any) -> Any:
        return paged_attention(query, cache, batch, **inputs.options, return_lse=True, implementation="mosaic_gpu")

    arguments = (query, cache, batch, spare_out, spare_lse)
    compiled = call.lower(*arguments).compile()
    copied = copies_output(compiled, spare_out)
    out, lse = jax.block_until_ready(compiled(*arguments))
    arena.check("out", "lse")
    error = relative_error(np.asarray(out).astype(np.float64), inputs.expected()[0])
    assert error <= tolerance(inputs.case), error
    assert not np.isnan(np.asarray(lse)).any()
    if out.unsafe_buffer_pointer() != arena.pointer("out") or copied:
        pytest.skip("the output was not written in its place among canaries; all else was in bounds")


SLOTS = [5, -1, 23, 24, 0, INT32.min, INT32.max, 47, 48, 49, 60, 11, 23, 2, 148, 5000, 10**6, 10**9, -8, -(10**6)]
PAIRS = [[0, 1], [1, 2], [-1, 3], [3, 6], [6, 4], [INT32.max, 0], [0, INT32.min], [2, 5], [4, 7], [5, 100], [10**6, 1]]
BLOCKS, BLOCK_SIZE = 6, 8
CACHES = {
    "bfloat16": ("bfloat16", None, "NHD"),
    "bfloat16-HN2D": ("bfloat16", None, "HN2D"),
    "bfloat16-N2HD": ("bfloat16", None, "N2HD"),
    "int8": ("int8", "token_head", "NHD"),
    "float8": ("float8_e4m3fn", "head", "2HND"),
}


def placed_cache(arena: Arena, name: str) -> tuple[KVCache, KVCache]:
    """A cache of random numbers among canaries, and a copy of it elsewhere."""
    dtype, scales, layout = CACHES[name]
    elsewhere = KVCache.zeros(BLOCKS, BLOCK_SIZE, 2, 32, dtype, layout=layout, scales=scales)
    rng = np.random.default_rng(0)
    elsewhere = jax.tree.map(lambda x: jnp.asarray(rng.uniform(0.5, 2, x.shape), x.dtype), elsewhere)
    leaves, treedef = jax.tree.flatten(elsewhere)
    placed = [arena.place(f"cache {i}", np.asarray(leaf)) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(treedef, placed), elsewhere


def check_updated(arena: Arena, got: KVCache, expected: KVCache) -> None:
    """The update was made in place, is the reference's, and touched nothing else."""
    leaves = jax.block_until_ready(jax.tree.leaves(got))
    names = [f"cache {i}" for i in range(len(leaves))]
    arena.check(*names)
    for name, leaf, other in zip(names, leaves, jax.tree.leaves(expected), strict=True):
        if leaf.ndim >= 3:  # scales of a head are not written, and so need not stay
            assert leaf.unsafe_buffer_pointer() == arena.pointer(name)
        leaf, other = (np.frombuffer(np.asarray(x).tobytes(), np.uint8) for x in (leaf, other))
        assert np.mean(leaf != other) <= (0.05 if got.quantized else 0.0)  # XLA rounds quotients otherwise


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("name", CACHES)
def test_cache_write(arena: Arena, name: str, bits: int) -> None:
    cache, elsewhere = placed_cache(arena, name)
    slots = np.array(SLOTS, np.int32)
    if bits == 64:
        slots = np.array([*SLOTS[:-4], 2**32 + 3, 2**40, -(2**40), 2**63 - 1], np.int64)
    rng = np.random.default_rng(1)
    rows = [rng.standard_normal((len(slots), 2, 32), np.float32).astype(jnp.bfloat16) for _ in range(2)]
    with jax.enable_x64(bits == 64):
        placed = [arena.place(n, x) for n, x in zip(("key", "value", "slots"), (*rows, slots), strict=True)]
        write = jax.jit(functools.partial(write_kv, implementation="mosaic_gpu"), donate_argnums=0)
        expected = write_kv(elsewhere, *rows, jnp.asarray(slots), implementation="reference")
        check_updated(arena, write(cache, *placed), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CACHES)
def test_block_copy(arena: Arena, name: str) -> None:
    cache, elsewhere = placed_cache(arena, name)
    pairs = np.array(PAIRS, np.int32)
    copy = jax.jit(functools.partial(copy_blocks, implementation="mosaic_gpu"), donate_argnums=0)
    expected = copy_blocks(elsewhere, pairs, implementation="reference")
    check_updated(arena, copy(cache, arena.place("pairs", pairs)), expected)


@pytest.mark.gpu
def test_gather(arena: Arena) -> None:
    cache, elsewhere = placed_cache(arena, "bfloat16")
    table = np.array([[5, 2, 99], [-1, 0, INT32.min], [1, 1, INT32.max]], np.int32)
    lens = np.array([9, 7, INT32.max], np.int32)
    got = gather_kv(
        cache, arena.place("table", table), arena.place("lens", lens), total_tokens=64, implementation="mosaic_gpu"
    )
    expected = gather_kv(elsewhere, table, lens, total_tokens=64, implementation="reference")
    for one, other in zip(jax.block_until_ready(got), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    arena.check()


# That the checks above would find a fault.


@pytest.mark.gpu
def test_a_kernel_that_writes_past_the_cache_is_caught(arena: Arena) -> None:
    """The kernel is told of one block more than there is."""
    cache, _ = placed_cache(arena, "bfloat16")
    key, value = (arena.view(f"cache {i}", jnp.bfloat16, (BLOCKS + 1, *cache.key.shape[1:])) for i in range(2))
    rows = jnp.ones((1, 2, 32), jnp.bfloat16)
    write = jax.jit(functools.partial(write_kv, implementation="mosaic_gpu"), donate_argnums=0)
    jax.block_until_ready(write(KVCache.from_arrays(key, value), rows, rows, np.array([BLOCKS * BLOCK_SIZE], np.int32)))
    with pytest.raises(AssertionError, match=r"bytes changed, from byte 6144 of cache 0 on"):
        arena.check("cache 0", "cache 1")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_changed_byte_is_caught(request: pytest.FixtureRequest, device: str) -> None:
    if device == "cuda":
        request.getfixturevalue("arena")  # skips without a GPU
    arena = Arena(device, 8 << 20)
    for name in ("first", "second"):
        arena.place(name, np.arange(1000, dtype=np.float32))
    arena.check()
    for name, (start, stored) in arena.placed.items():
        for offset in (start - 1, start - BAND, start + stored.numel(), start + stored.numel() + BAND - 1):
            arena.memory[offset] ^= 1
            with pytest.raises(AssertionError, match="1 bytes changed"):
                arena.check(name)
            arena.memory[offset] ^= 1
        arena.memory[start] ^= 1
        arena.check(name)
        with pytest.raises(AssertionError, match=f"byte 0 of {name}"):
            arena.check()
        arena.memory[start] ^= 1
    arena.check()


@pytest.mark.parametrize("case", [case for case in CASES if "layout" not in case.name], ids=lambda case: case.name)
def test_the_reference_on_the_same_garbage(case: Case) -> None:
    """The cases are sound: the reference agrees with the oracle on them."""
    inputs = garbage(build(dataclasses.replace(case, dtype="bfloat16")))
    batch = PagedBatch.create(inputs.block_table, inputs.seq_lens, inputs.query_start_loc)
    arrays = (inputs.key_buffer, inputs.value_buffer)
    cache = KVCache.from_arrays(*(None if x is None else jnp.asarray(x) for x in arrays), layout=case.layout)
    out = paged_attention(jnp.asarray(inputs.query), cache, batch, **inputs.options, implementation="reference")
    assert relative_error(np.asarray(out).astype(np.float64), inputs.expected()[0]) <= tolerance(inputs.case)
