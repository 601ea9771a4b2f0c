"""The answer to why a page is, or is not, a hit: values, for the process of the admin API too."""

from dataclasses import dataclass, field
from typing import Any, Final, TypedDict

VERDICTS: Final = (
    "hit", "pending", "other_shard", "evicted", "expired", "read_once", "quarantined", "unreadable",
    "operator", "cleared", "moved", "head_missing", "other_space", "never_stored", "unknown",
)  # fmt: skip
"""All that can be the answer, the best first."""


class Difference(TypedDict):
    """A field in which a stored page is not the one that was asked for."""

    field: str
    asked: Any
    there: Any


class Departure(TypedDict):
    """What is remembered of a page that left; ages in seconds, None = not known.

    ``head``: the page whose leaving took this one along. ``wanted_by``: label of the space that
    needed its room, a slot of ``wanted_bytes``; 0 bytes = that space was over its quota.
    """

    cause: str
    policy: str
    shard: int
    head: str
    hits: int
    wanted_by: str
    wanted_bytes: int
    left_s_ago: float | None
    stored_s_ago: float | None
    used_s_ago: float | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer for one key.

    Attributes:
        verdict: one of :data:`VERDICTS`.
        text: the same as a sentence.
        key: hex.
        space: label of the space that the answer is about; empty when it is about none.
        shards: shard number → tiers in which that page is READY, or ``["writing"]``.
        differs: what keeps a stored page from being this one: field, what was asked, what is there.
        head: why the page before it is missing, when that is the reason.
        left: what is remembered of its leaving, ages in seconds.
        hit_pages: of a token list: how many leading pages are a hit; None for a single key.
        asked_pages: of a token list: how many full pages it has.
        peers: of a page that is not here: node that has it, as far as the index knows → numbers of
            the shards that it has.
        read_from: the node from which it was read last; empty = none, or it is not remembered.
    """

    verdict: str
    text: str
    key: str
    space: str = ""
    shards: dict[str, list[str]] = field(default_factory=dict)
    differs: list[Difference] = field(default_factory=list)
    head: "Explanation | None" = None
    left: Departure | None = None
    hit_pages: int | None = None
    asked_pages: int | None = None
    peers: dict[str, list[int]] = field(default_factory=dict)
    read_from: str = ""
