"""The answer of explain, why a page is or is not a hit: values, also for the admin process."""

from dataclasses import dataclass, field
from typing import Any, Final, TypedDict

VERDICTS: Final = (
    "hit", "pending", "other_shard", "evicted", "expired", "read_once", "quarantined", "unreadable",
    "operator", "cleared", "moved", "head_missing", "other_space", "never_stored", "unknown",
)  # fmt: skip
"""All that can be the answer, the best first."""


class Difference(TypedDict):
    """A field in which a stored page differs from the requested one."""

    field: str
    asked: Any
    there: Any


class Departure(TypedDict):
    """The record of a dropped page; ages in seconds, None = unknown.

    ``head``: the ancestor with which it was dropped. ``wanted_by``: label of the space that needed
    its room, a slot of ``wanted_bytes``; 0 bytes = that space was over its quota.
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
        text: the explanation as a sentence.
        key: hex.
        space: label of the space of the answer; empty if none.
        shards: shard number → tiers in which that page is READY, or ``["writing"]``.
        differs: differences between a stored page and this one: field, requested, stored.
        head: why the parent is missing, if that is the reason.
        left: the record of its drop, ages in seconds.
        hit_pages: number of leading pages of a token list that are a hit; None for a single key.
        asked_pages: number of full pages of a token list.
        peers: node that has the page, as far as the index knows → numbers of the shards that it
            has; empty if the page is here.
        read_from: the node from which it was read last; empty = none, or unknown.
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
