"""The answers of the page table, and the actions that it tells its node to take."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from kvstore.protocol.page import PrefixKey
from kvstore.state.tree.places import Tier
from kvstore.state.tree.prefix_tree import PrefixTree


class PageStatus(IntEnum):
    """The result for one page of a put."""

    GRANTED = 0
    """A slot waits for its bytes; no other put is granted this page meanwhile."""
    EXISTS = 1
    PENDING = 2
    """Another writer is writing it."""
    NO_ROOM = 3
    NO_PARENT = 4
    """The page before it is not stored, so no lookup could reach it."""
    STORED = 5
    DROPPED = 6
    """The page before it was dropped while this one was being written."""


GRANTED: Final = PageStatus.GRANTED
NO_ROOM: Final = PageStatus.NO_ROOM
NO_PARENT: Final = PageStatus.NO_PARENT
STORED: Final = PageStatus.STORED
"""Members that each put needs: those of the class are looked up by Python code each time."""


@dataclass(slots=True, init=False)
class Stored:
    """Action: these pages became READY, in memory.

    Attributes:
        tokens: of exactly these pages, uint32 little-endian; empty unless those of all are known.
    """

    space: PrefixTree
    shard: int
    keys: list[PrefixKey]
    parent: PrefixKey
    tokens: bytes

    # Written out for the compiler, as in the classes below: what `dataclass` makes stays
    # interpreted, and each message makes some.
    def __init__(
        self, space: PrefixTree, shard: int, keys: list[PrefixKey], parent: PrefixKey, tokens: bytes
    ) -> None:
        self.space = space
        self.shard = shard
        self.keys = keys
        self.parent = parent
        self.tokens = tokens


@dataclass(slots=True, init=False)
class Removed:
    """Action: these pages were dropped from the index, leaves first.

    Their slots are not reused before this action is carried out.

    Attributes:
        tiers: the tiers they were in.
    """

    space: PrefixTree
    shard: int
    keys: list[PrefixKey]
    cause: str
    tiers: tuple[Tier, ...]

    def __init__(
        self, space: PrefixTree, shard: int, keys: list[PrefixKey], cause: str,
        tiers: tuple[Tier, ...] = ("host",),
    ) -> None:  # fmt: skip
        self.space = space
        self.shard = shard
        self.keys = keys
        self.cause = cause
        self.tiers = tiers


@dataclass(slots=True, init=False)
class TierStored:
    """Action: a READY page was added to one more tier; ``tokens`` as above."""

    space: PrefixTree
    shard: int
    keys: list[PrefixKey]
    parent: PrefixKey
    tier: Tier
    tokens: bytes = b""

    def __init__(
        self, space: PrefixTree, shard: int, keys: list[PrefixKey], parent: PrefixKey, tier: Tier,
        tokens: bytes = b"",
    ) -> None:  # fmt: skip
        self.space = space
        self.shard = shard
        self.keys = keys
        self.parent = parent
        self.tier = tier
        self.tokens = tokens


@dataclass(slots=True, init=False)
class TierRemoved:
    """Action: a page was removed from ``tier`` and is READY in the other; ``tokens`` as above."""

    space: PrefixTree
    shard: int
    keys: list[PrefixKey]
    parent: PrefixKey
    tier: Tier
    tokens: bytes = b""

    def __init__(
        self, space: PrefixTree, shard: int, keys: list[PrefixKey], parent: PrefixKey, tier: Tier,
        tokens: bytes = b"",
    ) -> None:  # fmt: skip
        self.space = space
        self.shard = shard
        self.keys = keys
        self.parent = parent
        self.tier = tier
        self.tokens = tokens


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Action: a writer abandoned its pages; requests that wait for them may stop waiting."""

    space: PrefixTree
    keys: list[PrefixKey]


Action = Stored | Removed | Abandoned | TierStored | TierRemoved
