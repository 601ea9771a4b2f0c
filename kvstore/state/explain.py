"""Why a page is, or is not, a hit: a question to the state that changes nothing. Pure.

The answer is looked for where the page should be, then among what left (the ghosts), then under the
same key in other spaces. When nothing is known the answer says whether something may have been
forgotten.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from kvstore.page import PrefixKey
from kvstore.state.ghosts import Ghost
from kvstore.state.pages import PageTable
from kvstore.state.tree import Node, Space

VERDICTS: Final = (
    "hit", "pending", "other_shard", "evicted", "expired", "read_once", "quarantined", "unreadable",
    "operator", "cleared", "head_missing", "other_space", "never_stored", "unknown",
)  # fmt: skip
"""All that can be the answer, the best first."""
_VERDICT_OF: Final = {
    "corrupt": "quarantined",
    "head_lost": "head_missing",
    "reclaimed": "evicted",
    "quota": "evicted",
    "retired": "evicted",
}
_NS_PER_S: Final = 1_000_000_000


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
    """

    verdict: str
    text: str
    key: str
    space: str = ""
    shards: dict[str, list[str]] = field(default_factory=dict)
    differs: list[dict[str, Any]] = field(default_factory=list)
    head: "Explanation | None" = None
    left: dict[str, Any] | None = None
    hit_pages: int | None = None
    asked_pages: int | None = None


class Explainer:
    """Answers from one page table, at one moment.

    Args:
        pages: asked, never changed.
        now_ns: the moment, on the node's clock.
    """

    def __init__(self, pages: PageTable, now_ns: int) -> None:
        """Ask nothing yet."""
        self._pages = pages
        self._now_ns = now_ns

    def key(self, key: PrefixKey, space: Space | None, shard: int | None = None) -> Explanation:
        """Why the page of ``key`` is a hit or not.

        Args:
            key: what is asked for.
            space: where; None = wherever it is known best.
            shard: number of the shard in ``space``; None = any.
        """
        if space is not None:
            return self._in_space(space, key, shard) or self._elsewhere(space, key)
        found = [self._in_space(one, key, None) for one in self._pages.spaces]
        known = [one for one in found if one is not None]
        if known:
            return min(known, key=lambda one: VERDICTS.index(one.verdict))
        return self._nothing(None, key)

    def tokens(
        self, chains: Mapping[int, Sequence[PrefixKey]], space: Space | None, shard: int | None
    ) -> Explanation:
        """Why a token list is no hit: how far it is one, and why the page after that is not there.

        Args:
            chains: tokens in a page → the keys of the list's full pages; at least one each, and
                those of ``space``.
            space: where; None = the space that holds the longest part.
            shard: as in :meth:`key`.
        """
        chosen, hits = space, 0
        if space is not None:
            hits = _hits(space, chains[space.identity.page_tokens], shard)
        else:
            for one in self._pages.spaces:
                keys = chains.get(one.identity.page_tokens)
                count = _hits(one, keys, None) if keys else 0
                if count > hits:
                    chosen, hits = one, count
        size = chosen.identity.page_tokens if chosen is not None else min(chains)
        keys = chains[size]
        at = min(hits, len(keys) - 1)
        found = self.key(keys[at], chosen, shard if chosen is space else None)
        text = f"{hits} of {len(keys)} pages are a hit"
        if hits < len(keys):
            text += f"; page {hits}: {found.text}"
        if space is not None and found.verdict in ("never_stored", "unknown"):
            found = self._in_other_pages(chains, space, hits * size) or found
            text = f"{hits} of {len(keys)} pages are a hit; page {hits}: {found.text}"
        return Explanation(
            found.verdict, text, found.key, found.space, found.shards, found.differs, found.head,
            found.left, hits, len(keys),
        )  # fmt: skip

    def _in_other_pages(
        self, chains: Mapping[int, Sequence[PrefixKey]], space: Space, tokens: int
    ) -> Explanation | None:
        """Tokens that a space with pages of another size has further than ``tokens``."""
        for other in self._pages.spaces:
            size = other.identity.page_tokens
            if size == space.identity.page_tokens or size not in chains:
                continue
            count = _hits(other, chains[size], None)
            if count * size > tokens:
                key = chains[size][count - 1]
                return self._of_other(space, other, other.nodes[key])
        return None

    def _in_space(self, space: Space, key: PrefixKey, shard: int | None) -> Explanation | None:
        """The answer that this space alone can give."""
        node = space.nodes.get(key)
        if node is not None and node.present:
            found = self._present(node, shard)
            if found is not None:
                return found
        ghost = self._pages.ghosts.find(space, key)
        if ghost is not None and (shard is None or node is None or ghost.shard == shard):
            return self._left(space, ghost)
        if node is not None and node.present and shard is not None:
            return self._other_shard(node, shard)
        return None

    def _present(self, node: Node, shard: int | None) -> Explanation | None:
        shards = where(node)
        label, key = node.space.label, node.key.hex()
        mask = node.ready if shard is None else node.ready & 1 << shard
        if mask:
            tiers = sorted({tier for one in _bits(mask) for tier in shards[str(one)]})
            text = f"stored: READY in {', '.join(tiers)}"
            return Explanation("hit", text, key, label, shards)
        if node.present & ~node.ready and (shard is None or node.present >> shard & 1):
            text = "being written now: a lookup that waits will get it"
            return Explanation("pending", text, key, label, shards)
        return None

    def _other_shard(self, node: Node, shard: int) -> Explanation:
        space = node.space
        stored = _bits(node.present)[0]
        if shard >= len(space.shards):
            text = f"shard {shard} is not open in this space; it has 0..{len(space.shards) - 1}"
            return Explanation("other_shard", text, node.key.hex(), space.label, where(node))
        differs = _differences(space.shards[shard].spec, space.shards[stored].spec)
        names = ", ".join(one["field"] for one in differs)
        text = f"stored for shard {stored}, not for {shard}: they differ in {names}"
        return Explanation("other_shard", text, node.key.hex(), space.label, where(node), differs)

    def _elsewhere(self, space: Space, key: PrefixKey) -> Explanation:
        """The same key in another space, or nothing."""
        for other in self._pages.spaces:
            node = other.nodes.get(key) if other is not space else None
            if node is not None and node.present:
                return self._of_other(space, other, node)
        return self._nothing(space, key)

    def _of_other(self, space: Space, other: Space, node: Node) -> Explanation:
        differs = _differences(space.identity, other.identity)
        names = ", ".join(one["field"] for one in differs)
        text = f"stored in another space ({other.label[:12]}): it differs in {names}"
        return Explanation("other_space", text, node.key.hex(), other.label, where(node), differs)

    def _left(self, space: Space, ghost: Ghost) -> Explanation:
        left = self._remembered(ghost)
        verdict = _VERDICT_OF.get(ghost.cause, ghost.cause)
        head = None
        ago = f"{left['left_s_ago']:.1f} s ago"
        if ghost.head or ghost.cause == "head_lost":
            verdict = "head_missing"
            text = f"unreachable since {ago}: a page before it left"
            if ghost.head:
                head = self.key(ghost.head, space)
                text = f"unreachable since {ago}: page {ghost.head.hex()[:12]} before it left"
        elif ghost.cause == "evicted":
            text = f"evicted {ago} by policy {ghost.policy}"
            if left["wanted_bytes"]:
                text += f" to make room for a slot of {left['wanted_bytes']} bytes"
                text += f" of space {left['wanted_by'][:12]}" if left["wanted_by"] else ""
            elif left["wanted_by"]:
                text += " because its space was over its quota"
        elif ghost.cause == "corrupt":
            text = f"quarantined {ago}: its bytes were not those that were stored"
        else:
            text = f"{_SENTENCES.get(ghost.cause, ghost.cause)} {ago}"
        return Explanation(
            verdict if verdict in VERDICTS else "unknown", text, ghost.key.hex(), space.label,
            head=head, left=left,
        )  # fmt: skip

    def _remembered(self, ghost: Ghost) -> dict[str, Any]:
        spaces = {space.number: space.label for space in self._pages.spaces}
        by = spaces.get(ghost.wanted_by, "") if ghost.wanted_by is not None else ""
        return {
            "cause": ghost.cause,
            "policy": ghost.policy,
            "shard": ghost.shard,
            "head": ghost.head.hex(),
            "hits": ghost.hits,
            "wanted_by": by,
            "wanted_bytes": ghost.wanted_bytes,
            "left_s_ago": self._ago(ghost.left_ns),
            "stored_s_ago": self._ago(ghost.stored_ns),
            "used_s_ago": self._ago(ghost.used_ns),
        }

    def _nothing(self, space: Space | None, key: PrefixKey) -> Explanation:
        ghosts = self._pages.ghosts
        label = space.label if space is not None else ""
        if ghosts.forgotten:
            text = "not known: never stored, or it left before the oldest page still remembered"
            if oldest := self._ago(ghosts.oldest_ns()):
                text += f" ({oldest:.1f} s ago; {ghosts.forgotten} are forgotten)"
            return Explanation("unknown", text, key.hex(), label)
        text = "never stored since this node started"
        return Explanation("never_stored", text, key.hex(), label)

    def _ago(self, then_ns: int) -> float | None:
        return (self._now_ns - then_ns) / _NS_PER_S if then_ns else None


