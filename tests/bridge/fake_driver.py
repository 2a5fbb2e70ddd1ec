"""A CUDA driver of our own, as far as `replays.h` needs one: streams, captures, graphs of kernels, and launches.

Handles are small numbers. What a graph owns is overwritten when the graph is destroyed.
"""

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

Pointer, Int, Size, Unsigned = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint32
COOPERATIVE, CLUSTER, EARLY = 2, 4, 6
INVALID_VALUE, FAILED = 1, 999
GLOBAL, RELAXED = 0, 2
GRID, BLOCK, SHARED = (132, 2, 3), (128, 4, 1), 70_000
LAYOUT = ((0, 4), (64, 128), (192, 8))
"""Offset and size of each of a kernel's parameters: a number, descriptors of its buffers, and a pointer."""


class NodeParameters(ctypes.Structure):
    _fields_ = [
        ("function", Pointer), ("grid", Unsigned * 3), ("block", Unsigned * 3), ("shared", Unsigned),
        ("parameters", ctypes.POINTER(Pointer)), ("extra", Pointer), ("kernel", Pointer), ("context", Pointer),
    ]  # fmt: skip


class Attribute(ctypes.Structure):
    _fields_ = [("id", Unsigned), ("padding", Unsigned), ("value", Unsigned * 16)]


class Config(ctypes.Structure):
    _fields_ = [
        ("grid", Unsigned * 3), ("block", Unsigned * 3), ("shared", Unsigned), ("stream", Pointer),
        ("attributes", ctypes.POINTER(Attribute)), ("num_attributes", Unsigned),
    ]  # fmt: skip


class Launch(NamedTuple):
    """What `cuLaunchKernelEx` was called with."""

    stream: int
    function: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    parameters: tuple[bytes, ...]
    attributes: dict[int, tuple[int, ...]]


def parameters(number: int, addresses: tuple[int, ...]) -> tuple[bytes, ...]:
    """What a kernel's parameters are: its number, its buffers' addresses in place of descriptors, and the last one."""
    each = b"".join(address.to_bytes(8, "little") for address in addresses)
    return number.to_bytes(4, "little"), each.ljust(128, b"\1")[:128], addresses[-1].to_bytes(8, "little")


class Node:
    """A kernel in a graph."""

    def __init__(self, number: int, addresses: tuple[int, ...]) -> None:
        self.function = function_of(number)
        self.memory = [ctypes.create_string_buffer(x, len(x)) for x in parameters(number, addresses)]
        self.pointers = (Pointer * len(LAYOUT))(*[ctypes.addressof(x) for x in self.memory])

    def destroy(self) -> None:
        for x in self.memory:
            ctypes.memset(x, 0xDD, len(x))
        ctypes.memset(self.pointers, 0, ctypes.sizeof(self.pointers))


def function_of(number: int) -> int:
    return 5000 + number


