"""The demo language model in JAX: the arithmetic of `jaxpaged.demo.model` on a pytree of weights.

Like it, the model works on one flat axis of tokens and leaves attention to its caller: to pages, or to dense attention.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.attention import paged_attention
from jaxpaged.cache import write_kv
from jaxpaged.demo.config import WEIGHTS, DemoConfig
from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache

Params = dict[str, Any]
"""`embed_tokens` [vocab_size, hidden_size], `norm` [hidden_size], and under `layers` those of all layers by Hugging
Face's names, each [num_layers, out, in] or [num_layers, hidden_size]."""

Attend = Callable[[Any, Any, Any, Any, Any], tuple[Any, Any]]
"""`attend(state, layer_index, query, key, value)`: the new state, and the output in the query's shape."""


def load_jax_model(dtype: Any = jnp.float32) -> tuple[DemoConfig, Params]:
    """The shipped model's shape and weights, in `dtype`."""
    config = DemoConfig.shipped()
    stored = read_safetensors((WEIGHTS / "model.safetensors").read_bytes())
    first = "model.layers.0."
    names = [name.removeprefix(first) for name in stored if name.startswith(first)]
    layers = {
        name: np.stack([stored[f"model.layers.{i}.{name}"] for i in range(config.num_hidden_layers)]) for name in names
    }
    weights = {"embed_tokens": stored["model.embed_tokens.weight"], "norm": stored["model.norm.weight"]}
    return config, jax.tree.map(lambda x: jnp.asarray(x, dtype), {**weights, "layers": layers})


def read_safetensors(data: bytes) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file of bfloat16 and float32: its length, a JSON header, and then the numbers."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    dtypes = {"BF16": jnp.bfloat16, "F32": jnp.float32}

    def tensor(entry: dict[str, Any]) -> np.ndarray:
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        return np.frombuffer(data[begin:end], dtypes[entry["dtype"]]).reshape(entry["shape"])

    return {name: tensor(entry) for name, entry in header.items() if name != "__metadata__"}


def hidden_states(
    config: DemoConfig, params: Params, tokens: Any, positions: Any, attend: Attend, state: Any
) -> tuple[Any, Any]:
    """The last layer's normalised output, from which `logits` come, after all layers have attended.

    Args:
      tokens, positions: [num_tokens] int32; a position is a token's place in its own request.
      attend: the attention, which alone knows which tokens belong together.
      state: what it carries from layer to layer, such as a cache: updated in place if donated.

    Returns:
      The new state, and [num_tokens, hidden_size].
    """
    hidden = params["embed_tokens"][tokens]
    rotate = _rotation(positions, config)

    def layer(carry: tuple[Any, Any], inputs: tuple[Any, Params]) -> tuple[tuple[Any, Any], None]:
        state, hidden = carry
        index, weights = inputs
        x = _rms_norm(hidden, weights["input_layernorm.weight"], config)
        query, key, value = (
            _linear(x, weights[f"self_attn.{name}_proj.weight"]).reshape(len(x), -1, config.head_dim) for name in "qkv"
        )
        state, out = attend(state, index, rotate(query), rotate(key), value)
        hidden = hidden + _linear(out.reshape(len(x), -1), weights["self_attn.o_proj.weight"])
        x = _rms_norm(hidden, weights["post_attention_layernorm.weight"], config)
        gated = jax.nn.silu(_linear(x, weights["mlp.gate_proj.weight"])) * _linear(x, weights["mlp.up_proj.weight"])
        return (state, hidden + _linear(gated, weights["mlp.down_proj.weight"])), None

    numbered = jnp.arange(config.num_hidden_layers, dtype=jnp.int32), params["layers"]
    (state, hidden), _ = jax.lax.scan(layer, (state, hidden), numbered)
    return state, _rms_norm(hidden, params["norm"], config)


def logits(params: Params, hidden: Any) -> Any:
    """[..., vocab_size] float32; the output matrix is the embedding."""
    return _linear(hidden, params["embed_tokens"]).astype(jnp.float32)


def paged_attend(batch: PagedBatch, config: DemoConfig) -> Attend:
    """Attention over one cache of all layers, which is the state: layer i owns the i-th part of its blocks."""

    def attend(cache: KVCache, layer: Any, query: Any, key: Any, value: Any) -> tuple[KVCache, Any]:
        n = cache.num_blocks // config.num_hidden_layers
        own = batch.shift_blocks(layer * n, num_blocks=n, block_size=cache.block_size)
        cache = write_kv(cache, key, value, own.slot_mapping)
        return cache, paged_attention(query, cache, own)

    return attend


def dense_attend(state: None, layer: Any, query: Any, key: Any, value: Any) -> tuple[None, Any]:
    """Causal attention of one request to itself, without a cache."""
    return None, jax.nn.dot_product_attention(query[None], key[None], value[None], is_causal=True)[0]


def _linear(x: Any, weight: Any) -> Any:
    return jnp.einsum("...i,oi->...o", x, weight, precision=jax.lax.Precision.HIGHEST)


def _rms_norm(x: Any, weight: Any, config: DemoConfig) -> Any:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + config.rms_norm_eps)
    return weight * wide.astype(x.dtype)


def _rotation(positions: Any, config: DemoConfig) -> Callable[[Any], Any]:
    """Rotary embedding of [num_tokens, heads, head_dim], pairing each component with the one half a head away."""
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    angles = positions.astype(jnp.float32)[:, None] * config.rope_theta**-exponents
    cosine, sine = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]

    def rotate(heads: Any) -> Any:
        first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
        rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
        return rotated.astype(heads.dtype)

    return rotate
