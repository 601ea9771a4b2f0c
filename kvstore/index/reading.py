"""Where bytes from outside become values: one function, which knows all that can go wrong there.

Decoders raise more than they say: msgspec lets ``UnicodeDecodeError`` through, and
``RecursionError`` for what is nested too deeply. Whoever reads what clients, engines or publishers
sent calls :func:`read`; anything else that is raised is our own mistake.
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
    """These bytes are not what they should be; the text says why."""


def read(decode: Callable[[bytes], T], raw: bytes) -> T:
    """What ``raw`` says.

    Args:
        decode: of a decoder; has no effects.
        raw: from outside.

    Raises:
        UnreadableError: it is something else.
    """
    try:
        return decode(raw)
    except _NOT_READ as error:
        raise UnreadableError(str(error) or type(error).__name__) from error