@dataclasses.dataclass
class FakeDriver:
    """The driver.

    Attributes:
      errors: of functions, by name.
      capturing: streams of others that are captured.
      cluster: what nodes say of clusters.
      cooperative: what nodes say of cooperative launches.
      node_kind: of all nodes.
      layout: see `LAYOUT`.
      mode: this thread's capture mode; each change is in `modes`.
      launches: what was launched.
      captures: what is being captured, by stream.
      streams: that live.
      num_captures: that have begun.
      graphs: that live, by handle.
    """

    errors: dict[str, int] = dataclasses.field(default_factory=dict)
    capturing: set[int] = dataclasses.field(default_factory=set)
    cluster: tuple[int, int, int] = (0, 0, 0)
    cooperative: int = 0
    node_kind: int = 0
    layout: tuple[tuple[int, int], ...] = LAYOUT
    mode: int = GLOBAL
    modes: list[int] = dataclasses.field(default_factory=list)
    launches: list[Launch] = dataclasses.field(default_factory=list)
    captures: dict[int, list[tuple[int, tuple[int, ...]]]] = dataclasses.field(default_factory=dict)
    streams: list[int] = dataclasses.field(default_factory=list)
    num_captures: int = 0
    graphs: dict[int, list[Node]] = dataclasses.field(default_factory=dict)
    _nodes: dict[int, Node] = dataclasses.field(default_factory=dict)
    _handles: int = 1000

    def addresses(self) -> dict[str, int]:
        """Of its functions, which live as long as this."""
        self._functions = {name: function(self._with_error(name, call)) for name, (function, call) in self._all()}
        return {name: ctypes.cast(f, Pointer).value or 0 for name, f in self._functions.items()}

    def _all(self) -> Any:
        words = ctypes.POINTER(Pointer)

        def of(*kinds: Any) -> Any:
            return ctypes.CFUNCTYPE(Int, *kinds)

        return {
            "cuThreadExchangeStreamCaptureMode": (of(ctypes.POINTER(Int)), self._exchange),
            "cuStreamCreate": (of(words, Unsigned), self._create),
            "cuStreamDestroy_v2": (of(Pointer), self._destroy),
            "cuStreamIsCapturing": (of(Pointer, ctypes.POINTER(Int)), self._is_capturing),
            "cuStreamBeginCapture_v2": (of(Pointer, Int), self._begin),
            "cuStreamEndCapture": (of(Pointer, words), self._end),
            "cuGraphDestroy": (of(Pointer), self._destroy_graph),
            "cuGraphGetNodes": (of(Pointer, words, ctypes.POINTER(Size)), self._get_nodes),
            "cuGraphNodeGetType": (of(Pointer, ctypes.POINTER(Int)), self._get_type),
            "cuGraphKernelNodeGetParams_v2": (of(Pointer, ctypes.POINTER(NodeParameters)), self._get_parameters),
            "cuGraphKernelNodeGetAttribute": (of(Pointer, Int, ctypes.POINTER(Unsigned)), self._get_attribute),
            "cuFuncGetParamInfo": (of(Pointer, Size, ctypes.POINTER(Size), ctypes.POINTER(Size)), self._get_layout),
            "cuLaunchKernelEx": (of(ctypes.POINTER(Config), Pointer, words, Pointer), self._launch),
        }.items()

    def _with_error(self, name: str, call: Callable[..., int | None]) -> Callable[..., int]:
        return lambda *arguments: self.errors.get(name) or call(*arguments) or 0

    def _new_handle(self) -> int:
        self._handles += 1
        return self._handles

    def _exchange(self, mode: Any) -> None:
        mode[0], self.mode = self.mode, mode[0]
        self.modes.append(self.mode)

    def _create(self, stream: Any, flags: int) -> None:
        assert flags == 1  # CU_STREAM_NON_BLOCKING
        stream[0] = self._new_handle()
        self.streams.append(stream[0])

    def _destroy(self, stream: int) -> None:
        assert stream not in self.captures
        self.streams.remove(stream)

    def _is_capturing(self, stream: int, status: Any) -> None:
        status[0] = stream in self.capturing

    def _begin(self, stream: int, mode: int) -> None:
        assert mode == RELAXED
        assert stream in self.streams
        self.captures[stream] = []
        self.num_captures += 1

    def _end(self, stream: int, graph: Any) -> None:
        graph[0] = self._new_handle()
        self.graphs[graph[0]] = [Node(*launch) for launch in self.captures.pop(stream)]

    def _destroy_graph(self, graph: int) -> None:
        for node in self.graphs.pop(graph):
            node.destroy()

    def _get_nodes(self, graph: int, nodes: Any, count: Any) -> None:
        found = self.graphs[graph][: count[0]]
        for i, node in enumerate(found):
            nodes[i] = self._new_handle()
            self._nodes[nodes[i]] = node
        count[0] = len(found)

    def _get_type(self, node: int, kind: Any) -> None:
        kind[0] = self.node_kind

    def _get_parameters(self, node: int, found: Any) -> None:
        kernel = self._nodes[node]
        pointers = ctypes.cast(kernel.pointers, ctypes.POINTER(Pointer))
        found[0] = NodeParameters(kernel.function, GRID, BLOCK, SHARED, pointers, None, None, None)

    def _get_attribute(self, node: int, name: int, value: Any) -> int:
        known = {COOPERATIVE: (self.cooperative,), CLUSTER: self.cluster}
        if name not in known:
            return INVALID_VALUE
        for i, x in enumerate(known[name]):
            value[i] = x
        return 0

    def _get_layout(self, function: int, index: int, offset: Any, size: Any) -> int:
        if index >= len(self.layout):
            return INVALID_VALUE
        offset[0], size[0] = self.layout[index]
        return 0

    def _launch(self, config: Any, function: int, given: Any, extra: Any) -> None:
        assert extra is None
        x = config[0]
        assert x.num_attributes == 0 or x.attributes
        attributes = {a.id: tuple(a.value[:3]) for a in x.attributes[: x.num_attributes]}
        got = tuple(ctypes.string_at(given[i], size) for i, (_, size) in enumerate(self.layout))
        self.launches.append(Launch(x.stream, function, tuple(x.grid), tuple(x.block), x.shared, got, attributes))


NAMES = tuple(FakeDriver().addresses())
"""The functions that `replays.h` uses."""
