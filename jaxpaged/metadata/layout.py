"""How a KV cache lies in memory: one description for every layout, read and written by the same few index rules."""

import dataclasses
from typing import Any, Literal

from jaxpaged.metadata.checks import shape_text

Which = Literal["key", "value"]

_PRESETS: dict[str, tuple[str, str | None]] = {
    "NHD": ("n s h d", "n s h d"),
    "HND": ("n h s d", "n h s d"),
    "2NHD": ("2 n s h d", None),
    "2HND": ("2 n h s d", None),
    "N2HD": ("n 2 s h d", None),
    "HN2D": ("n h s (2d)", None),
    "NH2D": ("n s h (2d)", None),
    "VLLM_V0": ("n h d s x", "n h d s"),
}
_PRESET_NAMES = {axes: name for name, axes in _PRESETS.items()}
_AXIS_NAMES = {
    "n": "num_blocks",
    "s": "block_size",
    "h": "num_kv_heads",
    "d": "head_size",
    "2": "2",
    "(2d)": "head_size + v_head_size",
    "x": "x",
}


@dataclasses.dataclass(frozen=True)
class CacheDims:
    """Sizes of a KV cache, whatever its layout."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int
    v_head_size: int


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """The axes of the buffers of a KV cache, from the outermost to the innermost.

    An axis is a letter: `n` physical block, `s` slot within the block, `h` kv head, `d` element of the head, `2` key or
    value, `(2d)` a row that holds the head's key and then its value, `x` the inner part of a head split as
    `d` = head_size / x and `x` (the layout of vLLM's first paged attention kernels, for keys).

    Attributes:
      key: axes of the key buffer, or of the one buffer that holds both.
      value: axes of the value buffer; None when `key` names an axis `2` or `(2d)` and so holds both.

    Named layouts: `NHD` [n, s, h, d] and `HND` [n, h, s, d], separate; `2NHD` [2, n, s, h, d], `2HND` [2, n, h, s, d],
    `N2HD` [n, 2, s, h, d], `HN2D` [n, h, s, 2 * d] and `NH2D` [n, s, h, 2 * d], combined; `VLLM_V0`, keys
    [n, h, d / x, s, x] and values [n, h, d, s].
    """

    key: str
    value: str | None = None

    def __post_init__(self) -> None:
        for which, axes in (("key", self.key), ("value", self.value)):
            if axes is not None:
                self._check_axes(which, axes)
        holds_both = any(axis in self.key.split() for axis in ("2", "(2d)"))
        if holds_both != (self.value is None):
            raise ValueError(
                f"layout: a layout needs `value` axes, or an axis `2` or `(2d)` in `key`, not both: "
                f"got key={self.key!r}, value={self.value!r}"
            )

    @staticmethod
    def _check_axes(which: str, axes: str) -> None:
        names = axes.split()
        row = "(2d)" if "(2d)" in names and which == "key" else "d"
        required = {"n", "s", "h", row}
        optional = {"x"} if row == "d" and "2" not in names else set()
        if row == "d" and which == "key":
            optional.add("2")
        if len(set(names)) != len(names) or not required <= set(names) <= required | optional:
            raise ValueError(
                f"layout: {which} axes must be n, s, h and d (or (2d)), each once, with 2 or x at most: got {axes!r}"
            )
        if next(name for name in names if name != "2") != "n" or "n" not in names[:2]:
            raise ValueError(f"layout: {which} axes must start with n, or with 2 and n: got {axes!r}")

    @classmethod
    def of(cls, layout: "str | KVLayout") -> "KVLayout":
        """A layout from its name (`"NHD"`, `"HND"`, ...) or from itself."""
        if isinstance(layout, KVLayout):
            return layout
        if not isinstance(layout, str):
            raise TypeError(f"layout: expected a name or a KVLayout, got {type(layout).__name__}")
        if layout not in _PRESETS:
            raise ValueError(f"layout: expected one of {', '.join(_PRESETS)} or a KVLayout, got {layout!r}")
        return cls(*_PRESETS[layout])

    @property
    def name(self) -> str:
        """The layout's short name, or its axes when it has none."""
        axes = self.key if self.value is None else f"{self.key} | {self.value}"
        return _PRESET_NAMES.get((self.key, self.value), axes)

    @property
    def combined(self) -> bool:
        """Whether one buffer holds keys and values."""
        return self.value is None

    def axes(self, which: Which) -> tuple[str, ...]:
        """The axes of the buffer that holds the keys or the values."""
        return tuple((self.key if which == "key" or self.value is None else self.value).split())

    def shapes(self, dims: CacheDims, x: int = 8) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Shapes of the key buffer and of the value buffer (None when combined)."""
        if "2" in self.axes("key") and dims.head_size != dims.v_head_size:
            raise ValueError(
                f"layout {self.name}: key and value heads share a buffer and must have one size: "
                f"got head_size={dims.head_size}, v_head_size={dims.v_head_size}"
            )
        key = self._shape("key", dims, x)
        return key, None if self.combined else self._shape("value", dims, x)

    def _shape(self, which: Which, dims: CacheDims, x: int) -> tuple[int, ...]:
        axes = self.axes(which)
        head_size = dims.head_size if which == "key" else dims.v_head_size
        if "x" in axes and head_size % x:
            raise ValueError(f"layout {self.name}: head_size {head_size} is not a multiple of x = {x}")
        sizes = {
            "n": dims.num_blocks,
            "s": dims.block_size,
            "h": dims.num_kv_heads,
            "d": head_size // x if "x" in axes else head_size,
            "x": x,
            "2": 2,
            "(2d)": dims.head_size + dims.v_head_size,
        }
        return tuple(sizes[axis] for axis in axes)

    def dims(
        self, key_shape: tuple[int, ...], value_shape: tuple[int, ...] | None, head_size: int | None = None
    ) -> CacheDims:
        """The sizes that buffers of these shapes have; ValueError where they contradict the layout or each other.

        Args:
          head_size: size of a key head in a `(2d)` row; half of the row when None.
        """
        key = self._sizes("key_cache", "key", key_shape)
        if "(2d)" in key:
            row = key["(2d)"]
            if head_size is None and row % 2:
                raise ValueError(f"key_cache: a row of {row} elements holds no two equal heads: give head_size")
            k_size = row // 2 if head_size is None else head_size
            if not 0 < k_size < row:
                raise ValueError(f"head_size: expected 1 to {row - 1} in a row of {row} elements, got {k_size}")
            return CacheDims(key["n"], key["s"], key["h"], k_size, row - k_size)
        k_size = key["d"] * key.get("x", 1)
        if head_size not in (None, k_size):
            raise ValueError(f"head_size: the key cache holds heads of {k_size}, got {head_size}")
        if value_shape is None:
            if not self.combined:
                raise ValueError(f"value_cache: layout {self.name} keeps values in a buffer of their own, got None")
            return CacheDims(key["n"], key["s"], key["h"], k_size, k_size)
        value = self._sizes("value_cache", "value", value_shape)
        for axis in "nsh":
            if key[axis] != value[axis]:
                raise ValueError(
                    f"value_cache: {_AXIS_NAMES[axis]} is {value[axis]}, but {key[axis]} in key_cache "
                    f"(shapes {shape_text(value_shape)} and {shape_text(key_shape)})"
                )
        return CacheDims(key["n"], key["s"], key["h"], k_size, value["d"] * value.get("x", 1))

    def _sizes(self, name: str, which: Which, shape: tuple[int, ...]) -> dict[str, int]:
        axes = self.axes(which)
        if len(shape) != len(axes) or ("2" in axes and shape[axes.index("2")] != 2):
            raise ValueError(
                f"{name}: layout {self.name} expects shape {shape_text(_AXIS_NAMES[a] for a in axes)}, "
                f"got {shape_text(shape)}"
            )
        return dict(zip(axes, shape, strict=True))

    def index(self, which: Which, dims: CacheDims, blocks: Any, slots: Any = None) -> tuple[Any, ...]:
        """An index into a buffer, for NumPy, JAX or torch, of the key or value rows at `blocks` (and `slots` in them).

        Without `slots` the result has axes [len(blocks), the buffer's other axes in their order]; with `slots`, of the
        shape of `blocks`, it has [len(blocks), the buffer's axes but n and s].
        """
        row = slice(0, dims.head_size) if which == "key" else slice(dims.head_size, None)
        picks = {
            "n": blocks,
            "s": slice(None) if slots is None else slots,
            "2": 0 if which == "key" else 1,
            "(2d)": row,
        }
        return tuple(picks.get(axis, slice(None)) for axis in self.axes(which))

    def rest(self, which: Which, taken: str) -> tuple[str, ...]:
        """The axes left after `index` has taken `taken` ("n" or "ns") away, `(2d)` read as `d`."""
        return tuple("d" if a == "(2d)" else a for a in self.axes(which) if a not in taken and a != "2")
