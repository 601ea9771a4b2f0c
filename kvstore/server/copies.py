"""Jobs that copy pages to other nodes: replicate, move to a node, drain.

The other nodes fetch the pages themselves (:mod:`kvstore.cluster.copier`). Nothing is dropped here
that another node has not said to have.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from time import monotonic_ns
from typing import Any, Final, NamedTuple

from kvstore.cluster.copier import Copier, CopyEnd, CopyOrder
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.page import KEY_BYTES, PrefixKey
from kvstore.server import answers, operations
from kvstore.server.answers import JobRow
from kvstore.server.channel import Caller
from kvstore.server.cluster import ClusterSide
from kvstore.server.jobs import Jobs, OperatorJob
from kvstore.server.naming import key_of, not_stored, space_of
from kvstore.server.refusal import Refusal
from kvstore.server.turns import Work
from kvstore.state.remote.located import LOCATE_KEYS_MAX
from kvstore.state.table.pages import PageTable
from kvstore.state.table.runs import chain_keys, lasting_pages
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree

FAILURES_MAX: Final = 3
"""A drain asks a node for no more pages after so many chains that it did not take as a whole."""
REJOIN_NS: Final = 5_000_000_000
"""A drain waits so long for a session with any other node before it ends."""
_POLL_S: Final = 0.005
_REJOIN_POLL_S: Final = 0.1
_TELL_S: Final = 2.0
"""Limit of telling a node which pages have left this one."""
_STEP_NODES: Final = 32
_NS_PER_MS: Final = 1_000_000
_NOTHING: Final = "its pages have a TTL, are read once, or have left"
_NO_MORE: Final = "it has no room for more, does not get them, or moves them away itself"


class _Part(NamedTuple):
    """Pages of one shard of a chain: those from number ``first`` on, and before ``stop``."""

    shard: int
    first: int
    stop: int


@dataclass(slots=True)
class _Drained:
    """What a drain has done.

    Attributes:
        hottest: what is to be copied: ends of runs, the last used first.
        peer_of: number of a space, and end of a run → the node that has said to have all pages up
            to it.
        failures: of each node, since it last took a chain as a whole.
        why: why the last copy was not made.
        since_ns: when it began.
    """

    hottest: list[tuple[int, int, PrefixTree, PrefixKey]] = field(default_factory=list)
    peer_of: dict[tuple[int, PrefixKey], str] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    why: str = ""
    since_ns: int = 0


class CopyJobs:
    """The operations that start such jobs.

    Args:
        table: the page table.
        jobs: of the node.
        side: the side towards the other nodes, None while there is none.

    Attributes:
        handlers: operation → its implementation, which also gets the caller.
    """

    def __init__(
        self, table: PageTable, jobs: Jobs, side: Callable[[], ClusterSide | None]
    ) -> None:  # fmt: skip
        self._table = table
        self._jobs = jobs
        self._side = side
        self._draining = False
        self.handlers: dict[type[operations.Operation], Callable[[Any, Caller], Work[Any]]] = {
            operations.ReplicatePages: self.replicate,
            operations.MoveToNode: self.move,
            operations.DrainNode: self.drain,
        }

    def replicate(self, asked: operations.ReplicatePages, by: Caller) -> Work[JobRow]:
        """Let several nodes have the pages of a key and of all keys before it."""
        yield from ()
        copier = self._joined().copier
        space, keys = self._chain(asked.space, asked.key)
        if asked.node is not None and asked.node not in copier.peers(keys[:KEY_BYTES]):
            raise _no_such(copier)
        deadline_ns = _deadline_ns(asked.deadline_s)

        def work(job: OperatorJob) -> Work[None]:
            parts = yield from self._parts(space, keys)
            job.total = (asked.copies - 1) * sum(stop - first for _, first, stop in parts)
            copies, why = 1, "" if parts else _NOTHING
            peers = copier.peers(keys[:KEY_BYTES]) if parts else ()
            for peer in sorted(peers, key=lambda one: one != asked.node):
                if copies >= asked.copies or _is_over(job, deadline_ns):
                    break
                failed = yield from self._copy(job, peer, space, keys, parts, 0, deadline_ns)
                copies += not failed
                job.done = job.pages
                why = failed or why
                job.result["copies"] = copies
            complete = copies >= asked.copies
            why = "" if complete else why or "there are too few other nodes" + _left_out(copier)
            job.result.update(copies=copies, complete=complete, why=why)

        subject: dict[str, answers.Value] = {
            "space": space.label, "key": asked.key, "copies": asked.copies
        }  # fmt: skip
        return self._jobs.start("replicate", subject, by, work)

    def move(self, asked: operations.MoveToNode, by: Caller) -> Work[JobRow]:
        """Let another node have pages, then drop those here that nothing else needs."""
        yield from ()
        copier = self._joined().copier
        space, keys = self._chain(asked.space, asked.key)
        able = copier.peers(keys[:KEY_BYTES])
        if (asked.node is not None and asked.node not in able) or not able:
            raise _no_such(copier)
        peer = asked.node or able[0]
        deadline_ns = _deadline_ns(asked.deadline_s)

        def work(job: OperatorJob) -> Work[None]:
            space.leaving.append(keys)  # before any other node is asked
            try:
                yield from self._move(job, peer, space, keys, deadline_ns)
            finally:
                space.leaving.remove(keys)

        subject: dict[str, answers.Value] = {"space": space.label, "key": asked.key, "node": peer}
        return self._jobs.start("move-to-node", subject, by, work)

    def drain(self, asked: operations.DrainNode, by: Caller) -> Work[JobRow]:
        """Let other nodes have all pages of this one, the last used ones first."""
        yield from ()
        self._joined()
        if self._draining:
            raise Refusal(409, "busy", "a drain runs already; see kvstore jobs")
        self._jobs.refuse_if_full()
        self._draining = True
        deadline_ns = _deadline_ns(asked.deadline_s)
        subject: dict[str, answers.Value] = {
            "deadline_s": asked.deadline_s, "bytes_per_s": asked.bytes_per_s
        }  # fmt: skip
        return self._jobs.start(
            "drain", subject, by, lambda job: self._drain(job, deadline_ns, asked.bytes_per_s)
        )

    def _move(
        self, job: OperatorJob, peer: str, space: PrefixTree, keys: bytes, deadline_ns: int
    ) -> Work[None]:
        """Let a node have a chain whose keys are leaving, then drop it here."""
        parts = yield from self._parts(space, keys)
        job.total = sum(stop - first for _, first, stop in parts)
        job.result.update(dropped=0)
        why = _NOTHING
        if parts:
            why = yield from self._copy(job, peer, space, keys, parts, 0, deadline_ns)
        job.done = job.pages
        if not why and not job.cancelled:
            gone = yield from self._drop(job, space, keys, parts)
            yield from self._tell_gone(peer, space, keys, parts, gone)
        job.result.update(complete=not why, why=why)

    # ---- a drain ----------------------------------------------------------------------------

    def _drain(self, job: OperatorJob, deadline_ns: int, bytes_per_s: int) -> Work[None]:
        side, done = self._joined(), _Drained(since_ns=monotonic_ns())
        complete = False
        job.result.update(kept=0)
        side.set_state("draining")
        try:
            yield from self._find(job, done)
            complete = yield from self._drain_all(job, done, deadline_ns, bytes_per_s)
        finally:
            self._draining = False
            if not complete:
                side.set_state("up")
        job.result["kept"] = max(0, job.total - job.done)
        if _is_over(job, deadline_ns):
            done.why = "cancelled" if job.cancelled else "the deadline has passed"
        job.result.update(complete=complete, why="" if complete else done.why)

    def _find(self, job: OperatorJob, done: _Drained) -> Work[None]:
        """All runs of pages, by their last use."""
        for space in list(self._table.spaces):
            for number in space.by_creation.numbers(0):
                nodes = space.by_creation.nodes(number)
                for count, node in enumerate(nodes, start=1):
                    if node.ready and not node.expires and not node.read_once:
                        used_ns = max(node.used_ns, node.stored_ns)
                        heappush(done.hottest, (-used_ns, len(done.hottest), space, node.key))
                        job.total += node.count * node.ready.bit_count()
                    if count % _STEP_NODES == 0:
                        yield None
                yield None

    def _drain_all(
        self, job: OperatorJob, done: _Drained, deadline_ns: int, bytes_per_s: int
    ) -> Work[bool]:
        """Copy one chain after the other; whether all were copied."""
        left = 0
        while done.hottest:
            used_ns, _, space, key = heappop(done.hottest)
            node = space.index.get(key)
            if node is None or (space.number, key) in done.peer_of:
                yield None  # it has left, or went with a page behind it
                continue
            keys = _chain_to(node, key)
            if len(keys) > LOCATE_KEYS_MAX * KEY_BYTES:
                done.why = f"pages beyond the first {LOCATE_KEYS_MAX} of a chain are not copied"
                left += 1
                yield None
                continue
            peers = yield from self._targets(job, done, keys[:KEY_BYTES])
            if not peers or _is_over(job, deadline_ns):
                return False
            idle_ms = max(1, (self._table.now_ns + used_ns) // _NS_PER_MS)
            for peer in peers:
                failed = yield from self._drain_to(
                    job, done, peer, space, keys, idle_ms, deadline_ns
                )
                if not failed or _is_over(job, deadline_ns):
                    break
                done.failures[peer] = done.failures.get(peer, 0) + 1
                done.why = f"node {peer}: {failed}"
            left += bool(failed)
            if bytes_per_s:
                due_s = int(job.result.get("bytes") or 0) / bytes_per_s
                yield from _pause(job, due_s - (monotonic_ns() - done.since_ns) / 1e9, deadline_ns)
        return not left

    def _targets(self, job: OperatorJob, done: _Drained, first: bytes) -> Work[list[str]]:
        """The nodes to ask for a chain that begins with a key; none = the drain is over."""
        give_up_ns = monotonic_ns() + REJOIN_NS
        while True:
            up = self._joined().copier.peers(first)
            able = [peer for peer in up if done.failures.get(peer, 0) < FAILURES_MAX]
            if able or _is_over(job, give_up_ns):
                break
            if up:
                break  # those that are there have no room
            yield _REJOIN_POLL_S
        if not able and not up:
            done.why = "no session with any other node that is not draining; " + done.why
        return able

    def _drain_to(
        self, job: OperatorJob, done: _Drained, peer: str, space: PrefixTree, keys: bytes,
        idle_ms: int, deadline_ns: int,
    ) -> Work[str]:  # fmt: skip
        """Let a node have a chain; why it has not, empty if it has."""
        ends, known = yield from self._ends(done, peer, space, keys)
        parts = yield from self._parts(space, keys)
        new = [_Part(of, max(first, known), stop) for of, first, stop in parts if stop > known]
        failed = yield from self._copy(job, peer, space, keys, new, idle_ms, deadline_ns)
        if not failed:
            done.failures.pop(peer, None)
            for end in ends:
                done.peer_of[space.number, end] = peer
            job.done += sum(stop - first for _, first, stop in new)
        return failed

    def _ends(
        self, done: _Drained, peer: str, space: PrefixTree, keys: bytes
    ) -> Work[tuple[list[PrefixKey], int]]:
        """Ends of the runs of a chain, and how many leading pages a node has of it already."""
        ends = [PrefixKey(keys[-KEY_BYTES:])]
        node = space.index.get(ends[0])
        at = node.above if node is not None else None
        while at is not None and at.above is not None:
            if done.peer_of.get((space.number, at.key)) == peer:
                return ends, at.depth
            ends.append(at.key)
            at = at.above
            if len(ends) % _STEP_NODES == 0:
                yield None
        return ends, 0

    # ---- chains -----------------------------------------------------------------------------

    def _parts(self, space: PrefixTree, keys: bytes) -> Work[list[_Part]]:
        """Of each shard the pages that may be copied: they are READY, and stay until evicted."""
        parts: list[_Part] = []
        for shard in range(len(space.shards)):
            first, stop = yield from lasting_pages(space, shard, keys)
            if first < stop:
                parts.append(_Part(shard, first, stop))
            yield None
        return parts

    def _copy(
        self, job: OperatorJob, peer: str, space: PrefixTree, keys: bytes, parts: Sequence[_Part],
        idle_ms: int, deadline_ns: int,
    ) -> Work[str]:  # fmt: skip
        """Let a node have parts of a chain; why it has not all, empty if it has."""
        for shard, first, stop in parts:
            of, ends = space.shards[shard], list[CopyEnd]()
            order = CopyOrder(
                peer, space.identity, of.spec, keys[: stop * KEY_BYTES], first, idle_ms, deadline_ns
            )
            self._joined().copier.copy(order, ends.append)
            while not ends:
                if job.cancelled:
                    return "cancelled"
                yield _POLL_S
            (end,) = ends
            job.pages += end.pages
            _add(job, "pages", end.pages)
            _add(job, "bytes", end.pages * of.page_bytes)
            _add(job, f"to {peer}", end.pages)
            if not end.complete:
                return _why(end.error)
        return ""

    def _drop(
        self, job: OperatorJob, space: PrefixTree, keys: bytes, parts: Sequence[_Part]
    ) -> Work[int]:
        """Drop pages that another node has, from the last one on, up to one that must stay.

        Returns:
            number of the first one that was dropped; that of pages if none was.
        """
        table, dropped, gone = self._table, 0, len(keys) // KEY_BYTES
        for at in range(len(keys) // KEY_BYTES - 1, -1, -1):
            node = space.nodes.get(PrefixKey(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]))
            if node is None:
                continue
            there = {of for of, first, stop in parts if first <= at < stop}
            shards = [of for of in range(len(space.shards)) if node.present >> of & 1]
            free = not node.memory or table.eviction.releasable(node)
            if node.below or node.pins or not free or not set(shards) <= there:
                break
            for shard in shards:
                table.residents.drop(node, shard, "moved")
                dropped += 1
            job.result["dropped"], gone = dropped, at
            yield None
        return gone

    def _tell_gone(
        self, peer: str, space: PrefixTree, keys: bytes, parts: Sequence[_Part], gone: int
    ) -> Work[None]:
        """Let the node that has pages now keep them as its own: they are replicas of none here.

        If it cannot be told, it takes them for replicas until its session with this node ends.
        """
        deadline_ns = _deadline_ns(_TELL_S)
        for shard, first, stop in parts:
            ends = list[CopyEnd]()
            order = CopyOrder(
                peer, space.identity, space.shards[shard].spec, keys[: stop * KEY_BYTES],
                max(first, gone), 0, deadline_ns, gone=True,
            )  # fmt: skip
            if order.first < stop:
                self._joined().copier.copy(order, ends.append)
                while not ends:
                    yield _POLL_S

    def _chain(self, label: str, text: str) -> tuple[PrefixTree, bytes]:
        space, key = space_of(self._table.spaces, label), key_of(text)
        node = space.index.get(key)
        if node is None or not node.ready:
            raise not_stored(key.hex(), "key")
        return space, _chain_to(node, key)

    def _joined(self) -> ClusterSide:
        side = self._side()
        if side is None:
            message = "this node is not in a cluster: set cluster.name"
            raise Refusal(409, "not_clustered", message)
        return side


def _chain_to(node: PrefixNode, key: PrefixKey) -> bytes:
    """The keys of the chain up to one page of a node."""
    keys = chain_keys(node)
    return keys[: len(keys) - (node.count - 1 - node.position(key)) * KEY_BYTES]


def _no_such(copier: Copier) -> Refusal:
    message = f"there is no session with such a node{_left_out(copier)}; see kvstore nodes"
    return Refusal(409, "peer_unreachable", message, "node")


def _left_out(copier: Copier) -> str:
    """Which nodes are not asked for copies, as the end of a sentence; empty = none."""
    names = ", ".join(copier.draining())
    return f" (draining, so not asked: {names})" if names else ""


def _why(error: KVStoreError | None) -> str:
    return f"{error.code}: {error}" if error is not None else _NO_MORE


def _add(job: OperatorJob, name: str, more: int) -> None:
    job.result[name] = int(job.result.get(name) or 0) + more


def _deadline_ns(seconds: float) -> int:
    return monotonic_ns() + int(seconds * 1e9)


def _is_over(job: OperatorJob, deadline_ns: int) -> bool:
    return job.cancelled or monotonic_ns() >= deadline_ns


def _pause(job: OperatorJob, seconds: float, deadline_ns: int) -> Work[None]:
    """Wait in short parts, so that a job that is cancelled ends soon."""
    until_ns = monotonic_ns() + int(seconds * 1e9)
    while monotonic_ns() < until_ns and not _is_over(job, deadline_ns):
        yield min(_REJOIN_POLL_S, (until_ns - monotonic_ns()) / 1e9)
