"""Rotary position embedding, as FlashAttention's cache function applies it to queries and new keys."""

import dataclasses
from typing import Self

import numpy as np
import torch

from jaxpaged.metadata.checks import check_shape


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Tables [positions, rotary_dim / 2] of cosines and sines. Build it with `of`, which checks them.

    Attributes:
      interleaved: the elements 2 i and 2 i + 1 of a head are a pair; else i and i + rotary_dim / 2.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool

    @classmethod
    def of(cls, cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool, head_size: int) -> Self | None:
        """None where there are no tables."""
        if cos is None and sin is None:
            return None
        if cos is None or sin is None:
            raise ValueError("rotary_cos, rotary_sin: expected both or neither")
        for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
            if not x.dtype.is_floating_point:
                raise TypeError(f"{name}: expected a float dtype, got {x.dtype}")
            check_shape(name, x.shape, ("positions", "rotary_dim / 2"))
        check_shape("rotary_sin", sin.shape, tuple(cos.shape))
        if 2 * cos.shape[1] > head_size:
            raise ValueError(f"rotary_cos: it rotates {2 * cos.shape[1]} elements of a head, which has {head_size}")
        return cls(cos, sin, bool(interleaved))

    def rotate(self, x: torch.Tensor, first: np.ndarray | torch.Tensor, *, steps: bool) -> torch.Tensor:
        """`x` rotated by its positions (Su et al., RoFormer, 2021), in float32, as a new tensor of its dtype.

        Args:
          x: [batch, tokens, heads, head_size]; elements of a head past `rotary_dim` stay as they are.
          first: [batch] int32, the position of each request's first token. Of a tensor on a GPU, values aren't read: a
            position that the tables lack is PyTorch's error of an index there.
          steps: the tokens follow each other; else all of them sit at the first position.
        """
        at = torch.as_tensor(first, dtype=torch.int64)[:, None].expand(-1, x.shape[1])
        if steps:
            at = at + torch.arange(x.shape[1], device=at.device)
        if at.device.type == "cpu" and at.numel() and int(at.max()) >= self.cos.shape[0]:
            raise ValueError(f"rotary_cos: it has {self.cos.shape[0]} positions, expected at least {int(at.max()) + 1}")
        c, s = (table[at].float().unsqueeze(2) for table in (self.cos, self.sin))
        rotary_dim = 2 * self.cos.shape[1]
        turned = x[..., :rotary_dim].float()
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
        else:
            a, b = turned.chunk(2, -1)
            turned = torch.cat((a * c - b * s, a * s + b * c), -1)
        return torch.cat((turned.to(x.dtype), x[..., rotary_dim:]), -1)
