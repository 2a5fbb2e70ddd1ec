"""Every variant of the attention kernels lowers for CUDA on a machine without a GPU."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpaged import KVCache, PagedBatch
from jaxpaged.attention import make_options
from jaxpaged.pallas import attention, config
from jaxpaged.testing.cases import every_third, favour_recent

# Where a layout can't be found, Mosaic searches for minutes before it says so.
pytestmark = pytest.mark.timeout(120)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A call, by the shapes and options that choose what is compiled.

    Attributes:
      hint: the batch's `max_query_len`.
      takes: which kernels it needs: d for decode, u for prefill with tiles of one head, p for prefill with packed
        heads, s for prefill of a shared prefix.
      in_parts: whether prefill splits tiles among CTAs.
      options: of `paged_attention`; "alibi", "alibi_per_request" and "sinks" stand for arrays.
    """

    num_tokens: int
    num_reqs: int
    hint: int | None
    takes: str
    in_parts: bool = False
    num_kv_heads: int = 8
    group: int = 4
    head_size: int = 128
    v_head_size: int | None = None
    block_size: int = 16
    layout: str = "NHD"
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    scales: str | None = None
    shares_prefix: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def but(self, **changes: Any) -> "Variant":
        return dataclasses.replace(self, **changes)


DECODE = Variant(9, 9, 1, "d")
UNPACKED = Variant(4096, 4, 2048, "u")
PACKED = Variant(640, 7, 128, "p")
MIXED = Variant(2048, 64, None, "dp")
MODES = {
    "decode": DECODE,
    "decode-1-request": DECODE.but(num_tokens=1, num_reqs=1),
    "decode-4-new": DECODE.but(num_tokens=36, hint=4),
    "decode-8-new": DECODE.but(num_tokens=72, hint=8),
    "unpacked": UNPACKED,
    "unpacked-in-parts": UNPACKED.but(num_tokens=128, num_reqs=1, hint=128, in_parts=True, num_kv_heads=2),
    "packed": PACKED,
    "packed-in-parts": PACKED.but(num_tokens=100, num_reqs=4, in_parts=True, num_kv_heads=2),
    "mixed": MIXED,
    "mixed-unpacked": MIXED.but(num_tokens=4096, num_reqs=16, takes="du"),
    "mixed-in-parts": MIXED.but(num_tokens=64, num_reqs=9, in_parts=True, num_kv_heads=1),
}
INVARIANT = (("batch_invariant", True),)
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": (20, 0)},
    "both-sides": {"window": (7, 9), "causal": False},
    "soft-cap": {"soft_cap": 2.0},
    "alibi": {"alibi": True},
    "alibi-per-request": {"alibi_per_request": True},
    "sinks": {"sinks": True},
    "mask-mod": {"mask_mod": every_third},
    "score-mod": {"score_mod": favour_recent},
    "lse": {"return_lse": True},
    "encoder": {"causal": False},
    "negative-scale": {"scale": -0.1},
    "everything": {
        "window": (30, 0), "soft_cap": 5.0, "alibi": True, "sinks": True, "mask_mod": every_third,
        "score_mod": favour_recent, "return_lse": True,
    },
}  # fmt: skip
EIGHT_BITS = [("float8_e4m3fn", "tensor"), ("float8_e5m2", "head"), ("int8", "head"), ("int8", "token_head")]
HEAD_SIZES = [8, 40, 64, 80, 96, 112, 160, 192, 224, 256]
ROWS = {"mixed": MIXED, "unpacked": UNPACKED}


