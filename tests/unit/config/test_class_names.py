"""Which class of the weights belongs to which class of the data set, by hand."""

from __future__ import annotations

import pytest

from ray_yolo.config.class_names import are_placeholders, match_classes
from ray_yolo.core.errors import DatasetError

SHAPES = ("circle", "square", "triangle")


def rows(data: tuple[str, ...], weights: tuple[str, ...], *, allow: bool = False) -> tuple[tuple[int, ...], str]:
    match = match_classes(data, weights, data_file="d.yaml", weights_file="w.pt", allow_names=allow)
    return match.rows, match.note


@pytest.mark.parametrize(("data", "weights"), [
    (SHAPES, SHAPES), (SHAPES, ("Circle", " square", "TRIANGLE ")), (("cat", "cat"), ("cat", "cat"))])
def test_equal_names_need_no_word(data: tuple[str, ...], weights: tuple[str, ...]) -> None:
    assert rows(data, weights) == (tuple(range(len(data))), "")


@pytest.mark.parametrize(("data", "weights", "expected", "said"), [
    (SHAPES, ("square", "triangle", "circle"), (2, 0, 1), "circle 0 = 2, square 1 = 0, triangle 2 = 1"),
    (SHAPES, ("Triangle", "circle ", "SQUARE"), (1, 2, 0), "by name"),
    (("dog", "person"), ("person", "car", "dog"), (2, 0), "other classes of the weights are left out: 1"),
    (("person",), ("person", "car"), (0,), "are left out: 1"),
    (("traffic light", "car"), ("car", "traffic  light"), (1, 0), "by name"),
    (("Cat", "cat"), ("cat", "Cat"), (1, 0), "Cat 0 = 1, cat 1 = 0"),  # two classes, if a maker means it so
    (("1", "2", "0"), ("0", "1", "2"), (1, 2, 0), "by name"),  # digits are names if both sides have them
])
def test_the_same_names_elsewhere_are_matched_by_name_and_that_is_said(
        data: tuple[str, ...], weights: tuple[str, ...], expected: tuple[int, ...], said: str) -> None:
    numbers, note = rows(data, weights)
    assert numbers == expected
    assert said in note


@pytest.mark.parametrize(("data", "weights", "said"), [
    (SHAPES, ("class0", "class1", "class2"), "w.pt has no class names"),
    (SHAPES, ("0", "1", "2"), "w.pt has no class names"),
    (SHAPES, ("1", "2", "3"), "0 circle, 1 square, 2 triangle"),
    (("class0", "class1", "class2"), SHAPES, "d.yaml has no class names"),
    (("cell",), ("item",), "w.pt has no class names"),
])
def test_absent_names_are_no_other_names(data: tuple[str, ...], weights: tuple[str, ...], said: str) -> None:
    numbers, note = rows(data, weights)
    assert numbers == tuple(range(len(data)))
    assert said in note


def test_two_files_without_names_agree() -> None:
    assert rows(("class0", "class1"), ("0", "1")) == ((0, 1), "")


@pytest.mark.parametrize(("data", "weights"), [
    (SHAPES, ("red", "green", "blue")),
    (SHAPES, ("circle", "square", "hexagon")),
    (SHAPES, ("circle", "square")),
    (SHAPES, ("class0", "class1")),
    (("circle", "hexagon"), SHAPES),
    (("cat", "cat", "dog"), ("cat", "dog", "cat")),  # which of the two is meant?
    (("cat", "dog"), ("Cat", "cat")),
])
def test_other_names_are_refused_with_both_lists_side_by_side(data: tuple[str, ...], weights: tuple[str, ...]) -> None:
    with pytest.raises(DatasetError) as caught:
        rows(data, weights)
    lines = str(caught.value).splitlines()
    assert lines[1].split() == ["d.yaml", "w.pt"]
    for number in range(max(len(data), len(weights))):
        left, right = (names[number] if number < len(names) else "-" for names in (data, weights))
        assert lines[2 + number].split() == [str(number), left, right]


def test_allowed_names_go_by_name_where_they_match_and_by_order_elsewhere() -> None:
    assert rows(SHAPES, ("red", "green", "blue"), allow=True)[0] == (0, 1, 2)
    numbers, note = rows(("vehicle", "person", "dog"), ("person", "dog", "car"), allow=True)
    assert numbers == (2, 0, 1)
    assert "vehicle = car" in note
    with pytest.raises(DatasetError):
        rows(SHAPES, ("circle", "square"), allow=True)


@pytest.mark.parametrize(("names", "expected"), [
    ((), True), (("class_0", "class_1"), True), (("1", "2"), True), (("item",), True),
    (("0", "2"), False), (("class1", "class0"), False), (("cat",), False), (("class", "type"), False),
])
def test_placeholders_count_the_classes(names: tuple[str, ...], expected: bool) -> None:
    assert are_placeholders(names) is expected
