"""The merge kernel: it lowers for CUDA in every variant, and merges as the oracle does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import merge_attention_states
from jaxpaged.pallas import merge
from jaxpaged.pallas.merge import MergeTiles
from jaxpaged.pallas.mosaic import interpreter
from jaxpaged.testing import oracle

# States, tokens, heads, v_head_size.
SHAPES = [
    (2, 100, 8, 128),
    (16, 4, 32, 64),
    (3, 33, 5, 80),
    (1, 1, 1, 8),
    (2, 1, 8, 128),
    (2, 5, 3, 72),
    (4, 40, 2, 256),
    (5, 6, 1, 512),
]
DTYPES = ["float32", "bfloat16", "float16"]
TOLERANCE = {"float32": 1e-6, "bfloat16": 5e-3, "float16": 6e-4}


def states(shape, dtype, seed=0):
    """States of which some attended to nothing, with NaN in their outputs."""
    rng = np.random.default_rng(seed)
    count, tokens, heads, _ = shape
    outputs = rng.standard_normal(shape, np.float32)
    lses = (4 * rng.standard_normal((count, heads, tokens))).astype(np.float32)
    lses[rng.random(lses.shape) < 0.2] = -np.inf
    lses[rng.random(lses.shape) < 0.1] = np.inf
    lses[:, 0, 0] = -np.inf
    lses[0, -1, -1] = 1e30  # the others weigh nothing
    outputs[np.isinf(lses).swapaxes(1, 2)] = np.nan
    return jnp.asarray(outputs, dtype), jnp.asarray(lses)


def check(got, outputs, lses):
    out, lse = (np.asarray(x).astype(np.float64) for x in got)
    expected, expected_lse = oracle.merge_states(np.asarray(outputs).astype(np.float64), np.asarray(lses))
    assert got[0].dtype == outputs.dtype
    assert np.abs(out - expected).max() <= TOLERANCE[outputs.dtype.name] * max(1, np.abs(expected).max())
    assert np.array_equal(np.isneginf(lse), np.isneginf(expected_lse))
    finite = np.isfinite(expected_lse)
    np.testing.assert_allclose(lse[finite], expected_lse[finite], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [*SHAPES, (64, 256, 32, 128), (2, 8192, 32, 96)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_lowers_for_cuda(shape, dtype):
    outputs = jax.ShapeDtypeStruct(shape, dtype)
    lses = jax.ShapeDtypeStruct((shape[0], shape[2], shape[1]), jnp.float32)
    if merge.refusal(outputs) is not None:
        assert shape[-1] * outputs.dtype.itemsize % 16
        return
    lowered = jax.jit(merge.merge_attention_states).trace(outputs, lses).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize(
    ("shape", "reason"),
    [((2, 4, 2, 4), "16 bytes"), ((2, 4, 2, 1024), "too large"), ((4000, 4, 2, 128), "too large")],
)
def test_what_the_kernel_cannot_take_is_refused_with_a_reason(shape, reason):
    assert reason in merge.refusal(jax.ShapeDtypeStruct(shape, jnp.bfloat16))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_merges_as_the_oracle(kernels, shape, dtype):
    outputs, lses = states(shape, dtype)
    check(merge_attention_states(outputs, lses, implementation="mosaic_gpu"), outputs, lses)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_ring_shorter_than_the_states(kernels, stages):
    outputs, lses = states((7, 70, 2, 64), "bfloat16")
    got = merge.merge_attention_states(outputs, lses, interpret=interpreter(), config=MergeTiles(stages=stages))
    check(got, outputs, lses)


@pytest.mark.parametrize("shape", [(2, 0, 3, 16), (2, 3, 0, 16)])
def test_nothing_to_merge(kernels, shape):
    out, lse = merge_attention_states(
        jnp.zeros(shape), jnp.zeros((shape[0], shape[2], shape[1])), implementation="mosaic_gpu"
    )
    assert out.shape == shape[1:]
    assert lse.shape == (shape[2], shape[1])
