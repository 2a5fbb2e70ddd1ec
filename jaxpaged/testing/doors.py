"""The ways into the package. Each runs a case and gives float64 results, or says why it can't."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.attention import kernels_refuse, make_options, paged_attention
from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.testing import backend_doors
from jaxpaged.testing.cases import FLOAT8, QUANTIZED, Case, Inputs, aligned, build, stored_as_bits

Result = tuple[np.ndarray, np.ndarray | None]


@dataclasses.dataclass(frozen=True)
class Door:
    """A way in.

    Attributes:
      run: the output [num_tokens, num_heads, v_head_size] and lse [num_heads, num_tokens] of a case, float64; None for
        an lse that the way in doesn't give.
      refuses: why a case can't go this way, or None.
      adapt: the case that stands for a named one here.
      slack: by what factor errors of outputs may be larger than the output's own rounding.
    """

    run: Callable[[Inputs], Result]
    refuses: Callable[[Case], str | None]
    adapt: Callable[[Case], Case] = lambda case: case
    slack: float = 1.0


def _float64(out: Any, lse: Any) -> Result:
    return np.asarray(out).astype(np.float64), np.asarray(lse).astype(np.float64)


def _cache(inputs: Inputs, as_bits: bool) -> KVCache:
    dtype = inputs.key_buffer.dtype
    buffers = (inputs.key_buffer, inputs.value_buffer)
    key, value = (stored_as_bits(b) if as_bits else b for b in buffers)
    return KVCache.from_arrays(
        jnp.asarray(key),
        None if value is None else jnp.asarray(value),
        layout=inputs.case.layout,
        k_scale=None if inputs.k_scale is None else jnp.asarray(inputs.k_scale),
        v_scale=None if inputs.v_scale is None else jnp.asarray(inputs.v_scale),
        dtype=dtype,
    )


def _run_jax(inputs: Inputs, implementation: str | None = "reference") -> Result:
    batch = PagedBatch.create(inputs.block_table, inputs.seq_lens, inputs.query_start_loc)
    cache = _cache(inputs, as_bits=False)
    options = {**inputs.options, "return_lse": True, "implementation": implementation}
    return _float64(*paged_attention(jnp.asarray(inputs.query), cache, batch, **options))


def _run_jit(inputs: Inputs, implementation: str | None = "reference") -> Result:
    """Everything traced: nothing about the batch is known when it is compiled."""
    arrays = {k: v for k, v in inputs.options.items() if isinstance(v, np.ndarray)}
    static = {k: v for k, v in inputs.options.items() if k not in arrays}
    static |= {"return_lse": True, "implementation": implementation}

    @jax.jit
    def call(query: Any, cache: KVCache, table: Any, lens: Any, starts: Any, arrays: Any) -> Any:
        return paged_attention(query, cache, PagedBatch.create(table, lens, starts), **static, **arrays)

    args = (inputs.block_table, inputs.seq_lens, inputs.query_start_loc)
    return _float64(*call(inputs.query, _cache(inputs, True), *args, arrays))


def _anything(case: Case) -> str | None:
    return None


def _jit_refuses(case: Case) -> str | None:
    if max(case.query_lens, default=0) > 32 and case.cache_dtype not in FLOAT8:
        return "the program would be that of the door jax, with nothing left to the batch's known lengths"
    return None


def _in_half(case: Case) -> Case:
    """A case of float32 in bfloat16."""
    cache_dtype = None if case.cache_dtype == "float32" else case.cache_dtype
    return dataclasses.replace(
        case, dtype="bfloat16" if case.dtype == "float32" else case.dtype, cache_dtype=cache_dtype
    )


def _kernels_refuse(case: Case) -> str | None:
    """Why the kernels don't take a case on this machine: what the call itself says before it computes anything."""
    inputs = build(case)
    batch = PagedBatch.create(inputs.block_table, inputs.seq_lens, inputs.query_start_loc)
    options = {k: v for k, v in inputs.options.items() if k != "batch_invariant"}
    return kernels_refuse(jnp.asarray(inputs.query), _cache(inputs, as_bits=False), batch, **options)


_TORCH_OPTIONS = {"scale", "causal", "window", "soft_cap", "alibi", "alibi_per_request", "sinks"}


def _torch_refuses(case: Case) -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    if case.layout in ("HND", "VLLM_V0", "2HND", "HN2D"):
        return f"the function takes caches [num_blocks, block_size, num_kv_heads, head_size], not {case.layout}"
    unknown = {name for name, _ in case.options} - _TORCH_OPTIONS
    if unknown:
        return f"the function has no {', '.join(sorted(unknown))}"
    if case.cache_dtype == "float32" and case.dtype != "float32":
        return "the function takes caches of the query's dtype"
    return None


