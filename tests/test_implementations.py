"""Which implementation a call gets on GPUs that aren't here: devices that only look like them."""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpaged import KVCache, PagedBatch, implementations, notices, paged_attention
from jaxpaged.attention import kernels_refuse
from jaxpaged.pallas import tuning


@dataclasses.dataclass(frozen=True)
class Device:
    platform: str
    device_kind: str
    compute_capability: str
    core_count: int


A100 = Device("gpu", "NVIDIA A100-SXM4-80GB", "8.0", 108)
B200 = Device("gpu", "NVIDIA B200", "10.0", 148)
H100 = Device("gpu", "NVIDIA H100 PCIe", "9.0", 114)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls `paged_attention` as if its arrays lay on a device."""
    notices._given.clear()
    cache = KVCache.zeros(2, 16, 1, 64, "bfloat16")
    query, batch = jnp.ones((1, 1, 64), jnp.bfloat16), PagedBatch.create([[1]], [3])

    def attend(device: Device, function: Any = paged_attention, **options: Any) -> Any:
        monkeypatch.setattr(implementations, "_device", lambda arrays: device)
        return function(query, cache, batch, **options)

    yield attend
    notices._given.clear()


def test_an_unsuitable_gpu_gets_the_reference_and_one_warning(call):
    with pytest.warns(RuntimeWarning) as caught:
        for _ in range(3):
            assert not call(A100).any()
    (warning,) = caught
    assert str(warning.message) == (
        "jaxpaged: the kernels are written for GPUs of compute capability 9.0, not 8.0 (NVIDIA A100-SXM4-80GB); "
        "the slower reference is used"
    )
    assert warning.filename == __file__
    with pytest.warns(RuntimeWarning, match="not 10.0"):
        call(B200)


def test_who_asks_for_kernels_or_the_reference_gets_no_warning(call):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(A100, implementation="reference")
        with pytest.raises(ValueError, match=r"not 8.0 \(NVIDIA A100-SXM4-80GB\)"):
            call(A100, implementation="mosaic_gpu")
        assert "not 8.0" in call(A100, kernels_refuse)


def test_kernels_are_compiled_for_the_device_of_the_call(call, monkeypatch):
    given = []

    def spied(*arguments: Any) -> Any:
        given.append(arguments[-1])
        return None, None

    monkeypatch.setattr("jaxpaged.attention._mosaic_gpu", spied)
    call(H100)
    assert [(gpu.kind, gpu.num_sms) for gpu in given] == [("NVIDIA H100 PCIe", 114)]


def test_the_gpu_is_a_static_argument():
    """Programs for different GPUs are different ones, and one for the same GPU is found again."""
    compiled: list[str] = []
    count = jax.jit(lambda x, gpu: compiled.append(gpu.kind) or x, static_argnums=1)
    for device in (H100, H100, dataclasses.replace(H100, core_count=100), H100):
        count(1.0, tuning.gpu_of(device))
    assert len(compiled) == 2
