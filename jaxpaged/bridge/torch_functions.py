"""Mask and score functions written in PyTorch, as JAX functions that compiled attention can call on every score.

A function is traced once on tensors of one element each and becomes a list of operations. Two functions with equal
lists are equal, and the tensors that they hold are arguments of the compiled program: an engine may make a new function
every step, around new tensors, and nothing is compiled anew while shapes stay the same.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from jaxpaged.bridge.aten_ops import OPS, as_constant, jax_dtype
from jaxpaged.bridge.cache_shapes import array_shape
from jaxpaged.metadata.masks import as_pytree

POSITIONS = (torch.int32,) * 4
SCORE_AND_POSITIONS = (torch.float32, *POSITIONS)
"""Dtypes of the arguments of a mask function and of a score function."""

_PLACES = ("device", "layout", "pin_memory", "memory_format", "non_blocking")
"""Arguments that say where and how a tensor lies."""


class _Ref(NamedTuple):
    """A value that a step uses: an argument, a constant or the result of an earlier step."""

    kind: Literal["argument", "constant", "result"]
    number: int


class _Step(NamedTuple):
    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TorchFunction:
    """A traced function, as a pytree whose leaves are the tensors that it holds.

    Attributes:
      constants: arrays on the memory of these tensors, or in 32 bits where they have 64.
      steps: the operations in order.
      output: what is returned, a value or a number.
    """

    constants: tuple[Any, ...]
    steps: tuple[_Step, ...] = dataclasses.field(metadata={"static": True})
    output: Any = dataclasses.field(metadata={"static": True})

    def __call__(self, *args: Any) -> Any:
        results: list[Any] = []
        values = {"argument": args, "constant": [jnp.asarray(x) for x in self.constants], "result": results}

        def value(x: Any) -> Any:
            if isinstance(x, _Ref):
                return values[x.kind][x.number]
            return tuple(map(value, x)) if isinstance(x, tuple) else x

        for step in self.steps:
            results.append(OPS[step.op](*map(value, step.args), **{name: value(x) for name, x in step.kwargs}))
        return jnp.asarray(value(self.output))


def jax_function(
    name: str, function: Any, dtypes: Sequence[torch.dtype], device: torch.device | str = "cpu"
) -> Callable[..., Any]:
    """A user's function, of PyTorch or of JAX, as a pytree for `jaxpaged.paged_attention`.

    Args:
      name: what messages call it.
      function: of tensors that broadcast against each other, to be treated element by element. It may index tensors by
        its arguments. A pytree passes as it is.
      dtypes: of its arguments.
      device: of the tensors that it is traced on, and of those that it may hold. A GPU's stay tensors in the pytree, an
        argument for `torch_call`.

    Raises:
      TypeError: it is not a function, looks at values in Python (`if`), or uses an operation that has no counterpart.
    """
    if not callable(function):
        raise TypeError(f"{name}: expected a function, got {type(function).__name__}")
    if not jax.tree_util.all_leaves([function]):
        return function
    try:
        traced = _traced(function, dtypes, device)
        _check(traced, dtypes)
        return traced
    except Exception as error:  # whatever a user's function raises on tensors, it may be one of JAX
        try:
            _check(function, dtypes)
        except Exception:
            raise TypeError(
                f"{name}: expected a function of PyTorch or of JAX that works element by element, but {error}"
            ) from error
        return as_pytree(name, function)


def _check(function: Any, dtypes: Sequence[torch.dtype]) -> None:
    """Raise unless it can be traced by JAX and makes one element of one."""
    arguments = [jax.ShapeDtypeStruct((1,), jax_dtype(dtype)) for dtype in dtypes]
    if isinstance(function, TorchFunction):  # the tensors that it holds may be a GPU's, which JAX doesn't take
        result = jax.eval_shape(lambda traced, *args: traced(*args), jax.tree.map(array_shape, function), *arguments)
    else:
        result = jax.eval_shape(function, *arguments)
    if result.shape not in ((), (1,)):
        raise ValueError(f"it makes shape {list(result.shape)} of one element")


def _traced(function: Any, dtypes: Sequence[torch.dtype], device: torch.device | str) -> TorchFunction:
    with torch.no_grad():
        # One element, not none of its axes: a tensor without axes would be read when it is an index.
        elements = [torch.zeros(1, dtype=dtype, device=device) for dtype in dtypes]
        module = make_fx(lambda *args: _checked(function(*args)))(*elements)
        trace = _Trace()
        for node in module.graph.nodes:
            trace.add(node, module)
    return TorchFunction(tuple(map(as_constant, trace.constants)), tuple(trace.steps), trace.output)


def _checked(result: Any) -> Any:
    if not isinstance(result, torch.Tensor | bool | int | float):
        raise TypeError(f"it returns {type(result).__name__}, expected a tensor")
    return result


class _Trace:
    """The steps of a graph of PyTorch's. What depends on no argument is computed here and now, by PyTorch."""

    def __init__(self) -> None:
        self.constants: list[torch.Tensor] = []
        self.steps: list[_Step] = []
        self.output: Any = None
        self._known: dict[Any, Any] = {}  # by node: a _Ref, or a tensor that depends on no argument
        self._num_arguments = 0

    def add(self, node: Any, module: Any) -> None:
        if node.op == "placeholder":
            self._known[node] = _Ref("argument", self._num_arguments)
            self._num_arguments += 1
        elif node.op == "get_attr":
            self._known[node] = getattr(module, node.target)
        elif node.op == "call_function":
            self._known[node] = self._called(node)
        elif node.op == "output":
            self.output = self._stored(self._resolved(node.args[0]))

    def _called(self, node: Any) -> Any:
        args, kwargs = self._resolved(tuple(node.args)), self._resolved(dict(node.kwargs))
        inputs = [self._known[n] for n in node.all_input_nodes]
        if not any(isinstance(x, _Ref) for x in inputs):
            return node.target(*args, **kwargs)
        op = node.target.overloadpacket.__name__
        if op not in OPS:
            raise NotImplementedError(f"{node.target} has no counterpart here")
        kept = {name: self._stored(x) for name, x in kwargs.items() if name not in _PLACES}
        self.steps.append(_Step(op, self._stored(args), tuple(kept.items())))
        return _Ref("result", len(self.steps) - 1)

    def _resolved(self, x: Any) -> Any:
        """Nodes replaced by what is known of them; lists become tuples, which are hashable."""
        if isinstance(x, torch.fx.Node):
            return self._known[x]
        if isinstance(x, dict):
            return {name: self._resolved(value) for name, value in x.items()}
        return tuple(map(self._resolved, x)) if isinstance(x, list | tuple) else x

    def _stored(self, x: Any) -> Any:
        """Tensors replaced by constants; _Refs are tuples, too."""
        if isinstance(x, torch.Tensor):
            self.constants.append(x)
            return _Ref("constant", len(self.constants) - 1)
        return tuple(map(self._stored, x)) if isinstance(x, tuple) and not isinstance(x, _Ref) else x
