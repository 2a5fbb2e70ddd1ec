"""KV cache layouts, against where each of them keeps one element."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxpaged.metadata.layout import CacheDims, KVLayout

DIMS = CacheDims(num_blocks=5, block_size=4, num_kv_heads=3, head_size=16, v_head_size=16)
UNEQUAL = dataclasses.replace(DIMS, v_head_size=8)
X = 8

# Where a layout keeps element d of head h of slot s of block n: of the key, of the value.
ELEMENTS = {
    "NHD": (lambda n, s, h, d: (n, s, h, d), lambda n, s, h, d: (n, s, h, d)),
    "HND": (lambda n, s, h, d: (n, h, s, d), lambda n, s, h, d: (n, h, s, d)),
    "2NHD": (lambda n, s, h, d: (0, n, s, h, d), lambda n, s, h, d: (1, n, s, h, d)),
    "2HND": (lambda n, s, h, d: (0, n, h, s, d), lambda n, s, h, d: (1, n, h, s, d)),
    "N2HD": (lambda n, s, h, d: (n, 0, s, h, d), lambda n, s, h, d: (n, 1, s, h, d)),
    "HN2D": (lambda n, s, h, d: (n, h, s, d), lambda n, s, h, d: (n, h, s, 16 + d)),
    "NH2D": (lambda n, s, h, d: (n, s, h, d), lambda n, s, h, d: (n, s, h, 16 + d)),
    "VLLM_V0": (lambda n, s, h, d: (n, h, d // X, s, d % X), lambda n, s, h, d: (n, h, d, s)),
}
SHAPES = {
    "NHD": ((5, 4, 3, 16), (5, 4, 3, 16)),
    "HND": ((5, 3, 4, 16), (5, 3, 4, 16)),
    "2NHD": ((2, 5, 4, 3, 16), None),
    "2HND": ((2, 5, 3, 4, 16), None),
    "N2HD": ((5, 2, 4, 3, 16), None),
    "HN2D": ((5, 3, 4, 32), None),
    "NH2D": ((5, 4, 3, 32), None),
    "VLLM_V0": ((5, 3, 2, 4, 8), (5, 3, 16, 4)),
}
UNEQUAL_SHAPES = {
    "NHD": ((5, 4, 3, 16), (5, 4, 3, 8)),
    "HND": ((5, 3, 4, 16), (5, 3, 4, 8)),
    "HN2D": ((5, 3, 4, 24), None),
    "NH2D": ((5, 4, 3, 24), None),
    "VLLM_V0": ((5, 3, 2, 4, 8), (5, 3, 8, 4)),
}
# What `index` leaves of the axes, once with blocks alone and once with blocks and slots, for the key and for the value.
RESTS = {
    "NHD": (("shd", "hd"), ("shd", "hd")),
    "HND": (("hsd", "hd"), ("hsd", "hd")),
    "2NHD": (("shd", "hd"), ("shd", "hd")),
    "2HND": (("hsd", "hd"), ("hsd", "hd")),
    "N2HD": (("shd", "hd"), ("shd", "hd")),
    "HN2D": (("hsd", "hd"), ("hsd", "hd")),
    "NH2D": (("shd", "hd"), ("shd", "hd")),
    "VLLM_V0": (("hdsx", "hdx"), ("hds", "hd")),
}
names = pytest.mark.parametrize("name", ELEMENTS)
which_parameter = pytest.mark.parametrize("which", ["key", "value"])


def numbered_buffers(layout, dims=DIMS):
    """Key and value buffers (one, twice, when combined) whose elements are all different."""
    key_shape, value_shape = layout.shapes(dims, X)
    key = np.arange(np.prod(key_shape), dtype=np.int32).reshape(key_shape)
    if value_shape is None:
        return {"key": key, "value": key}
    return {"key": key, "value": np.arange(np.prod(value_shape), dtype=np.int32).reshape(value_shape) + key.size}


def in_order(selected, rest, order):
    """Selected rows with the axes `rest` after the first, as [n, *order], with `x` joined to `d` again."""
    rest, order = ("n", *rest), ("n", *order, *(["x"] if "x" in rest else []))
    selected = selected.transpose([rest.index(axis) for axis in order])
    return selected.reshape(*selected.shape[: len(order) - 2], -1) if "x" in rest else selected


def test_every_preset_is_tested():
    with pytest.raises(ValueError) as caught:
        KVLayout.of("?")
    for name in ELEMENTS:
        assert name in str(caught.value)
    assert str(caught.value).count(",") == len(ELEMENTS)


@names
def test_names_and_shapes(name):
    layout = KVLayout.of(name)
    assert layout.name == name and KVLayout.of(layout) is layout
    assert KVLayout(layout.key, layout.value) == layout and hash(KVLayout(layout.key, layout.value)) == hash(layout)
    assert layout.shapes(DIMS, X) == SHAPES[name]
    assert layout.combined == (SHAPES[name][1] is None)
    assert layout.dims(*SHAPES[name]) == DIMS
    assert layout.dims(*SHAPES[name], head_size=16) == DIMS


@pytest.mark.parametrize("name", UNEQUAL_SHAPES)
def test_key_and_value_heads_of_different_size(name):
    layout = KVLayout.of(name)
    assert layout.shapes(UNEQUAL, X) == UNEQUAL_SHAPES[name]
    assert layout.dims(*UNEQUAL_SHAPES[name], head_size=16) == UNEQUAL


def test_layout_without_a_name_is_named_by_its_axes():
    assert KVLayout("n h d s", "n s h d").name == "n h d s | n s h d"
    assert KVLayout("n s 2 h d").name == "n s 2 h d"


@names
@which_parameter
def test_rest(name, which):
    expected = RESTS[name][which == "value"]
    assert KVLayout.of(name).rest(which, "n") == tuple(expected[0])
    assert KVLayout.of(name).rest(which, "ns") == tuple(expected[1])


@names
@which_parameter
@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray, torch.asarray], ids=["numpy", "jax", "torch"])
def test_index_selects_the_rows_of_slots(name, which, convert):
    layout = KVLayout.of(name)
    buffer = numbered_buffers(layout)[which]
    blocks, slots = np.array([4, 0, 2, 2, 4, 1]), np.array([3, 0, 1, 2, 3, 2])
    selected = np.asarray(convert(buffer)[layout.index(which, DIMS, convert(blocks), convert(slots))])
    rows = in_order(selected, layout.rest(which, "ns"), "hd")
    element = ELEMENTS[name][which == "value"]
    expected = [
        [[buffer[element(n, s, h, d)] for d in range(16)] for h in range(3)] for n, s in zip(blocks, slots, strict=True)
    ]
    np.testing.assert_array_equal(rows, expected)


@names
@which_parameter
@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray, torch.asarray], ids=["numpy", "jax", "torch"])
def test_index_selects_whole_blocks(name, which, convert):
    layout = KVLayout.of(name)
    buffer = numbered_buffers(layout)[which]
    blocks = np.array([3, 0, 3])
    selected = np.asarray(convert(buffer)[layout.index(which, DIMS, convert(blocks))])
    rows = in_order(selected, layout.rest(which, "n"), "shd")
    element = ELEMENTS[name][which == "value"]
    expected = [
        [[[buffer[element(n, s, h, d)] for d in range(16)] for h in range(3)] for s in range(4)] for n in blocks
    ]
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("name", UNEQUAL_SHAPES)
def test_rows_written_are_read_back_and_nothing_else_changes(name):
    layout = KVLayout.of(name)
    buffers = numbered_buffers(layout, UNEQUAL)
    before = {which: buffer.copy() for which, buffer in buffers.items()}
    blocks, slots = np.array([4, 0, 2]), np.array([3, 0, 1])
    written = {}
    for which, size in (("key", 16), ("value", 8)):
        index, rest = layout.index(which, UNEQUAL, blocks, slots), layout.rest(which, "ns")
        assert buffers[which][index].size == 3 * 3 * size
        written[which] = -1 - np.arange(3 * 3 * size, dtype=np.int32).reshape(buffers[which][index].shape)
        buffers[which][index] = written[which]
        assert in_order(buffers[which][index], rest, "hd").shape == (3, 3, size)
    for which in ("key", "value"):
        np.testing.assert_array_equal(buffers[which][layout.index(which, UNEQUAL, blocks, slots)], written[which])
    changed = {id(buffer): int((buffer != before[which]).sum()) for which, buffer in buffers.items()}
    assert sum(changed.values()) == 3 * 3 * (16 + 8)


@pytest.mark.parametrize(
    ("message", "key", "value"),
    [
        ("key axes must be n, s, h and d .* got 'n s h'", "n s h", "n s h d"),
        ("key axes must be .* got 'n s h d d'", "n s h d d", "n s h d"),
        ("key axes must be .* got 'n s h q'", "n s h q", "n s h d"),
        ("key axes must be .* got ''", "", None),
        ("key axes must be .* got '2 n s h d x'", "2 n s h d x", None),
        ("key axes must be .* got '2 n s h \\(2d\\)'", "2 n s h (2d)", None),
        ("value axes must be .* got '2 n s h d'", "n s h d", "2 n s h d"),
        ("value axes must be .* got 'n s h \\(2d\\)'", "n s h d", "n s h (2d)"),
        ("key axes must start with n, or with 2 and n: got 's n h d'", "s n h d", "n s h d"),
        ("key axes must start with n, or with 2 and n: got '2 s n h d'", "2 s n h d", None),
        ("value axes must start with n, or with 2 and n: got 'h n s d'", "n s h d", "h n s d"),
        ("not both: got key='2 n s h d', value='n s h d'", "2 n s h d", "n s h d"),
        ("not both: got key='n s h d', value=None", "n s h d", None),
        ("not both: got key='n s h \\(2d\\)', value='n s h d'", "n s h (2d)", "n s h d"),
    ],
)
def test_axes_that_make_no_layout(message, key, value):
    with pytest.raises(ValueError, match=f"layout: .*{message}"):
        KVLayout(key, value)


def test_unknown_layouts():
    with pytest.raises(ValueError, match=r"layout: expected one of NHD, HND, .* or a KVLayout, got 'nhd'"):
        KVLayout.of("nhd")
    with pytest.raises(TypeError, match="layout: expected a name or a KVLayout, got int"):
        KVLayout.of(3)


def test_sizes_that_a_layout_cannot_hold():
    for name in ("2NHD", "2HND", "N2HD"):
        with pytest.raises(ValueError, match=f"layout {name}: .* one size: got head_size=16, v_head_size=8"):
            KVLayout.of(name).shapes(UNEQUAL)
    with pytest.raises(ValueError, match="layout VLLM_V0: head_size 16 is not a multiple of x = 12"):
        KVLayout.of("VLLM_V0").shapes(DIMS, x=12)


@pytest.mark.parametrize(
    ("message", "name", "arguments"),
    [
        (r"key_cache: layout NHD expects shape \[num_blocks, block_size, num_kv_heads, head_size\], got \[5, 4, 48\]",
         "NHD", ((5, 4, 48), (5, 4, 3, 16))),
        (r"value_cache: layout HND expects shape \[num_blocks, num_kv_heads, block_size, head_size\], got \[\]",
         "HND", ((5, 3, 4, 16), ())),
        (r"key_cache: layout 2NHD expects shape \[2, num_blocks, .*\], got \[3, 5, 4, 3, 16\]",
         "2NHD", ((3, 5, 4, 3, 16), None)),
        (r"key_cache: layout HN2D expects shape .*head_size \+ v_head_size\], got \[5, 4\]", "HN2D", ((5, 4), None)),
        ("key_cache: a row of 17 elements holds no two equal heads: give head_size", "NH2D", ((5, 4, 3, 17), None)),
        ("head_size: expected 1 to 31 in a row of 32 elements, got 32", "NH2D", ((5, 4, 3, 32), None, 32)),
        ("head_size: expected 1 to 31 in a row of 32 elements, got -8", "NH2D", ((5, 4, 3, 32), None, -8)),
        ("head_size: the key cache holds heads of 16, got 8", "NHD", ((5, 4, 3, 16), (5, 4, 3, 16), 8)),
        ("value_cache: layout NHD keeps values in a buffer of their own, got None", "NHD", ((5, 4, 3, 16), None)),
        (r"value_cache: num_blocks is 6, but 5 in key_cache \(shapes \[6, 4, 3, 16\] and \[5, 4, 3, 16\]\)",
         "NHD", ((5, 4, 3, 16), (6, 4, 3, 16))),
        ("value_cache: block_size is 8, but 4 in key_cache", "VLLM_V0", ((5, 3, 2, 4, 8), (5, 3, 16, 8))),
        ("value_cache: num_kv_heads is 1, but 3 in key_cache", "NHD", ((5, 4, 3, 16), (5, 4, 1, 16))),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit(message, name, arguments):
    with pytest.raises(ValueError, match=message):
        KVLayout.of(name).dims(*arguments)
