"""The entries of pages in a directory that nodes share: keys and values. Pure.

An entry is a key of :data:`NAME_BYTES` random bytes, one for each page and shard, and a text: the
**members** that have it, separated by commas. A member is the number of a node's announcement, with
a minus before it for pages on the node's SSDs: ``17,-17,23``. docs/internals/directory.md has the
reasons.
"""

import hashlib
import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.index.apply import shard_name
from kvstore.protocol.page import KEY_BYTES

NAME_BYTES: Final = 13
"""With the prefix ``k``, 14 bytes: the longest key for which Redis allocates 16."""
SIGNS: Final = {"CPU": "", "STORAGE": "-"}
"""Medium, as events name it → prefix of the number of a member."""
HOLDERS_MAX: Final = 16
"""Maximum nodes of an answer: those that have most of the pages."""
_SCOPES_MAX: Final = 1_024


class NumberHolder(NamedTuple):
    """The node that a number belongs to.

    Attributes:
        node: name of the node.
        boot: its boot id.
    """

    node: str
    boot: bytes


class FoundEntries(NamedTuple):
    """The directory's entries for the pages of a query.

    Attributes:
        runs: for each shard, numbers of consecutive pages and their text; an empty text if no node
            has them.
        holders: of the valid numbers in these texts.
    """

    runs: Sequence[Sequence[tuple[int, str]]]
    holders: Mapping[int, NumberHolder]


class EntryNames:
    """Names the pages of one cluster.

    A name is the first 13 bytes of the prefix key, xor a mask of cluster, space and shard. Prefix
    keys are cryptographic digests, so two names of a scope are equal with a probability of 2^-104.
    """

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._masks: dict[tuple[str, str], npt.NDArray[np.uint8]] = {}

    def of(self, space: str, shard: str, keys: bytes) -> bytes:
        """The names of some pages, :data:`NAME_BYTES` each.

        Args:
            space: hex digest of their space.
            shard: hex digest of their shard; 16 digits suffice.
            keys: their prefix keys of 32 bytes.
        """
        mask = self._masks.get((space, shard))
        if mask is None:
            if len(self._masks) >= _SCOPES_MAX:
                self._masks.clear()
            parts = [part.encode() for part in (self._cluster, space, shard_name(0, shard))]
            scope = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
            digest = hashlib.blake2b(scope, digest_size=NAME_BYTES).digest()
            mask = self._masks[space, shard] = np.frombuffer(digest, dtype=np.uint8)
        rows = np.frombuffer(keys, dtype=np.uint8).reshape(-1, KEY_BYTES)
        names: bytes = (rows[:, :NAME_BYTES] ^ mask).tobytes()
        return names


def numbers_of(text: str) -> list[int]:
    """The numbers in the text of an entry, without those that cannot be read."""
    numbers = []
    for member in text.split(","):
        digits = member.removeprefix("-")
        if digits.isascii() and digits.isdigit() and len(digits) < 10:
            numbers.append(int(digits))
    return numbers


class HolderPages(NamedTuple):
    """How many leading pages one boot of a node has."""

    holder: NumberHolder
    pages: int


def usable_prefixes(
    found: FoundEntries, windows: Sequence[int], among: Mapping[str, bytes] | None = None
) -> list[HolderPages]:
    """How many leading pages each node has.

    Args:
        found: the entries.
        windows: for each shard how many of the last pages of a prefix suffice; 0 = all are needed.
        among: the nodes to consider, and their boot ids, empty = any; None = all nodes.

    Returns:
        Those with at least one page, the longest prefix first; at most :data:`HOLDERS_MAX`.
    """
    holders = {
        number: one
        for number, one in found.holders.items()
        if among is None or among.get(one.node) in (one.boot, b"")
    }
    known: dict[str, frozenset[NumberHolder]] = {}
    most: Counter[NumberHolder] = Counter()
    for runs in found.runs:
        pages_of: Counter[str] = Counter()
        for count, text in runs:
            pages_of[text] += count
        for text, count in pages_of.items():
            if text not in known:
                known[text] = frozenset(holders[n] for n in numbers_of(text) if n in holders)
            for holder in known[text]:
                most[holder] += count
    usable = []
    for holder in heapq.nsmallest(HOLDERS_MAX, most, key=lambda one: (-most[one], one)):
        shards = [_merged(holder, runs, known) for runs in found.runs]
        pages = _usable(shards, windows)
        if pages:
            usable.append(HolderPages(holder, pages))
    return sorted(usable, key=lambda one: (-one.pages, one.holder))


def _merged(
    holder: NumberHolder,
    runs: Sequence[tuple[int, str]],
    known: Mapping[str, frozenset[NumberHolder]],
) -> list[tuple[int, bool]]:
    """How many consecutive pages a holder has or lacks, alternating."""
    merged: list[tuple[int, bool]] = []
    for count, text in runs:
        is_there = holder in known[text]
        if merged and merged[-1][1] == is_there:
            merged[-1] = (merged[-1][0] + count, is_there)
        else:
            merged.append((count, is_there))
    return merged


def _usable(shards: Sequence[Sequence[tuple[int, bool]]], windows: Sequence[int]) -> int:
    """The longest prefix that satisfies every shard."""
    usable: npt.NDArray[np.bool_] | None = None
    for runs, window in zip(shards, windows, strict=True):
        met: list[npt.NDArray[np.bool_]] = []
        at = 0
        for count, is_there in runs:
            if not is_there:
                met.append(np.zeros(count, dtype=np.bool_))
            elif window:
                met.append(
                    np.ones(count, dtype=np.bool_) if at == 0 else np.arange(1, count + 1) >= window
                )
            else:
                met.append(np.full(count, at == 0))
            at += count
        whole = np.concatenate(met) if met else np.zeros(0, dtype=np.bool_)
        usable = whole if usable is None else usable[: len(whole)] & whole[: len(usable)]
    if usable is None or not usable.any():
        return 0
    return int(len(usable) - usable[::-1].argmax())
