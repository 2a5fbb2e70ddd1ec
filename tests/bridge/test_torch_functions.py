"""Functions written in PyTorch and their translations, value by value; what can't be translated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxpaged.bridge.torch_functions import POSITIONS, TorchFunction, jax_function
from jaxpaged.metadata.masks import CausalMask
from jaxpaged.testing.compilations import compilations

TABLE = torch.arange(24).reshape(4, 6) - 3
LOOKUP = torch.tensor([2, 0, 1, 3, 3, 1], dtype=torch.int32)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 2.0], dtype=torch.float64)


def captured(b, h, q, kv):
    inside = TABLE[:, 1:][LOOKUP[q] % 4, kv % 5] >= 0  # a part of a tensor that depends on no argument
    return torch.where(inside & (kv < torch.tensor(5)), q >= kv, False)


MASKS = {
    "causal": lambda b, h, q, kv: q >= kv,
    "operators": lambda b, h, q, kv: ((q - kv) % 3 == 0) | ~(kv <= q // 2) & (h != 1) ^ (b > 0),
    "captured": captured,
    "logical": lambda b, h, q, kv: torch.logical_and(q != kv, torch.logical_not(kv > 4)),
    "ones": lambda b, h, q, kv: b.new_ones(size=(), dtype=torch.bool),
    "constant": lambda b, h, q, kv: True,
    "made inside": lambda b, h, q, kv: (
        torch.arange(2, 12)[q] * torch.zeros(3)[b] + torch.ones(()) > torch.full((1,), 0.5)
    ),
    "floats": lambda b, h, q, kv: (q / 2 - kv.float() * 0.75).abs() < torch.sqrt(h + 1.5),
    "floor": lambda b, h, q, kv: torch.div(kv - q, 2, rounding_mode="floor") > -2,
    "trunc": lambda b, h, q, kv: torch.div(kv - q, 2, rounding_mode="trunc") >= 0,
}
SCORES = {
    "bias": lambda s, b, h, q, kv: s - SLOPES[h] * (q - kv).abs(),
    "cap": lambda s, b, h, q, kv: 2 * torch.tanh(s / 2) + torch.clamp(s, min=-0.5) * torch.sigmoid(-s),
    "inf": lambda s, b, h, q, kv: torch.where(q >= kv, s.to(torch.float32), float("-inf")),
    "full": lambda s, b, h, q, kv: s + torch.full_like(s, 0.5) - torch.zeros_like(s) ** 2 + torch.maximum(s, -s).pow(2),
    "same": lambda s, b, h, q, kv: s,
}


def arguments():
    b, h = np.int32(1), np.arange(4, dtype=np.int32)[:, None, None]
    q, kv = np.arange(6, dtype=np.int32)[:, None], np.arange(6, dtype=np.int32)[None]
    return b, h, q, kv


def in_torch(function, args):
    shape = np.broadcast_shapes(*(np.shape(a) for a in args))
    out = torch.as_tensor(function(*(torch.from_numpy(np.broadcast_to(a, shape).copy()) for a in args)))
    return np.broadcast_to(out.numpy(), shape)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    ours = jax_function("mask_mod", MASKS[name], POSITIONS)
    assert isinstance(ours, TorchFunction)
    args = arguments()
    expected = in_torch(MASKS[name], args)
    got = jax.jit(lambda f, *a: f(*a))(ours, *args)
    assert got.dtype == jnp.bool_
    np.testing.assert_array_equal(np.broadcast_to(got, expected.shape), expected)


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    ours = jax_function("score_mod", SCORES[name], (torch.float32, *POSITIONS))
    args = arguments()
    score = np.random.default_rng(0).standard_normal((4, 6, 6)).astype(np.float32)
    expected = in_torch(SCORES[name], (score, *args))
    np.testing.assert_allclose(jax.jit(lambda f, *a: f(*a))(ours, score, *args), expected, rtol=1e-6, atol=1e-6)


def test_new_functions_around_new_tensors_compile_nothing():
    call = jax.jit(lambda f, *args: f(*args))
    args = arguments()

    def make(limit):
        return jax_function("mask_mod", lambda b, h, q, kv: kv < limit[h], POSITIONS)

    call(make(torch.tensor([1, 2, 3, 4])), *args)
    with compilations() as compiled:
        got = call(make(torch.tensor([4, 3, 2, 1])), *args)
    assert compiled.count == 0
    assert got.sum() == 10


def test_functions_of_jax_pass():
    mask = CausalMask()
    assert jax_function("mask_mod", mask, POSITIONS) is mask
    ours = jax_function("mask_mod", lambda b, h, q, kv: jnp.where(q > 2, kv < 3, True), POSITIONS)
    assert ours(*arguments()).sum() == 27


def data_dependent(b, h, q, kv):
    return q > kv if q > 3 else q >= kv


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # a tensor indexed by a tracer of JAX
@pytest.mark.parametrize(
    ("function", "match"),
    [
        (3, "mask_mod: expected a function, got int"),
        (data_dependent, "mask_mod: expected a function of PyTorch or of JAX that works element by element"),
        (lambda b, h, q, kv: torch.cumsum(q, 0) > kv, "aten.cumsum.default has no counterpart"),
        (lambda b, h, q, kv: TABLE[q] > kv, "2 axes indexed by 1: index all of them"),
        (lambda b, h, q, kv: kv < SLOPES, r"it makes shape \[4\] of one element"),
        (lambda b, h, q, kv: q.new_ones(3).sum() > kv, r"a new tensor of shape \[3\]|no counterpart"),
        (lambda b, h, q, kv: None, "it returns NoneType"),
        (lambda b, h, q, kv: torch.tensor([2**40])[b] > kv, "int64 holds 1099511627776"),
    ],
)
def test_what_is_no_such_function_is_refused(function, match):
    with pytest.raises(TypeError, match=match):
        jax_function("mask_mod", function, POSITIONS)
