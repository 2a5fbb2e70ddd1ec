"""Plans of prefill by themselves: every CTA's list, for random batches."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpaged import KVCache, PagedBatch
from jaxpaged.attention import make_options
from jaxpaged.pallas import prefill_plan as field
from jaxpaged.pallas.prefill_plan import PrefillTiling, plan_prefill

HEADS, KV_HEADS, BLOCK_SIZE, BLOCKS = 4, 2, 8, 64
TILINGS = {
    "unpacked": PrefillTiling(128, False, 128, 3, most_parts=1, l2_bytes=1 << 14),
    "packed": PrefillTiling(32, True, 128, 3, most_parts=1, l2_bytes=1 << 14),
    "in parts": PrefillTiling(32, True, 64, 40, most_parts=7, l2_bytes=1 << 14),
}
OPTIONS: dict[str, Any] = {"scale": 1.0, "soft_cap": None, "alibi_slopes": None, "sinks": None}
OPTIONS |= {"mask_mod": None, "score_mod": None}


@st.composite
def batches(draw: Any) -> tuple[PagedBatch, int]:
    """Requests, some without new tokens or without a context, and rows of no request."""
    new = draw(st.lists(st.sampled_from([0, 1, 2, 40, 130]), min_size=1, max_size=4))
    before = [draw(st.sampled_from([0, 1, 63, 100, 300])) for _ in new]
    # A request may be said to be shorter than its new tokens: the first of those have nothing to attend to.
    lens = [max(0, b + n - draw(st.sampled_from([0, 0, 0, 150]))) for b, n in zip(before, new, strict=True)]
    return requests(new, lens), sum(new) + draw(st.sampled_from([0, 5]))


def requests(new: Any, lens: Any) -> PagedBatch:
    table = np.zeros((len(new), BLOCKS), np.int32)
    return PagedBatch.create(table, np.array(lens, np.int32), query_lens=np.array(new, np.int32))


NOTHING_BETWEEN = requests((130, 40, 130), (430, 0, 430)), 300
"""A request that attends to nothing between two whose keys don't fit in the L2 cache together."""


def lists(plan: Any) -> list[list[dict[int, int]]]:
    work, counts = np.asarray(plan.work), np.asarray(plan.counts)
    return [[dict(enumerate(item)) for item in work[cta, : counts[cta]].tolist()] for cta in range(len(counts))]


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("window", [None, (50, 0)])
@settings(max_examples=8, deadline=None)
@example(NOTHING_BETWEEN)
@given(batches())
def test_each_step_once_and_what_has_none_last(tiling: str, window: Any, drawn: tuple[PagedBatch, int]) -> None:
    batch, num_tokens = drawn
    if num_tokens == 0:
        return
    cut = TILINGS[tiling]
    options = make_options(num_heads=HEADS, num_reqs=batch.num_reqs, causal=True, window=window, **OPTIONS)
    cache = jax.eval_shape(lambda: KVCache.zeros(BLOCKS, BLOCK_SIZE, KV_HEADS, 32, "bfloat16"))
    plan = plan_prefill(cache, batch, options, cut, num_tokens=num_tokens, num_heads=HEADS, shortest=1)
    left = 10**6 if window is None else window[0]
    starts, lens = np.asarray(batch.query_start_loc).tolist(), np.asarray(batch.seq_lens).tolist()
    wanted = set()
    for head in range(KV_HEADS if cut.packed else HEADS):
        for request in range(batch.num_reqs):
            for row in range(starts[request], starts[request + 1]):
                position = lens[request] - starts[request + 1] + row
                wanted |= {(row, head, p // cut.step) for p in range(max(0, position - left), position + 1)}
    found: dict[tuple[int, int, int], int] = {}
    rows = set()
    for items in lists(plan):
        has_steps = [item[field.STEPS] > 0 for item in items]
        assert has_steps == sorted(has_steps, reverse=True)
        for item in items:
            for row in range(item[field.FIRST_ROW], item[field.FIRST_ROW] + item[field.ROWS]):
                rows.add((row, item[field.HEAD]))
                for step in range(item[field.FIRST_STEP], item[field.FIRST_STEP] + item[field.STEPS]):
                    found[row, item[field.HEAD], step] = found.get((row, item[field.HEAD], step), 0) + 1
    assert wanted <= found.keys() and set(found.values()) <= {1}
    assert rows == {(row, head) for row in range(num_tokens) for head in range(KV_HEADS if cut.packed else HEADS)}
