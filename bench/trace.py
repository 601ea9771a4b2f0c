"""Traces of requests: JSON lines with ``timestamp`` (ms) and ``hash_ids``, names of blocks.

Equal ids are equal prefixes up to the end of that block, so a request is a path in a tree.
"""

from pathlib import Path
from typing import Final

import msgspec

BLOCK_TOKENS: Final = 512


class Request(msgspec.Struct, frozen=True):
    """One request: when it came (ms) and the blocks of its prompt, the last one partly filled."""

    timestamp: int
    hash_ids: list[int]


def blocks(path: Path) -> list[Request]:
    """Every request of a trace, in order.

    Raises:
        msgspec.DecodeError: a line is no request.
    """
    decoder = msgspec.json.Decoder(Request)
    with path.open("rb") as lines:
        return [decoder.decode(line) for line in lines if line.strip()]
