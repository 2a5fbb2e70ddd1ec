"""The oracle itself: against torch in float64, and against numbers worked out by hand."""

import numpy as np
import pytest

from jaxpaged import merge_attention_states
from jaxpaged.testing import oracle

torch = pytest.importorskip("torch")
RNG = np.random.default_rng(0)


def _dense(query_len, kv_len, heads=6, kv_heads=2, size=16):
    return (RNG.standard_normal((n, h, size)) for n, h in ((query_len, heads), (kv_len, kv_heads), (kv_len, kv_heads)))


def _sdpa(q, k, v, bias, scale=None):
    q, k, v = (torch.from_numpy(x).transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.from_numpy(bias), scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1).numpy()


@pytest.mark.parametrize(("query_len", "kv_len"), [(7, 7), (3, 20), (1, 9)])
@pytest.mark.parametrize("kind", ["causal", "full", "window", "alibi", "scale"])
def test_against_torch(query_len, kv_len, kind):
    q, k, v = _dense(query_len, kv_len)
    distance = np.arange(kv_len)[None] - (kv_len - query_len + np.arange(query_len)[:, None])
    bias = np.zeros((6, query_len, kv_len))
    options = {}
    if kind != "full":
        bias[:, distance > 0] = -np.inf
    if kind == "full":
        options["causal"] = False
    if kind == "window":
        options["window"] = (2, 0)
        bias[:, distance < -2] = -np.inf
    if kind == "alibi":
        options["alibi_slopes"] = np.linspace(0.1, 0.6, 6)
        bias += options["alibi_slopes"][:, None, None] * distance
    if kind == "scale":
        options["scale"] = 0.4
    out, lse = oracle.attention(q, [k], [v], np.array([query_len]), **options)
    np.testing.assert_allclose(out, _sdpa(q, k, v, bias, options.get("scale")), rtol=1e-12, atol=1e-14)
    scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, 3, 1)) * options.get("scale", 16**-0.5) + bias
    np.testing.assert_allclose(lse, np.log(np.exp(scores).sum(-1)), rtol=1e-12)


def test_by_hand():
    """One query, two keys with scores 0 and ln 3: weights 1/4 and 3/4."""
    q = np.array([[[1.0]]])
    k, v = np.array([[[0.0]], [[np.log(3)]]]), np.array([[[8.0]], [[4.0]]])
    n = np.array([1])
    out, lse = oracle.attention(q, [k], [v], n, scale=1.0)
    np.testing.assert_allclose([out.item(), lse.item()], [5.0, np.log(4)])
    out, lse = oracle.attention(q, [k], [v], n, scale=1.0, sinks=np.array([np.log(4)]))  # half of the denominator
    np.testing.assert_allclose([out.item(), lse.item()], [2.5, np.log(4)])
    out, _ = oracle.attention(q, [k], [v], n, scale=1.0, soft_cap=1e-9)  # all scores 0
    np.testing.assert_allclose(out.item(), 6.0)
    out, lse = oracle.attention(q, [k], [v], n, mask_mod=lambda b, h, q, kv: kv < 0)
    assert out.item() == 0
    assert lse.item() == -np.inf
    out, _ = oracle.attention(q, [k], [v], n, scale=1.0, score_mod=lambda s, b, h, q, kv: s + (kv == 0) * np.log(3))
    np.testing.assert_allclose(out.item(), 6.0)
    out, lse = oracle.attention(q, [k], [v], n, score_mod=lambda s, b, h, q, kv: s - np.inf)  # masked by score
    assert out.item() == 0
    assert lse.item() == -np.inf


def test_positions_are_int32():
    def check(score, b, h, q_pos, kv_pos):
        assert q_pos.dtype == kv_pos.dtype == b.dtype == h.dtype == np.int32
        return score

    q, k, v = _dense(2, 5)
    oracle.attention(q, [k], [v], np.array([2]), score_mod=check)


def test_gather_clamps_lengths_and_marks_blocks_out_of_range():
    cache = np.arange(12.0).reshape(3, 4, 1, 1)
    keys, _, valid = oracle.gather(cache, cache, np.array([[2, 0], [7, 1]]), np.array([99, 5]))
    assert keys[0].ravel().tolist() == [8, 9, 10, 11, 0, 1, 2, 3]
    assert valid[1].tolist() == [False] * 4 + [True]


def test_quantize_by_hand():
    x = np.array([0.5, 1.5, -2.5, 1e9, np.nan])
    assert oracle.quantize(x, "int8", 1).tolist() == [0, 2, -2, 127, 0]
    assert oracle.quantize(np.array([1e9, 17.0]), "float8_e4m3fn", 1).astype(float).tolist() == [448, 16]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_merge_attention_states_against_the_oracle(dtype):
    """Several at once, rows that some or all states leave empty, +inf for empty, garbage under an empty row."""
    outputs = RNG.standard_normal((4, 5, 3, 8)).astype(dtype if dtype != "bfloat16" else np.float32)
    lses = RNG.uniform(-200, 200, (4, 3, 5)).astype(np.float32)
    lses[0, :, 1], lses[2, :, 1], lses[:, :, 2], lses[1, 0] = -np.inf, np.inf, -np.inf, -np.inf
    lses[3, 2, 2] = np.inf
    outputs[~np.isfinite(lses).swapaxes(1, 2)] = np.nan
    import jax.numpy as jnp

    states = jnp.asarray(outputs, dtype)
    expected, expected_lse = oracle.merge_states(np.asarray(states).astype(np.float64), lses)
    tolerance = {"float32": 1e-6, "bfloat16": 4e-3, "float16": 5e-4}[dtype]
    for args in ((states, lses), (list(states), list(lses))):
        out, lse = merge_attention_states(*args)
        assert out.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(out).astype(np.float64), expected, atol=tolerance * np.abs(expected).max()
        )
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)


def test_merging_parts_of_the_keys_gives_attention_to_all():
    q, k, v = _dense(5, 12)
    whole, whole_lse = oracle.attention(q, [k], [v], np.array([5]), causal=False)
    parts = [oracle.attention(q, [k[s]], [v[s]], np.array([5]), causal=False) for s in (slice(0, 3), slice(3, 12))]
    out, lse = oracle.merge_states(*(np.stack(x) for x in zip(*parts, strict=True)))
    np.testing.assert_allclose(out, whole, rtol=1e-12)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-12)
