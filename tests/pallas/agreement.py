"""Results of the kernels beside the definition's."""

from jaxpaged.testing.cases import Case
from jaxpaged.testing.doors import DOORS
from jaxpaged.testing.verify import compare


def check(case: Case, door: str = "kernels") -> None:
    """A case is not refused, and its results are the definition's."""
    result = compare(case, door, DOORS[door])
    assert result.skipped is None, result.skipped
    assert result.ok, result
