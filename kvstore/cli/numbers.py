"""Parsers for numbers in command-line options."""

import math
from argparse import ArgumentTypeError
from collections.abc import Callable

from kvstore.protocol.sizes import size_of


def count(least: int) -> Callable[[str], int]:
    """A parser for whole numbers of ``least`` or more."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError as error:
            raise ArgumentTypeError(f"{text!r} is not a whole number") from error
        if number < least:
            raise ArgumentTypeError(f"{number} is less than {least}")
        return number

    return read


def seconds(*, zero: bool, most: float = math.inf) -> Callable[[str], float]:
    """A parser for seconds up to ``most``; 0 only if ``zero`` is true."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError as error:
            raise ArgumentTypeError(f"{text!r} is not a number of seconds") from error
        if not math.isfinite(number):
            raise ArgumentTypeError(f"{text!r} is not a number of seconds")
        if number < 0 or (number == 0 and not zero):
            raise ArgumentTypeError(f"{text} is {'less' if zero else 'not more'} than 0 seconds")
        if number > most:
            raise ArgumentTypeError(f"{text} is more than {most:.0f} seconds")
        return number

    return read


def size(text: str) -> int:
    """A parser for sizes, as in the configuration."""
    try:
        return size_of(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error
