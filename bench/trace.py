"""A request trace as lists of block ids; block ids become the keys of pages."""

import hashlib
from pathlib import Path

import msgspec


class TraceLine(msgspec.Struct):
    """One request: ids of its 512-token blocks, in order."""

    hash_ids: list[int]


def blocks(path: Path) -> list[list[int]]:
    """The block ids of every request, in order of arrival."""
    decoder = msgspec.json.Decoder(TraceLine)
    return [decoder.decode(line).hash_ids for line in path.read_bytes().splitlines() if line]


def key(block: int) -> bytes:
    """The key of a block's page."""
    return hashlib.sha256(block.to_bytes(8, "little")).digest()
