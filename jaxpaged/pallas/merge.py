"""Merge of attention states on Hopper: one pass over the outputs, whose weights are computed on the way.

A CTA takes some tokens of one head. The lses of all states come into shared memory first and give the states' shares;
the outputs stream through a ring of stages behind them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.pallas.mosaic import Interpreter, kernel, store
from jaxpaged.pallas.row_tiles import TMA_ALIGNMENT, TMA_BYTES, columns, load, pieces, rows_layout, rows_step

SMEM_BYTES = 220 * 1024
MAX_WIDTH = 512
"""Wider sums don't have registers."""


@dataclasses.dataclass(frozen=True)
class MergeTiles:
    """How a merge is cut into CTAs.

    Attributes:
      rows: tokens of a CTA, or more where registers want more; a multiple of 32, so that their lses may come by TMA.
      stages: states that are on their way at once, at most.
    """

    rows: int = TMA_ALIGNMENT // 4
    stages: int = 4


@dataclasses.dataclass(frozen=True)
class MergePlan:
    """Sizes of a merge; `rows` tokens of one head are a tile."""

    states: int
    tokens: int
    heads: int
    width: int
    dtype: Any
    rows: int
    stages: int

    @classmethod
    def of(cls, outputs: Any, config: MergeTiles) -> "MergePlan":
        states, tokens, heads, width = outputs.shape
        dtype = jnp.dtype(outputs.dtype)
        rows = tile_tokens(width, dtype, config)
        plan = cls(states, tokens, heads, width, dtype, rows, min(config.stages, states))
        while plan.stages > 1 and plan.smem_bytes > SMEM_BYTES:
            plan = dataclasses.replace(plan, stages=plan.stages - 1)
        return plan

    @property
    def tiles(self) -> int:
        """Of each head."""
        return pl.cdiv(self.tokens, self.rows)

    @property
    def pieces(self) -> list[tuple[int, int]]:
        return pieces(self.width)

    @property
    def smem_bytes(self) -> int:
        tile = self.rows * self.width * self.dtype.itemsize
        return (self.stages + 1) * tile + (self.states + 1) * self.rows * 4 + 8 * 1024

    def scratch(self) -> dict[str, Any]:
        """A ring of the states' rows, all of their lses, and what is stored in the end."""
        return {
            "ring": [plgpu.SMEM((self.stages, self.rows, size), self.dtype) for _, size in self.pieces],
            "arrived": plgpu.Barrier(num_arrivals=len(self.pieces), num_barriers=self.stages),
            "state_lses": plgpu.SMEM((self.states, self.rows), jnp.float32),
            "lses_arrived": plgpu.Barrier(num_arrivals=self.states),
            "merged": [plgpu.SMEM((self.rows, size), self.dtype) for _, size in self.pieces],
            "merged_lse": plgpu.SMEM((self.rows,), jnp.float32),
        }


def refusal(outputs: Any) -> str | None:
    """Why the kernel can't merge such outputs, or None."""
    width = outputs.shape[-1]
    sizes = [size * jnp.dtype(outputs.dtype).itemsize for size in (width, pieces(width)[0][1])]
    if any(size % TMA_BYTES for size in sizes) or width % len(pieces(width)):
        return f"outputs: the kernel takes rows of a multiple of {TMA_BYTES} bytes, not {width} of {outputs.dtype}"
    if MergePlan.of(outputs, MergeTiles()).smem_bytes > SMEM_BYTES or width > MAX_WIDTH:
        return f"outputs: {outputs.shape[0]} states with {width} numbers in a row are too large for the kernel"
    return None


def tile_tokens(width: int, dtype: Any, config: MergeTiles | None = None) -> int:
    """Tokens of a tile."""
    return max((config or MergeTiles()).rows, rows_step(pieces(width)[0][1], jnp.dtype(dtype).itemsize))


