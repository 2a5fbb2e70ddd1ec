"""What a JAX function launches on a GPU, read from its StableHLO: Mosaic GPU kernels in order, over numbered buffers.

Only functions that consist of kernels can be read: around them there may be reshapes and other views of the same bytes,
constants, and memory that nothing has written. Any other operation would be computed by XLA, and is refused.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.mlir import ir

KERNEL = "mosaic_gpu_v2"
"""The target of Pallas' custom calls in jax 0.11 and 0.12."""
CONFIG_NAMES = frozenset(
    ("kernel_hash", "module", "skip_device_barrier", "use_custom_barrier", "uses_xla_collective_metadata")
)
"""What such a call says of its kernel in those versions. Anything else might change how it is to be launched."""
_UNWRITTEN = "AllocateBuffer"
_VIEWS = ("stablehlo.reshape", "stablehlo.bitcast_convert", "stablehlo.optimization_barrier")


class GlueError(ValueError):
    """A function does something besides launching kernels."""


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """One launch.

    Attributes:
      module: the kernel, as Mosaic serialises it.
      buffers: numbers of the buffers that it gets, operands before results. A result that is written in place has its
        operand's number.
      written: those of them that are results.
    """

    module: bytes
    buffers: tuple[int, ...]
    written: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class KernelCalls:
    """The launches of a function.

    Attributes:
      calls: in order.
      num_inputs: buffers 0 to `num_inputs - 1` are the function's arguments, leaf by leaf.
      outputs: for each leaf of the result its buffer, which may be that of an argument written in place.
      constants: by buffer.
      sizes: bytes of each buffer.
    """

    calls: tuple[KernelCall, ...]
    num_inputs: int
    outputs: tuple[int, ...]
    constants: dict[int, np.ndarray]
    sizes: tuple[int, ...]

    @property
    def mutated(self) -> frozenset[int]:
        """The arguments that are written in place."""
        return frozenset(b for call in self.calls for b in call.written if b < self.num_inputs)

    @property
    def results(self) -> tuple[int, ...]:
        """The buffers of the result that are no arguments, each once."""
        return tuple(dict.fromkeys(b for b in self.outputs if b >= self.num_inputs))

    @property
    def intermediates(self) -> tuple[int, ...]:
        """The buffers that live as long as a call."""
        taken = {*self.results, *self.constants}
        return tuple(b for b in range(self.num_inputs, len(self.sizes)) if b not in taken)


class _View(NamedTuple):
    """The bytes of a buffer, as they are after so many writes."""

    buffer: int
    writes: int


