"""Random cases of the whole space, against the float64 oracle."""

from hypothesis import HealthCheck, Phase, given, settings

from jaxpaged.testing.doors import DOORS
from jaxpaged.testing.strategies import cases
from jaxpaged.testing.verify import compare


# Shrinking would compile for minutes; the case is small enough to read as it is.
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(cases())
def test_random_case(case):
    result = compare(case, "jax", DOORS["jax"])
    assert result.ok, result
