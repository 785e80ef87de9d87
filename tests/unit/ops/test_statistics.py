"""Student's quantiles, against values of tables."""

import pytest

from ray_yolo.ops.statistics import student


def test_students_quantile():
    assert [student(freedom) for freedom in (3, 4, 6, 20)] == pytest.approx([2.353, 2.132, 1.943, 1.725], rel=0.005)
    assert [student(freedom, 1.959964) for freedom in (4, 6, 20)] == pytest.approx([2.776, 2.447, 2.086], rel=0.01)
