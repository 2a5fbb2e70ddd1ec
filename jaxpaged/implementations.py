"""The implementations of the public functions, and which of them a call gets."""

from typing import Literal, get_args

Implementation = Literal["reference"]


def choose(implementation: str | None) -> str:
    """The name of the implementation to call; the best one for this machine when None.

    Raises:
      ValueError: there is none of that name.
    """
    if implementation is None:
        return "reference"
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"implementation: expected None or one of {', '.join(get_args(Implementation))}, got {implementation!r}"
        )
    return implementation
