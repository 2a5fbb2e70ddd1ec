"""`torch.ops.jaxpaged`: the kernels as operators of PyTorch, for tensors of a GPU, and the same for the CPU.

Their schemas say what is written, so `torch.compile` keeps them in order without a copy of a cache. They are registered
with a `Library` and not with `custom_op`, whose wrappers in Python take longer than a launch.

On a GPU they run on the current stream (`launch.py`), and can be captured in a CUDA graph once they were called, or
warmed up, for such shapes. Eager code that counts microseconds calls them through `direct.py`. Where kernels can't be
launched, a warning says so once, and JAX serves by DLPack (`dlpack_calls.py`), or what `set_fallback` was given.
"""

from collections.abc import Callable
from typing import Any

import torch

from jaxpaged.bridge.copy_calls import copy_on_gpu, swap_on_gpu
from jaxpaged.bridge.cpu_calls import (
    copy_on_cpu,
    decode_on_cpu,
    plan_on_cpu,
    plan_prefill_on_cpu,
    prefill_on_cpu,
    swap_on_cpu,
    write_on_cpu,
)
from jaxpaged.bridge.decode_calls import decode_on_gpu
from jaxpaged.bridge.decode_shapes import plan_sizes
from jaxpaged.bridge.dlpack_calls import (
    copy_by_dlpack,
    decode_by_dlpack,
    plan_by_dlpack,
    plan_prefill_by_dlpack,
    prefill_by_dlpack,
    swap_by_dlpack,
    write_by_dlpack,
)
from jaxpaged.bridge.mosaic_abi import unavailable
from jaxpaged.bridge.op_arguments import Arguments
from jaxpaged.bridge.plan_calls import plan_on_gpu
from jaxpaged.bridge.prefill_calls import prefill_on_gpu
from jaxpaged.bridge.prefill_plan_calls import plan_prefill_on_gpu
from jaxpaged.bridge.prefill_shapes import plan_numbers, prefill_shapes, prefill_workspace_bytes
from jaxpaged.bridge.process import leave_memory_to_torch
from jaxpaged.bridge.write_calls import write_on_gpu
from jaxpaged.notices import warn_once

_SCORES = "float scale, bool causal, int window_left, int window_right, float soft_cap"
_SCALES = "Tensor? k_scale=None, Tensor? v_scale=None"
_SCHEMAS = {
    "reshape_and_cache": (
        "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
        "str kv_cache_dtype, Tensor(c!)? k_scale, Tensor(d!)? v_scale) -> ()"
    ),
    "copy_blocks": "(Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor block_mapping) -> ()",
    "swap_blocks": "(Tensor src, Tensor(a!) dst, Tensor block_mapping) -> ()",
    "plan_decode": (
        "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, "
        f"Tensor query_start_loc, int max_query_len, bool batch_invariant, {_SCORES}, {_SCALES}) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    "decode": (
        "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor requests, Tensor shares, "
        f"Tensor(a!) workspace, Tensor? slopes, Tensor? sinks, int max_query_len, bool batch_invariant, {_SCORES}, "
        f"Tensor(b!) out, {_SCALES}, Tensor(c!)? lse=None) -> ()"
    ),
    "plan_prefill": (
        "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, "
        f"Tensor query_start_loc, bool batch_invariant, {_SCORES}, {_SCALES}) -> (Tensor, Tensor)"
    ),
    "prefill": (
        "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor query_start_loc, Tensor plan, "
        "Tensor(a!) workspace, Tensor? slopes, Tensor? sinks, Tensor? decode_slopes, Tensor? decode_sinks, "
        f"bool batch_invariant, {_SCORES}, Tensor(b!) out, {_SCALES}, Tensor(c!)? lse=None) -> ()"
    ),
}
_ON_GPU: dict[str, Callable[..., Any]] = {
    "reshape_and_cache": write_on_gpu,
    "copy_blocks": copy_on_gpu,
    "swap_blocks": swap_on_gpu,
    "plan_decode": plan_on_gpu,
    "decode": decode_on_gpu,
    "plan_prefill": plan_prefill_on_gpu,
    "prefill": prefill_on_gpu,
}
_ON_CPU: dict[str, Callable[..., Any]] = {
    "reshape_and_cache": write_on_cpu,
    "copy_blocks": copy_on_cpu,
    "swap_blocks": swap_on_cpu,
    "plan_decode": plan_on_cpu,
    "decode": decode_on_cpu,
    "plan_prefill": plan_prefill_on_cpu,
    "prefill": prefill_on_cpu,
}
serving: dict[str, Callable[..., Any]] = {}
"""What serves each operator on a GPU: its function, or the fallback."""
_fallbacks: dict[str, Callable[..., Any]] = {
    "reshape_and_cache": write_by_dlpack,
    "copy_blocks": copy_by_dlpack,
    "swap_blocks": swap_by_dlpack,
    "plan_decode": plan_by_dlpack,
    "decode": decode_by_dlpack,
    "plan_prefill": plan_prefill_by_dlpack,
    "prefill": prefill_by_dlpack,
}
_library = torch.library.Library("jaxpaged", "DEF")
_gpu_libraries: dict[str, torch.library.Library] = {}


