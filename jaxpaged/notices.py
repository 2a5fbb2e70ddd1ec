"""What a user is told once: that another path serves, and why."""

import warnings

_given: set[str] = set()


def warn_once(message: str, stacklevel: int = 2) -> None:
    """Give a RuntimeWarning the first time that it has this message.

    Args:
      stacklevel: whose line it is to name: 1 for the caller's, 2 for that of its caller, and so on.
    """
    if message not in _given:
        _given.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=stacklevel + 1)
