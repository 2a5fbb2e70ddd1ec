"""JAX functions of a user's own on PyTorch's tensors, in the order of PyTorch's stream, caches written in place.

This is the general path: any JAX function, by DLPack and XLA. It takes some hundred microseconds a call and can't be
captured in a CUDA graph; `torch.ops.jaxpaged` is the fast path for what it has.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from jaxpaged.bridge import imports, stream_order
from jaxpaged.bridge.dlpack import check_shareable, refuse_capture, refuse_grad, to_jax, to_torch
from jaxpaged.bridge.process import leave_memory_to_torch, refuse_after_fork
from jaxpaged.metadata.checks import shape_text

if torch.cuda.is_available():
    leave_memory_to_torch()


def torch_call(function: Callable[..., Any], *args: Any, donate: Sequence[int] = ()) -> Any:
    """Call a JAX function on PyTorch's tensors: compiled, without a copy of them, in the order of PyTorch's stream.

    A cache is passed as `jaxpaged.bridge.dlpack.tensor_cache` makes it, and is a `KVCache` in the function::

        def step(cache, query, key, value, batch):
            cache = write_kv(cache, key, value, batch.slot_mapping)
            return paged_attention(query, cache, batch), cache

        cache = tensor_cache(key_cache, value_cache)  # tensors [num_blocks, block_size, num_kv_heads, head_size]
        output = torch_call(step, cache, query, key, value, batch, donate=[0])  # a tensor; the caches are written

    On a GPU the function starts when PyTorch's current stream has done what is queued there, and that stream waits for
    it; the host waits for neither. A tensor is imported once and found again for as long as its memory lives. Tensors
    may be freed right after the call, and results are PyTorch's own memory. On the CPU the call returns when all is
    done, and as JAX donates none of PyTorch's memory there, new values of donated arguments are copied into it, whole.

    Args:
      function: pure, as for `jax.jit`. It is compiled once for each set of shapes, so pass the same object each time.
        Without `donate` it returns its result, any pytree of arrays. With it, a tuple: the result, then the new value
        of each donated argument in the order of `donate`, of its shape and dtype.
      args: pytrees of tensors of one device, compact (see `physical_order`), of the dtypes that `to_jax` takes; int64
        goes in by `int64_words` and is read by `words_to_slots`. Arrays of JAX or NumPy and numbers pass as they are.
      donate: positions of arguments whose tensors are overwritten by their new values. Nothing else may lie in their
        memory.

    Returns:
      The result, with tensors instead of arrays.

    Raises:
      TypeError, ValueError: an argument or what the function returns doesn't fit; nothing has been written.
      RuntimeError: a CUDA graph is being captured, or the process was forked.
    """
    donate = _checked_positions(donate, len(args))
    leaves, tree = jax.tree.flatten(args)
    is_tensor = tuple(isinstance(x, torch.Tensor) for x in leaves)
    try:
        call = _call(function, tree, donate, is_tensor)
    except TypeError as error:
        raise TypeError(f"function: expected a function that can be hashed, got {function!r}: {error}") from error
    return call(leaves)


@functools.lru_cache(maxsize=1024)
def _call(function: Callable[..., Any], tree: Any, donate: tuple[int, ...], is_tensor: tuple[bool, ...]) -> "_Call":
    return _Call(function, tree, donate, is_tensor)


class _Call:
    """A function with the structure of its arguments, compiled for whatever shapes they have.

    The compiled program takes donated memory, that of the arguments and that of the results, in the order in which it
    returns their new contents: by this order JAX pairs what it returns with what it was given.
    """

    def __init__(
        self, function: Callable[..., Any], tree: Any, donate: tuple[int, ...], is_tensor: tuple[bool, ...]
    ) -> None:
        self._function, self._tree, self._positions = function, tree, donate
        self._is_tensor = is_tensor
        placed = tree.unflatten(range(tree.num_leaves))
        donated = [i for position in donate for i in jax.tree.leaves(placed[position])]
        self._names = [
            f"args{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_flatten_with_path(placed)[0]
        ]
        self._donated = [i for i in donated if is_tensor[i]]
        self._others = [i for i in range(tree.num_leaves) if i not in self._donated]
        self._kept = [is_tensor[i] for i in donated]
        self._program = jax.jit(self._run, donate_argnums=(0, 1), keep_unused=True)
        self._results: dict[Any, Any] = {}

    def __call__(self, leaves: list[Any]) -> Any:
        device = self._checked_device(leaves)
        structs, tree = self._result_shapes(leaves)
        token = stream_order.queued_work(device)
        results = [torch.empty(x.shape, dtype=_torch_dtype(x.dtype), device=device) for x in structs]
        targets = [leaves[i] for i in self._donated]
        others = [self._argument(leaves[i], self._names[i]) for i in self._others]
        donated = [imports.take(leaves[i], self._names[i]) for i in self._donated]
        *arrays, done = self._program(donated, [to_jax(x, "function's result") for x in results], others, token)
        stream_order.wait_for(done)
        stream_order.keep_until_done(*(x for x in leaves if isinstance(x, torch.Tensor)))
        for tensor, array in zip(targets, arrays[0], strict=True):
            _put(tensor, array)
        for tensor, array in zip(results, arrays[1], strict=True):
            if not _is_on(tensor, array):
                _copy(tensor, array)
        return tree.unflatten(results)

    def _argument(self, leaf: Any, name: str) -> Any:
        return imports.find(leaf, name) if isinstance(leaf, torch.Tensor) else leaf

    def _run(self, donated: list[Any], results: list[Any], others: list[Any], token: Any) -> Any:
        """The program. `results` are there for their memory; `token` is waited for, and its successor comes last."""
        del results
        new, result = self._computed(donated, others)
        # Without this an argument that the function returns would be returned as it is, in its own memory.
        return new, jax.lax.optimization_barrier(jax.tree.leaves(result)), token + 1

    def _computed(self, donated: list[Any], others: list[Any]) -> tuple[list[Any], Any]:
        """New values of the donated tensors, and the result."""
        leaves = dict(zip((*self._donated, *self._others), (*donated, *others), strict=True))
        args = self._tree.unflatten([leaves[i] for i in range(len(leaves))])
        returned = self._function(*args)
        if not self._positions:
            return [], returned
        if not isinstance(returned, tuple) or len(returned) != 1 + len(self._positions):
            raise TypeError(
                f"function: expected to return a tuple of its result and the new values of {len(self._positions)} "
                f"donated arguments, got {_kind(returned)}"
            )
        result, *values = returned
        for position, value in zip(self._positions, values, strict=True):
            _check_new_value(f"args[{position}]", args[position], value)
        new = [x for x, kept in zip(jax.tree.leaves(values), self._kept, strict=True) if kept]
        return new, result

    def _result_shapes(self, leaves: list[Any]) -> Any:
        """Shapes and dtypes of the result, leaf by leaf, and its structure; found once for such arguments."""
        name = tuple(map(_signature, leaves))
        found = self._results.get(name)
        if found is None:
            for name_of, x in zip(self._names, leaves, strict=True):
                if isinstance(x, torch.Tensor):
                    check_shareable(x, name_of)  # here for the dtype, which JAX may not have
            shapes = [_shape(x) if isinstance(x, torch.Tensor) else x for x in leaves]
            given = ([shapes[i] for i in self._donated], [shapes[i] for i in self._others])
            _, result = jax.eval_shape(self._computed, *given)
            found = self._results[name] = jax.tree.flatten(result)
        return found

    def _checked_device(self, leaves: list[Any]) -> torch.device:
        """The device of all tensors, of which none is refused for what it is, nor lies in a donated one's memory."""
        tensors = [(name, x) for name, x in zip(self._names, leaves, strict=True) if isinstance(x, torch.Tensor)]
        if not tensors:
            raise TypeError("args: expected at least one tensor, got none; call the function by JAX alone")
        device = tensors[0][1].device
        for name, x in tensors:
            if x.device != device:
                raise ValueError(f"{name}: expected a tensor on {device}, as {tensors[0][0]} is, got one on {x.device}")
            refuse_grad(x, name)
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"{tensors[0][0]}: expected a tensor on the CPU or a CUDA device, got one on {device}")
        if device.type == "cuda":
            refuse_after_fork()
            refuse_capture(device, getattr(self._function, "__name__", "function"))
        if self._donated:
            self._check_apart(leaves)
        return device

    def _check_apart(self, leaves: list[Any]) -> None:
        places = sorted(
            (x.data_ptr(), x.data_ptr() + x.numel() * x.element_size(), i)
            for i, x in enumerate(leaves)
            if isinstance(x, torch.Tensor) and x.numel()
        )
        end, last = 0, -1
        for start, stop, i in places:
            if start < end and (i in self._donated or last in self._donated):
                raise ValueError(
                    f"{self._names[i]}: it shares memory with {self._names[last]}, and a donated argument's memory "
                    f"must be its own; pass the tensor that holds both once, such as tensor_cache makes"
                )
            if stop > end:
                end, last = stop, i


