"""Continuous batching: what is scheduled when, shared prefixes, chunks, and preemption."""

import pytest

from jaxpaged.demo.scheduler import Request, Scheduler, Status


def drive(scheduler, requests, limit=500):
    """Run to the end with made-up tokens; the lengths that each step scheduled, by request."""
    for request in requests:
        scheduler.add(request)
    history = []
    while scheduler.busy and len(history) < limit:
        parts = scheduler.schedule()
        history.append({part.request.name: part.length for part in parts})
        for part in parts:
            held = len(part.request.blocks) * scheduler.block_size
            assert held >= part.start + part.length
            scheduler.computed(part)
            if part.reaches_end:
                part.request.generated.append(1)
                if part.request.complete:
                    scheduler.finish(part.request)
    assert not scheduler.busy
    return history


def test_long_prompts_are_cut_into_chunks_beside_decodes():
    scheduler = Scheduler(64, 4, max_step_tokens=8, max_requests=4)
    first = Request("first", [1] * 3, 6)
    second = Request("second", [2] * 20, 2, arrival=1)
    history = drive(scheduler, [first, second])
    assert history[0] == {"first": 3}
    assert history[1] == {"first": 1, "second": 7}
    assert history[2] == {"first": 1, "second": 7}
    assert history[3] == {"first": 1, "second": 6}
    assert history[4] == {"first": 1, "second": 1}


def test_a_prefix_is_shared_and_its_blocks_are_counted_once():
    scheduler = Scheduler(64, 4, max_step_tokens=32, max_requests=4)
    prefix = list(range(10, 22))
    first, second = Request("first", [*prefix, 1], 8), Request("second", [*prefix, 2], 8, arrival=1)
    drive(scheduler, [first, second])
    assert (first.num_shared, second.num_shared) == (0, 12)


def test_a_whole_cached_prompt_still_computes_its_last_token():
    scheduler = Scheduler(64, 4, max_step_tokens=32, max_requests=4)
    history = drive(scheduler, [Request("a", [7] * 8, 1), Request("b", [7] * 8, 1, arrival=1)])
    assert history == [{"a": 8}, {"b": 4}]  # 7 of the 8 tokens could be shared, in whole blocks 4


def test_preemption_when_blocks_run_out():
    scheduler = Scheduler(6, 4, max_step_tokens=32, max_requests=4)
    first, second = Request("first", [1] * 8, 14), Request("second", [2] * 8, 14)
    drive(scheduler, [first, second])
    assert (first.num_preemptions, second.num_preemptions > 0) == (0, True)
    assert [len(r.generated) for r in (first, second)] == [14, 14]
    assert first.status is second.status is Status.FINISHED
    scheduler.prefixes.evict(6)
    assert scheduler.pool.num_used == 0


def test_requests_that_can_never_fit_are_refused():
    scheduler = Scheduler(2, 4, max_step_tokens=8, max_requests=2)
    with pytest.raises(ValueError, match=r"request 'big' of 5 \+ 4 tokens needs 3 blocks, the cache has 2"):
        scheduler.add(Request("big", [1] * 5, 4))
    with pytest.raises(ValueError, match="prompt: expected at least one token in request 'none', got none"):
        scheduler.add(Request("none", [], 4))