def variants() -> dict[str, Variant]:
    found = dict(MODES)
    for name, base in MODES.items():
        if name in ("decode", "decode-4-new", "unpacked", "mixed"):
            # Short requests and long ones are each always one kernel's.
            takes = "d" if base.hint == 1 else "dp" if name == "decode-4-new" else "d" + base.takes.strip("d")
            found[f"{name}-batch-invariant"] = base.but(options=INVARIANT, takes=takes)
    for name, options in OPTIONS.items():
        found |= {f"{name}-{rows}": base.but(options=tuple(options.items())) for rows, base in ROWS.items()}
    for name in ("alibi-per-request", "sinks", "everything"):
        base = MODES["packed-in-parts"]
        found[f"{name}-packed-in-parts"] = base.but(options=tuple(OPTIONS[name].items()))
    for name in ("decode", "decode-4-new", "unpacked-in-parts", "packed", "packed-in-parts"):
        found[f"mask-mod-{name}"] = MODES[name].but(options=tuple(OPTIONS["mask-mod"].items()))
    found |= {f"head-size-{n}": MIXED.but(head_size=n) for n in HEAD_SIZES}
    found |= {f"head-size-{n}-unpacked": UNPACKED.but(head_size=n) for n in (40, 64, 192, 256)}
    found |= {f"head-size-{n}-in-parts": MODES["packed-in-parts"].but(head_size=n) for n in (40, 256)}
    # A single head's rows are copied as plain bytes, which must not go on in the next head.
    for group in (1, 5):
        found |= {f"head-size-{n}-group-{group}": DECODE.but(head_size=n, group=group) for n in (40, 80, 112, 160)}
    # Shared memory has room for fewer tiles then, and with twice the rows for none.
    found |= {f"head-size-{n}-decode-8-new": MODES["decode-8-new"].but(head_size=n) for n in (192, 256)}
    found["head-size-256-group-8-decode-8-new"] = MODES["decode-8-new"].but(
        head_size=256, group=8, takes="dp", in_parts=True
    )
    found |= {
        f"head-sizes-{n}-{m}": MIXED.but(head_size=n, v_head_size=m) for n, m in ((192, 128), (64, 40), (40, 256))
    }
    layouts = ("HND", "2NHD", "2HND", "N2HD", "HN2D", "NH2D")
    found |= {f"layout-{n}": MIXED.but(layout=n) for n in layouts}
    found |= {f"layout-{n}-head-size-80": MIXED.but(layout=n, head_size=80) for n in ("HN2D", "N2HD")}
    found |= {f"block-size-{n}": MIXED.but(block_size=n) for n in (8, 32, 48, 64, 128)}
    found |= {f"group-{n}": MIXED.but(group=n, num_kv_heads=4) for n in (7, 12)}
    found["group-1"] = MIXED.but(group=1, num_kv_heads=32, takes="du")
    found["group-1-decode-8-new"] = MODES["decode-8-new"].but(group=1)
    found["group-100"] = UNPACKED.but(group=100, num_kv_heads=1)
    found |= {f"float16-{rows}": base.but(dtype="float16") for rows, base in ROWS.items()}
    for base in ("decode", "decode-8-new", "mixed"):
        for cache_dtype, scales in EIGHT_BITS:
            eight = MODES[base].but(cache_dtype=cache_dtype, scales=scales)
            if scales == "token_head":
                eight = eight.but(takes="d")  # longer requests are decoded, too, in chunks
            found[f"{cache_dtype}-{scales}-{base}"] = eight
    for cache_dtype, scales in EIGHT_BITS:
        eight = MODES["decode-4-new"].but(cache_dtype=cache_dtype, scales=scales)
        found[f"mask-mod-{cache_dtype}-{scales}"] = eight.but(options=tuple(OPTIONS["mask-mod"].items()))
    found["float8_e4m3fn-head-float16"] = DECODE.but(cache_dtype="float8_e4m3fn", scales="head", dtype="float16")
    lse = (("return_lse", True),)
    found["shared-prefix"] = DECODE.but(shares_prefix=True, takes="ds")
    found["shared-prefix-4-new"] = MODES["decode-4-new"].but(shares_prefix=True, options=lse, takes="ds")
    found["float16-out"] = MIXED.but(options=(("out_dtype", "float16"),))
    return found


VARIANTS = variants()