def _put(tensor: torch.Tensor, array: jax.Array) -> None:
    """See to it that a donated tensor has its new value: on a GPU it lies there already."""
    if _is_on(tensor, array):
        imports.keep(tensor, array)
    elif tensor.device.type == "cpu":
        _copy(tensor, array)
    else:
        raise RuntimeError("donate: JAX didn't keep a donated tensor's memory, so it has not been written")


def _copy(tensor: torch.Tensor, array: jax.Array) -> None:
    with torch.no_grad():
        tensor.copy_(to_torch(array))
    if tensor.device.type == "cuda":  # XLA would use the array's memory anew, whatever PyTorch's stream does
        torch.cuda.current_stream(tensor.device).synchronize()


def _is_on(tensor: torch.Tensor, array: jax.Array) -> bool:
    return tensor.numel() == 0 or array.unsafe_buffer_pointer() == tensor.data_ptr()


def _check_new_value(name: str, old: Any, new: Any) -> None:
    expected: Any = jax.tree.structure(old)
    got: Any = jax.tree.structure(new)
    if expected != got:
        raise TypeError(f"function: expected to return a new value of {name} that is {expected}, got {got}")
    for was, is_now in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        if (jnp.shape(was), jnp.result_type(was)) != (jnp.shape(is_now), jnp.result_type(is_now)):
            raise ValueError(
                f"function: expected to return a new value of {name} with {jnp.result_type(was)}"
                f"{shape_text(jnp.shape(was))} in it, got {jnp.result_type(is_now)}{shape_text(jnp.shape(is_now))}"
            )


def _checked_positions(donate: Sequence[int], num_args: int) -> tuple[int, ...]:
    positions = tuple(donate)
    for i in positions:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < num_args:
            raise ValueError(f"donate: expected positions of {num_args} arguments, from 0 on, got {i!r}")
    if len(set(positions)) != len(positions):
        raise ValueError(f"donate: expected each position once, got {list(positions)}")
    return positions


def _signature(x: Any) -> Any:
    """What a result's shapes and dtypes depend on."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return tuple(x.shape), x.dtype, getattr(x, "weak_type", False)
    return type(x)


def _shape(x: torch.Tensor) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(x.shape), str(x.dtype).removeprefix("torch."))


def _torch_dtype(dtype: Any) -> torch.dtype:
    found = getattr(torch, dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"function: it returns {dtype}, which PyTorch lacks")
    return found


def _kind(x: Any) -> str:
    return f"{len(x)} values" if isinstance(x, tuple) else type(x).__name__
