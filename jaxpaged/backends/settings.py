"""What every attention layer is made with, checked, whatever the engine."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from jaxpaged.backends.attention_type import AttentionType
from jaxpaged.backends.block_sparse import BlockSparseMask
from jaxpaged.backends.checks import check_slopes, check_tensors, checked_scale, checked_soft_cap
from jaxpaged.backends.padded_calls import Options
from jaxpaged.bridge.torch_cache import stored_dtype
from jaxpaged.metadata.checks import check_positive


@dataclasses.dataclass(frozen=True)
class Settings:
    """A layer's settings. Build it with `of`.

    Attributes:
      alibi_slopes: [num_heads] float32.
      window: how many positions a query sees to each side at most, its own included; None for no bound.
      soft_cap: None for none.
      mask_mod: a mask that the layer adds to its batch's, or None.
    """

    num_heads: int
    head_size: int
    scale: float
    num_kv_heads: int
    alibi_slopes: torch.Tensor | None
    window: int | None
    soft_cap: float | None
    mask_mod: Any = None

    @classmethod
    def of(
        cls,
        *,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Sequence[float] | torch.Tensor | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        blocksparse_params: Mapping[str, Any] | None = None,
    ) -> "Settings":
        """From the arguments of an engine's constructor.

        Raises:
          TypeError, ValueError: an argument doesn't fit; the message names it.
        """
        for name, value in (("num_heads", num_heads), ("head_size", head_size), ("num_kv_heads", num_kv_heads)):
            check_positive(name, value)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads: expected a multiple of the {num_kv_heads} kv heads, got {num_heads}")
        stored_dtype(kv_cache_dtype)
        slopes = None if alibi_slopes is None else torch.as_tensor(alibi_slopes, dtype=torch.float32, device="cpu")
        check_tensors(alibi_slopes=slopes)
        check_slopes(slopes, 1, num_heads)
        return cls(
            num_heads=num_heads,
            head_size=head_size,
            scale=checked_scale(scale, head_size),
            num_kv_heads=num_kv_heads,
            alibi_slopes=slopes,
            window=None if sliding_window is None else check_positive("sliding_window", sliding_window),
            soft_cap=checked_soft_cap(logits_soft_cap),
            mask_mod=BlockSparseMask.of(blocksparse_params, num_heads, num_kv_heads),
        )

    @property
    def window_sides(self) -> tuple[int, int]:
        """(left, right) of a decoder's window, as FlashAttention's functions take it; -1 for no bound."""
        return (-1, -1) if self.window is None else (self.window - 1, 0)

    def options(self, attn_type: AttentionType) -> Options:
        """What scores go through: a window and ALiBi's bias reach back in a decoder, and to both sides elsewhere."""
        causal = attn_type == AttentionType.DECODER
        cross = attn_type == AttentionType.ENCODER_DECODER
        if cross and not (self.window is None and self.alibi_slopes is None and self.mask_mod is None):
            raise ValueError(
                "sliding_window, alibi_slopes, blocksparse_params: a decoder's positions are at no distance from an "
                "encoder's, expected None in cross-attention"
            )
        left = None if self.window is None else self.window - 1
        return Options(
            scale=self.scale,
            causal=causal,
            window=(left, None if causal else left),
            soft_cap=self.soft_cap,
            alibi_slopes=self.alibi_slopes,
            mask_mod=self.mask_mod,
        )

    def heads(
        self, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, gpu: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Query, key and value as [num_tokens, heads, head_size], from that or from [num_tokens, heads * head_size].

        Args:
          gpu: whether they are tensors of a GPU, as `on_gpu` says; else they must be on the CPU.
        """
        if not gpu:
            check_tensors(query=query, key=key, value=value)
        if (key is None) != (value is None):
            raise ValueError("key, value: expected both or neither")
        by_head = [_by_head("query", query, self.num_heads, self.head_size)]
        for name, x in (("key", key), ("value", value)):
            if x is not None:
                by_head.append(_by_head(name, x, self.num_kv_heads, self.head_size))
        return (by_head[0], None, None) if key is None else (by_head[0], by_head[1], by_head[2])


def check_head_size(head_size: int, supported: Sequence[int], backend: str) -> None:
    if head_size not in supported:
        raise ValueError(f"head_size: expected one of {list(supported)} for {backend}, got {head_size!r}")


def _by_head(name: str, x: torch.Tensor, heads: int, head_size: int) -> torch.Tensor:
    if x.ndim == 2 and x.shape[1] == heads * head_size:
        return x.unflatten(1, (heads, head_size))
    if x.ndim == 3 and tuple(x.shape[1:]) == (heads, head_size):
        return x
    raise ValueError(
        f"{name}: expected shape [num_tokens, {heads} * {head_size}] or [num_tokens, {heads}, {head_size}], "
        f"got {list(x.shape)}"
    )
