"""The tiles of every call: the file that holds them, which rule counts, and that what they make fits on a GPU."""

import copy
import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged import KVCache, PagedBatch
from jaxpaged.attention import make_options
from jaxpaged.pallas import attention, config, decode, prefill, tuned_file
from jaxpaged.pallas.tuning import CallShape, DecodeTiles, Gpu, PrefillTiles, Rule, ShapeClass, gpu_of, tuned_for
from jaxpaged.reference.attention import AttentionOptions

TABLE = tuned_file.packaged()
DATA = json.loads(tuned_file.text_of(TABLE))
H200 = "NVIDIA H200"
SMEM_BYTES = 227 * 1024
SMEM_BYTES_OF_TWO = 113 * 1024
"""What a CTA of compute capability 9.0 may have, and each of two on a multiprocessor."""
LAST = len(TABLE.gpu(None).decode) - 1


# The file.


def test_the_file_is_as_the_tuner_would_write_it():
    assert tuned_file.parse(tuned_file.text_of(TABLE)) == TABLE
    packaged = tuned_file.importlib.resources.files("jaxpaged.pallas").joinpath(tuned_file.NAME)
    assert packaged.read_text(encoding="utf-8") == tuned_file.text_of(TABLE)


def changed(path: list[Any], value: Any) -> str:
    """The file with one value changed, or left out where `value` is `changed`."""
    data = copy.deepcopy(DATA)
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    if value is changed:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(data)


