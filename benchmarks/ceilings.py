"""What the GPU reaches at best: reading, copying, multiplying, and reading a paged cache."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from attention_cases import PAGED_READS, bytes_read
from gpu_timing import kernel_times

PAGE_READERS = ((4, 4, 4), (4, 8, 4), (4, 16, 4), (8, 2, 4), (8, 8, 4), (8, 8, 8), (16, 4, 8))
"""Blocks at a time, times, and warps of `triton_read.read_pages` that are tried."""


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """The GPU's rates.

    Attributes:
      read, copy: TB/s of reads alone, and of a copy, read and written.
      matmul: TFLOP/s of bfloat16.
      reader: what read the fastest.
      paged_read: TB/s of reading the keys and values of `attention_cases.PAGED_READS` through its block table.
      page_reader: what read those the fastest.
      readers: TB/s of all that read, by name.
    """

    read: float
    copy: float
    matmul: float
    reader: str
    paged_read: float | None = None
    page_reader: str = ""
    readers: Mapping[str, float] = dataclasses.field(default_factory=dict)


def measure_ceilings() -> Ceilings:
    """The fastest of several reductions over 4 GiB, a copy of 4 GiB, a product of 8192 x 8192, and paged reads."""
    import torch

    rates = _plain_rates()
    torch.cuda.empty_cache()
    try:
        pages = _rates(_page_readers(), bytes_read(PAGED_READS))
    except Exception as error:
        warnings.warn(f"ceilings: no paged reads: {type(error).__name__}: {error}", stacklevel=2)
        return rates
    best = max(pages, key=lambda name: pages[name])
    return dataclasses.replace(rates, paged_read=pages[best], page_reader=best, readers={**rates.readers, **pages})


def _plain_rates() -> Ceilings:
    import torch

    # Random bits: ones that seldom change would take less power.
    source = torch.randint(-(2**31), 2**31, (2**30,), dtype=torch.int32, device="cuda")
    readers = _rates(_readers(source), source.nbytes)
    reader = max(readers, key=lambda name: readers[name])
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    others = kernel_times({"copy": lambda: target.copy_(source), "matmul": lambda: a @ b}, repeats=10)
    return Ceilings(
        read=readers[reader],
        copy=2 * source.nbytes / others["copy"].microseconds / 1e6,
        matmul=2 * 8192**3 / others["matmul"].microseconds / 1e6,
        reader=reader,
        readers=readers,
    )


def _rates(calls: Mapping[str, Callable[[], Any]], size: int) -> dict[str, float]:
    """TB/s of calls that read so many bytes."""
    return {
        name: size / timing.microseconds / 1e6 for name, timing in kernel_times(calls, warmup=2, repeats=10).items()
    }


def _readers(source: Any) -> dict[str, Callable[[], Any]]:
    """Reductions of [numbers] int32."""
    import jax
    import torch

    calls: dict[str, Callable[[], Any]] = {
        "torch sum": source.view(torch.float32).sum,
        "torch amax": source.amax,
        "jnp max": functools.partial(jax.jit(lambda x: x.max()), jax.dlpack.from_dlpack(source)),
    }
    try:
        from triton_read import read_all

        _check(read_all(source), source)
        calls["Triton sum"] = functools.partial(read_all, source)
    except Exception as error:
        warnings.warn(f"ceilings: no Triton reader: {type(error).__name__}: {error}", stacklevel=2)
    return calls


def _page_readers(device: str = "cuda", case: Any = PAGED_READS) -> dict[str, Callable[[], Any]]:
    """Sums of the keys and values of a case."""
    import torch
    from attention_inputs import make_inputs
    from triton_read import read_pages

    inputs = make_inputs(case, device)
    key, value = (x.view(torch.int32) for x in (inputs.key, inputs.value))
    table = inputs.block_table.flatten()
    read = key[table.long()], value[table.long()]
    calls = {}
    for blocks, steps, warps in PAGE_READERS:
        call = functools.partial(read_pages, key, value, table, blocks, steps, warps)
        _check(call(), *read)
        calls[f"Triton, {steps} times {blocks} blocks, {warps} warps"] = call
    return calls


def _check(sums: Any, *read: Any) -> None:
    """See that sums, which may have run over, are of all that was to be read, once.

    Raises:
      RuntimeError: they are not.
    """
    import torch

    found = int(sums.sum(dtype=torch.int64)) % 2**32
    expected = sum(int(x.sum(dtype=torch.int64)) for x in read) % 2**32
    if found != expected:
        raise RuntimeError(f"the sum of what was read is {found}, expected {expected}")
