"""Sizes to pad to."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.metadata.buckets import next_bucket


@given(st.integers(1, 2**40))
def test_powers_of_two(size):
    bucket = next_bucket(size)
    assert bucket.bit_count() == 1 and bucket >= size > bucket // 2
    assert next_bucket(bucket) == bucket


@given(st.integers(0, 100), st.lists(st.integers(1, 100), min_size=1))
def test_given_buckets(size, buckets):
    if size > max(buckets):
        with pytest.raises(ValueError, match=f"buckets: the largest is {max(buckets)}, but {size} must fit"):
            next_bucket(size, buckets)
    else:
        bucket = next_bucket(size, buckets)
        assert bucket in buckets and bucket >= size
        assert not any(size <= other < bucket for other in buckets)


def test_small_sizes_and_kinds_of_integers():
    assert [next_bucket(size) for size in range(6)] == [1, 1, 2, 4, 4, 8]
    assert next_bucket(np.int64(5)) == 8 and type(next_bucket(np.int64(5))) is int
    assert next_bucket(np.int32(5), (np.int64(6), 7)) == 6


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "size: expected 0 or more, got -1", (-1,)),
        (TypeError, "size: expected an int, got 2.0", (2.0,)),
        (TypeError, "size: expected an int, got True", (True,)),
        (ValueError, "buckets: the largest is 0, but 1 must fit", (1, [])),
        (ValueError, "buckets: expected a positive int, got 0", (0, [0, 4])),
        (TypeError, "buckets: expected a positive int, got 4.5", (1, [4.5])),
    ],
)
def test_errors(error, message, arguments):
    with pytest.raises(error, match=message):
        next_bucket(*arguments)
