"""Sizes, times and switches as people type them."""

import pytest

from mlx_isolate_supervisor.settings.quantities import (
    Share,
    parse_number,
    parse_size,
    parse_switch,
    parse_time,
    parse_whole,
    show_bytes,
    show_seconds,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("32GB", 32_000_000_000),
        ("32gb", 32_000_000_000),
        ("1.5G", 1_500_000_000),
        ("512 MiB", 512 << 20),
        ("64k", 64_000),
        ("64KiB", 65_536),
        ("2TB", 2_000_000_000_000),
        ("123", 123),
        ("7B", 7),
        ("0", 0),
        ("20%", Share(0.2)),
    ],
)
def test_a_size_is_read_with_its_unit(text: str, expected: object) -> None:
    assert parse_size(text) == expected


def test_a_bare_number_counts_in_the_unit_of_its_flag() -> None:
    assert parse_size("32", 1_000_000_000) == 32_000_000_000
    assert parse_size("32MB", 1_000_000_000) == 32_000_000


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e9", "12 apples", "120%", "nan", "1 G B"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size|100%"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("90s", 90.0), ("5m", 300.0), ("250ms", 0.25), ("1.5h", 5400.0), ("0", 0.0)],
)
def test_a_time_is_read_with_its_unit(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "-5", "5 minutes", "inf", "m"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="90s"):
        parse_time(text)


def test_switches_have_the_usual_spellings() -> None:
    assert [parse_switch(text) for text in ("1", "True", "yes", "ON")] == [True] * 4
    assert [parse_switch(text) for text in ("0", "false", "No", "off")] == [False] * 4
    with pytest.raises(ValueError, match="neither on nor off"):
        parse_switch("maybe")


@pytest.mark.parametrize("text", ["-1", "1.5", "", "ten"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="whole number"):
        parse_whole(text)


@pytest.mark.parametrize("text", ["-0.1", "nan", "inf", "hot"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="zero or more"):
        parse_number(text)


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_200_000_000, "1.2 GB"),
        (999_600, "1.0 MB"),
        (10**14, "100 TB"),
    ],
)
def test_bytes_are_shown_with_two_or_three_digits(count: int, shown: str) -> None:
    assert show_bytes(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.34, "0.3s"), (59, "59s"), (303, "5m 3s"), (7800, "2h 10m"), (273600, "3d 4h")],
)
def test_durations_are_shown_in_two_units(seconds: float, shown: str) -> None:
    assert show_seconds(seconds) == shown
