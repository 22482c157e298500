"""Numbers as people want to read them."""

from __future__ import annotations

import pytest

from stapsdtd.cli.quantity import bar, format_bound, format_quantity


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "ns", "-"),
        (1500, "", "1,500"),
        (2.25, "", "2.25"),
        (-0.25, "", "-0.25"),
        (4.0, "", "4.0"),
        (1 / 3, "", "0.333"),
        (10 / 3, "", "3.33"),
        (9.999, "", "10.0"),
        (0.00125, "", "0.00125"),
        (1.25e-7, "", "1.25e-07"),
        (0.0, "", "0.0"),
        (98.76, "", "98.8"),
        (1234.56, "", "1,234.6"),
        (0, "ns", "0 ns"),
        (999, "ns", "999 ns"),
        (1500, "ns", "1.50 us"),
        (1500, "us", "1.50 ms"),
        (12_345_678, "us", "12.3 s"),
        (2, "s", "2 s"),
        (-1500, "us", "-1.50 ms"),
        (7_200, "s", "7,200 s"),
        (float("inf"), "ms", "inf"),
        (float("nan"), "bytes", "nan"),
        (1023, "bytes", "1,023 B"),
        (4096, "bytes", "4 KiB"),
        (5 << 30, "bytes", "5 GiB"),
        (1_500_000, "bytes", "1.43 MiB"),
    ],
)
def test_quantities(value: float | None, unit: str, text: str) -> None:
    assert format_quantity(value, unit) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (512, "512"), (1000, "1,000"), (1024, "1K"), (65_536, "64K"), (1 << 20, "1M"), (1 << 63, "8E"),
        (1 << 64, "16E"), (-1024, "-1K"), (-1000, "-1,000"), (3072, "3,072"),
    ],
)  # fmt: skip
def test_bounds(value: int, text: str) -> None:
    assert format_bound(value) == text


@pytest.mark.parametrize(
    ("part", "text"), [(0, ""), (1, "████"), (0.5, "██"), (1 / 32, "▏"), (0.0001, "▏"), (3 / 32, "▍"), (17 / 32, "██▏")]
)
def test_bars(part: float, text: str) -> None:
    assert bar(part, 4) == text
