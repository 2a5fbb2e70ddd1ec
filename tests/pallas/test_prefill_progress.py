"""A CTA of prefill gets through any list of items: its warpgroups never wait for each other in a circle.

Each case runs in a process of its own, which a kernel that hangs can be stopped with.
"""

import os
import subprocess
import sys

import pytest

CASES = {
    # In the order of work: items with steps, then items without any.
    "rows of no request": '"", (20, 9), (40, 30), extra_tokens=300',
    "requests without keys": '"", (20,) * 4 + (5,), (40, 0, 0, 0, 0)',
    "nothing to attend at all": '"", (20,) * 4, (0,) * 4',
    "one slot for queries": '"", (20, 20, 20), (40, 140, 40), head_size=256',
    "one slot for queries, rows of no request": '"", (20, 20), (40, 30), head_size=256, extra_tokens=100',
    "one slot for queries, nothing kept for some": '"", (20, 20, 20), (40, 140, 40), head_size=256, options=MASKED',
}
ON_A_GPU = {
    "rows of no request": '"", (20, 9), (40, 30), extra_tokens=40000',
    "one slot for queries": '"", (300,) * 40, (300,) * 40, head_size=256, num_heads=16, num_kv_heads=8',
}
PROGRAM = """
import contextlib
import dataclasses
from jaxpaged.pallas.mosaic import interpreted
from jaxpaged.pallas.tuning import gpu_of, tuned_for
from jaxpaged.testing.cases import Case
from jaxpaged.testing.doors import DOORS
from jaxpaged.testing.verify import compare

MASKED = (("mask_mod", lambda b, h, q, k: (b != 1) & (k > 5)),)
with {within}, tuned_for(dataclasses.replace(gpu_of(), num_sms={num_sms})):
    result = compare(Case({case}), "kernels", DOORS["kernels"])
assert result.ok and result.skipped is None, result
"""


def run(**given: object) -> None:
    command = [sys.executable, "-c", PROGRAM.format(**given)]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # another process holds memory of the GPU
    try:
        done = subprocess.run(command, env=environment, timeout=200, capture_output=True, text=True, check=False)
    except subprocess.TimeoutExpired:
        pytest.fail("it hangs")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", CASES)
def test_all_items_on_one_cta(name):
    run(num_sms=1, within="interpreted()", case=CASES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_many_items_on_a_gpu(hopper, name):
    run(num_sms=132, within="contextlib.nullcontext()", case=ON_A_GPU[name])
