"""A serving loop in JAX over a paged KV cache, to read and to copy.

    python examples/jax_serving.py

Requests come while others run. Each step computes one token, or a few guessed ones, for every request that decodes, and
gives the rest of its room to prompts, in chunks; prompts share the blocks of what they have in common, and a fork
shares all blocks until it writes to one. The step is one jitted function over donated memory, compiled for three sizes.
"""

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged import KVCache, copy_blocks, paged_attention, write_kv
from jaxpaged.demo.jax_engine import StepInputs, StepSizes
from jaxpaged.demo.jax_model import Params, hidden_states, load_jax_model, logits
from jaxpaged.demo.sampling import choose_tokens, guess_by_lookup
from jaxpaged.demo.scheduler import Request, Scheduler
from jaxpaged.demo.text import decode, encode

NUM_BLOCKS, GUESSES = 64, 3
SIZES = StepSizes(block_size=16, max_requests=8, max_blocks_per_req=32, max_step_tokens=64, num_guesses=GUESSES)

config, params = load_jax_model()


@functools.partial(jax.jit, donate_argnums=1)  # the cache is updated in place
def step(params: Params, cache: KVCache, inputs: StepInputs) -> tuple[KVCache, jax.Array]:
    """Compute a step's tokens: the cache with their keys and values, and the tokens that follow."""
    layers = jnp.arange(config.num_hidden_layers)[:, None, None]
    pairs = jnp.where(inputs.copies < 0, -1, inputs.copies + layers * NUM_BLOCKS)
    cache = copy_blocks(cache, pairs.reshape(-1, 2))  # blocks that were shared and are about to be written

    def attend(cache: KVCache, layer: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array):
        own = inputs.batch.shift_blocks(layer * NUM_BLOCKS, num_blocks=NUM_BLOCKS, block_size=SIZES.block_size)
        cache = write_kv(cache, key, value, own.slot_mapping)
        return cache, paged_attention(query, cache, own)

    cache, hidden = hidden_states(config, params, inputs.tokens, inputs.positions, attend, cache)
    rows = inputs.rows.reshape(-1)  # the last token of each request, and its guesses
    temperatures, seeds = (jnp.repeat(x, 1 + GUESSES) for x in (inputs.temperatures, inputs.seeds))
    follow = choose_tokens(logits(params, hidden[rows]), temperatures, seeds, inputs.positions[rows] + 1)
    return cache, follow.reshape(inputs.rows.shape)


def serve(arrivals: dict[int, Request], forks: dict[int, tuple[Request, Request]]) -> Iterator[tuple[int, Request]]:
    """Run requests that come at given steps, and forks of running ones; each request with the step it ends in."""
    scheduler = Scheduler(
        NUM_BLOCKS,
        SIZES.block_size,
        max_step_tokens=SIZES.max_step_tokens,
        max_requests=SIZES.max_requests,
        propose=functools.partial(guess_by_lookup, num_guesses=GUESSES),
    )
    all_blocks = config.num_hidden_layers * NUM_BLOCKS  # layer i owns blocks i * NUM_BLOCKS and on
    cache = KVCache.zeros(all_blocks, SIZES.block_size, config.num_key_value_heads, config.head_dim, jnp.float32)
    for number in itertools.count():
        if number in arrivals:
            scheduler.add(arrivals[number])
        if number in forks:
            parent, child = forks[number]
            child.prompt = list(parent.tokens)
            scheduler.fork(parent, child)
        parts = scheduler.schedule()
        if not parts and number > max([*arrivals, *forks]):
            return
        cache, follow = step(params, cache, SIZES.inputs(parts, scheduler.copies))
        for part, chosen in zip(parts, np.asarray(follow), strict=False):
            if part.reaches_end:
                scheduler.accept(part, chosen.tolist())  # keeps right guesses, takes wrong ones back
            else:
                scheduler.computed(part)
            if part.request.complete:
                scheduler.finish(part.request)
                yield number, part.request


def main() -> None:
    head = "import os\nimport sys\n\n\n"
    greedy = Request("greedy", encode(head + "def read_lines(path):\n"), 60)
    drawn = Request("drawn", encode(head + "class Stack:\n    def __init__(self"), 60, temperature=0.7, seed=1)
    fork = Request("fork of greedy", [], 30, temperature=1.0, seed=2)
    for number, request in serve({0: greedy, 4: drawn}, {12: (greedy, fork)}):
        print(
            f"--- {request.name}: {len(request.generated)} tokens, done in step {number}, {request.num_shared} shared"
        )
        print(decode(request.tokens))


if __name__ == "__main__":
    main()
