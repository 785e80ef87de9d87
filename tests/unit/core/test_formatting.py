"""Numbers, durations and sizes as text."""

from __future__ import annotations

from ray_yolo.core.formatting import align_columns, format_count, format_duration, format_number, format_size


def test_what_a_user_reads() -> None:
    for text, expected in [
        (format_number(None), "-"), (format_number(0.123456), "0.1235"), (format_number(12345.6), "1.235e+04"),
        (format_count(1, "epoch"), "1 epoch"), (format_count(0, "epoch"), "0 epochs"),
        (format_count(2, "loader process"), "2 loader processes"), (format_count(1.0, "CPU"), "1 CPU"),
        (format_count(0.5, "CPU"), "0.5 CPUs"), (format_count(12_345_678, "step"), "12345678 steps"),
        (format_duration(0.4), "0:00:00"), (format_duration(59.6), "0:01:00"), (format_duration(90_061), "25:01:01"),
        (format_size(850), "850 B"), (format_size(1500), "1.5 kB"), (format_size(64e6), "64 MB"),
        (format_size(1e9), "1.0 GB"), (format_size(3e13), "30 TB"),
    ]:
        assert text == expected, (text, expected)


def test_a_table_has_names_to_the_left_and_numbers_to_the_right() -> None:
    assert align_columns([("", "A", "long"), ("name", "1.25", ""), ("b", "10", "3")]) == [
        "         A  long", "name  1.25", "b       10     3"]
