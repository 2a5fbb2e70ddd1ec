"""What a compiled kernel does before it waits for the one before it, read from its Mosaic module; needs no GPU.

The modules' operations are private to JAX; seen to work with jax 0.11.2 and 0.12.0. What is not known to leave global
memory alone counts as an access, so a change there is noticed.
"""

import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import jax
from jax.experimental.mosaic.gpu import dialect
from jax.extend.mlir import ir

PREFIX = "stable_mosaic_gpu."
HARMLESS = re.compile(
    r"(arith|scf)\..*|builtin\.unrealized_conversion_cast|nvvm\.(elect|shfl)\.sync"
    r"|gpu\.(barrier|block_dim|block_id|dynamic_shared_memory|launch|terminator|thread_id)"
    r"|llvm\.(add|mul|extractvalue|insertvalue|getelementptr|inttoptr|ptrtoint|mlir\.\w+)"
    r"|memref\.(alloca|cast|extract_strided_metadata|reinterpret_cast|subview|transpose|view)"
)
"""Operations that touch no memory; of `gpu.launch` and `scf` what they hold counts."""
HARMLESS_ASM = re.compile(r"(@\$\d )?(mbarrier\.init\.shared|fence\.mbarrier_init\.|prefetch\.tensormap)")
"""Descriptors for TMA are among a kernel's parameters."""
ASM = {"griddepcontrol.wait;": "wait", "griddepcontrol.launch_dependents;": "trigger"}
OWN = ("memref.alloca", "gpu.dynamic_shared_memory")
"""Where memory comes from that no other CTA sees."""
ARGUMENT = "mosaic_gpu.from_kernel_arg_idx"


class Step(NamedTuple):
    """One operation that counts.

    Attributes:
      kind: "wait", "trigger" (let the next kernel start), or the name of an operation that may touch global memory.
      argument: the kernel's argument that it reads, where that can be told.
      depth: how many blocks it is in; 1 for what all threads do.
    """

    kind: str
    argument: int | None
    depth: int


def steps(module: bytes) -> list[Step]:
    """What the kernel does, in the order of its text."""
    context = jax.jit(lambda x: x).trace(1.0).lower().compiler_ir("stablehlo").context
    context.allow_unregistered_dialects = True
    dialect.register_dialect(context)
    parsed = ir.Module.parse(module, context=context)  # kept: its operations don't keep it
    (kernel,) = (op for op, _ in _walk(parsed.operation, 0) if _name(op) == "gpu.launch")
    return [step for op, depth in _walk(kernel, 0) if (step := _step(op, depth)) is not None]


def fault(module: bytes, *, there_before: Collection[int] = ()) -> str | None:
    """Why a kernel that is launched early might see memory too soon, or let the next one; or None.

    Args:
      there_before: arguments that it may read before it waits.
    """
    order = [step for step in steps(module) if step.argument is None or step.argument not in there_before]
    begin = [step.kind for step in order[:2]]
    if begin[0] == "trigger":
        return "lets the next kernel start before it waits"
    if begin[0] != "wait":
        return f"{begin[0]} before it waits"
    if order[0].depth > 1:
        return "some threads don't wait"
    if begin[1] != "trigger" or order[1].depth > 1:
        return "lets the next kernel start late"
    return "waits twice" if [s.kind for s in order].count("wait") > 1 else None


def _walk(op: Any, depth: int) -> Iterator[tuple[Any, int]]:
    yield op, depth
    for block in (block for region in op.regions for block in region.blocks):
        for inner in block.operations:
            yield from _walk(inner.operation, depth + 1)


def _name(op: Any) -> str:
    return op.name.removeprefix(PREFIX)


def _step(op: Any, depth: int) -> Step | None:
    name = _name(op)
    if HARMLESS.fullmatch(name):
        return None
    if name == "llvm.inline_asm":
        text = op.attributes["asm_string"].value
        return None if HARMLESS_ASM.match(text) else Step(ASM.get(text, text), None, depth)
    if name == "memref.store":
        return None if _name(_source(op.operands[1])) in OWN else Step(name, None, depth)
    if name == "memref.load":
        source = _source(op.operands[0])
        index = source.attributes[ARGUMENT].value if ARGUMENT in source.attributes else None
        return None if _name(source) in OWN else Step(name, index, depth)
    return Step(name, None, depth)


def _source(memory: Any) -> Any:
    """The operation that a view's memory comes from."""
    op = memory.owner
    while _name(op).startswith("memref.") and _name(op) not in OWN:
        op = op.operands[0].owner
    return op
