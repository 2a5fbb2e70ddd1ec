"""The classes of shapes that tiles are found for: what stands for each on the GPU, and what may be tried."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from attention_cases import CASES, Case

from jaxpaged import KVCache, PagedBatch
from jaxpaged.attention import make_options
from jaxpaged.pallas import config
from jaxpaged.pallas.tuning import CallShape, DecodeTiles, Gpu, PrefillTiles, Rule, ShapeClass

Kernel = Literal["decode", "prefill"]
Tiles = DecodeTiles | PrefillTiles
_CASES = {case.name: case for case in CASES}
MIB = 1 << 20

VALUES: dict[Kernel, dict[str, tuple[Any, ...]]] = {
    "decode": {
        "ctas_per_sm": (1, 2),
        "warpgroups": (1, 2, 3),
        "heads": (1, 2, 4, 8),
        "tile": (64, 128),
        "most_stages": (2, 3, 4, 5, 6, 8),
        "fewest_tiles": (1, 2, 4, 8, 16),
    },
    "prefill": {
        "step": (64, 128),
        "most_stages": (2, 3, 4),
        "registers": ((240, 24), (232, 40), (224, 56)),
        "packed_below": (0, 48, 96, 160, 320),
        "l2_bytes": (12 * MIB, 18 * MIB, 24 * MIB, 32 * MIB, 40 * MIB),
        "most_parts": (1, 4, 8, 16, 32),
    },
}
"""What is tried of each attribute, in this order."""


@dataclasses.dataclass(frozen=True)
class TunedClass:
    """A class of shapes, and the cases that stand for it: what is best for them on the whole is taken."""

    name: str
    kernel: Kernel
    when: ShapeClass
    cases: tuple[Case, ...]
    values: dict[str, tuple[Any, ...]] | None = None

    def candidates(self, tiles: Tiles, attribute: str) -> Iterator[Tiles]:
        """`tiles` with each other value of an attribute that a kernel can have."""
        for value in (self.values or VALUES[self.kernel])[attribute]:
            more = {"ctas_per_sm": 1} if attribute == "warpgroups" and value > 1 else {}  # where one CTA has an SM
            candidate = dataclasses.replace(tiles, **{attribute: value}, **more)
            if candidate != tiles and candidate.refusal() is None:
                yield candidate

    @property
    def attributes(self) -> tuple[str, ...]:
        return tuple(self.values or VALUES[self.kernel])

    def tiny(self, values: dict[str, tuple[Any, ...]]) -> "TunedClass":
        """The same with a case small enough for a CPU, and these values."""
        case = dataclasses.replace(self.cases[0].tiny(), num_heads=4, num_kv_heads=1)
        return dataclasses.replace(self, cases=(case,), values=values)


def with_tiles(gpu: Gpu, kernel: Kernel, tiles: Tiles) -> Gpu:
    """A GPU on which a kernel has these tiles, whatever the call."""
    return dataclasses.replace(gpu, **{kernel: (Rule(ShapeClass(), tiles),)})


def tiles_of(gpu: Gpu, kernel: Kernel, case: Case) -> Tiles:
    """What a case gets on a GPU."""
    return getattr(gpu, f"{kernel}_tiles")(call_shape(kernel, case))


def call_shape(kernel: Kernel, case: Case) -> CallShape:
    query, cache, batch, longest = _arguments(case)
    if kernel == "decode":
        return config.decode_call(query, cache, batch, False, longest)
    return config.prefill_call(query, cache, batch, False)


def kernel_shape(gpu: Gpu, kernel: Kernel, case: Case) -> Any:
    """What a case's kernel is compiled for: candidates in which it is the same are the same program."""
    query, cache, batch, longest = _arguments(case)
    if kernel == "decode":
        return config.decode_config(query, cache, batch, query.dtype, False, longest, gpu)
    options = {"scale": 1.0, "causal": case.causal, "window": case.window}
    options |= dict.fromkeys(("soft_cap", "alibi_slopes", "sinks", "mask_mod", "score_mod"))
    made = make_options(num_heads=case.num_heads, num_reqs=batch.num_reqs, **options)
    return config.prefill_config(query, cache, batch, made, query.dtype, False, False, gpu)


