"""The calls of the benchmark of cache operations: ours, the reference's, vLLM's Triton ops and a plain copy.

The peer's ops are optional: their files must be importable as `vllm.v1.attention.ops`.
"""

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory, too

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxpaged import KVCache, copy_blocks, gather_kv, merge_attention_states, swap_blocks, write_kv
from jaxpaged.pallas import block_copy
from jaxpaged.pallas.block_pairs import block_pairs
from jaxpaged.pallas.cache_write import write_rows
from jaxpaged.pallas.mosaic import interpreter

BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, NUM_HEADS = 16, 8, 128, 32
OURS, REFERENCE, TRITON = "jaxpaged", "jaxpaged reference (XLA)", "Triton"
OPS = "vllm.v1.attention.ops"


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation.

    Attributes:
      size: tokens, blocks, or tokens of each state.
      make: from the size, implementations by name, ours first; each is a call that may be repeated.
      moved: bytes that must be read and written.
      tolerance: largest share of elements that may differ from the reference's, or largest difference of `floats`.
      target: what it should reach, in words.
    """

    name: str
    size: int
    make: Callable[[int], dict[str, Callable[[], Any]]]
    moved: int
    tolerance: float = 0.0
    floats: bool = False
    target: str = ""


class Donated:
    """A call that updates a cache in place: it carries the cache from one call to the next."""

    def __init__(self, function: Callable[..., KVCache], cache: KVCache, *arguments: Any) -> None:
        self.cache = jax.tree.map(jnp.copy, cache)
        self.arguments = arguments
        self.function = jax.jit(function, donate_argnums=0)

    def __call__(self) -> tuple[Any, ...]:
        self.cache = self.function(self.cache, *self.arguments)
        return tuple(jax.tree.leaves(self.cache))


class InPlace:
    """A call of the peer that updates tensors; like `Donated` it starts from the cache given."""

    def __init__(self, function: Callable[..., None], cache: KVCache, *arguments: Any) -> None:
        self.tensors = [as_torch(jnp.copy(leaf)).clone() for leaf in jax.tree.leaves(cache)]
        self.arguments = arguments
        self.function = function

    def __call__(self) -> tuple[Any, ...]:
        self.function(*self.tensors, *self.arguments)
        return tuple(self.tensors)


def as_torch(x: Any) -> torch.Tensor:
    return torch.from_dlpack(x)


def random_cache(size: int, dtype: str = "bfloat16", scales: Any = None, layout: str = "NHD", seed: int = 0) -> KVCache:
    """A cache of random numbers with room for twice as many tokens as `size`, at least 4096."""
    blocks = max(4096 // BLOCK_SIZE, 2 * size // BLOCK_SIZE)
    cache = KVCache.zeros(blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, dtype, layout=layout, scales=scales)
    key = jax.random.key(seed)

    def noise(x: Any) -> Any:
        if x is None or x.dtype == jnp.float32:
            return None if x is None else jax.random.uniform(key, x.shape, minval=0.01, maxval=0.1)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jax.random.normal(key, x.shape, x.dtype)
        return jax.random.randint(key, x.shape, 0, 100, jnp.int32).astype(x.dtype)

    return jax.tree.map(noise, cache)


def writes(size: int, dtype: str = "bfloat16", scales: Any = None, layout: str = "NHD") -> dict[str, Callable[[], Any]]:
    """New tokens to random slots."""
    cache = random_cache(size, dtype, scales, layout)
    key, value = jax.random.normal(jax.random.key(1), (2, size, NUM_KV_HEADS, HEAD_SIZE), jnp.bfloat16)
    slots = jnp.asarray(np.random.default_rng(0).permutation(cache.num_slots)[:size].astype(np.int32))
    calls: dict[str, Callable[[], Any]] = {
        name: Donated(functools.partial(write_kv, implementation=implementation), cache, key, value, slots)
        for name, implementation in ((OURS, "mosaic_gpu"), (REFERENCE, "reference"))
    }
    calls["jaxpaged, slots known to differ"] = Donated(
        functools.partial(write_rows, interpret=interpreter()), cache, key, value, slots
    )
    peer = triton_write(dtype, scales) if layout == "NHD" else None
    if peer is not None:
        calls[TRITON] = InPlace(peer, cache, as_torch(key), as_torch(value), as_torch(slots).long())
    return calls


def triton_write(dtype: str, scales: Any) -> Callable[..., None] | None:
    """The peer's write, of the cache's leaves and then key, value and slots."""
    module = peer_module("triton_reshape_and_cache_flash")
    if module is None:
        return None
    one = torch.ones((), device="cuda")
    if scales is None:

        def plain(k: Any, v: Any, key: Any, value: Any, slots: Any) -> None:
            module.triton_reshape_and_cache_flash(key, value, k, v, slots, "auto", one, one)

        return plain
    if scales == "tensor" and dtype == "float8_e4m3fn":

        def scaled(k: Any, v: Any, k_scale: Any, v_scale: Any, key: Any, value: Any, slots: Any) -> None:
            module.triton_reshape_and_cache_flash(key, value, k, v, slots, "fp8", k_scale, v_scale)

        return scaled
    if scales == "token_head":
        mode = importlib.import_module("vllm.v1.kv_cache_interface").KVQuantMode
        kind = mode.INT8_PER_TOKEN_HEAD if dtype == "int8" else mode.FP8_PER_TOKEN_HEAD
        view = torch.int8 if dtype == "int8" else torch.float8_e4m3fn

        def by_row(k: Any, v: Any, k_scale: Any, v_scale: Any, key: Any, value: Any, slots: Any) -> None:
            module.triton_reshape_and_cache_flash_per_token_head_quant(
                key, value, k.view(view), v.view(view), k_scale, v_scale, slots, kind
            )

        return by_row
    return None


def peer_module(name: str) -> Any:
    try:
        return importlib.import_module(f"{OPS}.{name}") if torch.cuda.is_available() else None
    except ImportError:
        return None


def block_copies(size: int, chain: bool = False) -> dict[str, Callable[[], Any]]:
    """`size` blocks copied to `size` others of the cache; with `chain` each target is the next one's source."""
    cache = random_cache(2 * size * BLOCK_SIZE)
    blocks = np.random.default_rng(0).permutation(cache.num_blocks)[: 2 * size].astype(np.int32)
    pairs = np.stack([blocks[:size], blocks[1 : size + 1] if chain else blocks[size:]], 1)
    on_device = jnp.asarray(pairs)
    calls: dict[str, Callable[[], Any]] = {
        OURS: Donated(functools.partial(copy_blocks, implementation="mosaic_gpu"), cache, on_device),
        REFERENCE: Donated(functools.partial(copy_blocks, implementation="reference"), cache, on_device),
    }
    if not chain:
        known = block_pairs(pairs, cache.num_blocks, cache.num_blocks, within=True)
        copy = functools.partial(block_copy.copy_blocks, None, interpret=interpreter())
        calls["jaxpaged, pairs from the host"] = Donated(copy, cache, jax.tree.map(jnp.asarray, known))
    return calls | plain_copy(size)


