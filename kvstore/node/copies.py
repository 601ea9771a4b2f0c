"""Copies of pages on several nodes, as engines and other nodes request them. Pure.

No node writes into another node's memory: a node that is to have pages is asked to fetch them.
"""

from typing import Final

from kvstore.config.cluster import NODES_MAX
from kvstore.node.awaited import Outcome
from kvstore.node.requests import PERSIST_PAGES_MAX, Requests
from kvstore.protocol import wire
from kvstore.protocol.errors import CapacityError, InvalidArgument
from kvstore.protocol.page import KEY_BYTES
from kvstore.state.remote.jobs import Holding
from kvstore.state.remote.located import Span
from kvstore.state.remote.pages import RemotePages
from kvstore.state.remote.spreads import Spreading
from kvstore.state.table.pages import PageTable
from kvstore.state.table.runs import chain_keys, leading_ready, ready_pages
from kvstore.state.tree.sessions import Fetch, Process

_NS_PER_MS: Final = 1_000_000
_TELL_MS: Final = 50
"""The peer side ends this long before the request that waits for it, but at most a quarter of its
time before, so that its result can still be reported."""


class CopyRequests:
    """Bring and Replicate, carried out on one page table.

    Every method raises :class:`~kvstore.protocol.errors.KVStoreError` if the node refuses; then
    nothing was changed.

    Args:
        pages: the page table.
        requests: the other messages of sessions.
    """

    def __init__(self, pages: PageTable, requests: Requests) -> None:
        self._pages = pages
        self._requests = requests

    def bring(
        self, process: Process, request: wire.Bring, *, waits: bool, earlier: Fetch | None = None
    ) -> Outcome:
        """Fetch pages from the node that asks; this does not count as a read by an engine.

        Pages that are leaving this node are not reported as present: otherwise two nodes that each
        moved the same page to the other would both drop it.

        ``earlier``: the fetch that the request has waited for; pages that it did not deliver are
        not requested again from a node that did not have them.
        """
        space = self._requests.space(process, request.space, [request.shard])
        count, shard = wire.count_keys(request.keys), request.shard
        if not 0 <= request.first < count:
            raise InvalidArgument(
                "first", f"{request.first} is not below {count}, the number of keys"
            )
        if request.idle_ms < 0:
            raise InvalidArgument("idle_ms", f"{request.idle_ms} is less than 0")
        remote = self._remote()
        wanted = request.keys[request.first * KEY_BYTES :]
        ready, _ = ready_pages(space, shard, wanted)
        answer = wire.Brought(request.id, ready)
        if request.gone:
            run = leading_ready(space, wanted, shard)
            self._pages.eviction.source_gone(run, process.peer.node)
            return answer, None
        begin, end = request.first * KEY_BYTES, (request.first + 1) * KEY_BYTES
        if any(chain[begin:end] == wanted[:KEY_BYTES] for chain in space.leaving):
            return wire.Brought(request.id, 0), None
        if not waits or ready * KEY_BYTES == len(wanted):
            return answer, None
        at = request.first + ready
        if earlier is None:
            self._pages.counts["brings"] += 1
            remote.promised(space, shard, request.keys, at, Holding(process.peer.node, count))
        span = remote.want(space, shard, request.keys, at, asks=False, begins=False)
        slot_bytes = space.shards[shard].slot_bytes
        free_bytes = process.session.free_bytes + (earlier.size_bytes if earlier else 0)
        if not isinstance(span, Span) or free_bytes < slot_bytes:
            return answer, None
        span = span._replace(pages=min(span.pages, free_bytes // slot_bytes))
        now_ns, idle_ns = self._pages.now_ns, request.idle_ms * _NS_PER_MS
        with self._pages.eviction.sparing(max(1, now_ns - idle_ns) if idle_ns else 0):
            fetch, _ = self._requests.begin_fetch(process, request, 0, span, earlier)
        if fetch.waits:
            return answer, fetch
        self._pages.end_fetch(process, fetch)
        return answer, None

    def bring_again(
        self, process: Process, request: wire.Bring, awaited: Fetch, *, waits: bool
    ) -> Outcome:
        """Continue to fetch what is missing."""
        try:
            return self.bring(process, request, waits=waits, earlier=awaited)
        finally:
            self._pages.end_fetch(process, awaited)

    def replicate(self, process: Process, request: wire.Replicate, *, waits: bool) -> Outcome:
        """Ask other nodes to fetch pages; wait until they have them, or cannot."""
        space = self._requests.space(process, request.space, [request.shard])
        count = wire.count_keys(request.keys)
        if count > PERSIST_PAGES_MAX:
            raise InvalidArgument("keys", f"{count} keys, at most {PERSIST_PAGES_MAX}")
        if not 1 <= request.copies <= NODES_MAX:
            raise InvalidArgument("copies", f"{request.copies} is outside 1..{NODES_MAX}")
        run = leading_ready(space, request.keys, request.shard)
        missing = count - sum([node.count for node in run])
        if missing:
            raise CapacityError(f"{missing} of {count} pages are not stored; put them again")
        if any(one.read_once >> request.shard & 1 for one in run):
            raise InvalidArgument("keys", "a page to be read once is not copied to other nodes")
        only_here = wire.Replicated(request.id, 1)
        if request.copies == 1 or not waits or self._requests.remote is None:
            return only_here, None
        keys = chain_keys(run[-1])
        spread_ms = request.wait_ms - min(_TELL_MS, request.wait_ms // 4)
        deadline_ns = self._pages.now_ns + spread_ms * _NS_PER_MS
        spreading = self._remote().spreads.begin(
            space.identity, space.shards[request.shard].spec, keys, len(keys) // KEY_BYTES - count,
            request.copies - 1, deadline_ns,
        )  # fmt: skip
        return only_here, spreading

    def _remote(self) -> RemotePages:
        remote = self._requests.remote
        if remote is None:
            raise InvalidArgument("request", "this node is not in a cluster")
        return remote


def tell_copies(request: wire.Replicate, spreading: Spreading) -> wire.Answer:
    """The answer to a Replicate after its end or its deadline."""
    return wire.Replicated(request.id, 1 + spreading.peers, spreading.draining)