DECODE, PREFILL = ["gpus", H200, "decode", 0], ["gpus", H200, "prefill", 0]
WRONG = {
    "unknown key": ([*DECODE, "use", "tiel"], 64, r"decode\[0\]\.use\.tiel: unknown key, expected one of tile, "),
    "unknown condition": ([*DECODE, "when", "bits"], [8, 8], r"decode\[0\]\.when\.bits: unknown key"),
    "unknown key of a rule": ([*DECODE, "if"], {}, r"decode\[0\]\.if: unknown key"),
    "unknown kernel": (["gpus", H200, "decoed"], [], rf"gpus\.{H200}\.decoed: unknown key"),
    "unknown key of the file": (["gpu"], {}, r"\.gpu: unknown key"),
    "missing key": ([*DECODE, "use", "tile"], changed, r"decode\[0\]\.use: expected the key tile"),
    "missing kernel": (["gpus", H200, "prefill"], changed, r"expected the key prefill"),
    "a string": ([*DECODE, "use", "tile"], "64", r"decode\[0\]\.use\.tile: expected an integer of 0 or more, got '64'"),
    "a float": ([*PREFILL, "use", "step"], 64.0, r"prefill\[0\]\.use\.step: expected an integer"),
    "a bool": ([*DECODE, "use", "most_stages"], True, r"most_stages: expected an integer"),
    "not a pair": ([*PREFILL, "use", "registers"], 240, r"registers: expected a list of two integers, got 240"),
    "not a range": ([*PREFILL, "when", "rows"], 3, r"when\.rows: expected \[least, most\]"),
    "a wrong range": ([*PREFILL, "when", "rows"], [3, 1], r"when\.rows: expected \[least, most\], got \[3, 1\]"),
    "a wrong bound": ([*PREFILL, "when", "rows"], [None, "x"], r"when\.rows\[1\]: expected an integer"),
    "no such tile": ([*DECODE, "use", "tile"], 96, r"decode\[0\]\.use\.tile: expected 64 or 128, got 96"),
    "too many registers": ([*PREFILL, "use", "registers"], [240, 32], r"registers: two computing .* have 504"),
    "too many warpgroups": (
        [*DECODE, "use", "warpgroups"],
        4,
        r"warpgroups: expected 1, or with one CTA up to 3, got 4",
    ),
    "too many heads": ([*DECODE, "use", "heads"], 3, r"heads: expected 1, 2, 4 or 8, got 3"),
    "warpgroups of two CTAs": (
        [*DECODE[:-1], LAST, "use", "warpgroups"],
        2,
        rf"decode\[{LAST}\]\.use\.warpgroups: expected 1, or",
    ),
    "odd registers": ([*PREFILL, "use", "registers"], [230, 24], r"registers: expected multiples of 8"),
    "not total": ([*DECODE[:-1], LAST, "when"], {"rows": [1, 8]}, rf"decode\[{LAST}\]\.when: expected {{}}"),
    "no rules": (["gpus", H200, "decode"], [], r"decode: expected a list of rules, got \[\]"),
    "no multiprocessors": (["gpus", H200, "num_sms"], 0, r"num_sms: expected an integer of 1 or more, got 0"),
    "not a GPU": (["gpus", H200], 3, rf"gpus\.{H200}: expected an object, got 3"),
    "like nothing": (["gpus", "NVIDIA H20", "like"], "H1", r"NVIDIA H20\.like: expected a GPU with rules, .* got 'H1'"),
    "no default": (["default"], None, r"default: expected a GPU with rules, .* got None"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_file_is_said(name):
    path, value, message = WRONG[name]
    with pytest.raises(ValueError, match=r"^my\.json.*" + message):
        tuned_file.parse(changed(path, value), "my.json")


def test_a_file_that_is_not_json():
    with pytest.raises(ValueError, match=r"my\.json: not JSON: "):
        tuned_file.parse("{", "my.json")


# The GPU and the rule.


@dataclasses.dataclass(frozen=True)
class Device:
    device_kind: str
    platform: str = "gpu"


@dataclasses.dataclass(frozen=True)
class CountedDevice(Device):
    core_count: int = 0


def test_multiprocessors_of_a_device():
    """As many as the device says; else as many as the file says of its kind, or of the default one."""
    known = {"NVIDIA H200": 132, "NVIDIA H100 80GB HBM3": 132, "NVIDIA H100 PCIe": 114, "NVIDIA H20": 78}
    for kind, num_sms in known.items():
        gpu = gpu_of(Device(kind))
        assert (gpu.kind, gpu.num_sms) == (kind, num_sms)
    assert gpu_of(CountedDevice("NVIDIA H100 80GB HBM3", core_count=114)).num_sms == 114
    other = gpu_of(CountedDevice("NVIDIA H300", core_count=99))
    assert other == dataclasses.replace(gpu_of(), kind="NVIDIA H300", num_sms=99)
    assert gpu_of(Device("NVIDIA H300")).num_sms == 132


def test_without_a_gpu_the_default_one():
    for device in (None, "cpu", Device("cpu", platform="cpu"), jax.devices("cpu")[0]):
        assert gpu_of(device).kind == H200
    few = dataclasses.replace(gpu_of(), num_sms=3)
    with tuned_for(few):
        assert gpu_of(Device("NVIDIA H20")) is few
    assert gpu_of(Device("NVIDIA H20")).num_sms == 78


def test_the_first_rule_that_holds_counts():
    tiles = [DecodeTiles(64, 2, stages, 4) for stages in (2, 3, 4)]
    classes = [ShapeClass(rows=(None, 8), num_reqs=(2, 3)), ShapeClass(rows=(8, None)), ShapeClass()]
    gpu = Gpu("", 1, tuple(map(Rule, classes, tiles)), gpu_of().prefill)
    for rows, num_reqs, expected in ((8, 2, 0), (1, 3, 0), (1, 4, 2), (1, 1, 2), (8, 4, 1), (9, 2, 1)):
        assert gpu.decode_tiles(CallShape(16, 128, rows, num_reqs)) == tiles[expected]


def test_up_to_64_decodes_get_half_the_shares():
    """A CTA has a multiprocessor to itself then, and the more warpgroups."""
    cache = jax.eval_shape(lambda: KVCache.zeros(64, 16, 8, 128, "bfloat16"))
    query = jax.ShapeDtypeStruct((1, 32, 128), jnp.bfloat16)
    shapes = [config.decode_config(query, cache, requests(n), query.dtype, False, 1, gpu_of()) for n in (1, 64, 65)]
    one, some, many = (shape.num_shares * shape.head_groups for shape in shapes)
    assert one <= 132 and some <= 132 < many <= 264
    assert [shape.warpgroups for shape in shapes] == [3, 3, 1]


# What becomes of them.


def requests(count: int, hint: int | None = None) -> PagedBatch:
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((count, 40), (count,), (count + 1,))]
    return PagedBatch(*ints, None, hint)


@dataclasses.dataclass(frozen=True)
class Call:
    query: Any
    cache: Any
    batch: PagedBatch
    options: AttentionOptions
    batch_invariant: bool


@st.composite
def calls(draw: Any) -> Call:
    """Any call that the kernels take, by its shapes."""
    cache_dtype = draw(st.sampled_from(["bfloat16", "float16", "int8", "float8_e4m3fn"]))
    eight = cache_dtype in ("int8", "float8_e4m3fn")
    sizes = st.integers(1, 4).map(lambda n: 64 * n) if eight else st.integers(1, 32).map(lambda n: 8 * n)
    heads, group = draw(st.sampled_from([1, 2, 3, 8, 16, 64, 128])), draw(st.integers(1, 100))
    scales = draw(st.sampled_from(["head", "token_head"])) if eight else None
    k_size, v_size, block_size = draw(sizes), draw(sizes), draw(st.sampled_from([8, 16, 24, 64, 128]))

    def zeros() -> KVCache:
        return KVCache.zeros(64, block_size, heads, k_size, cache_dtype, v_head_size=v_size, scales=scales)

    num_reqs, new = draw(st.sampled_from([1, 2, 3, 8, 300])), draw(st.sampled_from([1, 2, 7, 8, 40, 1000]))
    query = jax.ShapeDtypeStruct((num_reqs * new, heads * group, k_size), "bfloat16" if eight else cache_dtype)
    options = {"scale": 1.0, "causal": True, "window": draw(st.sampled_from([None, (9, 0)]))}
    options |= dict.fromkeys(("soft_cap", "alibi_slopes", "sinks", "mask_mod", "score_mod"))
    made = make_options(num_heads=heads * group, num_reqs=num_reqs, **options)
    batch = requests(num_reqs, draw(st.sampled_from([None, new])))
    call = Call(query, jax.eval_shape(zeros), batch, made, draw(st.booleans()))
    assume(attention.refusal(query, call.cache, batch, made, query.dtype) is None)
    return call


@st.composite
def gpus(draw: Any) -> Gpu:
    """Those of the file, and others whose rule asks for anything that a file may ask for."""
    if draw(st.booleans()):
        return TABLE.gpu(draw(st.sampled_from([*TABLE.gpus, None])), draw(st.sampled_from([None, 7, 114, 144])))
    tile, stages = draw(st.sampled_from([64, 128])), draw(st.integers(2, 16))
    registers = draw(st.sampled_from([(240, 24), (216, 72)]))
    ctas = draw(st.integers(1, 2))
    warpgroups, heads = draw(st.integers(1, 3)) if ctas == 1 else 1, draw(st.sampled_from([1, 2, 4, 8]))
    decode = DecodeTiles(tile, ctas, stages, draw(st.integers(1, 9)), warpgroups, heads)
    prefill = PrefillTiles(tile, stages, registers, draw(st.integers(0, 200)), 1 << 20, draw(st.integers(1, 64)))
    assert decode.refusal() is None and prefill.refusal() is None
    return Gpu("", draw(st.integers(1, 200)), (Rule(ShapeClass(), decode),), (Rule(ShapeClass(), prefill),))


def shared_bytes(module: Any, shape: Any, names: tuple[str, ...] = ()) -> int:
    """Shared memory that a kernel allocates, as it says itself; Mosaic has each piece in multiples of 1024 bytes."""
    pieces: dict[str, Any] = {}

    def capture(run: Any, *, collective_axes: str, **refs: Any) -> None:
        pieces.update(refs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.pl, "run_scoped", capture)
        module._allocate(shape, None, None, names, *[object()] * len(names))
    refs = jax.tree.leaves(list(pieces.values()), is_leaf=lambda x: not isinstance(x, list))
    barriers = sum(8 * int(np.prod(ref.num_barriers)) for ref in refs if isinstance(ref, plgpu.Barrier))
    avals = [ref.inner_aval for ref in refs if not isinstance(ref, plgpu.Barrier)]
    return barriers + sum(-(-math.prod(a.shape) * jnp.dtype(a.dtype).itemsize // 1024) * 1024 for a in avals)


@settings(max_examples=300, deadline=None)
@given(calls(), gpus(), st.integers(1, attention.MOST_DECODED))
def test_every_decode_fits(call, gpu, longest):
    group, most_rows = call.query.shape[1] // call.cache.num_kv_heads, config.most_decoded_rows(call.cache)
    assert group * attention.decoded_lens(call.query, call.cache, call.batch, call.batch_invariant) <= most_rows
    longest = min(longest, most_rows // group)
    assume(longest > 0)
    given = (call.query, call.cache, call.batch, call.query.dtype, call.batch_invariant, longest)
    shape = config.decode_config(*given, gpu)
    rule = gpu.decode_tiles(config.decode_call(call.query, call.cache, call.batch, call.batch_invariant, longest))
    assert 1 <= shape.heads <= rule.heads and call.cache.num_kv_heads % shape.heads == 0
    assert shape.heads == 1 or shape.rows <= config.MOST_SHARED_ROWS
    assert shape.scores[0] in (64, rule.tile) and 2 <= shape.stages <= rule.most_stages
    assert 1 <= shape.warpgroups <= rule.warpgroups and shape.stages % shape.warpgroups == 0
    assert shape.rows == shape.heads * group * longest
    assert shape.fewest_tiles == rule.fewest_tiles * shape.heads
    most = max(1, rule.ctas_per_sm * gpu.num_sms // shape.head_groups)
    assert shape.num_shares == call.batch.num_reqs if call.batch_invariant else 1 <= shape.num_shares <= most
    by_row = call.cache.k_scale is not None and call.cache.k_scale.ndim == 3
    needed = shared_bytes(decode, shape, ("k_scales",) if by_row else ()) + decode.reduction_bytes(shape)
    of_one = max(1, gpu.num_sms // shape.head_groups)
    two = not call.batch_invariant and shape.num_shares > of_one
    assert needed <= (SMEM_BYTES_OF_TWO if two else SMEM_BYTES)


@settings(max_examples=300, deadline=None)
@given(calls(), gpus())
def test_every_prefill_fits(call, gpu):
    assume(not call.cache.quantized)
    given = (call.query, call.cache, call.batch, call.options, call.query.dtype, True, call.batch_invariant)
    shape = config.prefill_config(*given, gpu)
    rule = gpu.prefill_tiles(config.prefill_call(call.query, call.cache, call.batch, call.batch_invariant))
    tiling = shape.tiling
    assert tiling.step in (64, rule.step) and 2 <= shape.stages <= rule.most_stages
    assert tiling.num_ctas == gpu.num_sms and 1 <= tiling.most_parts <= rule.most_parts
    assert tiling.tokens * (shape.group if tiling.packed else 1) <= config.TILE_ROWS
    assert not (call.batch_invariant and shape.in_parts)
    assert shared_bytes(prefill, shape) <= SMEM_BYTES


@settings(max_examples=100, deadline=None)
@given(calls(), st.sampled_from([1, 2, 50]), st.sampled_from([1, 9]))
def test_batch_invariant_tiles_depend_on_no_batch(call, num_reqs, tokens):
    """Bits depend on tiles and steps, so these must not depend on how many requests there are, nor on their tokens."""
    classes = (ShapeClass(num_reqs=(None, 2)), ShapeClass(rows=(None, 40)), ShapeClass())
    decode = tuple(map(Rule, classes, (DecodeTiles(tile, 1, 2, 1) for tile in (64, 64, 128))))
    steps = (PrefillTiles(step, 2, (240, 24), 96, 1, 1) for step in (64, 64, 128))
    gpu = Gpu("", 132, decode, tuple(map(Rule, classes, steps)))
    query = jax.ShapeDtypeStruct((num_reqs * tokens, *call.query.shape[1:]), call.query.dtype)
    arguments = [(call.query, call.cache, call.batch), (query, call.cache, requests(num_reqs))]
    assert len({gpu.decode_tiles(config.decode_call(*a, True, 1)) for a in arguments}) == 1
    assert len({gpu.prefill_tiles(config.prefill_call(*a, True)) for a in arguments}) == 1