_SENTENCES: Final = {
    "expired": "its time to live ran out",
    "read_once": "a page to be read once; its reader was done",
    "unreadable": "the disk failed to read it, and no copy was in memory",
    "operator": "an operator took it out",
    "reclaimed": "evicted from the SSD: its segment was reclaimed",
    "quota": "evicted from the SSD: its space was at its quota there",
    "cleared": "an operator cleared its space",
    "retired": "its memory was given up: a process that nobody can watch may still touch it",
}


def where(node: Node) -> dict[str, list[str]]:
    """Shard number → tiers in which the page is READY, or ``["writing"]``."""
    found: dict[str, list[str]] = {}
    for shard in _bits(node.present):
        tiers = ["host"] if shard in node.slots else []
        tiers += ["ssd"] if shard in node.disk else []
        found[str(shard)] = tiers if node.ready >> shard & 1 else ["writing"]
    return found


def _bits(mask: int) -> list[int]:
    return [at for at in range(mask.bit_length()) if mask >> at & 1]


def _hits(space: Space, keys: Sequence[PrefixKey], shard: int | None) -> int:
    for count, key in enumerate(keys):
        node = space.nodes.get(key)
        ready = node.ready if node is not None else 0
        if not (ready if shard is None else ready >> shard & 1):
            return count
    return len(keys)


def _differences(asked: msgspec.Struct, there: msgspec.Struct) -> list[dict[str, Any]]:
    """The fields in which two names differ."""
    mine, theirs = msgspec.to_builtins(asked), msgspec.to_builtins(there)
    return [
        {"field": name, "asked": mine[name], "there": theirs[name]}
        for name in mine
        if mine[name] != theirs[name]
    ]
