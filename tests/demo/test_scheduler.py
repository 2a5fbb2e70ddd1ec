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
            if not part.reaches_end:
                scheduler.computed(part)
                continue
            scheduler.accept(part, [1])
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


def test_wrong_guesses_are_taken_back_with_their_blocks():
    scheduler = Scheduler(8, 2, max_step_tokens=8, max_requests=2, propose=lambda tokens: [7, 8, 9])
    request = Request("a", [1, 2, 3], 10)
    scheduler.add(request)
    (part,) = scheduler.schedule()
    assert (part.tokens, part.draft) == ([1, 2, 3], ())
    scheduler.accept(part, [4])
    (part,) = scheduler.schedule()
    assert (part.tokens, len(request.blocks)) == ([4, 7, 8, 9], 4)
    assert scheduler.accept(part, [7, 5, 6, 0]) == [7, 5]
    assert (request.generated, request.num_computed, len(request.blocks)) == ([4, 7, 5], 5, 3)
    (part,) = scheduler.schedule()
    assert (part.start, part.tokens) == (5, [5, 7, 8, 9])
    assert scheduler.accept(part, [7, 8, 9, 1]) == [7, 8, 9, 1]
    assert (request.num_computed, request.num_uncomputed) == (9, 1)


def test_guesses_end_with_the_request_and_at_its_stop_token():
    scheduler = Scheduler(8, 4, max_step_tokens=8, max_requests=2, propose=lambda tokens: [0, 5, 5, 5])
    request = Request("a", [1, 2], 3, stop_token=0)
    scheduler.add(request)
    scheduler.accept(scheduler.schedule()[0], [4])
    (part,) = scheduler.schedule()
    assert part.draft == (0,)  # of 3 tokens one is there, and one comes in any case
    assert scheduler.accept(part, [0, 5]) == [0]
    assert request.complete


def test_guesses_preempt_nobody():
    scheduler = Scheduler(2, 4, max_step_tokens=16, max_requests=2, propose=lambda tokens: [9] * 3)
    first, second = Request("first", [1, 2], 6), Request("second", [3, 4], 6)
    for request in (first, second):
        scheduler.add(request)
    for part in scheduler.schedule():
        scheduler.accept(part, [8])
    parts = scheduler.schedule()
    assert [(part.length, part.draft) for part in parts] == [(1, ()), (1, ())]
    assert first.num_preemptions + second.num_preemptions == 0


def test_a_cancelled_request_frees_its_blocks_wherever_it_is():
    scheduler = Scheduler(4, 4, max_step_tokens=16, max_requests=1)
    first, second = Request("first", [1] * 6, 4), Request("second", [2] * 6, 4)
    for request in (first, second):
        scheduler.add(request)
    scheduler.computed(scheduler.schedule()[0])
    scheduler.cancel(second)
    scheduler.cancel(first)
    scheduler.prefixes.evict(4)
    assert (scheduler.busy, scheduler.pool.num_used) == (False, 0)
    assert first.status is second.status is Status.FINISHED
