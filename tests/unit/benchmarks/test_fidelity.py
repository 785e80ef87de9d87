"""Rank correlation, against a value of a table."""

import pytest

from tests.benchmarks.fidelity import spearman


def test_equal_values_share_their_mean_rank():
    assert spearman([1, 2, 3], [2, 4, 9]) == 1
    assert spearman([1, 2, 2, 3], [4, 3, 2, 1]) == pytest.approx(-0.9486832980505139)
    assert spearman([1, 1], [1, 2]) == 0