def plain_copy(size: int) -> dict[str, Callable[[], Any]]:
    """The same bytes in one piece: what there is to reach."""
    if not torch.cuda.is_available():
        return {}
    source = torch.zeros(size * block_bytes() // 4, device="cuda")
    target = torch.empty_like(source)
    return {"plain copy": lambda: target.copy_(source)}


def block_bytes() -> int:
    return 2 * BLOCK_SIZE * NUM_KV_HEADS * HEAD_SIZE * 2


def swaps(size: int) -> dict[str, Callable[[], Any]]:
    """`size` blocks of one cache copied into another."""
    source, cache = random_cache(2 * size * BLOCK_SIZE, seed=2), random_cache(2 * size * BLOCK_SIZE)
    rng = np.random.default_rng(0)
    pairs = jnp.asarray(np.stack([rng.permutation(cache.num_blocks)[:size] for _ in range(2)], 1).astype(np.int32))

    def swap(implementation: str) -> Donated:
        def into(cache: KVCache, source: KVCache, pairs: Any) -> KVCache:
            return swap_blocks(source, cache, pairs, implementation=implementation)

        return Donated(into, cache, source, pairs)

    return {OURS: swap("mosaic_gpu"), REFERENCE: swap("reference")} | plain_copy(size)


def gathers(size: int) -> dict[str, Callable[[], Any]]:
    """16 requests of `size / 16` tokens in blocks in random order."""
    cache = random_cache(size)
    blocks = np.random.default_rng(0).permutation(cache.num_blocks)[: size // BLOCK_SIZE]
    table = jnp.asarray(blocks.reshape(16, -1).astype(np.int32))
    lens = jnp.full(16, size // 16, jnp.int32)

    def gather(implementation: str) -> Callable[[], Any]:
        function = functools.partial(gather_kv, total_tokens=size, implementation=implementation)
        return functools.partial(jax.jit(function), cache, table, lens)

    return {OURS: gather("mosaic_gpu"), REFERENCE: gather("reference")}


def merges(size: int, states: int) -> dict[str, Callable[[], Any]]:
    """States of `size` tokens, of which some attended to nothing."""
    outputs = jax.random.normal(jax.random.key(0), (states, size, NUM_HEADS, HEAD_SIZE), jnp.bfloat16)
    lses = jax.random.normal(jax.random.key(1), (states, NUM_HEADS, size))
    lses = lses.at[0, :, ::7].set(-jnp.inf)

    def merge(implementation: str) -> Callable[[], Any]:
        function = functools.partial(merge_attention_states, implementation=implementation)
        return functools.partial(jax.jit(function), outputs, lses)

    calls = {OURS: merge("mosaic_gpu"), REFERENCE: merge("reference")}
    module = peer_module("triton_merge_attn_states")
    if module is not None and states == 2:
        out, lse = (torch.empty_like(as_torch(x)[0]) for x in (outputs, lses))
        first, second = as_torch(outputs)
        first_lse, second_lse = as_torch(lses)

        def peer() -> tuple[torch.Tensor, torch.Tensor]:
            module.merge_attn_states(out, first, first_lse, second, second_lse, lse)
            return out, lse

        calls[TRITON] = peer
    return calls


def all_cases() -> list[Case]:
    token = 2 * NUM_KV_HEADS * HEAD_SIZE
    moved = 2 * token * 2
    cases = [
        Case(f"write {n} tokens", n, writes, moved * n, target=f"{least} and >= 1.00x Triton")
        for n, least in ((64, "7.7 µs"), (512, "8.6 µs"), (8192, "30.6 µs"), (65536, "85% of a copy"))
    ]
    cases += [
        Case(f"write 8192 tokens, {layout}", 8192, functools.partial(writes, layout=layout), moved * 8192)
        for layout in ("HND", "N2HD", "HN2D")
    ]
    for dtype, scales in (
        ("float8_e4m3fn", None),
        ("float8_e4m3fn", "tensor"),
        ("float8_e4m3fn", "head"),
        ("float8_e4m3fn", "token_head"),
        ("int8", "token_head"),
    ):
        # XLA's division is off by an ulp at times, and then a number between two others is rounded the other way.
        cases.append(
            Case(
                f"write 65536 tokens, {dtype}, scales {scales}",
                65536,
                functools.partial(writes, dtype=dtype, scales=scales),
                (token * 2 + token) * 65536,
                tolerance=1e-3,
            )
        )
    copied = 2 * block_bytes() * 4096
    cases += [
        Case("copy 4096 blocks", 4096, block_copies, copied, target="85% of a copy"),
        Case("copy 4096 blocks in a chain", 4096, functools.partial(block_copies, chain=True), copied),
        Case("swap 4096 blocks", 4096, swaps, copied, target="85% of a copy"),
        Case("gather 65536 tokens", 65536, gathers, moved * 65536),
    ]
    for states, tokens in ((2, 64), (2, 8192), (16, 64), (4, 8192)):
        name = f"merge {states} states of {tokens} tokens"
        size = (states + 1) * tokens * NUM_HEADS * HEAD_SIZE * 2
        cases.append(Case(name, tokens, functools.partial(merges, states=states), size, tolerance=2e-2, floats=True))
    return cases
