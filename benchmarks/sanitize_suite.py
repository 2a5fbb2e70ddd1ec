"""What runs under compute-sanitizer: a suite of the kernels' calls, each compared with what it must give, and planted
faults.

compute-sanitizer --tool memcheck python benchmarks/sanitize_suite.py run

Memory comes from the driver call by call, from PyTorch where it is there: memcheck knows the bounds of such
allocations, but not those of pieces of an allocator's pool.
"""

import dataclasses
import functools
import os
import re
import time
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from planted_faults import COLUMNS, ROWS, pass_on, write_row

from jaxpaged import KVCache, PagedBatch, copy_blocks, gather_kv, merge_attention_states, paged_attention, write_kv
from jaxpaged.testing.cases import Case, build, tolerance
from jaxpaged.testing.doors import DOORS
from jaxpaged.testing.verify import compare, relative_error

DONE = "sanitize: all checks passed"
FAR = 1_000_000
"""Rows past the end that a planted write lands: memcheck must see it whatever allocator is in use."""
app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)


def without_pools() -> None:
    """Have XLA and PyTorch take each piece of memory from the driver; called before either has started."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"


_kept: list[Any] = []


def place(x: np.ndarray | None) -> Any:
    """A JAX array on the GPU, in memory of PyTorch's own where it is there."""
    torch = _torch()
    if x is None or torch is None:
        return None if x is None else jnp.asarray(x)
    x = np.ascontiguousarray(x)
    words = {1: np.uint8, 2: np.int16, 4: np.int32}[x.dtype.itemsize]
    tensor = torch.from_numpy(x.view(words).copy()).cuda().view(getattr(torch, x.dtype.name))
    torch.cuda.synchronize()
    _kept.append(tensor)
    return jax.dlpack.from_dlpack(tensor)


@functools.cache
def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def attend(case: Case) -> None:
    """A case of the suite: garbage in the table, NaN in unused memory, a result that is the oracle's."""
    inputs = build(dataclasses.replace(case, dtype="bfloat16"))
    cache = KVCache.from_arrays(place(inputs.key_buffer), place(inputs.value_buffer), layout=case.layout)
    batch = PagedBatch.create(inputs.block_table, inputs.seq_lens, inputs.query_start_loc)
    batch = dataclasses.replace(batch, block_table=place(inputs.block_table))
    options = {**inputs.options, "return_lse": True, "implementation": "mosaic_gpu"}
    out, lse = paged_attention(place(inputs.query), cache, batch, **options)
    expected, _ = inputs.expected()
    error = relative_error(np.asarray(out).astype(np.float64), expected)
    assert error <= tolerance(inputs.case), f"{case.name}: error {error}"
    assert np.asarray(lse).shape == (case.num_heads, inputs.query.shape[0])


SLOTS = [5, -1, 23, 24, 0, -(2**31), 2**31 - 1, 47, 48, 11, 23, 2, 10**6, 10**9]
PAIRS = [[0, 1], [1, 2], [-1, 3], [3, 6], [6, 4], [2**31 - 1, 0], [0, -(2**31)], [2, 5], [10**6, 1], [1, 10**6]]
Place = Callable[[np.ndarray], Any]


def by_both(call: Callable[[str, Place], Any]) -> tuple[Any, Any]:
    """What a call gives by the reference, on the CPU, and by the kernels.

    On a GPU memcheck finds that XLA's own kernel for the reference's scatter reads a slot past the last one.
    """
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.device_get(call("reference", jnp.asarray))
    return expected, call("mosaic_gpu", place)


def random_cache(dtype: str, scales: Any, layout: str, place: Place = place) -> KVCache:
    rng = np.random.default_rng(0)
    cache = KVCache.zeros(6, 8, 2, 32, dtype, layout=layout, scales=scales)

    def drawn(x: Any) -> Any:
        return place(rng.uniform(0.5, 2, x.shape).astype(x.dtype)) if x is not None and x.ndim else x

    fields = ("key", "value", "k_scale", "v_scale")
    return dataclasses.replace(cache, **{name: drawn(getattr(cache, name)) for name in fields})


