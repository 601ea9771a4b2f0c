"""Why a page is, or is not, a hit: a question to the state that changes nothing. Pure.

The answer is searched where the page should be, then among dropped pages (the ghosts), then under
the same key in other spaces. If nothing is found, the answer says whether records may have been
discarded.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from kvstore.protocol.explanation import VERDICTS, Departure, Difference, Explanation
from kvstore.protocol.page import KEY_BYTES, PrefixKey
from kvstore.state.ask.traversal import Steps
from kvstore.state.choice.ghosts import Ghost
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree

_VERDICT_OF: Final = {
    "corrupt": "quarantined",
    "head_lost": "head_missing",
    "reclaimed": "evicted",
    "quota": "evicted",
    "retired": "evicted",
}
_NS_PER_S: Final = 1_000_000_000


HEADS_MAX: Final = 8
"""Maximum ancestors that are explained with a page: each may have been dropped because of its
parent."""
RUNS_MAX: Final = 64
"""Maximum spaces that are listed if several hold equally many pages of a prompt."""
_STEP_SPACES: Final = 32
_CONVERSATIONS_SHOWN: Final = 4
_NAME_CHARS: Final = 64
_STEP_KEYS: Final = 256


class Explainer:
    """Answers from one page table, at one time.

    Args:
        pages: the page table; never changed.
        now_ns: the time, on the node's clock.
    """

    def __init__(self, pages: PageTable, now_ns: int) -> None:
        self._pages = pages
        self._conversations = pages.keeping.conversations
        self._now_ns = now_ns

    def steps(
        self,
        key: PrefixKey,
        space: PrefixTree | None,
        shard: int | None = None,
        heads: int = HEADS_MAX,
    ) -> Steps[Explanation]:
        """Why the page of ``key`` is a hit or not.

        Args:
            key: the key.
            space: the space; None = the one that knows most about it.
            shard: number of the shard in ``space``; None = any.
            heads: maximum ancestors to explain, each because its child was dropped with it.
        """
        if space is not None:
            found = yield from self._in_space(space, key, shard, heads)
            return found or (yield from self._elsewhere(space, key))
        best: tuple[int, PrefixTree] | None = None
        for count, one in enumerate(list(self._pages.spaces), start=1):
            found = yield from self._in_space(one, key, None, 0)
            if found is not None:
                rank = VERDICTS.index(found.verdict)
                best = (rank, one) if best is None or rank < best[0] else best
            if count % _STEP_SPACES == 0:
                yield
        if best is not None:
            found = yield from self._in_space(best[1], key, None, heads)
            if found is not None:
                return found
        return self._nothing(None, key)

    def other(self, space: PrefixTree, other: PrefixTree, key: PrefixKey) -> Explanation:
        """Why a page of another space is not a page of ``space``."""
        node = other.nodes.get(key)
        if node is None or not node.present:
            return self._nothing(space, key)
        return self._of_other(space, other, node)

    def _in_space(
        self, space: PrefixTree, key: PrefixKey, shard: int | None, heads: int
    ) -> Steps[Explanation | None]:
        """The answer from this space alone."""
        node = space.nodes.get(key)
        if node is not None and node.present:
            found = self._present(node, shard)
            if found is not None:
                return found
        ghost = self._pages.residents.ghosts.find(space, key)
        if ghost is not None and (shard is None or node is None or ghost.shard == shard):
            return (yield from self._left(space, ghost, heads))
        if node is not None and node.present and shard is not None:
            return self._other_shard(node, shard)
        return None

    def _present(self, node: PrefixNode, shard: int | None) -> Explanation | None:
        shards = where(node)
        label, key = node.space.label, node.key.hex()
        mask = node.ready if shard is None else node.ready & 1 << shard
        if mask:
            tiers = sorted({tier for one in _bits(mask) for tier in shards[str(one)]})
            text = f"READY in {', '.join(tiers)}"
            source = self._pages.story.source(node) if node.replica else ""
            text += f", read from node {source}" if source else ""
            text += self._kept_for(node)
            return Explanation("hit", text, key, label, shards, read_from=source)
        if node.present & ~node.ready and (shard is None or node.present >> shard & 1):
            text = "being written now: a lookup that waits will get it"
            return Explanation("pending", text, key, label, shards)
        return None

    def _kept_for(self, node: PrefixNode) -> str:
        """The conversations that keep it, and how long; or why none does any more."""
        kept = self._conversations.of(node)[:_CONVERSATIONS_SHOWN]
        left = [(one.name, (one.expires_ns - self._now_ns) / _NS_PER_S) for one in kept]
        texts = [f"{name[:_NAME_CHARS]} ({max(0.0, seconds):.0f} s left)" for name, seconds in left]
        if texts:
            return f", kept for conversation {', '.join(texts)}"
        return self._gave_way(node.space, node.key)

    def _gave_way(self, space: PrefixTree, key: PrefixKey) -> str:
        """The conversation that kept it, and the space it gave way to; empty = it did not."""
        past = self._conversations.gave_way.get((space.number, key))
        if past is None:
            return ""
        return (
            f", kept for conversation {past.name[:_NAME_CHARS]} until {self._ago(past.at_ns):.1f} s"
            f" ago: it gave way to space {past.space[:12]}, which kept less"
        )

    def _other_shard(self, node: PrefixNode, shard: int) -> Explanation:
        space = node.space
        stored = _bits(node.present)[0]
        if shard >= len(space.shards):
            text = f"shard {shard} is not open in this space; it has 0..{len(space.shards) - 1}"
            return Explanation("other_shard", text, node.key.hex(), space.label, where(node))
        differs = _differences(space.shards[shard].spec, space.shards[stored].spec)
        names = ", ".join(one["field"] for one in differs)
        text = f"stored for shard {stored}, not for {shard}: they differ in {names}"
        return Explanation("other_shard", text, node.key.hex(), space.label, where(node), differs)

    def _elsewhere(self, space: PrefixTree, key: PrefixKey) -> Steps[Explanation]:
        """The same key in another space, or that there is none."""
        for count, other in enumerate(list(self._pages.spaces), start=1):
            node = other.nodes.get(key) if other is not space else None
            if node is not None and node.present:
                return self._of_other(space, other, node)
            if count % (_STEP_SPACES * 8) == 0:
                yield
        return self._nothing(space, key)

    def _of_other(self, space: PrefixTree, other: PrefixTree, node: PrefixNode) -> Explanation:
        differs = _differences(space.identity, other.identity)
        names = ", ".join(one["field"] for one in differs)
        text = f"stored in another space ({other.label[:12]}): it differs in {names}"
        return Explanation("other_space", text, node.key.hex(), other.label, where(node), differs)

    def _left(self, space: PrefixTree, ghost: Ghost, heads: int) -> Steps[Explanation]:
        left = self._remembered(ghost)
        verdict = _VERDICT_OF.get(ghost.cause, ghost.cause)
        head = None
        ago = f"{left['left_s_ago']:.1f} s ago"
        if ghost.head or ghost.cause == "head_lost":
            verdict = "head_missing"
            text = f"unreachable since {ago}: a page before it was dropped"
            if ghost.head:
                if heads:
                    head = yield from self.steps(ghost.head, space, None, heads - 1)
                text = (
                    f"unreachable since {ago}: page {ghost.head.hex()[:12]} before it was dropped"
                )
        elif ghost.cause == "evicted":
            text = f"evicted {ago} by policy {ghost.policy}"
            if left["wanted_bytes"]:
                text += f" to make room for a slot of {left['wanted_bytes']} bytes"
                text += f" of space {left['wanted_by'][:12]}" if left["wanted_by"] else ""
            elif left["wanted_by"]:
                text += " because its space was over its quota"
        elif ghost.cause == "corrupt":
            text = f"quarantined {ago}: its bytes failed their digest"
        else:
            text = f"{_SENTENCES.get(ghost.cause, ghost.cause)} {ago}"
        text += self._gave_way(space, ghost.key)
        return Explanation(
            verdict if verdict in VERDICTS else "unknown", text, ghost.key.hex(), space.label,
            head=head, left=left,
        )  # fmt: skip

    def _remembered(self, ghost: Ghost) -> Departure:
        wanting = (one.label for one in self._pages.spaces if one.number == ghost.wanted_by)
        by = next(wanting, "") if ghost.wanted_by is not None else ""
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

    def _nothing(self, space: PrefixTree | None, key: PrefixKey) -> Explanation:
        ghosts = self._pages.residents.ghosts
        label = space.label if space is not None else ""
        if ghosts.forgotten:
            text = (
                "unknown: never stored, or dropped before the oldest page that is still remembered"
            )
            if oldest := self._ago(ghosts.oldest_ns()):
                text += f" ({oldest:.1f} s ago; {ghosts.forgotten} are forgotten)"
            return Explanation("unknown", text, key.hex(), label)
        text = "never stored since this node started"
        return Explanation("never_stored", text, key.hex(), label)

    def _ago(self, then_ns: int) -> float | None:
        return (self._now_ns - then_ns) / _NS_PER_S if then_ns else None


_SENTENCES: Final = {
    "expired": "its TTL ended",
    "read_once": "a read-once page: its reader released it",
    "unreadable": "the disk failed to read it, and no copy was in memory",
    "operator": "an operator evicted it",
    "reclaimed": "evicted from the SSD: its segment was reclaimed",
    "quota": "evicted from the SSD: its space was over its quota there",
    "cleared": "an operator cleared its space",
    "moved": "an operator moved it to another node",
    "retired": "dropped: an unwatched process may still access its memory",
}


def where(node: PrefixNode) -> dict[str, list[str]]:
    """Shard number → tiers in which the page is READY, or ``["writing"]``."""
    found: dict[str, list[str]] = {}
    for shard in _bits(node.present):
        found[str(shard)] = list(node.tiers(shard)) if node.ready >> shard & 1 else ["writing"]
    return found


def _bits(mask: int) -> list[int]:
    return [at for at in range(mask.bit_length()) if mask >> at & 1]


def leading_runs(
    spaces: Sequence[PrefixTree], packed: bytes, shard: int | None
) -> Steps[list[tuple[PrefixTree, int]]]:
    """Which spaces hold most of the leading pages of a chain, and how many pages that is.

    Args:
        spaces: the spaces.
        packed: consecutive keys of one chain.
        shard: the shard; None = any.

    Returns:
        those that hold most, at most :data:`RUNS_MAX`; none if no space holds the first page.
    """
    best: list[tuple[PrefixTree, int]] = []
    looked = 0
    for space in spaces:
        count = 0
        for at in range(0, len(packed), KEY_BYTES):
            looked += 1
            if looked % _STEP_KEYS == 0:
                yield
            node = space.index.get(PrefixKey(packed[at : at + KEY_BYTES]))
            ready = node.ready if node is not None else 0
            if not (ready if shard is None else ready >> shard & 1):
                break
            count += 1
        most = best[0][1] if best else 0
        if count > most:
            best = [(space, count)]
        elif count == most > 0 and len(best) < RUNS_MAX:
            best.append((space, count))
        looked += 1
    return best


def _differences(asked: msgspec.Struct, there: msgspec.Struct) -> list[Difference]:
    """The fields in which two identities differ."""
    mine, theirs = msgspec.to_builtins(asked), msgspec.to_builtins(there)
    return [
        {"field": name, "asked": mine[name], "there": theirs[name]}
        for name in mine
        if mine[name] != theirs[name]
    ]
