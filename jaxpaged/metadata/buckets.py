"""Sizes to pad to, so that batches of many sizes share few compiled programs."""

from collections.abc import Sequence

import numpy as np

from jaxpaged.metadata.checks import check_positive


def next_bucket(size: int, buckets: Sequence[int] | None = None) -> int:
    """The smallest bucket that holds `size`.

    Args:
      size: 0 or more.
      buckets: the sizes to choose from; powers of two when None.

    Raises:
      TypeError, ValueError: `size` is no int of 0 or more, or no bucket is large enough.
    """
    if isinstance(size, bool) or not isinstance(size, int | np.integer):
        raise TypeError(f"size: expected an int, got {size!r}")
    if size < 0:
        raise ValueError(f"size: expected 0 or more, got {size}")
    if buckets is None:
        return 1 << max(0, int(size) - 1).bit_length()
    fitting = [check_positive("buckets", b) for b in buckets if b >= size]
    if not fitting:
        raise ValueError(f"buckets: the largest is {max(buckets, default=0)}, but {size} must fit")
    return min(fitting)
