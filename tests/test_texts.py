"""Digests, name patterns, and sizes and times for people."""

from __future__ import annotations

import pytest

from colonnade.texts import digest_of, format_bytes, format_count, format_seconds, pattern_of


def test_a_digest_has_62_bits_and_tells_texts_apart():
    found = [digest_of(str(number)) for number in range(200)]
    assert len(set(found)) == 200
    assert 2**61 < max(found) < 2**62
    assert digest_of("1") == digest_of(b"1") == found[1]


def test_a_pattern_has_a_star_for_each_number():
    assert pattern_of("layers.11.fc1.weight") == "layers.*.fc1.weight"
    assert pattern_of("layers.11.fc1.weight", inside=True) == "layers.*.fc*.weight"
    assert pattern_of("weight") == "weight"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (12_900, "12.9 kB"),
        (999_600, "1 MB"),
        (-2_500, "-2.5 kB"),
        (80e9, "80 GB"),
        (5e18, "5e+03 PB"),
    ],
)
def test_bytes_have_three_digits(count, text):
    assert format_bytes(count) == text


def test_counts_and_times_have_three_digits():
    assert (format_count(12_900), format_count(7), format_count(432e9)) == ("12.9 k", "7", "432 G")
    seconds = [90, 3725, 59, 1.5, 1.234e-3, 5e-6]
    assert [*map(format_seconds, seconds)] == ["0:01:30", "1:02:05", "59 s", "1.5 s", "1.23 ms", "5 µs"]
