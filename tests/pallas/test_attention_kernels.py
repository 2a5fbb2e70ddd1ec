"""The attention kernels: the suite on a GPU, small cases in the interpreter, and every variant lowered without a GPU."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxpaged import KVCache, PagedBatch, paged_attention
from jaxpaged.testing.cases import Case, build, named_cases
from jaxpaged.testing.doors import DOORS
from jaxpaged.testing.verify import compare

CASES = {case.name: case for case in named_cases()}


@pytest.mark.gpu
@pytest.mark.parametrize("door", ["kernels", "kernels-jit"])
@pytest.mark.parametrize("name", CASES)
def test_suite_on_a_gpu(hopper, name, door):
    result = compare(CASES[name], door, DOORS[door])
    if result.skipped:
        pytest.skip(result.skipped)
    assert result.ok, result
