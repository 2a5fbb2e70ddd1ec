"""What CTAs of one kernel say to each other, and rows that a single warp fills: in PTX, as Pallas has no word for it.

Seen to work with jax 0.11.2 and 0.12.0. The interpreter runs CTAs one after the other, in their order, so what a CTA
waits for there has been done.
"""

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
  .reg .pred lowered; .reg .b64 found;
AGAIN:
  ld.acquire.gpu.global.b64 found, [$0];
  setp.ne.b64 lowered, found, {_RAISED};
  @lowered bra AGAIN;
  fence.proxy.async;
}}"""
_LOWER = """{
  .reg .b64 lowered;
  mov.b64 lowered, 0;
  st.relaxed.gpu.global.b64 [$0], lowered;
}"""


def raise_flag(flag: Any, interpret: Interpreter | None) -> None:
    """Say, after all that a warpgroup has done so far, that it is done.

    Args:
      flag: a ref [FLAG] int32 in global memory, at a multiple of 8 bytes.
    """
    if interpret is None:
        _inline(_RAISE)(flag)


def wait_and_lower(flag: Any, interpret: Interpreter | None) -> None:
    """Wait in a warpgroup until a flag is raised, and lower it."""
    if interpret is None:
        _inline(_WAIT)(flag)
        _inline(_LOWER, after_all=True)(flag)


def wait_and_lower_in_warp(flag: Any, interpret: Interpreter | None) -> None:
    """Likewise in a single warp."""
    if interpret is None:
        _inline(_WAIT, "bar.warp.sync 0xffffffff;", _LOWER)(flag)


def fill(ref: Any, number: float, interpret: Interpreter | None) -> None:
    """Fill memory with a number, in a single warp, which Pallas gives no vectors.

    Args:
      ref: to global memory that lies side by side, a multiple of 4 bytes.
      number: 0 for 16-bit numbers.
    """
    if interpret is not None:
        ref[...] = jnp.full(ref.shape, number, ref.dtype)
        return
    assert number == 0 or ref.dtype == jnp.float32
    (bits,) = struct.unpack("I", struct.pack("f", number))
    size = int(jnp.dtype(ref.dtype).itemsize)
    for n in ref.shape:
        size *= n
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


def _inline(*steps: str, after_all: bool = False) -> Any:
    """A function that does steps in PTX with the address of a ref, perhaps after all threads of a warpgroup came."""

    def run(_: Any, ref: Any) -> None:
        if after_all:
            mgpu.utils.warpgroup_barrier()
        for step in steps:
            address = [mgpu.utils.memref_ptr(ref)] if "$0" in step else []
            constraints = ",".join(["l"] * len(address) + ["~{memory}"])
            llvm.inline_asm(ir.Type.parse("!llvm.void"), address, step, constraints, has_side_effects=True)

    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(run)
