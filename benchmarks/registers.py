"""Registers and spills of our attention kernels, as ptxas counts them, on a machine without a GPU.

    python benchmarks/registers.py [--only REGEX]

A thread of decode may have 128 registers where two CTAs are to share a multiprocessor, and what is spilled costs a loop
dearly; neither shows before a GPU is slow. It needs JAX's CUDA plugin and a C compiler. The plugin compiles where the
driver tells it which GPU there is: a library that says an H200 and does nothing takes its place, in another process.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer
from attention_cases import CASES, Case

DRIVER = """
#include <string.h>
#define SAYS(name, arguments, what) int name arguments { what; return 0; }
SAYS(cuInit, (unsigned flags), )
SAYS(cuDriverGetVersion, (int *version), *version = 13000)
SAYS(cuDeviceGetCount, (int *count), *count = 1)
SAYS(cuDeviceGet, (int *device, int ordinal), *device = 0)
SAYS(cuDeviceGetName, (char *name, int size, int device), strncpy(name, "NVIDIA H200", size))
SAYS(cuDeviceGetAttribute, (int *x, int which, int device), *x = which == 75 ? 9 : which == 76 ? 0 : 232448)
SAYS(cuCtxGetDevice, (int *device), *device = 0)
SAYS(cuCtxGetCurrent, (void **context), *context = (void *)8)
SAYS(cuModuleLoadData, (void **module, const void *image), *module = (void *)8)
SAYS(cuModuleLoadDataEx, (void **module, const void *image, unsigned n, void *o, void *v), *module = (void *)8)
SAYS(cuModuleGetFunction, (void **function, void *module, const char *name), *function = (void *)8)
SAYS(cuModuleUnload, (void *module), )
SAYS(cuFuncSetAttribute, (void *function, int which, int value), )
SAYS(cuGetErrorName, (int error, const char **name), *name = "none")
SAYS(cuGetErrorString, (int error, const char **text), *text = "none")
"""
"""Attributes 75 and 76 are the compute capability."""
BEGIN = "== "
"""What the compiling process prints before what ptxas says of a case's kernels."""
_INSIDE = "JAXPAGED_REGISTERS_INSIDE"


class Kernel(NamedTuple):
    """What ptxas says of one: its name, registers of a thread, and bytes that it spills."""

    name: str
    registers: int
    spilled: int


def kernels(text: str) -> list[Kernel]:
    """The kernels that ptxas speaks of, in order."""
    found = []
    for part in re.split(r"Compiling entry function '", text)[1:]:
        registers, spilled = re.search(r"Used (\d+) registers", part), re.search(r"(\d+) bytes spill stores", part)
        assert registers and spilled, part
        name = part.split("'")[0].removesuffix("_mosaic_gpu_kernel")
        found.append(Kernel(name, int(registers[1]), int(spilled[1])))
    return found


def modules(case: Case) -> list[bytes]:
    """The kernels that attention of a case launches, as Mosaic's modules."""
    from jax.extend.mlir import ir

    from jaxpaged import KVCache, PagedBatch
    from jaxpaged.bridge.kernel_calls import KERNEL
    from jaxpaged.pallas.attention import paged_attention
    from jaxpaged.reference.attention import AttentionOptions

    width = -(-max(case.seq_lens) // case.block_size)
    rows = jax.ShapeDtypeStruct(
        (len(case.seq_lens) * width, case.block_size, case.num_kv_heads, case.head_size), case.cache
    )
    scale = jax.ShapeDtypeStruct(rows.shape[:3] if case.cache == "int8" else (), jnp.float32)
    scales = {} if case.cache == "bfloat16" else {"k_scale": scale, "v_scale": scale}
    cache = jax.eval_shape(lambda k, v, scales: KVCache.from_arrays(k, v, **scales), rows, rows, scales)
    query = jax.ShapeDtypeStruct((case.num_tokens, case.num_heads, case.head_size), jnp.bfloat16)
    table = np.arange(len(case.seq_lens) * width, dtype=np.int32).reshape(-1, width)
    if case.shared_prefix:
        table[:] = table[0]
    batch = PagedBatch.create(table, list(case.seq_lens), query_lens=list(case.query_lens))

    options = AttentionOptions(case.head_size**-0.5, case.causal, case.window or (None, None))

    def attend(query: Any, cache: Any, batch: Any) -> Any:
        how: dict[str, Any] = {"batch_invariant": False, "return_lse": False, "interpret": None}
        return paged_attention(query, cache, batch, options, out_dtype=query.dtype, **how)

    lowered = jax.jit(attend).trace(query, cache, batch).lower(lowering_platforms=("cuda",))
    found: list[bytes] = []

    def visit(op: Any) -> Any:
        if op.name == "stablehlo.custom_call" and op.attributes["call_target_name"].value == KERNEL:
            config = op.attributes["mhlo.backend_config"]
            found.extend(config[i].attr.value_bytes for i in range(len(config)) if config[i].name == "module")
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    return found


def compile_all(only: str) -> None:
    """Have ptxas speak of each case's kernels, behind the case's name."""
    from jaxpaged.bridge.mosaic_abi import compile_kernel

    for case in CASES:
        if case.option is None and re.search(only, case.name):
            found = modules(case)
            print(f"{BEGIN}{case.name}", flush=True)
            for module in found:
                compile_kernel(module)


def compiled(only: str) -> str:
    """What a process with a driver that does nothing prints."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise FileNotFoundError("there is no C compiler here")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "driver.c")
        source.write_text(DRIVER, encoding="utf-8")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", f"{folder}/libcuda.so.1", str(source)], check=True)
        env = os.environ | {
            "LD_LIBRARY_PATH": folder,
            "MOSAIC_GPU_DUMP_PTXAS": "1",
            "JAX_PLATFORMS": "cpu",
            _INSIDE: "1",
        }
        command = [sys.executable, __file__, "--only", only]
        return subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


def main(
    only: Annotated[str, typer.Option(help="Compile the cases whose name this regular expression finds.")] = "",
) -> None:
    """Print registers of a thread, and bytes spilled, of each kernel of a case but its options."""
    if _INSIDE in os.environ:
        compile_all(only)
        return
    for part in compiled(only).split(BEGIN)[1:]:
        case = part.split("\n")[0]
        for kernel in kernels(part):
            print(f"{case:40} {kernel.name:28} {kernel.registers:4} registers, {kernel.spilled} bytes spilled")


if __name__ == "__main__":
    typer.run(main)
