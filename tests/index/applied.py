"""One worker's ingest, with what its changes have made of an index that is a plain set."""

import random
from typing import Any, NamedTuple

import msgspec
import pytest

from kvstore.index.apply import EngineScope, EventIngest
from kvstore.index.batch import ChangeBatch
from kvstore.index.blocks import BlockLimits, Workspace
from kvstore.mover.chains import CHAINS, Chains, NativeChains, PlainChains

SECRET = 0x1234_5678_9ABC_DEF0
DOMAIN = "model:m"
SPACE = "ab" * 32
KEYS = [n.to_bytes(32, "little") for n in range(3_000)]
PACK = msgspec.msgpack.encode
IMPLEMENTATIONS: list[Chains] = [
    PlainChains(), *([CHAINS] if isinstance(CHAINS, NativeChains) else []),
]  # fmt: skip
LIMITS = BlockLimits(1_000_000, 1_000, 1 << 20)
each = pytest.mark.parametrize("chains", IMPLEMENTATIONS, ids=lambda one: type(one).__name__)


class Place(NamedTuple):
    """A holder, without its worker."""

    medium: str
    shard: str = ""
    group: int = 0


class Applied:
    """A worker that is applied at once.

    Attributes:
        entries: (chain value, place) of everything that the index has.
    """

    def __init__(
        self,
        chains: Chains = CHAINS,
        scope: EngineScope = EngineScope(DOMAIN),  # noqa: B008
        limits: BlockLimits = LIMITS,
        holders_max: int = 1_000,
    ) -> None:
        self.entries: set[tuple[int, Place]] = set()
        self.batch = ChangeBatch()
        self._places: list[Place] = []
        self._holders_max = holders_max
        self.ingest = EventIngest(
            "w", scope, self._holder, self._dropped, Workspace(SECRET, chains), limits
        )

    def _holder(self, worker: str, medium: str, shard: str, group: int) -> int | None:
        assert worker == "w"
        place = Place(medium, shard, group)
        if place not in self._places[self._first :]:
            if len(self._places) - self._first >= self._holders_max:
                return None
            self._places.append(place)
        return self._places.index(place, self._first)

    _first = 0

    def _dropped(self, worker: str) -> None:
        assert worker == "w"
        self._take()
        self._first = len(self._places)  # numbers are not used again
        self.entries.clear()

    def _take(self) -> None:
        changes = self.batch.changes()
        for chain, number, stored in zip(*(one.tolist() for one in changes), strict=True):
            assert number >= self._first, "of a generation that has ended"
            entry = (chain, self._places[number])
            if stored:
                self.entries.add(entry)
            else:
                self.entries.discard(entry)
        self.batch.clear()

    def payload(self, payload: bytes) -> int:
        """Apply a payload; gives the number of its steps."""
        steps = 0
        for _ in self.ingest.apply(payload, self.batch):
            self._take()
            steps += 1
        self._take()
        self.ingest.blocks.check()
        return steps

    def apply(self, *events: Any) -> int:
        """Apply events as one batch."""
        return self.payload(PACK([1.0, events, None]))


def stored(hashes: list[Any], tokens: Any, parent: Any = None, **fields: Any) -> dict[str, Any]:
    """As vLLM publishes it; blocks of as many tokens as there are for each hash."""
    size = len(tokens) // len(hashes) if tokens and hashes else 4
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
        "token_ids": tokens, "block_size": size, "lora_id": None, "medium": "GPU",
        "lora_name": None, **fields,
    }  # fmt: skip


def removed(hashes: list[Any], **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", **fields}


def pages(keys: list[bytes], **fields: Any) -> dict[str, Any]:
    """Pages of a node."""
    return stored(keys, [], **{"space": SPACE, "medium": "CPU", **fields})


def pages_gone(keys: list[bytes], **fields: Any) -> dict[str, Any]:
    return removed(keys, **{"space": SPACE, "medium": "CPU", **fields})


def prompt(count: int, seed: int = 1) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(150_000) for _ in range(count)]
