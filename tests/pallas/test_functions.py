"""Users' functions in kernels: which are refused, and that those taken mean the same there and lower for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache, PagedBatch
from jaxpaged.metadata.masks import CausalMask, DocumentMask, and_masks, not_mask
from jaxpaged.pallas.attention import paged_attention, refusal
from jaxpaged.pallas.functions import call, function_refusal
from jaxpaged.reference.attention import AttentionOptions

TABLE = np.arange(3, dtype=np.int32)
REFUSED = {
    "closure": ("mask_mod", lambda b, h, q, k: jnp.asarray(TABLE)[b] > k, "holds arrays|gather"),
    "pytree": ("mask_mod", DocumentMask(np.zeros((2, 3), np.int32)), "holds arrays"),
    "floor": ("score_mod", lambda s, b, h, q, k: jnp.floor(s), "uses floor"),
    "inside jit": ("score_mod", lambda s, b, h, q, k: jax.jit(jnp.log1p)(s), "uses log1p"),
}
TAKEN = {
    "not": lambda s, b, h, q, k: jnp.where(~(q > k) | (k == 2), s, -jnp.inf),
    "relu": lambda s, b, h, q, k: jax.nn.relu(s) + b,
    "inner jit": lambda s, b, h, q, k: jax.jit(lambda x: jnp.tanh(x) * (q % 3))(s),
    "integers": lambda s, b, h, q, k: s - 0.1 * ((q // 7) ^ (k >> 1)) * (1 + h % 2),
    "exponentials": lambda s, b, h, q, k: (
        jnp.exp(-jnp.abs(s)) + jnp.log(1 + s * s) + jax.nn.sigmoid(s) + jnp.sqrt(s * s)
    ),
    "rounding": lambda s, b, h, q, k: jnp.clip(jnp.round(s), -1, 1) + jnp.sign(s) + jnp.sin(s) * jnp.cos(s),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    option, function, reason = REFUSED[name]
    said = function_refusal(AttentionOptions(1.0, **{option: function}))
    assert said is not None
    assert said.startswith(option)
    assert any(part in said for part in reason.split("|"))


@pytest.mark.parametrize("name", TAKEN)
def test_taken_functions_keep_their_values(name):
    rng = np.random.default_rng(0)
    score = jnp.asarray(rng.standard_normal((64, 8)), jnp.float32)
    h, q, k = (jnp.asarray(rng.integers(0, 50, (64, 8)), jnp.int32) for _ in range(3))
    got, expected = call(TAKEN[name], score, jnp.int32(2), h, q, k), TAKEN[name](score, jnp.int32(2), h, q, k)
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-6)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", TAKEN)
def test_taken_functions_lower(name):
    mask = not_mask(and_masks(CausalMask(), lambda b, h, q, k: (q - k) % 3 == 0))
    options = AttentionOptions(1.0, causal=False, score_mod=TAKEN[name], mask_mod=mask)

    def attend(query, cache, table, lens, starts):
        batch = PagedBatch(table, lens, starts, None, 1)
        assert refusal(query, cache, batch, options, query.dtype) is None
        how = {"out_dtype": query.dtype, "batch_invariant": False, "return_lse": False, "interpret": None}
        return paged_attention(query, cache, batch, options, **how)[0]

    shape = jax.ShapeDtypeStruct
    cache = jax.eval_shape(lambda: KVCache.zeros(8, 16, 2, 64, jnp.bfloat16))
    ints = [shape(s, jnp.int32) for s in ((2, 4), (2,), (3,))]
    lowered = jax.jit(attend).trace(shape((2, 4, 64), jnp.bfloat16), cache, *ints).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
