"""A hypothesis strategy over the space of cases; needs hypothesis, which only tests do."""

from hypothesis import strategies as st

from jaxpaged.testing.cases import LAYOUTS, OPTIONS, QUANTIZED, Case


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small cases of every kind. Sizes come from few values, since each new shape is compiled."""
    num_reqs = 4
    kinds = draw(
        st.lists(
            st.sampled_from(["decode", "prefill", "chunk", "empty", "padding"]), min_size=num_reqs, max_size=num_reqs
        )
    )
    query_lens, seq_lens = [], []
    for kind in kinds:
        total = draw(st.integers(1, 96))
        new = {"decode": 1, "prefill": total, "chunk": draw(st.integers(1, total)), "empty": 0, "padding": 0}[kind]
        query_lens.append(new)
        seq_lens.append(0 if kind == "padding" else total)
    tokens = sum(query_lens)
    dtype = draw(st.sampled_from(["float32", "float32", "bfloat16", "float16"]))
    cache_dtype = draw(st.sampled_from([None, None, "float32", *QUANTIZED]))
    layout = draw(st.sampled_from(LAYOUTS))
    # VLLM_V0 splits heads into parts of 16 bytes.
    head_size = draw(st.sampled_from([16, 64, 112, 256] if layout == "VLLM_V0" else [8, 16, 64, 112, 256]))
    separate = layout in ("NHD", "HND", "VLLM_V0")
    num_kv_heads, ratio = draw(st.sampled_from([(1, 1), (2, 3), (1, 4), (1, 7), (2, 8)]))
    return Case(
        name="random",
        query_lens=tuple(query_lens),
        seq_lens=tuple(seq_lens),
        num_heads=num_kv_heads * ratio,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        v_head_size=draw(st.sampled_from([None, 32])) if separate else None,
        block_size=draw(st.sampled_from([1, 3, 16, 64, 128])),
        layout=layout,
        dtype=dtype,
        cache_dtype=cache_dtype,
        scales=draw(st.sampled_from(["tensor", "head", "token_head"])) if cache_dtype in QUANTIZED else None,
        options=tuple(draw(st.sampled_from([{}, *OPTIONS.values()])).items()),
        shared=draw(st.integers(0, 2)),
        extra_tokens=(-tokens) % 64 + (64 if tokens == 0 else 0),
        seed=draw(st.integers(0, 2**16)),
    )