def lowered(variant: Variant) -> jax.stages.Lowered:
    """A call, lowered for CUDA."""
    num_heads, sizes = variant.group * variant.num_kv_heads, (variant.num_kv_heads, variant.head_size)
    options = {"scale": 0.1, "causal": True} | dict.fromkeys(("window", "soft_cap", "mask_mod", "score_mod"))
    options |= dict(variant.options)
    chosen = {
        "out_dtype": jnp.dtype(options.pop("out_dtype", variant.dtype)),
        "batch_invariant": options.pop("batch_invariant", False),
        "return_lse": options.pop("return_lse", False),
    }

    def zeros() -> KVCache:
        more = {"layout": variant.layout, "v_head_size": variant.v_head_size, "scales": variant.scales}
        return KVCache.zeros(64, variant.block_size, *sizes, variant.cache_dtype or variant.dtype, **more)

    def struct(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    slopes = sinks = None
    if options.pop("alibi", False):
        slopes = struct(num_heads, dtype=jnp.float32)
    if options.pop("alibi_per_request", False):
        slopes = struct(variant.num_reqs, num_heads, dtype=jnp.float32)
    if options.pop("sinks", False):
        sinks = struct(num_heads, dtype=jnp.bfloat16)
    cache = jax.eval_shape(zeros)
    batch = PagedBatch(
        struct(variant.num_reqs, 40),
        struct(variant.num_reqs),
        struct(variant.num_reqs + 1),
        None,
        variant.hint,
        variant.shares_prefix,
    )
    query = struct(variant.num_tokens, num_heads, variant.head_size, dtype=variant.dtype)

    def call(query: Any, cache: Any, batch: Any, slopes: Any, sinks: Any) -> Any:
        given = {"num_heads": num_heads, "num_reqs": variant.num_reqs, "alibi_slopes": slopes, "sinks": sinks}
        made = make_options(**given, **options)
        assert attention.refusal(query, cache, batch, made, chosen["out_dtype"]) is None
        return attention.paged_attention(query, cache, batch, made, **chosen, interpret=None)

    traced = jax.jit(call).trace(query, cache, batch, slopes, sinks)
    return traced.lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_lowers_for_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variant, tiles = VARIANTS[name], []

    def spied(*arguments: Any, **more: Any) -> Any:
        tiles.append(config.prefill_config(*arguments, **more))
        return tiles[-1]

    monkeypatch.setattr(attention, "prefill_config", spied)
    kernels = set(re.findall(r"paged_decode|paged_prefill", lowered(variant).as_text()))
    assert ("paged_decode" in kernels) == ("d" in variant.takes)
    assert ("paged_prefill" in kernels) == bool(set(variant.takes) & {"u", "p", "s"})
    assert bool(tiles) == bool(set(variant.takes) & {"u", "p"})
    for tile in tiles:
        assert tile.tiling.packed == ("p" in variant.takes)
        assert tile.in_parts == variant.in_parts


def operands_of(call: str) -> list[str]:
    return re.search(r"@mosaic_gpu_v2\(([^)]*)\)", call)[1].split(", ")  # type: ignore[index]


def place_of(kernel: str, lines: list[str]) -> int:
    """Of the call of a kernel among lines of StableHLO or HLO."""
    (place,) = (i for i, x in enumerate(lines) if "mosaic_gpu_v2" in x and re.search(rf"{kernel}(?!_)", x))
    return place


def prefill_and_decode(variant: Variant) -> tuple[str, str, dict[str, str]]:
    """From the StableHLO of a mixed batch: the calls of both kernels, and of each result the line that says it."""
    lines = [line.strip() for line in lowered(variant).as_text().splitlines() if re.match(r" *%", line)]
    by_result = {re.match(r"%\w+", line)[0]: line for line in lines}  # type: ignore[index]
    return lines[place_of("paged_prefill", lines)], lines[place_of("paged_decode", lines)], by_result


def test_what_decode_writes_beside_prefill_is_no_memory_that_prefill_uses() -> None:
    """In a mixed batch decode starts before prefill has ended, which XLA doesn't know: it must make no buffer between
    them. So all that decode writes is there before prefill starts: results of prefill, or what prefill takes."""
    prefill, decode, _ = prefill_and_decode(VARIANTS["mixed"])
    written = [int(i) for i in re.findall(r"operand_index = (\d+)", decode)]
    assert len(written) == int(re.match(r"%\d+:(\d+) = ", decode)[1]) == 4  # type: ignore[index]
    assert {operands_of(decode)[i].split("#")[0] for i in written} == {prefill.split(":")[0]}


@pytest.mark.parametrize("name", ["mixed", "everything-mixed", "mask-mod-mixed"])
def test_what_decode_reads_beside_prefill_is_there_before_prefill(name: str) -> None:
    """It doesn't wait, so XLA may compute nothing for it after what prefill takes."""
    prefill, decode, by_result = prefill_and_decode(VARIANTS[name])
    barrier = operands_of(prefill)[0].split("#")[0]
    assert "stablehlo.optimization_barrier" in by_result[barrier]
    made = {x.split("#")[0] for x in operands_of(decode) if not x.startswith("%arg")}
    assert made == {barrier, prefill.split(":")[0]}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mixed", "everything-mixed", "mask-mod-mixed", "mixed-in-parts"])
def test_xla_schedules_nothing_for_decode_between_it_and_prefill(hopper: Any, name: str) -> None:
    text = lowered(VARIANTS[name]).compile().as_text()
    assert "is_scheduled=true" in text
    lines = [line for line in text[text.index("\nENTRY") :].splitlines() if " = " in line]
    between = lines[place_of("paged_prefill", lines) + 1 : place_of("paged_decode", lines)]
    operations = {re.search(r"([a-z][\w-]*)\(", line.split(" = ", 1)[1])[1] for line in between}  # type: ignore[index]
    assert operations <= {"get-tuple-element", "bitcast", "tuple", "parameter", "constant"}
