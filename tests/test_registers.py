"""What ptxas says of kernels, on a machine without a GPU."""

import shutil

import pytest
import registers

from jaxpaged.bridge import mosaic_abi

PTXAS = """
ptxas info    : Compiling entry function 'paged_prefill_mosaic_gpu_kernel' for 'sm_90a'
ptxas         .     16 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 17 bytes smem
ptxas info    : Compiling entry function 'paged_decode_mosaic_gpu_kernel' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 96 registers, used 16 barriers, 1 bytes smem
"""


def test_kernels_are_read_in_order():
    assert registers.kernels(PTXAS) == [("paged_prefill", 168, 16), ("paged_decode", 96, 0)]


def test_each_kernel_of_a_case_is_found():
    cases = {case.name: case for case in registers.CASES}
    expected = {"decode 64x4096": 1, "decode 64 shared 4096+256": 2, "mixed chunk + 63 decodes": 2}
    assert {name: len(registers.modules(cases[name])) for name in expected} == expected


def test_kernels_are_compiled_where_jax_has_its_plugin():
    if (why := mosaic_abi.unavailable()) is not None:
        pytest.skip(why)
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    (found,) = registers.kernels(registers.compiled("^decode 64x4096$"))
    assert found.name == "paged_decode"
    assert 64 <= found.registers <= 128 and found.spilled == 0
