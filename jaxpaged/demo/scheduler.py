"""Continuous batching: which tokens of which requests each step computes, and which blocks hold them."""

import dataclasses
from collections import deque
from collections.abc import Callable
from enum import Enum

from jaxpaged.metadata.block_pool import BlockPool, OutOfBlocks
from jaxpaged.metadata.checks import check_positive
from jaxpaged.metadata.prefix_cache import PrefixCache


class Status(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt and what has been generated from it.

    Attributes:
      prompt: tokens.
      max_new_tokens: it finishes with so many generated tokens, or with `stop_token`.
      arrival: step at which it joins the queue.
      blocks: physical blocks that hold its tokens, in logical order.
      num_computed: tokens whose keys and values are in the cache.
      num_shared: of those, tokens found in the prefix cache when it was admitted.
      num_preemptions: how often its blocks were taken away, to be computed again.
      temperature: 0 for the likeliest token, else what the logits are divided by before one is drawn.
      seed: of the draws.
    """

    name: str
    prompt: list[int]
    max_new_tokens: int
    arrival: int = 0
    stop_token: int | None = None
    generated: list[int] = dataclasses.field(default_factory=list)
    blocks: list[int] = dataclasses.field(default_factory=list)
    status: Status = Status.WAITING
    num_computed: int = 0
    num_shared: int = 0
    num_preemptions: int = 0
    temperature: float = 0.0
    seed: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def num_uncomputed(self) -> int:
        return len(self.prompt) + len(self.generated) - self.num_computed

    def check_length(self, limit: int) -> None:
        """ValueError if the model has fewer positions, `limit`, than the request may come to need."""
        if len(self.prompt) + self.max_new_tokens > limit:
            raise ValueError(
                f"max_new_tokens: the model has {limit} positions, request {self.name!r} wants "
                f"{len(self.prompt)} + {self.max_new_tokens}"
            )

    @property
    def complete(self) -> bool:
        stopped = bool(self.generated) and self.generated[-1] == self.stop_token
        return stopped or len(self.generated) >= self.max_new_tokens


@dataclasses.dataclass(frozen=True)
class ScheduledRequest:
    """A request's part of a step: its tokens `start` to `start + length - 1`, and `draft`, guesses at the next ones."""

    request: Request
    start: int
    length: int
    draft: tuple[int, ...] = ()

    @property
    def tokens(self) -> list[int]:
        return [*self.request.tokens[self.start : self.start + self.length], *self.draft]

    @property
    def reaches_end(self) -> bool:
        """Whether the step computes the request's last token, from which the next one is chosen."""
        return self.start + self.length == len(self.request.tokens)


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step did.

    Attributes:
      parts: the requests in it, and which of their tokens.
      new_tokens: the tokens generated for each request whose last token was computed.
      finished: requests that left.
    """

    parts: list[ScheduledRequest]
    new_tokens: dict[str, list[int]]
    finished: list[Request]

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return sum(part.length + len(part.draft) for part in self.parts)


class Scheduler:
    """Gives every running request its next token, and the rest of a step to prompts, in chunks, in order of arrival.

    A prompt shares the blocks of the longest prefix that an earlier one left in the cache. When no block is free, the
    request that was admitted last is preempted: its blocks are freed and it waits to be computed again.

    Attributes:
      copies: pairs of a block that requests shared and one that takes its place for a request that will write to it:
        `copy_blocks` must copy these before the step last scheduled writes anything.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_step_tokens: int,
        max_requests: int,
        propose: Callable[[list[int]], list[int]] | None = None,
    ):
        """A scheduler over a cache of `num_blocks` blocks of `block_size` tokens.

        Args:
          max_step_tokens: tokens a step computes at most.
          max_requests: requests in a step at most; not more than `max_step_tokens`, so that each gets a token.
          propose: guesses at the tokens that follow others, for speculative decoding; see `accept`.
        """
        self.block_size = check_positive("block_size", block_size)
        self.max_step_tokens = check_positive("max_step_tokens", max_step_tokens)
        self.max_requests = min(check_positive("max_requests", max_requests), max_step_tokens)
        self.pool = BlockPool(num_blocks)
        self.prefixes = PrefixCache(self.pool, block_size)
        self.step = 0
        self.running: list[Request] = []
        self.copies: list[tuple[int, int]] = []
        self._propose = propose
        self._queue: deque[Request] = deque()

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
          ValueError: it is empty, or would not fit the cache even if it were alone.
        """
        if not request.prompt:
            raise ValueError(f"prompt: expected at least one token in request {request.name!r}, got none")
        needed = -(-(len(request.prompt) + request.max_new_tokens) // self.block_size)
        if needed > self.pool.num_blocks:
            raise ValueError(
                f"max_new_tokens: request {request.name!r} of {len(request.prompt)} + {request.max_new_tokens} tokens "
                f"needs {needed} blocks, the cache has {self.pool.num_blocks}"
            )
        self._queue.append(request)

    @property
    def waiting(self) -> list[Request]:
        """Requests that have arrived and are not running."""
        return [request for request in self._queue if request.arrival <= self.step]

    @property
    def busy(self) -> bool:
        return bool(self.running or self._queue)

    def schedule(self) -> list[ScheduledRequest]:
        """The next step's work; empty while nothing has arrived."""
        scheduled: list[ScheduledRequest] = []
        self.copies = []
        budget = self.max_step_tokens
        # Decodes come first: each needs one token, and a long prompt must not keep them waiting.
        for request in sorted(self.running, key=lambda r: r.num_uncomputed > 1):
            if request in self.running and budget > 0:  # it may have been preempted for another in this loop
                budget -= self._extend(request, budget, scheduled)
        while budget > 0 and self.waiting and len(self.running) < self.max_requests:
            if not self._admit(self.waiting[0]):
                break
            budget -= self._extend(self.running[-1], budget, scheduled)
        self.step += 1
        return scheduled

    def _extend(self, request: Request, budget: int, scheduled: list[ScheduledRequest]) -> int:
        """Schedule up to `budget` more tokens of a running request; how many it were."""
        length = min(request.num_uncomputed, budget)
        while True:
            try:
                self._hold(request, length)
                break
            except OutOfBlocks:
                victim = self.running[-1]
                self._preempt(victim)
                scheduled[:] = [part for part in scheduled if part.request is not victim]
                if victim is request:
                    return 0
        request.status = Status.PREFILL if request.num_uncomputed > 1 else Status.DECODE
        draft = self._draft(request, budget - length)
        scheduled.append(ScheduledRequest(request, request.num_computed, length, draft))
        return length + len(draft)

    def _hold(self, request: Request, length: int) -> None:
        """Make sure that a request owns, alone, the blocks that its next `length` tokens are written to.

        Raises:
          OutOfBlocks: there are not enough; nothing has changed.
        """
        first = request.num_computed // self.block_size
        missing = -(-(request.num_computed + length) // self.block_size) - len(request.blocks)
        shared = first < len(request.blocks) and self.pool.ref_count(request.blocks[first]) > 1
        blocks = self.prefixes.allocate(max(0, missing) + shared)
        if shared:
            self.pool.free([blocks.pop()])  # this one, freed last, is what `writable` hands out
            request.blocks[first], source = self.pool.writable(request.blocks[first])
            assert source is not None
            self.copies.append((source, request.blocks[first]))
        request.blocks += blocks

    def _draft(self, request: Request, budget: int) -> tuple[int, ...]:
        """Guesses at a decoding request's next tokens, as many as there is room for without preempting another."""
        room = min(budget, request.max_new_tokens - len(request.generated) - 1)
        if self._propose is None or request.num_uncomputed > 1 or room < 1:
            return ()
        draft = self._propose(request.tokens)[:room]
        try:
            self._hold(request, 1 + len(draft))
        except OutOfBlocks:
            return ()
        return tuple(draft)

    def _admit(self, request: Request) -> bool:
        """Let a waiting request run if its tokens fit beside the others'; whether it does."""
        needed = -(-len(request.tokens) // self.block_size)
        if needed > self.pool.num_free + self.prefixes.num_evictable:
            return False
        # The last token is computed in any case: the next one comes from its logits.
        request.blocks = self.prefixes.match(request.tokens[:-1])
        request.num_computed = request.num_shared = len(request.blocks) * self.block_size
        self._queue.remove(request)
        self.running.append(request)
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.free(request.blocks)
        request.blocks, request.num_computed, request.status = [], 0, Status.WAITING
        request.num_preemptions += 1
        self._queue.appendleft(request)

    def computed(self, part: ScheduledRequest) -> None:
        """Note that a part's keys and values are in the cache, and share the blocks that it filled."""
        self._computed(part.request, part.start + part.length)

    def finish_step(self, parts: list[ScheduledRequest], choices: list[list[int]]) -> StepResult:
        """Keep what a step computed and, of requests whose end it reached, the tokens chosen: see `accept`."""
        new_tokens: dict[str, list[int]] = {}
        finished = []
        for part, chosen in zip(parts, choices, strict=True):
            if not part.reaches_end:
                self.computed(part)
                continue
            new_tokens[part.request.name] = self.accept(part, chosen)
            if part.request.complete:
                self.finish(part.request)
                finished.append(part.request)
        return StepResult(parts, new_tokens, finished)

    def accept(self, part: ScheduledRequest, choices: list[int]) -> list[int]:
        """Note a part that reaches its request's end, and what the model chose to follow; the tokens generated.

        A guess that is what the model chose is kept, with its keys and values, and what follows it counts as well
        (Leviathan et al., 2023, for choices that are fixed). Blocks that hold none but other guesses are freed.

        Args:
          choices: what follows the part's last known token, and what follows each token of its draft.
        """
        request = part.request
        kept = 0
        while kept < len(part.draft) and part.draft[kept] == choices[kept] != request.stop_token:
            kept += 1
        request.generated += choices[: kept + 1]
        self._computed(request, part.start + part.length + kept)
        needed = -(-request.num_computed // self.block_size)
        self.pool.free(request.blocks[needed:])
        del request.blocks[needed:]
        return choices[: kept + 1]

    def _computed(self, request: Request, num_computed: int) -> None:
        request.num_computed = num_computed
        self.prefixes.insert(request.tokens[:num_computed], request.blocks)

    def fork(self, request: Request, child: Request) -> None:
        """Let a new request go on from where a running one is, in the same blocks until either writes to one.

        Args:
          child: its prompt is `request.tokens`.

        Raises:
          ValueError: its prompt is another, or it would not fit the cache even if it were alone.
        """
        if child.prompt != request.tokens:
            raise ValueError(f"child: expected the prompt to be the tokens of request {request.name!r}, got another")
        self.add(child)
        if request in self.running and len(self.running) < self.max_requests:
            self._queue.remove(child)
            child.blocks = self.pool.share(request.blocks)
            child.num_computed = child.num_shared = request.num_computed
            self.running.append(child)

    def cancel(self, request: Request) -> None:
        """Take a request out, whether it runs or waits, and free its blocks."""
        if request in self.running:
            self.finish(request)
        else:
            self._queue.remove(request)
            request.status = Status.FINISHED

    def finish(self, request: Request) -> None:
        """Take a running request out and free its blocks; the prefix cache may keep some."""
        request.status = Status.FINISHED
        self.running.remove(request)
        self.pool.free(request.blocks)
        request.blocks = []