def _torch_arguments(inputs: Inputs, device: str) -> tuple[dict[str, Any], Any, Any]:
    """Keyword arguments that both functions share, and the key and value caches as views of the case's buffers."""
    import torch

    from jaxpaged.bridge.dlpack import to_torch

    options = dict(inputs.options)
    window = options.pop("window", None) or (None, None)
    kwargs: dict[str, Any] = {
        "causal": options.pop("causal", True),
        "softmax_scale": options.pop("scale", None),
        "window_size": tuple(-1 if side is None else side for side in window),
        "softcap": options.pop("soft_cap", None) or 0.0,
        "block_table": torch.from_numpy(inputs.block_table).to(device),
        "return_softmax_lse": True,
    }
    for ours, theirs in (("alibi_slopes", "alibi_slopes"), ("sinks", "s_aux")):
        if ours in options:
            kwargs[theirs] = torch.from_numpy(options[ours]).to(device)
    for name, scale in (("k_descale", inputs.k_scale), ("v_descale", inputs.v_scale)):
        if scale is not None:
            kwargs[name] = torch.from_numpy(scale).clone().to(device)
    buffers = [None if b is None else to_torch(aligned(b)).to(device) for b in (inputs.key_buffer, inputs.value_buffer)]
    key, value = buffers
    assert key is not None
    if value is None:
        layout, size = inputs.case.layout, inputs.case.head_size
        if layout == "NH2D":
            key, value = key[..., :size], key[..., size:]
        else:
            key, value = key.unbind(layout.index("2"))
    return kwargs, key, value


def _from_torch(out: Any, lse: Any) -> Result:
    return out.double().cpu().numpy(), lse.double().cpu().numpy()


def _run_torch_varlen(inputs: Inputs, device: str = "cpu") -> Result:
    import torch

    from jaxpaged.backends.functional import flash_attn_varlen_func
    from jaxpaged.bridge.dlpack import to_torch

    kwargs, key, value = _torch_arguments(inputs, device)
    out, lse = flash_attn_varlen_func(
        to_torch(inputs.query).to(device),
        key,
        value,
        cu_seqlens_q=torch.from_numpy(inputs.query_start_loc).to(device),
        seqused_k=torch.from_numpy(inputs.seq_lens).to(device),
        **kwargs,
    )
    return _from_torch(out, lse)


def _run_torch_kvcache(inputs: Inputs, device: str = "cpu") -> Result:
    import torch

    from jaxpaged.backends.functional import flash_attn_with_kvcache
    from jaxpaged.bridge.dlpack import to_torch

    kwargs, key, value = _torch_arguments(inputs, device)
    case = inputs.case
    batch = len(case.query_lens)
    query = to_torch(inputs.query).to(device).view(batch, -1, case.num_heads, case.head_size)
    lens = torch.from_numpy(inputs.seq_lens).to(device)
    out, lse = flash_attn_with_kvcache(query, key, value, cache_seqlens=lens, **kwargs)
    return _from_torch(out.flatten(0, 1), lse.transpose(0, 1).flatten(1))


def _run_torch_without_lse(inputs: Inputs, device: str = "cpu") -> Result:
    """The same by a plan of the step's, with the longest number of new tokens known: decode takes what it can."""
    import torch

    from jaxpaged.backends.functional import flash_attn_varlen_func, plan_attention
    from jaxpaged.bridge.dlpack import to_torch

    kwargs, key, value = _torch_arguments(inputs, device)
    query = to_torch(inputs.query).to(device)
    starts, lens = (torch.from_numpy(x).to(device) for x in (inputs.query_start_loc, inputs.seq_lens))
    batch: dict[str, Any] = {
        "seqused_k": lens,
        "cu_seqlens_q": starts,
        "max_seqlen_q": max(inputs.case.query_lens, default=0),
    }
    plan = plan_attention(kwargs["block_table"], **batch)
    out = query.new_full((*query.shape[:2], value.shape[-1]), torch.nan)
    kwargs |= {"return_softmax_lse": False, "scheduler_metadata": plan, "out": out}
    for _ in range(2):  # as two layers do
        result = flash_attn_varlen_func(query, key, value, **batch, **kwargs)
    assert result is out
    return out.double().cpu().numpy(), None


