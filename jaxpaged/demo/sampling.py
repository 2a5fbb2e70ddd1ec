"""Which token follows: the likeliest or a drawn one, and cheap guesses at it for speculative decoding."""

from typing import Any

import jax
import jax.numpy as jnp


def choose_tokens(logits: Any, temperatures: Any, seeds: Any, positions: Any) -> Any:
    """The likeliest token where the temperature is 0, else one drawn from `softmax(logits / temperature)`.

    A draw is a largest sum of logits and Gumbel noise (Gumbel, 1954), and the noise depends on the request's seed and
    the token's position alone. So the tokens drawn are the same whatever else is in the batch, and whether they
    were guessed before or not.

    Args:
      logits: [n, vocab_size] float32.
      temperatures: [n] float32.
      seeds: [n] uint32.
      positions: [n] int32, of the tokens chosen.

    Returns:
      [n] int32.
    """

    def noise(seed: Any, position: Any) -> Any:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), logits.shape[1:])

    drawn = temperatures[:, None] > 0
    scaled = logits / jnp.where(drawn, temperatures[:, None], 1.0)
    return jnp.argmax(jnp.where(drawn, scaled + jax.vmap(noise)(seeds, positions), logits), axis=-1).astype(jnp.int32)


def guess_by_lookup(tokens: list[int], num_guesses: int, *, longest: int = 4, window: int = 512) -> list[int]:
    """What followed the last time that the newest tokens came in this order (prompt lookup decoding, Saxena, 2023).

    Args:
      tokens: the request's tokens so far.
      num_guesses: guesses at most.
      longest: newest tokens to look for; if they are found nowhere, fewer, down to 2.
      window: tokens looked through.

    Returns:
      Up to `num_guesses` tokens, none if nothing is found.
    """
    seen = bytes(tokens[-window:])  # the model's tokens are bytes, and bytes are searched fast
    for length in range(longest, 1, -1):
        found = seen[:-1].rfind(seen[-length:])
        if found >= 0:
            return list(seen[found + length :][:num_guesses])
    return []
