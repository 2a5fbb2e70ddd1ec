"""A small inference engine in JAX: the demo model, a paged cache, continuous batching, one jitted step.

The step has fixed shapes, of which there are three: for decoding, for decoding with guesses, and for prompts. So three
programs serve every batch; `Engine.warm_up` compiles them.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.cache import copy_blocks
from jaxpaged.demo.config import DemoConfig
from jaxpaged.demo.jax_model import Params, dense_attend, hidden_states, logits, paged_attend
from jaxpaged.demo.sampling import choose_tokens, guess_by_lookup
from jaxpaged.demo.scheduler import Request, ScheduledRequest, Scheduler, StepResult
from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.buckets import next_bucket
from jaxpaged.metadata.kv_cache import KVCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInputs:
    """What a step computes, in arrays of fixed sizes.

    Attributes:
      tokens, positions: [num_tokens] int32.
      batch: the requests' blocks, lengths and slots, for a cache of one layer.
      copies: [max_requests, 2] int32, pairs of blocks to copy before anything is written; (-1, -1) for none.
      rows: [max_requests, 1 + num_guesses] int32, the tokens after which one is chosen; 0 for none.
      temperatures, seeds: [max_requests] float32 and uint32.
    """

    tokens: Any
    positions: Any
    batch: PagedBatch
    copies: Any
    rows: Any
    temperatures: Any
    seeds: Any


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def serve_step(config: DemoConfig, params: Params, cache: KVCache, inputs: StepInputs) -> tuple[KVCache, Any]:
    """The cache with the step's keys and values, and the tokens chosen after each of `inputs.rows`."""
    per_layer = cache.num_blocks // config.num_hidden_layers
    first_blocks = jnp.arange(config.num_hidden_layers, dtype=jnp.int32)[:, None, None] * per_layer
    pairs = jnp.where(inputs.copies < 0, -1, inputs.copies + first_blocks).reshape(-1, 2)
    cache = copy_blocks(cache, pairs)
    attend = paged_attend(inputs.batch, config)
    cache, hidden = hidden_states(config, params, inputs.tokens, inputs.positions, attend, cache)
    rows = inputs.rows.reshape(-1)
    repeats = inputs.rows.shape[1]
    temperatures, seeds = (jnp.repeat(x, repeats) for x in (inputs.temperatures, inputs.seeds))
    chosen = choose_tokens(logits(params, hidden[rows]), temperatures, seeds, inputs.positions[rows] + 1)
    return cache, chosen.reshape(inputs.rows.shape)


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """The sizes of a step's arrays."""

    block_size: int
    max_requests: int
    max_blocks_per_req: int
    max_step_tokens: int
    num_guesses: int

    def bucket(self, longest: int) -> tuple[int, int]:
        """Tokens of a step whose requests have up to `longest` new ones, and an upper bound of those of each."""
        most_guessed = 1 + self.num_guesses
        if longest == 1:
            return self.max_requests, 1
        if longest <= most_guessed:
            return min(self.max_requests * most_guessed, self.max_step_tokens), next_bucket(most_guessed)
        return self.max_step_tokens, next_bucket(self.max_step_tokens)

    def inputs(
        self, parts: Sequence[ScheduledRequest], copies: Sequence[tuple[int, int]], *, longest: int = 1
    ) -> StepInputs:
        """A step's arrays, for requests that have up to `longest` new tokens or more, if they do."""
        new_tokens = [part.tokens for part in parts]
        num_tokens, max_query_len = self.bucket(max(longest, *map(len, new_tokens)) if parts else longest)
        tokens, positions = np.zeros((2, num_tokens), np.int32)
        pairs = np.full((self.max_requests, 2), -1, np.int32)
        pairs[: len(copies)] = np.array(copies, np.int32).reshape(-1, 2)
        table = np.full((self.max_requests, self.max_blocks_per_req), -1, np.int32)
        query_lens, seq_lens = np.zeros((2, self.max_requests), np.int32)
        rows = np.zeros((self.max_requests, 1 + self.num_guesses), np.int32)
        temperatures, seeds = np.zeros(self.max_requests, np.float32), np.zeros(self.max_requests, np.uint32)
        begin = 0
        for i, (part, new) in enumerate(zip(parts, new_tokens, strict=True)):
            end = begin + len(new)
            tokens[begin:end] = new
            positions[begin:end] = np.arange(part.start, part.start + len(new))
            table[i, : len(part.request.blocks)] = part.request.blocks
            query_lens[i], seq_lens[i] = len(new), part.start + len(new)
            rows[i, : 1 + len(part.draft)] = np.arange(end - 1 - len(part.draft), end)
            temperatures[i], seeds[i] = part.request.temperature, part.request.seed
            begin = end
        batch = PagedBatch.create(
            table,
            seq_lens,
            query_lens=query_lens,
            block_size=self.block_size,
            num_tokens=num_tokens,
            shares_prefix=False,  # a hint is part of the program, and so is its value
        )
        batch = dataclasses.replace(batch, max_query_len=max_query_len)
        return StepInputs(tokens, positions, batch, pairs, rows, temperatures, seeds)