def set_fallback(name: str, function: Callable[..., Any] | None) -> None:
    """What serves an operator on a GPU where kernels can't be launched on PyTorch's stream, instead of JAX by DLPack.

    Args:
      name: of the operator.
      function: takes the operator's arguments, and keeps to the order of the current stream; None for nothing.
    """
    if name not in _SCHEMAS:
        raise ValueError(f"name: expected one of {', '.join(_SCHEMAS)}, got {name!r}")
    if function is None:
        _fallbacks.pop(name, None)
    else:
        _fallbacks[name] = function


def release_on_gpu(name: str) -> Callable[..., Any]:
    """The function that serves an operator on a GPU, which serves it no more: another kernel can take its place."""
    _gpu_libraries.pop(name)._destroy()
    return serving[name]


def _fallback(name: str, reason: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        if name not in _fallbacks:
            raise NotImplementedError(f"{name}: {reason}")
        warn_once(
            f"jaxpaged's kernels can't run on PyTorch's stream: {reason}. XLA's programs serve instead: they take "
            f"longer to call, and no CUDA graph captures them"
        )
        return _fallbacks[name](*args, **options)

    return call


def _fake_plan(*given: Any, **named: Any) -> Any:
    call = _unstrided(Arguments.of(plan_on_gpu, given, named))
    requests, shares, workspace = plan_sizes(*call.layer, *call.how)
    integers = (call.block_table.new_empty(size, dtype=torch.int32) for size in (requests, shares))
    return *integers, call.block_table.new_empty(workspace, dtype=torch.uint8)


def _fake_prefill_plan(*given: Any, **named: Any) -> Any:
    call = Arguments.of(plan_prefill_on_gpu, given, named)
    if call.block_table.device.type == "cpu":
        numbers, workspace = 2 * call.block_table.shape[0] + 1, 0
    else:
        call = _unstrided(call)
        found = prefill_shapes(*call.layer, *call.how)
        numbers = plan_numbers(found.fields())
        workspace = prefill_workspace_bytes(found, call.block_table, call.query)
    new = call.block_table.new_empty
    return new(numbers, dtype=torch.int32), new(workspace, dtype=torch.uint8)


def _unstrided(call: Arguments) -> Arguments:
    """How caches are strided makes no difference to a plan, and can't be read off tensors that have no memory."""
    names = ("key_cache", "value_cache", "k_scale", "v_scale")
    tensors = {name: getattr(call, name) for name in names if getattr(call, name) is not None}
    compact = {name: x.new_empty([int(n) for n in x.shape]) for name, x in tensors.items()}
    return Arguments(**{**vars(call), **compact})


_FAKES: dict[str, Callable[..., Any]] = {"plan_decode": _fake_plan, "plan_prefill": _fake_prefill_plan}


def _register() -> None:
    reason = unavailable() if torch.cuda.is_available() else None
    for name, schema in _SCHEMAS.items():
        _library.define(name + schema)
        serving[name] = _ON_GPU[name] if reason is None else _fallback(name, reason)
        _gpu_libraries[name] = torch.library.Library("jaxpaged", "IMPL")
        _gpu_libraries[name].impl(name, serving[name], "CUDA")
        _library.impl(name, _ON_CPU[name], "CPU")
        fake = _FAKES.get(name, lambda *args, **how: None)
        torch.library.register_fake(f"jaxpaged::{name}", fake, lib=_library)


if torch.cuda.is_available():
    leave_memory_to_torch()
_register()
