"""The demo language model: a byte-level decoder of the Llama kind, 3.9 million parameters, trained on Python source.

The model knows nothing about caches, pages or batches. It works on one flat axis of tokens, on which the tokens of any
number of requests lie side by side, and leaves attention to a callable that its caller supplies. So the same module is
trained with dense attention and served with paged attention.

The vocabulary is the 256 byte values. Byte 0 never occurs in text: it starts a document and ends it.

Parameter names and arithmetic are those of Hugging Face's ``LlamaForCausalLM``, which loads the shipped files as they
are.
"""

from collections.abc import Callable

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from jaxpaged.demo.config import WEIGHTS, DemoConfig

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer_index, query, key, value)``, with rotary position embeddings already applied.

The query is `[num_tokens, num_heads, head_size]`, key and value are `[num_tokens, num_kv_heads, head_size]`; the result
has the shape of the query.
"""


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis, computed in float32, returned in the input's dtype."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(hidden.dtype)


def rotary_tables(positions: Tensor, head_size: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the rotary embedding, each ``[num_tokens, 1, head_size]``.

    Angles are formed in float32 whatever ``dtype`` is: bfloat16 cannot tell far positions apart.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=positions.device) / head_size
    angles = positions.float()[:, None] * theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate ``heads`` (``[num_tokens, any, head_size]``), pairing each component with the one half a head away."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine


class Attention(nn.Module):
    """Grouped-query attention's projections; the attention itself is the caller's."""

    def __init__(self, config: DemoConfig, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.head_size = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_value_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_value_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_value_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor, attend: Attend) -> Tensor:
        query = self.q_proj(hidden).unflatten(-1, (-1, self.head_size))
        key = self.k_proj(hidden).unflatten(-1, (-1, self.head_size))
        value = self.v_proj(hidden).unflatten(-1, (-1, self.head_size))
        query = apply_rotary(query, cosine, sine).to(value.dtype)
        key = apply_rotary(key, cosine, sine).to(value.dtype)
        return self.o_proj(attend(self.layer_index, query, key, value).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    """One decoder layer: attention, then the feed-forward network, each normalised before and added to its input."""

    def __init__(self, config: DemoConfig, layer_index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer_index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor, attend: Attend) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cosine, sine, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Decoder(nn.Module):
    """Embedding, layers and final normalisation: what Hugging Face names ``model``."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden = self.embed_tokens(tokens)
        cosine, sine = rotary_tables(positions, self.config.head_dim, self.config.rope_theta, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cosine, sine, attend)
        return self.norm(hidden)


class DemoModel(nn.Module):
    """The demo language model; its ``state_dict`` has the names of Hugging Face's ``LlamaForCausalLM``."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the next-token logits of every token.

        Args:
            tokens: ``[num_tokens]`` int64, the tokens of any number of requests side by side.
            positions: ``[num_tokens]`` int64, each token's place in its own request, from 0.
            attend: the attention, called once per layer. It alone knows which tokens belong together.

        Returns:
            ``[num_tokens, vocab_size]`` float32. The output matrix is the embedding.
        """
        hidden = self.model(tokens, positions, attend)
        return functional.linear(hidden, self.model.embed_tokens.weight).float()


def dense_causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over whole sequences of one length, with no cache.

    Args:
        query: ``[..., length, num_heads, head_size]``.
        key: ``[..., length, num_kv_heads, head_size]``.
        value: the shape of ``key``.

    Returns:
        The shape of ``query``.
    """
    query, key, value = (heads.transpose(-3, -2) for heads in (query, key, value))
    output = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return output.transpose(-3, -2)


def dense_attend(num_sequences: int = 1) -> Attend:
    """Return an ``attend`` for ``num_sequences`` whole sequences of one length that lie one after the other."""

    def attend(layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        separate = (heads.unflatten(0, (num_sequences, -1)) for heads in (query, key, value))
        return dense_causal_attention(*separate).flatten(0, 1)

    return attend


def load_demo_model(dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> DemoModel:
    """Load the shipped weights, which are bfloat16, as a model in ``dtype`` on ``device``, ready for inference."""
    config = DemoConfig.shipped()
    weights = safetensors.torch.load((WEIGHTS / "model.safetensors").read_bytes())
    with torch.device("meta"):
        model = DemoModel(config)
    model.load_state_dict(weights, assign=True)
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)
