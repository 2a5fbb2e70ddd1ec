"""What CTAs of one kernel say to each other, and rows that a single warp fills: in PTX, as Pallas has no word for it.

Seen to work with jax 0.11.2 and 0.12.0. The interpreter runs CTAs one after the other, in their order, so what a CTA
waits for there has been done.
"""

import math
import struct
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from jaxpaged.pallas.mosaic import Interpreter

FLAG = 2
"""Numbers of 32 bits in a flag."""
_RAISED = 0x6A09E667F3BCC908
"""A raised flag: 64 bits that memory of other use, or of none yet, does not hold."""
# What TMA has written and will read is ordered by flags, which are not TMA's, with a fence on both sides.
_RAISE = f"""{{
  .reg .pred first; .reg .b32 thread; .reg .b64 raised;
  mov.u32 thread, %tid.x;
  and.b32 thread, thread, 127;
  setp.eq.u32 first, thread, 0;
  mov.b64 raised, {_RAISED};
  fence.proxy.async;
  @first st.release.gpu.global.b64 [$0], raised;
}}"""
_WAIT = f"""{{
  .reg .pred there, lowered; .reg .b32 lane; .reg .b64 place, end, found, zero;
  mov.b64 zero, 0;
  mov.u32 lane, %laneid;
  mad.wide.u32 end, $2, 8, $0;
  add.u32 lane, lane, $1;
  mad.wide.u32 place, lane, 8, $0;
NEXT:
  setp.ge.u64 there, place, end;
  @there bra DONE;
AGAIN:
  ld.acquire.gpu.global.b64 found, [place];
  setp.ne.b64 lowered, found, {_RAISED};
  @lowered bra AGAIN;
  st.relaxed.gpu.global.b64 [place], zero;
  add.u64 place, place, 256;
  bra NEXT;
DONE:
  bar.warp.sync 0xffffffff;
  fence.proxy.async;
}}"""


def raise_flag(flag: Any, interpret: Interpreter | None) -> None:
    """Say, after all that a warpgroup has done so far, that it is done.

    Args:
      flag: a ref [FLAG] int32 in global memory, at a multiple of 8 bytes, that nobody raises besides.
    """
    if interpret is None:
        _inline(_RAISE)(flag)


def wait_and_lower(flags: Any, first: Any, end: Any, interpret: Interpreter | None) -> None:
    """Wait in a single warp until all flags from `first` to before `end` are raised, and lower them.

    Args:
      flags: a ref [n, FLAG] int32 in global memory.
    """
    if interpret is None:
        _inline(_WAIT)(flags, first, end)


def fill(ref: Any, number: float, interpret: Interpreter | None) -> None:
    """Fill memory with a number, in a single warp, which Pallas gives no vectors.

    Args:
      ref: to global memory that lies side by side, a multiple of 4 bytes.
      number: 0 unless the numbers are float32.
    """
    if interpret is not None:
        ref[...] = jnp.full(ref.shape, number, ref.dtype)
        return
    (bits,) = struct.unpack("I", struct.pack("f", number))
    size = math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize
    _inline(f"""{{
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
}}""")(ref)


def _inline(ptx: str) -> Any:
    """A function that runs PTX on the address of a ref, $0, and perhaps on numbers, $1 and so on."""

    def run(_: Any, ref: Any, *numbers: Any) -> None:
        values = [mgpu.utils.memref_ptr(ref), *(getattr(x, "registers", x) for x in numbers)]
        values = [x.item() if hasattr(x, "item") else x for x in values]
        constraints = ",".join(["l", *["r"] * len(numbers), "~{memory}"])
        llvm.inline_asm(ir.Type.parse("!llvm.void"), values, ptx, constraints, has_side_effects=True)

    def call(ref: Any, *numbers: Any) -> None:
        types = (plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * len(numbers))
        plgpu.inline_mgpu(arg_types=types)(run)(ref, *numbers)

    return call