def same(got: Any, expected: Any, name: str, share: float = 0.0) -> None:
    """Raise AssertionError where more than a share of the bytes differ."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = (np.frombuffer(np.asarray(x).tobytes(), np.uint8) for x in (a, b))
        assert a.size == b.size and np.mean(a != b) <= share, f"{name}: {np.mean(a != b):.3f} of the bytes differ"


def written(dtype: str, scales: Any, layout: str, slots: np.ndarray, implementation: str, place: Place) -> KVCache:
    """The random cache with new rows in its slots."""
    call = jax.jit(functools.partial(write_kv, implementation=implementation), donate_argnums=0)
    return call(random_cache(dtype, scales, layout, place), *map(place, new_rows()), place(slots))


def new_rows() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal((len(SLOTS), 2, 32)).astype(jnp.bfloat16) for _ in range(2)]


def write(dtype: str, scales: Any = None, layout: str = "NHD") -> None:
    call = functools.partial(written, dtype, scales, layout, np.array(SLOTS, np.int32))
    # XLA rounds a quotient otherwise than the kernel does.
    same(*by_both(call), f"write {dtype} {layout}", share=0.0 if scales is None else 0.05)


def copy(layout: str) -> None:
    pairs = np.array(PAIRS, np.int32)

    def copied(implementation: str, place: Place) -> KVCache:
        call = jax.jit(functools.partial(copy_blocks, implementation=implementation), donate_argnums=0)
        return call(random_cache("bfloat16", None, layout, place), place(pairs))

    same(*by_both(copied), f"copy {layout}")


def gather() -> None:
    table = np.array([[5, 2, 99], [-1, 0, 3], [1, 1, 2**31 - 1]], np.int32)
    lens = np.array([9, 7, 100], np.int32)

    def gathered(implementation: str, place: Place) -> Any:
        cache = random_cache("bfloat16", None, "NHD", place)
        return gather_kv(cache, place(table), lens, total_tokens=37, implementation=implementation)

    same(*by_both(gathered), "gather")


def merge() -> None:
    rng = np.random.default_rng(2)
    outputs = rng.standard_normal((3, 33, 4, 64)).astype(jnp.bfloat16)
    lses = rng.standard_normal((3, 4, 33)).astype(np.float32)

    def merged(implementation: str, place: Place) -> Any:
        return merge_attention_states(place(outputs), place(lses), implementation=implementation)[0]

    difference = relative_error(*(np.asarray(x).astype(np.float64) for x in reversed(by_both(merged))))
    assert difference <= 1e-2, f"merge: {difference}"


def attend_through(door: str, case: Case) -> None:
    """A case by one of the suite's doors; those of PyTorch launch on its stream."""
    result = compare(case, door, DOORS[door])
    assert result.ok and result.skipped is None, result


def write_from_torch(scales: Any) -> None:
    """The same write through PyTorch's function and through JAX, to the bit: both are one kernel."""
    import torch

    from jaxpaged.backends.functional import reshape_and_cache_flash

    dtype, name = ("bfloat16", "auto") if scales is None else ("int8", "int8")
    slots = np.array(SLOTS, np.int32)
    first = np.array([slots[i] not in slots[:i] for i in range(len(slots))])  # PyTorch's keeps any of equal slots
    slots = np.where(first, slots, -1).astype(np.int32)
    cache = random_cache(dtype, scales, "NHD")
    key_cache, value_cache, *rest = (torch.from_dlpack(x) for x in jax.tree.leaves(cache))
    key, value, slot_mapping = (torch.from_dlpack(place(x)) for x in (*new_rows(), slots))
    reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, name, *(rest or (1.0, 1.0)))
    torch.cuda.synchronize()
    same(cache, written(dtype, scales, "NHD", slots, "mosaic_gpu", place), f"write from PyTorch: {dtype}")