def _arguments(case: Case) -> tuple[Any, Any, PagedBatch, int]:
    """A case's query, cache and batch by their shapes, and the most new tokens of a request."""
    scales = {"bfloat16": None, "float8_e4m3fn": "tensor", "int8": "token_head"}[case.cache]

    def zeros() -> KVCache:
        return KVCache.zeros(1, case.block_size, case.num_kv_heads, case.head_size, case.cache, scales=scales)

    num_reqs, longest = len(case.seq_lens), max(case.query_lens)
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((num_reqs, 1), (num_reqs,), (num_reqs + 1,))]
    query = jax.ShapeDtypeStruct((case.num_tokens, case.num_heads, case.head_size), jnp.bfloat16)
    return query, jax.eval_shape(zeros), PagedBatch(*ints, None, longest), longest


def _decode(num_reqs: int, length: int, **more: Any) -> Case:
    new = more.pop("new", 1)
    return Case(f"decode {num_reqs}x{length}, {new} new", (new,) * num_reqs, (length,) * num_reqs, **more)


def _classes() -> tuple[TunedClass, ...]:
    classes: list[TunedClass] = []

    def add(name: str, kernel: Kernel, when: ShapeClass, *cases: str | Case) -> None:
        found = tuple(_CASES[case] if isinstance(case, str) else case for case in cases)
        classes.append(TunedClass(f"{kernel}: {name}", kernel, when, found))

    plain = ShapeClass(cache_bits=(16, 16), head_size=(128, 128), rows=(1, 8))

    def few(num_reqs: tuple[int, int | None]) -> ShapeClass:
        return dataclasses.replace(plain, num_reqs=num_reqs)

    eight = ShapeClass(cache_bits=(8, 8), head_size=(None, 128))
    float8 = {"cache": "float8_e4m3fn"}
    add("1 request", "decode", few((1, 1)), "decode 1x32768", _decode(1, 4096))
    add("2 to 8 requests", "decode", few((2, 8)), "decode 2x32768", "decode 4x32768", _decode(8, 4096))
    add("9 to 32 requests", "decode", few((9, 32)), "decode 16x8192", _decode(32, 2048))
    add("33 to 64 requests", "decode", few((33, 64)), "decode 64x4096", "decode 64 lognormal", _decode(64, 512))
    many = ("decode 128x1024", "decode 128x256", "decode 256x512")
    add("65 requests and more", "decode", few((65, None)), *many)
    rows = dataclasses.replace(plain, rows=(9, 32))
    add("9 to 32 rows", "decode", rows, "decode 64x4096, 4 new", "decode 64x4096, 8 new")
    add(
        "33 rows and more",
        "decode",
        dataclasses.replace(plain, rows=(33, None)),
        _decode(64, 4096, new=8, num_heads=64),
    )
    small, large = (dataclasses.replace(plain, head_size=bounds) for bounds in ((None, 64), (129, None)))
    add("heads of 64", "decode", small, "heads 64/8 of 64: decode 64x4096")
    add("heads of 256", "decode", large, "heads 8/1 of 256: decode 64x4096")
    add("8 bits, few requests", "decode", dataclasses.replace(eight, num_reqs=(1, 8)), _decode(1, 32768, **float8))
    more = dataclasses.replace(eight, num_reqs=(9, None))
    add("8 bits, 9 requests and more", "decode", more, "decode 64x4096 fp8", "decode 64x4096 int8")

    def long(low: int, high: int | None, head_size: tuple[int | None, int | None] = (65, 128)) -> ShapeClass:
        return ShapeClass(head_size=head_size, rows=(low, high))

    whole = ("prefill 8x4096", "prefill not causal 4x8192", "chunk 2048 on 32768")
    add("4096 rows and more", "prefill", long(4096, None), *whole)
    add("1024 to 4095 rows", "prefill", long(1024, 4095), "prefill 48 ragged 1..900")
    add("few rows", "prefill", long(1, 1023), "32x128 new on 4096", "1x128 new on 32768")
    add("heads of 64", "prefill", long(1, None, (None, 64)), "heads 64/8 of 64: prefill 4x4096")
    add("heads of 256", "prefill", long(1, None, (129, None)), "heads 8/1 of 256: prefill 4x4096")
    return tuple(classes)


CLASSES = _classes()
