"""From a step of prompts and decodes to launches: which addresses go where, and what is refused; kernels don't run."""

import dataclasses
from typing import Any

import pytest
import torch
from test_launch import ROW_SCALES, SCALES, Recorder, address, caches, recorder  # noqa: F401

from jaxpaged.bridge import prefill_plan_calls, torch_ops
from jaxpaged.bridge.decode_calls import by_column
from jaxpaged.bridge.decode_shapes import ScoreOptions
from jaxpaged.bridge.lse_rows import decoded_rows, prefilled_lse, row_requests
from jaxpaged.bridge.prefill_calls import prefill_on_gpu
from jaxpaged.bridge.prefill_plan_calls import plan_prefill_on_gpu
from jaxpaged.bridge.prefill_shapes import addresses_in, prefill_shape, prefill_shapes
from jaxpaged.pallas import decode_plan as field

HEADS = 8
PLAIN = ScoreOptions(0.125, True, -1, -1, 0.0)


@dataclasses.dataclass
class Step:
    """The tensors of a step, as an engine has them."""

    query: torch.Tensor
    caches: Any
    table: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor
    batch_invariant: bool = False
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @classmethod
    def new(cls, num_tokens: int, num_reqs: int, *, room: int = 0, **how: Any) -> "Step":
        query = torch.zeros(num_tokens + room, HEADS, 64, dtype=torch.bfloat16)[:num_tokens]
        table, lens, starts = (torch.zeros(s, dtype=torch.int32) for s in ((num_reqs, 6), num_reqs, num_reqs + 1))
        return cls(query, how.pop("caches", None) or caches(), table, lens, starts, **how)

    @property
    def batch(self) -> tuple[torch.Tensor, ...]:
        return self.table, self.lens, self.starts

    @property
    def scales(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self.k_scale, self.v_scale

    def plan(self) -> tuple[torch.Tensor, torch.Tensor]:
        return plan_prefill_on_gpu(self.query, *self.caches, *self.batch, self.batch_invariant, *PLAIN, *self.scales)

    def attend(self, plan: Any, slopes: Any = None, sinks: Any = None, **given: Any) -> torch.Tensor:
        by_column_of = [None if x is None else by_column(x, num_kv_heads=2, max_query_len=1) for x in (slopes, sinks)]
        by_column_of = given.pop("by_column_of", by_column_of)
        out = given.pop("out", torch.empty_like(self.query))
        how = (slopes, sinks, *by_column_of, self.batch_invariant, *PLAIN, out, *self.scales, given.pop("lse", None))
        prefill_on_gpu(self.query, *self.caches, self.table, self.starts, *plan, *how)
        return out

    def at(self, plan: torch.Tensor) -> dict[str, int]:
        found = prefill_shapes(self.query, *self.caches, self.table, self.batch_invariant, PLAIN, *self.scales)
        return addresses_in(plan, found.fields())


def numbers() -> int:
    return prefill_plan_calls._counts[-1].data_ptr()


def test_a_mixed_step_is_planned_by_two_kernels_and_attended_to_by_two(recorder: Recorder) -> None:  # noqa: F811
    step = Step.new(4096, 16)
    plan, workspace = step.plan()
    (_, planned), (_, decode_planned) = recorder.launches
    at = step.at(plan)
    counts = (numbers() + 4 * 16, numbers() + 4 * 4096)
    arrays = ("work", "counts", "tile_starts", "parts")
    assert planned == (*address(*step.batch), *counts, *(at[name] for name in arrays))
    assert decode_planned == (*address(*step.batch), counts[1], at["requests"], at["shares"])
    recorder.launches.clear()
    out = step.attend((plan, workspace))
    numbered = [number for number, _ in recorder.launches]
    # Decode starts where prefill's last CTAs have ended.
    assert [b"mosaic_gpu.uses_pdl" in recorder.modules[number] for number in numbered] == [False, True]
    (_, prefill), (_, decode) = recorder.launches
    read = (at["work"], at["counts"], *address(step.table, step.query, *step.caches, out))
    assert prefill == (*read, out.data_ptr())
    assert decode[:2] == (at["requests"], at["shares"])
    assert decode[-1] == out.data_ptr()
    workspace_end = workspace.data_ptr() + workspace.numel()
    assert all(workspace.data_ptr() <= x < workspace_end for x in decode[-4:-1])


def test_steps_of_other_sizes_run_the_same_programs(recorder: Recorder) -> None:  # noqa: F811
    """But for decode's plan, which is compiled for each number of requests."""
    for num_tokens, num_reqs in ((4096, 16), (3000, 16), (2049, 16), (4000, 12)):
        step = Step.new(num_tokens, num_reqs, room=4096 - num_tokens)
        step.attend(step.plan())
    plans = {number for i, (number, _) in enumerate(recorder.launches) if i % 4 == 1}
    others = {number for i, (number, _) in enumerate(recorder.launches) if i % 4 != 1}
    assert (len(recorder.launches), len(plans), len(others)) == (16, 2, 3)


def test_queries_are_copied_only_where_the_memory_behind_them_ends(recorder: Recorder) -> None:  # noqa: F811
    for room, same in ((5, True), (4, False)):
        step = Step.new(4091, 4, room=room)
        plan = step.plan()
        recorder.launches.clear()
        step.attend(plan)
        ((_, prefill),) = recorder.launches
        assert (prefill[3] == step.query.data_ptr()) == same


def test_few_requests_are_left_to_prefill(recorder: Recorder) -> None:  # noqa: F811
    step = Step.new(4096, 4)
    step.attend(step.plan())
    assert len(recorder.launches) == 2
    step = Step.new(4096, 4, batch_invariant=True)
    step.attend(step.plan())
    assert len(recorder.launches) == 2 + 4


def test_few_tiles_are_split_and_merged(recorder: Recorder) -> None:  # noqa: F811
    step = Step.new(64, 1)
    plan, workspace = step.plan()
    recorder.launches.clear()
    out = step.attend((plan, workspace))
    (_, prefill), (_, merge) = recorder.launches
    parts = prefill[-2:]
    at = step.at(plan)
    workspace_end = workspace.data_ptr() + workspace.numel()
    assert all(workspace.data_ptr() <= x < workspace_end for x in parts)
    assert merge == (at["work"], at["counts"], at["parts"], parts[1], parts[0], out.data_ptr(), out.data_ptr())


def test_slopes_and_sinks_go_to_each_kernel_in_its_order(recorder: Recorder) -> None:  # noqa: F811
    step = Step.new(4096, 16)
    slopes, sinks = torch.rand(1, HEADS), torch.rand(HEADS)
    by_column_of = [by_column(x, num_kv_heads=2, max_query_len=1) for x in (slopes, sinks)]
    plan = step.plan()
    recorder.launches.clear()
    step.attend(plan, slopes, sinks, by_column_of=by_column_of)
    (_, prefill), (_, decode) = recorder.launches
    assert set(address(slopes, sinks)) <= set(prefill)
    assert set(address(*by_column_of)) <= set(decode)
    each = torch.rand(16, HEADS)
    step.attend(plan, each)
    with pytest.raises(ValueError, match=r"slopes: expected a compact float32 tensor \(\(1, 8\), \(16, 8\)\)"):
        step.attend(plan, torch.rand(15, HEADS))
    with pytest.raises(ValueError, match="decode_sinks: expected what by_column makes of sinks"):
        step.attend(plan, None, sinks, by_column_of=[None, None])


EIGHT_BITS = [
    (dtype, name)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
    for name in SCALES
    if dtype != torch.int8 or name not in ("none", "values alone")
]


@pytest.mark.parametrize(("dtype", "name"), EIGHT_BITS)
def test_8_bit_caches_and_their_scales_go_to_prefill_and_decode(
    recorder: Recorder,  # noqa: F811
    dtype: Any,
    name: str,
) -> None:
    step = Step.new(4096, 16, caches=caches(dtype=dtype), **SCALES[name])
    query_dtype = torch.float16 if dtype == torch.float8_e5m2 else torch.bfloat16
    step.query = step.query.to(query_dtype)
    plan, workspace = step.plan()
    (_, planned), _ = recorder.launches
    assert planned[:3] == address(*step.batch)  # what a cache holds makes no difference to a plan
    recorder.launches.clear()
    out = step.attend((plan, workspace))
    assert out.dtype == query_dtype
    (_, prefill), (_, decode) = recorder.launches
    at = step.at(plan)
    scales = [x for x in step.scales if x is not None]
    tensors = address(step.table, step.query, *step.caches, *scales, out)
    assert prefill == (at["work"], at["counts"], *tensors, out.data_ptr())
    assert decode[: len(tensors) + 2] == (at["requests"], at["shares"], *tensors)


def test_8_bit_keys_and_values_of_one_buffer_with_scales_slopes_and_sinks(recorder: Recorder) -> None:  # noqa: F811
    step = Step.new(4096, 4, caches=caches("N2HD", dtype=torch.float8_e5m2), **SCALES["head"])
    slopes, sinks = torch.rand(1, HEADS), torch.rand(HEADS)
    plan = step.plan()
    recorder.launches.clear()
    out = step.attend(plan, slopes, sinks, lse=torch.empty(HEADS, 4096))
    ((_, prefill),) = recorder.launches
    at = step.at(plan[0])
    tensors = address(step.table, step.query, step.caches[0], *SCALES["head"].values(), slopes, sinks, out)
    assert prefill[:-2] == (at["work"], at["counts"], *tensors)
    assert prefill[-2:].count(out.data_ptr()) == 1  # the other one is for lses


def test_8_bit_tiles_that_are_split_are_merged_in_the_querys_dtype(recorder: Recorder) -> None:  # noqa: F811
    modules = []
    for dtype, scales in ((torch.int8, SCALES["head"]), (torch.bfloat16, {})):
        step = Step.new(64, 1, caches=caches(dtype=dtype), **scales)
        plan = step.plan()
        recorder.launches.clear()
        step.attend(plan)
        (_, got), (merge, _) = recorder.launches
        modules.append(recorder.modules[merge])
        assert {*address(*scales.values())} <= {*got}
    assert modules[0] == modules[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("sizes", [(4096, 16), (64, 1)], ids=["mixed", "in parts"])
def test_plans_are_as_large_as_compilers_are_told(
    recorder: Recorder,  # noqa: F811
    sizes: tuple[int, int],
    dtype: Any,
) -> None:
    step = Step.new(*sizes, caches=caches(dtype=dtype), **{} if dtype == torch.bfloat16 else SCALES["head"])
    tensors = (step.query, *step.caches, *step.batch, *step.scales)
    query, key, value, table, lens, starts, *scales = (None if x is None else x.to("meta") for x in tensors)
    fake = torch_ops._FAKES["plan_prefill"](query, key, value, table, lens, starts, False, *PLAIN, *scales)
    assert [x.shape for x in fake] == [x.shape for x in step.plan()]


def test_scales_of_other_shapes_are_other_programs(recorder: Recorder) -> None:  # noqa: F811
    numbers = []
    for name in ("tensor", "head", "tensor"):
        step = Step.new(4096, 4, caches=caches(dtype=torch.int8), **SCALES[name])
        step.attend(step.plan())
        numbers.append(recorder.launches[-1][0])
    assert numbers[0] == numbers[2] != numbers[1]


BAD_SCALES: dict[str, tuple[type[Exception], str, Any, dict[str, Any]]] = {
    "by token": (NotImplementedError, "k_scale, v_scale: scales per token and head are taken by decode alone", 64,
                 ROW_SCALES),
    "large heads": (NotImplementedError, "head_size: prefill has no room in shared memory for 8-bit heads of 256", 256,
                    SCALES["head"]),
    "odd heads": (NotImplementedError, "8-bit heads of a multiple of 64 elements, not 80", 80, SCALES["head"]),
    "none": (ValueError, "an int8 cache needs both scales", 64, {}),
    "one": (ValueError, "an int8 cache needs both scales", 64, {"k_scale": torch.ones(2)}),
    "dtype": (TypeError, "v_scale", 64, {"k_scale": torch.ones(2), "v_scale": torch.ones(2).half()}),
    "shape": (ValueError, "k_scale", 64, {"k_scale": torch.ones(3), "v_scale": torch.ones(2)}),
    "gaps": (ValueError, "k_scale", 64, {"k_scale": torch.ones(4)[::2], "v_scale": torch.ones(2)}),
    "device": (ValueError, "v_scale", 64, {"k_scale": torch.ones(2), "v_scale": torch.ones(2, device="meta")}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_SCALES)
def test_8_bit_caches_that_do_not_fit_are_refused_by_plan_and_kernels(recorder: Recorder, name: str) -> None:  # noqa: F811
    error, words, size, scales = BAD_SCALES[name]
    good = Step.new(4096, 4, caches=caches(dtype=torch.int8), **SCALES["head"])
    plan = good.plan()
    recorder.launches.clear()
    cache = [torch.zeros(40, 16, 2, size, dtype=torch.int8) for _ in range(2)]
    query = torch.zeros(4096, HEADS, size, dtype=torch.bfloat16)
    step = dataclasses.replace(good, query=query, caches=cache, **{"k_scale": None, "v_scale": None} | scales)
    with pytest.raises(error, match=words):
        step.plan()
    with pytest.raises(error, match=words):
        step.attend(plan)
    assert not recorder.launches


def test_a_table_that_is_part_of_a_wider_one(recorder: Recorder) -> None:  # noqa: F811
    step = Step.new(4096, 4)
    wide = torch.zeros(5, 9, dtype=torch.int32)
    step.table, step.lens = wide[:4, :6], torch.full((4,), 2**20, dtype=torch.int32)
    step.plan()
    ((_, planned),) = recorder.launches
    assert planned[0] == wide.data_ptr()
    assert planned[1] != step.lens.data_ptr()  # clamped to the columns that count
    step.table = torch.as_strided(torch.zeros(33, dtype=torch.int32), (4, 6), (9, 1))
    with pytest.raises(ValueError, match="block_table: expected whole rows of 9 columns"):
        step.plan()


def test_what_does_not_fit_is_refused_and_nothing_launched(recorder: Recorder) -> None:  # noqa: F811
    step = Step.new(4096, 4)
    plan, workspace = step.plan()
    recorder.launches.clear()
    shifted = torch.empty(step.query.numel() + 1, dtype=torch.bfloat16)[1:].view_as(step.query)
    for error, word, how in (
        (ValueError, "out: expected shape", {"out": torch.empty(4000, HEADS, 64, dtype=torch.bfloat16)}),
        (TypeError, "out: expected a compact tensor", {"out": torch.empty(4096, HEADS, 64)}),
        (ValueError, "out: expected memory from a multiple of 16", {"out": shifted}),
        (ValueError, "lse", {"lse": torch.empty(4096, HEADS)}),
    ):
        with pytest.raises(error, match=word):
            step.attend((plan, workspace), **how)
        recorder.launches.clear() if "lse" in how else None
        assert not recorder.launches
    with pytest.raises(ValueError, match="plan: expected one for these shapes"):
        step.attend((plan[1:], workspace))
    with pytest.raises(ValueError, match="seq_lens"):
        dataclasses.replace(step, lens=step.lens[:3]).plan()
    with pytest.raises(TypeError, match=r"query_start_loc: expected torch\.int32"):
        dataclasses.replace(step, starts=step.starts.long()).plan()
    with pytest.raises(TypeError, match="block_table"):
        dataclasses.replace(step, table=step.table.long()).plan()
    with pytest.raises(NotImplementedError, match="8-bit caches and ones of the query's dtype"):
        dataclasses.replace(step, caches=[x.half() for x in step.caches]).plan()
    with pytest.raises(ValueError, match="k_scale: scales belong to 8-bit caches"):
        dataclasses.replace(step, k_scale=torch.ones(())).plan()
    with pytest.raises(NotImplementedError, match="blocks of a multiple of 8"):
        dataclasses.replace(step, caches=[x[:, :4].contiguous() for x in step.caches]).plan()
    grad = step.query.clone().requires_grad_()
    with pytest.raises(ValueError, match="requires grad"):
        dataclasses.replace(step, query=grad).attend((plan, workspace))
    assert not recorder.launches


def test_lses_are_found_for_rows() -> None:
    """By numbers that say where they come from: tiles of 32 tokens of 4 heads a kv head, two halves of two heads."""
    step = Step.new(512, 8)
    found = prefill_shapes(step.query, *step.caches, step.table, False, PLAIN)
    shape = prefill_shape(found, True, None, step.query.device)
    assert (shape.tiling.packed, shape.tiling.tokens, shape.group) == (True, 32, 4)
    starts = torch.tensor([0, 40, 41, 41, 100, 100, 100, 100, 100], dtype=torch.int32)
    tile_starts = torch.tensor([0, 2, 2, 2, 4, 4, 4, 4, 4], dtype=torch.int32)
    request, index = rows_of = row_requests(starts, 103)
    assert request.tolist() == [0] * 40 + [1] + [3] * 59 + [8] * 3
    assert index.tolist() == [*range(40), 0, *range(59), 0, 1, 2]
    of_tiles = torch.arange(5 * 2 * 128, dtype=torch.float32).view(5, 2, 128)
    lse = prefilled_lse(of_tiles, tile_starts, rows_of, shape) / 0.6931471805599453
    for row, head, tile, slot in ((0, 0, 0, 0), (33, 0, 1, 1), (41, 1, 2, 32), (41, 2, 2, 64), (99, 7, 3, 96 + 26)):
        expected = tile * 256 + head // 4 * 128 + slot
        assert abs(float(lse[row, head]) - expected) < 1e-2, (row, head)


def test_rows_that_decode_takes_are_told_by_the_plan() -> None:
    starts = torch.tensor([0, 1, 1, 2, 7, 7, 7, 7, 7], dtype=torch.int32)
    requests = torch.zeros(9, 9, dtype=torch.int32)
    requests[:, field.Q_LEN] = torch.tensor([1, 0, 1, -1, 0, 0, 0, 0, -1])
    assert decoded_rows(requests, row_requests(starts, 8)).tolist() == [True, True] + [False] * 6