OPTIONS = {"window": (30, 0), "sinks": True, "alibi": True}
WHOLE = (("batch_invariant", True),)  # so few tiles would else be split among CTAs
CASES = [
    Case("decode", (1, 1, 1, 1), (50, 1, 0, 130)),
    Case("decode in parts", (1, 1), (1200, 20)),
    Case("speculative", (4, 4, 8), (64, 4, 200)),
    Case("prefill", (37, 1, 16), (37, 1, 16)),
    Case("prefill, one head a tile", (150, 300), (400, 300), options=WHOLE),
    Case("prefill, packed heads", (40, 16), (200, 16), options=WHOLE),
    Case("prefill in parts", (20,), (500,)),
    Case("mixed", (1, 40, 1, 3, 0, 1, 17, 1, 1), (33, 150, 1, 70, 0, 64, 17, 128, 300), extra_tokens=3),
    Case("bad blocks", (5, 1, 0, 40, 1, 3), (9, 33, 0, 150, 1, 70), bad_blocks=True),
    Case("table too narrow", (5, 1, 0, 40, 1, 3), (9, 33, 0, 150, 1, 70), short_table=True),
    Case("head size 40, group 3", (5, 1, 40), (9, 33, 150), num_heads=6, head_size=40),
    Case("layout HN2D", (5, 1, 40), (9, 33, 150), layout="HN2D"),
    Case("window, sinks, ALiBi", (5, 1, 40), (9, 33, 150), options=tuple(OPTIONS.items())),
    Case("decode, heads share tiles", (1, 1, 1), (50, 700, 130), num_heads=16, num_kv_heads=4, head_size=128),
]
WIDE: dict[str, Any] = {"num_heads": 8, "head_size": 128, "dtype": "bfloat16"}
EIGHT_BITS = [
    Case("decode, float8", (1, 1, 1), (50, 700, 130), **WIDE, cache_dtype="float8_e4m3fn", scales="tensor"),
    Case("decode, int8 by token and head", (1, 1, 1), (50, 700, 130), **WIDE, cache_dtype="int8", scales="token_head"),
    Case("prefill, float8 by head", (37, 16), (150, 16), **WIDE, cache_dtype="float8_e4m3fn", scales="head"),
]
SUITE: dict[str, Callable[[], None]] = {f"attention: {case.name}": functools.partial(attend, case) for case in CASES}
SUITE |= {f"attention: {case.name}": functools.partial(attend_through, "kernels", case) for case in EIGHT_BITS}
SUITE |= {
    "cache write: bfloat16": functools.partial(write, "bfloat16"),
    "cache write: int8 by token and head": functools.partial(write, "int8", "token_head"),
    "cache write: float8 by head, N2HD": functools.partial(write, "float8_e4m3fn", "head", "N2HD"),
    "block copy: NHD": functools.partial(copy, "NHD"),
    "block copy: 2HND": functools.partial(copy, "2HND"),
    "gather": gather,
    "merge": merge,
}
FROM_TORCH = {
    "decode in parts": "torch-planned-cuda",
    "speculative": "torch-planned-cuda",
    "prefill in parts": "torch-varlen-cuda",
    "mixed": "torch-planned-cuda",
    "bad blocks": "torch-varlen-cuda",
    "head size 40, group 3": "torch-varlen-cuda",
    "decode, int8 by token and head": "torch-planned-cuda",
    "prefill, float8 by head": "torch-varlen-cuda",
}
TORCH_SUITE: dict[str, Callable[[], None]] = {
    f"PyTorch: {case.name}": functools.partial(attend_through, FROM_TORCH[case.name], case)
    for case in CASES + EIGHT_BITS
    if case.name in FROM_TORCH
}
TORCH_SUITE |= {
    "PyTorch: cache write": functools.partial(write_from_torch, None),
    "PyTorch: cache write, int8 by token and head": functools.partial(write_from_torch, "token_head"),
}


@app.command()
def run(
    only: Annotated[str, typer.Option(help="A regular expression of names.")] = "",
    part: Annotated[int, typer.Option(help="Which of the parts of those.")] = 0,
    parts: Annotated[int, typer.Option(help="Into how many they are divided.")] = 1,
) -> None:
    """Run the suite, or a part of it, in this process."""
    without_pools()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, memory from {'PyTorch' if _torch() else 'XLA'}")
    suite = SUITE | (TORCH_SUITE if _torch() else {})
    for name, check in [item for item in suite.items() if re.search(only, item[0])][part::parts]:
        start = time.perf_counter()
        check()
        _kept.clear()
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    print(DONE, flush=True)


@app.command()
def plant(fault: Annotated[str, typer.Argument(help="far-write, near-write, good-write, race or awaited.")]) -> None:
    """Run a kernel with a planted fault, or the same without it: "good-write" and "awaited"."""
    without_pools()
    if fault in ("race", "awaited"):
        given = jnp.arange(COLUMNS, dtype=jnp.float32)
        result = np.asarray(jax.jit(functools.partial(pass_on, awaited=fault == "awaited"))(given))
        assert fault == "race" or np.array_equal(result, np.arange(COLUMNS))
    elif fault in ("far-write", "near-write", "good-write"):
        row = {"far-write": FAR, "near-write": ROWS, "good-write": ROWS - 1}[fault]
        buffer = place(np.zeros((ROWS, COLUMNS), np.float32))
        result = np.asarray(jax.jit(write_row, donate_argnums=0)(buffer, jnp.array([row], jnp.int32)))
        assert fault != "good-write" or (result[-1] == 7).all()
    else:
        raise typer.BadParameter(f"expected far-write, near-write, good-write, race or awaited, got {fault}")
    print(DONE, flush=True)


if __name__ == "__main__":
    app()
