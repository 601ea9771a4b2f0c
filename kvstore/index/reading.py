"""Decodes untrusted bytes; one function that catches all errors of decoders.

Decoders raise more than they document: msgspec passes on ``UnicodeDecodeError``, and
``RecursionError`` for deep nesting. Use :func:`read` for everything that clients, engines or
publishers sent. Any other exception is a bug of ours.
"""

import struct
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

T = TypeVar("T")

_NOT_READ: Final = (
    msgspec.MsgspecError,
    ValueError,  # UnicodeDecodeError is one
    RecursionError,
    OverflowError,
    struct.error,
)


class UnreadableError(Exception):
    """Invalid bytes; the message says why."""


def read(decode: Callable[[bytes], T], raw: bytes) -> T:
    """Decode ``raw``.

    Args:
        decode: function of a decoder, without side effects.
        raw: untrusted bytes.

    Raises:
        UnreadableError: the bytes are invalid.
    """
    try:
        return decode(raw)
    except _NOT_READ as error:
        raise UnreadableError(str(error) or type(error).__name__) from error
