"""The mask of local and strided blocks that models of the Phi-3 small kind have, as engines describe it."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax

from jaxpaged.metadata.checks import check_positive

_STATIC: Any = {"static": True}
_KEYS = (
    "max_seqlen", "num_heads", "num_kv_heads", "block_size", "local_blocks", "vert_stride", "homo_head",
    "homo_head_group",
)  # fmt: skip


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockSparseMask:
    """A mask function that keeps the last blocks up to a query's own, and every so-manieth block before them.

    Attributes:
      block_size: positions in a block of this mask.
      local_blocks: so many blocks up to the query's own are kept.
      vert_stride: of the others those where `block + 1` plus the head's shift is a multiple of it.
      shift: by how many blocks a head is ahead of the one before it.
      group: so many query heads are shifted alike.
    """

    block_size: int = dataclasses.field(metadata=_STATIC)
    local_blocks: int = dataclasses.field(metadata=_STATIC)
    vert_stride: int = dataclasses.field(metadata=_STATIC)
    shift: int = dataclasses.field(metadata=_STATIC)
    group: int = dataclasses.field(metadata=_STATIC)

    @classmethod
    def of(cls, params: Mapping[str, Any] | None, num_heads: int, num_kv_heads: int) -> Self | None:
        """From an engine's `blocksparse_params`: `block_size`, `local_blocks` and `vert_stride`, and where they differ
        from the defaults `homo_head` and `homo_head_group`; None for None.

        Heads count from 0 in each process, so with tensor parallelism a mask that depends on the head must be given
        by other means.

        Raises:
          TypeError, ValueError: a parameter is missing, unknown or doesn't fit.
        """
        if params is None:
            return None
        wrong = set(params) - set(_KEYS) or {"block_size", "local_blocks", "vert_stride"} - set(params)
        if wrong:
            expected = "block_size, local_blocks, vert_stride, and perhaps homo_head, homo_head_group"
            raise ValueError(f"blocksparse_params: expected {expected}, got {', '.join(params)}")
        for name, heads in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
            if params.get(name, heads) != heads:
                raise ValueError(f"blocksparse_params: expected {name}={heads}, the layer's, got {params[name]}")
        stride = check_positive("blocksparse_params: vert_stride", params["vert_stride"])
        local = params["local_blocks"]
        if local != 0:
            check_positive("blocksparse_params: local_blocks", local)
        by_group = bool(params.get("homo_head_group", False))
        shift = 0 if params.get("homo_head", False) else max(1, stride // (num_kv_heads if by_group else num_heads))
        size = check_positive("blocksparse_params: block_size", params["block_size"])
        return cls(size, local, stride, shift, num_heads // num_kv_heads if by_group else 1)

    def __call__(self, b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
        block = kv_pos // self.block_size
        strided = (block + h // self.group * self.shift + 1) % self.vert_stride == 0
        return strided | (block > q_pos // self.block_size - self.local_blocks)
