"""Plans made by XLA or by a kernel: the arrays are the same.

Only kernels can be launched on a stream of the caller's and captured in a CUDA graph. Plans with a mask function, and
those of a cascade, are XLA's alone.
"""

from typing import Any

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas import decode_plan, prefill_plan
from jaxpaged.pallas.decode_plan import DecodePlan
from jaxpaged.pallas.decode_plan_kernel import DecodeCut, plan_decode_by_kernel
from jaxpaged.pallas.mosaic import Interpreter
from jaxpaged.pallas.prefill_plan import PrefillPlan, PrefillTiling
from jaxpaged.pallas.prefill_plan_kernel import lists_of, plan_prefill_by_kernel
from jaxpaged.reference.attention import AttentionOptions

SMEM_BYTES = 220 * 1024


def decode_refusal(options: AttentionOptions, skip: Any = None) -> str | None:
    """Why no kernel can make a plan of decode, or None."""
    if options.mask_mod is not None:
        return "mask_mod: tiles that it leaves empty are skipped by a plan of XLA's"
    if skip is not None:
        return "skip: positions that a cascade attends to elsewhere are left out by a plan of XLA's"
    return None


def prefill_refusal(
    cache: KVCache, batch: PagedBatch, options: AttentionOptions, tiling: PrefillTiling, **how: Any
) -> str | None:
    """Why no kernel can make a plan of prefill, or None.

    Args:
      how: the other arguments of `plan_prefill`.
    """
    if options.mask_mod is not None:
        return "mask_mod: steps that it leaves empty are skipped by a plan of XLA's"
    needed = lists_of(cache, batch, options, tiling, **how).smem_bytes
    if needed > SMEM_BYTES:
        return f"num_tokens: a plan for {how['num_tokens']} takes {needed} bytes of shared memory, of {SMEM_BYTES}"
    return None


def plan_decode(
    cache: KVCache,
    batch: PagedBatch,
    options: AttentionOptions,
    *,
    by_kernel: bool,
    interpret: Interpreter | None,
    num_heads: int,
    skip: Any = None,
    **how: Any,
) -> DecodePlan:
    """`decode_plan.plan_decode`, by a kernel if asked for and unless `decode_refusal` says why not."""
    if by_kernel and decode_refusal(options, skip) is None:
        return plan_decode_by_kernel(cache, batch, DecodeCut(options, **how), interpret=interpret)
    return decode_plan.plan_decode(cache, batch, options, num_heads=num_heads, skip=skip, **how)


def plan_prefill(
    cache: KVCache,
    batch: PagedBatch,
    options: AttentionOptions,
    tiling: PrefillTiling,
    *,
    by_kernel: bool,
    interpret: Interpreter | None,
    **how: Any,
) -> PrefillPlan:
    """`prefill_plan.plan_prefill`, by a kernel if asked for and unless `prefill_refusal` says why not."""
    if by_kernel and prefill_refusal(cache, batch, options, tiling, **how) is None:
        return plan_prefill_by_kernel(cache, batch, options, tiling, **how, interpret=interpret)
    return prefill_plan.plan_prefill(cache, batch, options, tiling, **how)
