"""vLLM itself, where it is installed: the tokens of its own backend, and the answers to what it asks a backend."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed: it needs an environment of its own, see docs/vllm.md",
    ),
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    run("vllm_models.py", directory)
    return directory


def run(script, *arguments, **variables):
    own = {"PYTHONPATH": str(BENCHMARKS), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    own |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, BENCHMARKS / script, *arguments]
    done = subprocess.run(command, env=dict(os.environ) | own | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def result(models, tmp_path, backend, **options):
    case = {"models": str(models), "model": "gemma2", "backend": backend, "options": options}
    run("vllm_case.py", json.dumps(case), tmp_path / backend)
    return json.loads((tmp_path / backend).read_text(encoding="utf-8"))


def test_the_tokens_are_those_of_vllms_own_backend(models, tmp_path):
    base, ours = (result(models, tmp_path, backend) for backend in ("CPU_ATTN", "CUSTOM"))
    assert base["tokens"] == ours["tokens"]
    assert base["workers"][0]["calls"] == {}
    calls = ours["workers"][0]["calls"]
    assert len(calls) == 4 and len(set(calls.values())) == 1 and calls == ours["workers"][0]["writes"]
    assert ours["preemptions"] > 0


def configuration(**changes):
    """vLLM's questions about a layer."""
    import torch

    asked = {
        "head_size": 64, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False,
        "has_sink": True, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": True,
        "device_capability": None, "attn_type": "decoder", "has_sliding_window": True, "use_non_causal": True,
    }  # fmt: skip
    return asked | changes


def test_what_the_backend_says_it_can_do():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from jaxpaged.integrations.vllm.backend import JaxpagedBackend

    def refusals(**changes):
        return JaxpagedBackend.validate_configuration(**configuration(**changes))

    assert refusals() == []
    for attn_type in ("encoder", "encoder_only", "encoder_decoder"):
        assert refusals(attn_type=attn_type) == []
    for dtype in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        assert refusals(kv_cache_dtype=dtype) == []
    assert refusals(use_mla=True) == ["MLA not supported"]
    assert refusals(use_sparse=True) == ["sparse not supported"]
    assert refusals(head_size=100) == ["head_size not supported"]
    assert refusals(kv_cache_dtype="int8_per_token_head") == ["kv_cache_dtype not supported"]
    assert refusals(kv_cache_dtype="bfloat16") == ["kv_cache_dtype bfloat16 not supported for a model of torch.float32"]
    assert refusals(use_mm_prefix=True) == ["partial multimodal token full attention not supported"]
    assert AttentionBackendEnum[JaxpagedBackend.get_name()] is AttentionBackendEnum.CUSTOM


def test_cross_attention_and_chunked_attention_build_on_the_classes():
    from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend
    from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend

    from jaxpaged.integrations.vllm.backend import JaxpagedBackend, JaxpagedImpl, JaxpagedMetadataBuilder

    cross = create_cross_attention_backend(JaxpagedBackend)
    assert issubclass(cross.get_impl_cls(), JaxpagedImpl)
    assert issubclass(
        create_chunked_local_attention_backend(JaxpagedBackend, 8).get_builder_cls(), JaxpagedMetadataBuilder
    )
