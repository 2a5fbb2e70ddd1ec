"""What a single warp does with memory, which Pallas gives no vectors: in PTX."""

import math
import struct
from typing import Any

import jax.numpy as jnp

from jaxpaged.pallas.lanes import WARP
from jaxpaged.pallas.mosaic import Interpreter
from jaxpaged.pallas.ptx import inline, inline_number


def fill(ref: Any, number: float, interpret: Interpreter | None) -> None:
    """Fill memory with a number.

    Args:
      ref: to global memory that lies side by side, a multiple of 4 bytes.
      number: 0 unless the numbers are float32.
    """
    if interpret is not None:
        ref[...] = jnp.full(ref.shape, number, ref.dtype)
        return
    (bits,) = struct.unpack("I", struct.pack("f", number))
    size = math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize
    ptx = f"""{{
  .reg .pred done; .reg .b32 lane, word; .reg .b64 place, end;
  mov.u32 lane, %laneid;
  mov.b32 word, {bits};
  mad.wide.u32 place, lane, 4, $0;
  add.u64 end, $0, {size};
NEXT:
  setp.ge.u64 done, place, end;
  @done bra DONE;
  st.global.b32 [place], word;
  add.u64 place, place, 128;
  bra NEXT;
DONE:
  bar.warp.sync 0xffffffff;
}}"""
    inline(ptx, ref)


def is_last(slots: Any, slot: Any, index: Any, interpret: Interpreter | None) -> Any:
    """Whether a slot, 0 or more, is not found behind an index: bool, for each warp by itself.

    All slots are looked at in one go, as many loads at a time.

    Args:
      slots: a ref [n] int32 in global memory, or [n, 2] int32, the words of int64, low one first.
    """
    size, *words = slots.shape
    if interpret is not None:
        numbers = slots[...]
        same = (numbers[:, 0] == slot) & (numbers[:, 1] == 0) if words else numbers == slot
        return jnp.all(~same | (jnp.arange(size) <= index))
    return inline_number(_search(size, bool(words)), slots, slot, index) != 0


def _search(size: int, wide: bool) -> str:
    """PTX for 0 if number `$2` is found behind index `$3` among `size` ones at `$1`, else 1."""
    steps = range(-(-size // WARP))
    step_bytes = WARP * (8 if wide else 4)
    loads, compares = [], []
    for i in steps:
        into, kind = (f"{{low{i}, high{i}}}", "v2.b32") if wide else (f"low{i}", "b32")
        rest = size - WARP * i  # of the last step fewer, and what a lane beyond them has is no slot
        guard = f"mov.b32 low{i}, -1; setp.lt.u32 there, lane, {rest}; @there " if rest < WARP else ""
        loads.append(f"{guard}ld.global.{kind} {into}, [place + {i * step_bytes}];")
        compares.append(f"setp.eq.b32 same, low{i}, $2; setp.gt.and.s32 same, lane, after, same;")
        compares += [f"setp.eq.and.b32 same, high{i}, 0, same;"] if wide else []
        compares.append(f"or.pred found, found, same; sub.s32 after, after, {WARP};")
    registers = ", ".join(f"low{i}, high{i}" if wide else f"low{i}" for i in steps)
    return f"""{{
  .reg .pred found, same, there; .reg .b32 lane, after, {registers}; .reg .b64 place;
  mov.u32 lane, %laneid;
  mad.wide.u32 place, lane, {step_bytes // WARP}, $1;
  mov.b32 after, $3;
  setp.ne.u32 found, lane, lane;
  {" ".join(loads)}
  {" ".join(compares)}
  vote.sync.any.pred found, found, 0xffffffff;
  selp.b32 $0, 0, 1, found;
}}"""
