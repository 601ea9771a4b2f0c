"""Goal: a size is what was written, and what is shown can be read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.sizes import exact, rounded, size_of


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.0 KiB"), (36_864, "36.0 KiB"), (1 << 20, "1.0 MiB"),
     (80 << 30, "80.0 GiB"), (3 << 50, "3,072.0 TiB")],
)  # fmt: skip
def test_sizes_have_the_unit_in_which_they_can_be_read(value, text):
    assert rounded(value) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0"), (1000, "1000"), (65_536, "64KiB"), (3 << 29, "1536MiB"), (4 << 30, "4GiB")],
)
def test_a_size_in_a_message_is_exact(size, text):
    assert exact(size) == text


@given(st.integers(0, 1 << 50))
def test_what_is_shown_exactly_is_read_back(size):
    assert size_of(exact(size)) == size


@pytest.mark.parametrize(
    ("text", "size"),
    [("0.1GB", 10**8), ("1.5 Gi", 3 << 29), ("7", 7), ("2KB", 2000), ("1t", 10**12)],
)
def test_a_size_may_be_a_fraction_of_a_unit(text, size):
    assert size_of(text) == size


@pytest.mark.parametrize(
    "text", ["0.3", "1.0001KiB", "0.0001k", "1e9", "1_000", "0x10", "∞", "\u0663"]
)
def test_what_is_no_whole_number_of_bytes_is_refused(text):
    with pytest.raises(ValueError, match=r"whole number of bytes|is not a size"):
        size_of(text)
