"""A sample of the pages that a node's events named, for audits. Pure."""

import contextlib
from collections import deque
from typing import Final

from kvstore.index.blocks import Workspace
from kvstore.index.keys import packed_keys
from kvstore.index.payload import BlocksStored, read_payload
from kvstore.index.reading import UnreadableError
from kvstore.index.snapshot import SnapshotPages
from kvstore.protocol.page import KEY_BYTES

EVERY: Final = 16
"""One of this many batches is sampled."""
_EVENTS: Final = 8
"""Events of a batch that are looked at."""
_KEYS_MAX: Final = 256
"""Keys of one space, shard and medium; the newest are kept."""
_KINDS_MAX: Final = 16


class SampledPages:
    """Keys of pages that were stored, some of them evicted again.

    Args:
        workspace: what decoding needs.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._space = workspace
        self._batches = 0
        self._keys: dict[tuple[str, str, str], deque[bytes]] = {}

    def note(self, payload: bytes) -> None:
        """Look at a batch that was applied, sometimes."""
        self._batches += 1
        if self._batches % EVERY:
            return
        _, events, _ = read_payload(payload, self._space.chains, self._space.spots)
        stored = [event for event in events if type(event) is BlocksStored]
        for event in stored[:_EVENTS]:
            kind = (event.space or "", event.shard_digest or "", event.medium or "")
            if all(kind) and (kind in self._keys or len(self._keys) < _KINDS_MAX):
                with contextlib.suppress(UnreadableError):  # keys that are encoded in another way
                    first = packed_keys(event.block_hashes)[:KEY_BYTES]
                    self._keys.setdefault(kind, deque(maxlen=_KEYS_MAX)).append(first)

    def pages(self) -> list[SnapshotPages]:
        """These pages."""
        return [SnapshotPages(*kind, b"".join(keys)) for kind, keys in self._keys.items()]
