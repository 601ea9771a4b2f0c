"""Sizes in bytes, with units for people.

``8G`` and ``8GB`` are 8 x 10^9 bytes, ``8Gi`` and ``8GiB`` are 8 x 2^30, as in Kubernetes and the
SI; case does not matter. A user who confuses ``8G`` with ``8Gi`` gets a node with less memory than
intended, not more.
"""

import re
from fractions import Fraction
from typing import Final

_SIZE: Final = re.compile(
    r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?:([kmgt])(i?))?(b?)\s*", re.IGNORECASE
)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_NAMES: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def size_of(text: str) -> int:
    """Parse a size; returns bytes.

    Raises:
        ValueError: the text is not a size, or not a whole number of bytes.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a size: write 8GiB or 8Gi (8 x 2^30), 8GB or 8G (8 x 10^9), 1.5GiB,"
            " or a number of bytes"
        )
    number, unit, binary, _ = match.groups()
    power: int = _POWERS[(unit or "").lower()]
    size = Fraction(number) * int((1024 if binary else 1000) ** power)
    if size.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return size.numerator


def exact(size: int) -> str:
    """A size as text, without rounding: ``64KiB``, ``1000``."""
    power = 0
    while size and not size % 1024 and power < len(_NAMES) - 1:
        size //= 1024
        power += 1
    return f"{size}{_NAMES[power] if power else ''}"


def rounded(size: float) -> str:
    """A size as text, rounded: ``3.1 GiB``."""
    power = max(0, min((int(size).bit_length() - 1) // 10, len(_NAMES) - 1))
    return f"{size / 1024**power:,.1f} {_NAMES[power]}" if power else f"{size:,.0f} B"