def kernel_calls(lowered: jax.stages.Lowered) -> KernelCalls:
    """The kernels of a function that was lowered for CUDA.

    Raises:
      GlueError: it does something else besides, or reads what a kernel has overwritten.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    return _Reader(module).read()


class _Reader:
    def __init__(self, module: Any):
        operations = [op.operation for op in module.body.operations]
        self._functions = {op.attributes["sym_name"].value: op.regions[0].blocks[0] for op in operations}
        self._calls: list[KernelCall] = []
        self._sizes: list[int] = []
        self._writes: list[int] = []
        self._constants: dict[int, np.ndarray] = {}

    def read(self) -> KernelCalls:
        main = self._functions["main"]
        arguments = [self._new(argument.type) for argument in main.arguments]
        results = [self._current(x, "the function's result") for x in self._run(main, arguments)]
        outputs = tuple(self._new_constant(x).buffer if isinstance(x, np.ndarray) else x.buffer for x in results)
        for buffer in outputs:
            if buffer in self._constants:
                raise GlueError("the function returns a constant, which no kernel writes")
        return KernelCalls(tuple(self._calls), len(arguments), outputs, self._constants, tuple(self._sizes))

    def _run(self, block: ir.Block, arguments: Sequence[Any]) -> list[Any]:
        """What a block returns: views, and constants that no kernel has read yet."""
        values: dict[ir.Value, Any] = dict(zip(block.arguments, arguments, strict=True))
        for op in (op.operation for op in block.operations):
            inputs = [values[x] for x in op.operands]
            if op.name in ("func.return", "sdy.return"):
                return inputs
            values.update(zip(op.results, self._results(op, inputs), strict=True))
        raise GlueError("the function returns nothing")

    def _results(self, op: Any, inputs: list[Any]) -> Sequence[Any]:
        if op.name in _VIEWS:
            return [self._viewed(op, i, x) for i, x in enumerate(inputs)]
        if op.name == "func.call":
            return self._run(self._functions[op.attributes["callee"].value], inputs)
        if op.name == "stablehlo.constant":
            return [_constant(op)]
        if op.name == "stablehlo.broadcast_in_dim" and isinstance(inputs[0], np.ndarray) and inputs[0].ndim == 0:
            return [np.broadcast_to(inputs[0], op.results[0].type.shape)]
        target = op.attributes["call_target_name"].value if op.name == "stablehlo.custom_call" else None
        if target == _UNWRITTEN:
            return [self._new(op.results[0].type)]
        if target == KERNEL:
            return self._launched(op, inputs)
        raise GlueError(f"expected kernels alone, got {op.name if target is None else target}: {_shown(op)}")

    def _launched(self, op: Any, inputs: list[Any]) -> list[_View]:
        views = [self._new_constant(x) if isinstance(x, np.ndarray) else self._current(x, _shown(op)) for x in inputs]
        in_place = dict(_aliases(op))
        results = [
            views[in_place[i]] if i in in_place else self._new(result.type) for i, result in enumerate(op.results)
        ]
        for i, operand in in_place.items():
            buffer = results[i].buffer
            if buffer in self._constants or [v.buffer for v in views].count(buffer) > 1:
                raise GlueError(
                    f"operand {operand} is written in place, but is a constant or given twice: {_shown(op)}"
                )
        for view in results:
            self._writes[view.buffer] += 1
        buffers = (*(v.buffer for v in views), *(v.buffer for v in results))
        self._calls.append(KernelCall(_module(op), buffers, tuple(v.buffer for v in results)))
        return [_View(v.buffer, self._writes[v.buffer]) for v in results]

    def _viewed(self, op: Any, index: int, x: Any) -> Any:
        shape = op.results[index].type.shape
        if _num_bytes(op.operands[index].type) != _num_bytes(op.results[index].type):
            raise GlueError(f"expected a view of the same bytes: {_shown(op)}")
        if isinstance(x, np.ndarray):
            if op.name == "stablehlo.bitcast_convert":
                raise GlueError(f"a constant is not converted: {_shown(op)}")
            return x.reshape(shape)
        return x

    def _current(self, x: Any, reader: str) -> Any:
        if isinstance(x, _View) and x.writes != self._writes[x.buffer]:
            raise GlueError(f"a kernel has overwritten what is read afterwards, by {reader}")
        return x

    def _new(self, kind: Any) -> _View:
        self._sizes.append(_num_bytes(kind))
        self._writes.append(0)
        return _View(len(self._sizes) - 1, 0)

    def _new_constant(self, x: np.ndarray) -> _View:
        self._sizes.append(x.nbytes)
        self._writes.append(0)
        self._constants[len(self._sizes) - 1] = np.ascontiguousarray(x)
        return _View(len(self._sizes) - 1, 0)


def _module(op: Any) -> bytes:
    config = op.attributes["mhlo.backend_config"]
    given = {config[i].name: config[i].attr for i in range(len(config))}
    if set(given) - {"cost_estimate_json"} != CONFIG_NAMES:
        raise GlueError(f"expected a kernel's {sorted(CONFIG_NAMES)}, got {sorted(given)}; this jax is not known")
    flags = [name for name in CONFIG_NAMES - {"kernel_hash", "module"} if given[name].value]
    if flags:
        raise GlueError(f"a kernel asks for {flags}, which is not known here")
    for layouts in (op.attributes["operand_layouts"], op.attributes["result_layouts"]):
        for layout in layouts:
            axes = list(layout)
            if axes != sorted(axes, reverse=True):
                raise GlueError(f"expected row-major operands and results, got {layout}")
    return given["module"].value_bytes


def _aliases(op: Any) -> Iterator[tuple[int, int]]:
    """Pairs of a result and the operand in whose memory it is written."""
    if "output_operand_aliases" not in op.attributes:
        return
    for alias in op.attributes["output_operand_aliases"]:
        text = str(alias)
        results = re.search(r"output_tuple_indices = \[([\d, ]*)\]", text)
        operand = re.search(r"\boperand_index = (\d+), operand_tuple_indices = \[\]", text)
        if results is None or operand is None or "," in results[1]:
            raise GlueError(f"expected a result written in an operand's memory, got {text}")
        yield int(results[1] or 0), int(operand[1])


def _num_bytes(kind: Any) -> int:
    element = str(kind.element_type)
    bits = 8 if element == "i1" else int(kind.element_type.width)
    return math.prod(kind.shape) * bits // 8


def _constant(op: Any) -> np.ndarray:
    attribute = op.attributes["value"]
    try:
        return np.array(attribute)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise GlueError(f"a constant that NumPy doesn't know: {_shown(op)}") from error


def _shown(op: Any) -> str:
    text = str(op)
    return "".join(itertools.islice(text, 160)) + ("..." if len(text) > 160 else "")
