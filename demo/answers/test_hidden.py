"""What the reward is decided by; no rollout's sandbox has ever contained this file."""

import pytest
from toolz import partition_all


@pytest.mark.parametrize("length", range(0, 23))
@pytest.mark.parametrize("n", range(1, 7))
def test_partition_all_loses_nothing(length, n):
    parts = list(partition_all(n, list(range(length))))
    assert [x for part in parts for x in part] == list(range(length))
    assert all(len(part) == n for part in parts[:-1])


def test_partition_all_takes_iterators():
    assert list(partition_all(2, iter(range(5)))) == [(0, 1), (2, 3), (4,)]