def merge_attention_states(
    outputs: Any, lses: Any, *, interpret: Interpreter | None = None, config: MergeTiles | None = None
) -> tuple[Any, Any]:
    """`jaxpaged.merge_attention_states` on checked, stacked arguments."""
    plan = MergePlan.of(outputs, config or MergeTiles())
    if 0 in (plan.tokens, plan.heads, plan.width):
        return jnp.zeros(outputs.shape[1:], plan.dtype), jnp.full(lses.shape[1:], -jnp.inf, jnp.float32)
    # Each head's lses fill whole tiles: a TMA along one axis must begin at a multiple of 16 bytes, else an H200 stops
    # with an illegal instruction.
    padded = plan.tiles * plan.rows
    if padded > plan.tokens:
        lses = jnp.pad(lses, ((0, 0), (0, 0), (0, padded - plan.tokens)), constant_values=-jnp.inf)

    def merge_states(*refs: Any, **scratch: Any) -> None:
        _merge_tile(plan, *refs, **scratch)

    out, lse = kernel(
        merge_states,
        out_type=[
            jax.ShapeDtypeStruct(outputs.shape[1:], plan.dtype),
            jax.ShapeDtypeStruct((plan.heads * padded,), jnp.float32),
        ],
        grid=(plan.heads, plan.tiles),
        grid_names=("head", "tile"),
        scratch_types=plan.scratch(),
        interpret=interpret,
    )(outputs, lses.reshape(-1))
    return out, lse.reshape(plan.heads, padded)[:, : plan.tokens]


def _merge_tile(
    plan: MergePlan,
    outputs: Any,
    lses: Any,
    out: Any,
    lse: Any,
    *,
    ring: list[Any],
    arrived: Any,
    state_lses: Any,
    lses_arrived: Any,
    merged: list[Any],
    merged_lse: Any,
) -> None:
    """The kernel: lses and the first states' rows are fetched, shares are computed, and rows are added as they come."""
    head, tile = lax.axis_index("head"), lax.axis_index("tile")
    first = tile * plan.rows
    layout = rows_layout(plan.pieces[0][1], plan.dtype.itemsize)

    def fetch(state: Any) -> None:
        """A state's rows into its stage; past the last token TMA fills zeros."""
        stage = lax.rem(state, jnp.int32(plan.stages))
        for (start, size), buffer in zip(plan.pieces, ring, strict=True):
            source = outputs.at[state, pl.ds(first, plan.rows), head, columns(start, size, first)]
            plgpu.copy_gmem_to_smem(source, buffer.at[stage], arrived.at[stage])

    def refill(state: Any) -> None:
        plgpu.commit_smem()  # all threads have read the stage
        fetch(state)

    def lses_of(head: Any) -> Any:
        return pl.ds((head * plan.tiles + tile) * plan.rows, plan.rows)

    for state in range(plan.states):
        plgpu.copy_gmem_to_smem(lses.at[lses_of(state * plan.heads + head)], state_lses.at[state], lses_arrived)
    for state in range(plan.stages):
        fetch(jnp.int32(state))
    plgpu.barrier_wait(lses_arrived)

    def lse_of(state: Any) -> Any:
        x = load(state_lses.at[state], layout.reduce(1))
        return jnp.where(x == jnp.inf, -jnp.inf, x)

    def vector(x: float) -> Any:
        return plgpu.layout_cast(jnp.full((plan.rows,), x, jnp.float32), layout.reduce(1))

    peak = lax.fori_loop(0, plan.states, lambda s, peak: jnp.maximum(peak, lse_of(s)), vector(-jnp.inf))
    shift = jnp.where(peak == -jnp.inf, 0.0, peak)
    total = lax.fori_loop(0, plan.states, lambda s, total: total + jnp.exp(lse_of(s) - shift), vector(0.0))
    divisor = jnp.where(total > 0, total, 1.0)
    store(merged_lse, jnp.where(total > 0, shift + jnp.log(divisor), -jnp.inf))

    def add_state(state: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        stage = lax.rem(state, jnp.int32(plan.stages))
        share = jnp.exp(lse_of(state) - shift) / divisor
        plgpu.barrier_wait(arrived.at[stage])
        added = []
        for part, buffer in zip(sums, ring, strict=True):
            x = load(buffer.at[stage], layout).astype(jnp.float32)
            weight = lax.broadcast_in_dim(share, x.shape, [0])
            # A state with nothing attended may hold anything: select, since 0 * NaN is NaN.
            added.append(part + jnp.where(weight > 0, x * weight, 0.0))
        pl.when(state + plan.stages < plan.states)(lambda: refill(state + plan.stages))
        return tuple(added)

    zeros = tuple(plgpu.layout_cast(jnp.full((plan.rows, size), 0, jnp.float32), layout) for _, size in plan.pieces)
    sums = lax.fori_loop(0, plan.states, add_state, zeros)
    for part, buffer in zip(sums, merged, strict=True):
        store(buffer, part.astype(buffer.dtype))
    plgpu.commit_smem()
    for (start, size), buffer in zip(plan.pieces, merged, strict=True):
        plgpu.copy_smem_to_gmem(buffer, out.at[pl.ds(first, plan.rows), head, columns(start, size, first)])
    plgpu.copy_smem_to_gmem(merged_lse, lse.at[lses_of(head)])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
