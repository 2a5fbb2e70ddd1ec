"""What CTAs of one kernel say to each other: in PTX, as Pallas has no word for it.

The interpreter runs CTAs one after the other, in their order, so what a CTA waits for there has been done.
"""

from typing import Any

from jaxpaged.pallas.mosaic import Interpreter
from jaxpaged.pallas.ptx import inline

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
        inline(_RAISE, flag)


def wait_and_lower(flags: Any, first: Any, end: Any, interpret: Interpreter | None) -> None:
    """Wait in a single warp until all flags from `first` to before `end` are raised, and lower them.

    Args:
      flags: a ref [n, FLAG] int32 in global memory.
    """
    if interpret is None:
        inline(_WAIT, flags, first, end)