class Engine:
    """Generates for any number of requests at once.

    Attributes:
      cache: of all layers; layer i owns blocks `i * num_blocks` to `(i + 1) * num_blocks - 1`.
    """

    def __init__(
        self,
        config: DemoConfig,
        params: Params,
        *,
        num_blocks: int = 96,
        block_size: int = 16,
        max_step_tokens: int = 64,
        max_requests: int = 16,
        num_guesses: int = 4,
    ):
        """An engine over a model; see `Scheduler` for the sizes. `num_guesses` 0 is without speculative decoding."""
        self.config, self.params = config, params
        self.scheduler = Scheduler(
            num_blocks,
            block_size,
            max_step_tokens=max_step_tokens,
            max_requests=max_requests,
            propose=functools.partial(guess_by_lookup, num_guesses=num_guesses) if num_guesses else None,
        )
        blocks_per_req = min(num_blocks, -(-config.max_position_embeddings // block_size))
        self._sizes = StepSizes(block_size, self.scheduler.max_requests, blocks_per_req, max_step_tokens, num_guesses)
        dtype = params["embed_tokens"].dtype
        all_blocks = config.num_hidden_layers * num_blocks
        cache = KVCache.zeros(all_blocks, block_size, config.num_key_value_heads, config.head_dim, dtype)
        # Never read before it is written: NaN would show if it were.
        self.cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)

    def add(self, request: Request) -> None:
        request.check_length(self.config.max_position_embeddings)
        self.scheduler.add(request)

    def fork(self, request: Request, child: Request) -> None:
        """Let `child`, whose prompt is `request.tokens`, go on from where `request` is; see `Scheduler.fork`."""
        child.check_length(self.config.max_position_embeddings)
        self.scheduler.fork(request, child)

    def cancel(self, request: Request) -> None:
        self.scheduler.cancel(request)

    def warm_up(self) -> None:
        """Compile the programs of every batch, by steps without requests."""
        for longest in {1, 1 + self._sizes.num_guesses, self._sizes.max_step_tokens}:
            self._run(self._sizes.inputs([], [], longest=longest))

    def run(self) -> Iterator[StepResult]:
        """Step until every request is finished."""
        while self.scheduler.busy:
            yield self.step()

    def step(self) -> StepResult:
        parts = self.scheduler.schedule()
        if not parts:
            return StepResult([], {}, [])
        choices = self._run(self._sizes.inputs(parts, self.scheduler.copies))
        return self.scheduler.finish_step(parts, choices[: len(parts)].tolist())

    def _run(self, inputs: StepInputs) -> np.ndarray:
        self.cache, choices = serve_step(self.config, self.params, self.cache, inputs)
        return np.asarray(choices)


def dense_choices(config: DemoConfig, params: Params, request: Request) -> list[int]:
    """What dense attention would have generated at each place of a finished request, given what came before."""
    known = request.tokens[:-1]
    tokens = np.zeros(next_bucket(len(known)), np.int32)  # causal attention doesn't see what comes after
    tokens[: len(known)] = known
    chosen = _dense(config, params, tokens, np.float32(request.temperature), np.uint32(request.seed))
    return np.asarray(chosen)[len(request.prompt) - 1 : len(known)].tolist()


@functools.partial(jax.jit, static_argnums=0)
def _dense(config: DemoConfig, params: Params, tokens: Any, temperature: Any, seed: Any) -> Any:
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    _, hidden = hidden_states(config, params, tokens, positions, dense_attend, None)
    temperatures, seeds = (jnp.full(len(tokens), x) for x in (temperature, seed))
    return choose_tokens(logits(params, hidden), temperatures, seeds, positions + 1)