def no_hopper() -> str | None:
    """Why PyTorch can't run the kernels on this machine."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "PyTorch has no Hopper GPU here"
    return None


def on_gpu_refuses(case: Case, longest_known: bool = False) -> str | None:
    """Why the functions for PyTorch don't take a case on a GPU, whatever this machine has.

    Args:
      longest_known: whether they are told how many new tokens a request has at most.
    """
    reason = _torch_refuses(case)
    if reason is not None:
        return reason
    if case.cache_dtype in QUANTIZED:
        decoded = longest_known and max(case.query_lens, default=0) <= _most_decoded(case)
        reason = None if decoded else _prefill_refuses(case)
        if reason is not None:
            return reason
    elif case.cache_dtype not in (None, case.dtype):
        return "on a GPU the functions take caches of 8 bits or of the query's dtype"
    options = build(case).options
    if not options.get("causal", True) and "alibi_slopes" in options:
        return "on a GPU the functions take slopes with causal=True alone"
    return _shapes_refused(case)


def _most_decoded(case: Case) -> int:
    from jaxpaged.pallas.attention import most_decoded_lens

    return most_decoded_lens(_cache(build(case), as_bits=False), case.num_heads)


def _prefill_refuses(case: Case) -> str | None:
    from jaxpaged.pallas.attention import cache_refusal

    inputs = build(case)
    query_dtype = jnp.asarray(inputs.query).dtype
    return cache_refusal(query_dtype, _cache(inputs, as_bits=False), query_dtype)


def _shapes_refused(case: Case) -> str | None:
    """Why the kernels don't take a case, wherever they run."""
    from jaxpaged.pallas.attention import refusal

    inputs = build(case)
    batch = PagedBatch.create(inputs.block_table, inputs.seq_lens, inputs.query_start_loc)
    cache, query = _cache(inputs, as_bits=False), jnp.asarray(inputs.query)
    defaults = dict.fromkeys(("window", "soft_cap", "alibi_slopes", "sinks", "mask_mod", "score_mod"))
    given = {"scale": cache.head_size**-0.5, "causal": True, **defaults, **inputs.options}
    options = make_options(num_heads=case.num_heads, num_reqs=batch.num_reqs, **given)
    reason = refusal(query, cache, batch, options, query.dtype)
    return None if reason == "there is nothing to compute" else reason


def _cuda_refuses(refuses: Callable[[Case], str | None], longest_known: bool, case: Case) -> str | None:
    return no_hopper() or refuses(case) or on_gpu_refuses(case, longest_known)


def _kvcache_refuses(case: Case) -> str | None:
    if len(set(case.query_lens)) != 1 or case.query_lens[0] == 0 or case.extra_tokens:
        return "the function takes the same number of queries of each request"
    return _torch_refuses(case)


DOORS = {
    "jax": Door(_run_jax, _anything),
    "jax-jit": Door(_run_jit, _jit_refuses),
    # Tensor cores take the softmax's weights in 16 bits, too: a rounding more, as in FlashAttention-3.
    "kernels": Door(functools.partial(_run_jax, implementation="mosaic_gpu"), _kernels_refuse, _in_half, 1.5),
    "kernels-jit": Door(functools.partial(_run_jit, implementation="mosaic_gpu"), _kernels_refuse, _in_half, 1.5),
    "torch-varlen": Door(_run_torch_varlen, _torch_refuses),
    "torch-kvcache": Door(_run_torch_kvcache, _kvcache_refuses),
    **{
        f"{name}-cuda": Door(
            functools.partial(run, device="cuda"), functools.partial(_cuda_refuses, refuses, known), _in_half, 1.5
        )
        for name, run, refuses, known in (
            ("torch-varlen", _run_torch_varlen, _torch_refuses, False),
            ("torch-planned", _run_torch_without_lse, _torch_refuses, True),
            ("torch-kvcache", _run_torch_kvcache, _kvcache_refuses, True),
        )
    },
    **{
        name: Door(run, refuses, backend_doors.one_tensor)
        for name, run, refuses in (
            ("backend-flash", backend_doors.run_flash, backend_doors.flash_refuses),
            ("backend-flex", backend_doors.run_flex, backend_doors.flex_refuses),
            ("backend-sdpa", backend_doors.run_sdpa, backend_doors.sdpa_refuses),
        )
    },
}
"""By name: `paged_attention` by the reference, called eagerly, and with everything traced under `jit` and float8 kept
as uint8; by the GPU kernels, likewise; the two functions for PyTorch's tensors, on the CPU, on a GPU, and there by a
step's plan; and the classes for PyTorch engines."""
