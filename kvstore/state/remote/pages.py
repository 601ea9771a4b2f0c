"""Reads of peers' pages to memory, and the fetches that wait for them. Pure.

A fetch is a put of the node itself. Its jobs are put processes of their own, so that a job can be
lost and settled like a client's connection::

              begin: slots WRITING                  all came
    (wanted) ──────────────────────► READING ───────────────────────────► READY, the job is gone
                                     │  │  ▲
                 some came, settled  │  │  │ another holder has the rest
                                     │  └──┘
                                     │ no holder has: the rest is aborted, the job is gone
                                     │
       not settled, or the deadline  ▼                     settled
                                   LOST, slots in LIMBO ─────────────────► FREE, the job is gone

A page becomes READY only by an end that is settled and has its digest. A waiting request does not
know the source of its pages (:mod:`kvstore.state.tree.sessions`); when all jobs have ended it is
tried again, and pages that are still missing are requested from the remaining holders.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, groupby
from typing import Final

from kvstore.protocol.counts import RemoteCounts
from kvstore.protocol.page import DIGEST_BYTES, KEY_BYTES, PrefixKey
from kvstore.state.remote.arrival import Arrival
from kvstore.state.remote.jobs import FetchEnd, Holding, PeerFetch, PeerJob, PeerLimits
from kvstore.state.remote.located import (
    FRESH_NS,
    KEPT_NS,
    LocatedChain,
    LocatedChains,
    Span,
)  # fmt: skip
from kvstore.state.remote.rates import START_S, PeerRates
from kvstore.state.remote.spreads import Spreads
from kvstore.state.table.pages import PageTable
from kvstore.state.table.runs import ready_pages
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.node import ORDINARY, Retention
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Fetch, Peer, Process, Session

TURN_PAGES: Final = 128
"""Maximum pages that one turn starts to fetch; each may have to make room first."""
PARTS_MAX: Final = 4
"""Maximum peers that share a run of pages."""
PART_BYTES_MIN = 4 << 20
"""A run is not split into smaller parts."""


class RemotePages:
    """The fetches of a node, and what it knows about the pages of its peers.

    Args:
        table: the pages of the node.
        limits: of all fetches together.

    Attributes:
        jobs: for the peer side, in order.
        chains: what peers have.
        spreads: requests for copies of this node's pages at peers.
    """

    def __init__(self, table: PageTable, limits: PeerLimits) -> None:
        self.jobs: list[PeerJob] = []
        self.limits = limits
        self.chains = LocatedChains(self.jobs, table.counts)
        self.spreads = Spreads(self.jobs, table.counts)
        self._table = table
        self._rates = PeerRates()
        self._number = count(1)
        #: Every put of a fetch is of this session: its quota bounds the bytes in flight.
        self._session = Session(b"", "peers", limits.in_flight_bytes_max)
        self._arrivals: dict[int, Arrival] = {}
        #: (number of a space, shard) → key → the job that brings the page.
        self._by_key: dict[tuple[int, int], dict[PrefixKey, Arrival]] = {}

    # ---- what peers have --------------------------------------------------------------------

    def further(
        self, space: PrefixTree, shards: list[int], packed: bytes, pages: int,
        promise: Holding | None = None, answer: LocatedChain | None = None,
    ) -> LocatedChain | tuple[int, float]:  # fmt: skip
        """What peers have after the ``pages`` of a hit: a query in progress, or pages and seconds.

        Args:
            space: of the pages.
            shards: all shards of the hit.
            packed: keys of a chain, more than ``pages``.
            pages: of the hit here.
            promise: a holder named by the engine; then the directory is not queried.
            answer: the answer that the request has waited for, so that it does not query again.
                Otherwise two requests for the same page could replace each other's queries for
                ever.
        """
        mask = 0
        for shard in shards:
            mask |= 1 << shard
        now_ns, left = self._table.now_ns, len(packed) // KEY_BYTES - pages
        span = self.chains.find(space, mask, packed, pages, now_ns - FRESH_NS, answer)
        if (promise := self.chains.credited(space, packed, pages, promise, now_ns)) is not None:
            if span is None or span.chain.asking or not span.agrees(promise, pages):
                span = self.chains.believe(space, shards, packed, pages, now_ns, promise)
        elif span is not None and answer is None and not span.tells_all(left):
            span = None
        chain = span.chain if span else None
        if span is None and answer is None:
            chain = self.chains.ask(space, shards, packed, pages, now_ns)
        if chain is None or chain.asking:
            return chain or (0, 0.0)
        assert span is not None
        found, fastest = 0, 0.0
        for peer, held in chain.holdings.items():
            more = min(held - span.start, span.pages)
            if more >= max(found, 1) and not self._rates.is_away(peer, now_ns):
                rate = self._rates.of(peer)
                fastest = max(fastest, rate) if more == found else rate
                found = more
        if not found:
            return 0, 0.0
        size = 0
        for shard in shards:
            of = space.shards[shard]
            size += min(found, of.window_pages or found) * of.page_bytes
        return found, START_S + size / fastest

    def want(
        self, space: PrefixTree, shard: int, packed: bytes, ready: int, *, asks: bool, begins: bool,
        answer: LocatedChain | None = None,
    ) -> LocatedChain | Span | None:  # fmt: skip
        """What peers have of a run after its ``ready`` pages; None = nothing.

        Args:
            space: of the pages.
            shard: of the pages.
            packed: keys of the run, more than ``ready``.
            ready: number of its pages that are here.
            asks: a query may be sent first; it is returned while it has no answer. This needs the
                key of the page before the first missing one.
            begins: the run starts its chain.
            answer: the answer that the request has waited for; see :meth:`further`.
        """
        asks = asks and answer is None
        now_ns, may_ask = self._table.now_ns, asks and (ready > 0 or begins)
        oldest_ns = now_ns - (FRESH_NS if may_ask else KEPT_NS)
        span = self.chains.find(space, 1 << shard, packed, ready, oldest_ns, answer)
        if span is None:
            return self.chains.ask(space, [shard], packed, ready, now_ns) if may_ask else None
        if span.chain.asking:
            return span.chain if asks else None
        most = self._pages_of(span, shard)
        return span._replace(pages=most) if most > 0 else None

    def promised(
        self, space: PrefixTree, shard: int, packed: bytes, at: int, promise: Holding
    ) -> None:  # fmt: skip
        """A peer reports that it has a whole chain, whose page ``at`` is missing here."""
        self.chains.believe(space, [shard], packed, at, self._table.now_ns, promise)

    def offered(
        self, space: PrefixTree, shard: int, packed: bytes, ready: int, *, begins: bool
    ) -> int:
        """How many pages after the ``ready`` ones a waiting request may get, at most."""
        now_ns, may_ask = self._table.now_ns, ready > 0 or begins
        oldest_ns = now_ns - (FRESH_NS if may_ask else KEPT_NS)
        span = self.chains.find(space, 1 << shard, packed, ready, oldest_ns)
        if span is None:
            return len(packed) // KEY_BYTES - ready if may_ask else 0
        return span.pages if span.chain.asking else max(0, self._pages_of(span, shard))

    # ---- fetches ----------------------------------------------------------------------------

    def fetch(self, fetch: Fetch, span: Span, shard: int) -> bool:
        """Read the pages of a span for a fetch, or join reads in progress.

        Returns:
            whether memory had too little room for all of them.
        """
        chain, space = span.chain, span.chain.space
        at, end, left = self._first_missing(span, shard), span.start + span.pages, TURN_PAGES
        if self._table.now_ns >= fetch.peers_until_ns:
            return False
        while at < end and left > 0:
            key = chain.key(at)
            node = space.index.get(key)
            if node is not None and node.present >> shard & 1:
                if not node.ready >> shard & 1 and not self._share(fetch, space, shard, key):
                    return False  # a client writes it: that ends the run
                at += 1
                continue
            stop = at + 1
            while stop < min(end, at + left) and not _present(chain, shard, stop):
                stop += 1
            begun, room = self._begin_run(fetch, chain, shard, at, stop)
            left -= begun
            at += begun
            if at < stop:
                return not room
        return False

    def peer_fetched(self, end: FetchEnd) -> None:
        """A job has ended."""
        arrival = self._arrivals.get(end.job)
        if arrival is None:
            return
        if arrival.lost:
            if end.settled:
                self._settle(arrival)
            return
        pages, came = len(arrival.pages.slots), len(end.digests) // DIGEST_BYTES
        assert len(end.digests) % DIGEST_BYTES == 0
        assert came <= pages
        if not end.settled:
            self._count_end(arrival, 0)
            self._lose(arrival)
            return
        self._count_end(arrival, came, answered=end.error is None)
        if came:
            self._store(arrival, end.digests, end.kept or [ORDINARY] * came)
        if came == pages or not self._try_another(arrival):
            self._abandon(arrival)

    def peer_settled(self, job: int) -> None:
        """Nothing writes into the slots of a job any more."""
        arrival = self._arrivals.get(job)
        if arrival is not None and arrival.lost:
            self._settle(arrival)

    def advance(self) -> None:
        """Apply the deadlines that have passed: late jobs are given up."""
        now_ns = self._table.now_ns
        self.chains.expire(now_ns)
        late = [
            one for one in self._arrivals.values() if not one.lost and one.deadline_ns <= now_ns
        ]
        for arrival in late:
            self._table.counts["peer_late_jobs"] += 1
            self._count_end(arrival, 0)
            self._lose(arrival)

    def next_deadline_ns(self) -> int:
        """When to call :meth:`advance`; 0 = not needed."""
        deadlines = [one.deadline_ns for one in self._arrivals.values() if not one.lost]
        asked_ns = self.chains.next_deadline_ns()
        return min([*deadlines, asked_ns] if asked_ns else deadlines, default=0)

    def stats(self) -> RemoteCounts:
        """Reads in progress and measurements."""
        unsettled = Counter(one.peer for one in self._arrivals.values() if one.lost)
        lost = unsettled.total()
        return RemoteCounts(
            jobs=len(self._arrivals) - lost, unsettled_jobs=lost,
            in_flight_bytes=self._session.used_bytes,
            in_flight_bytes_max=self.limits.in_flight_bytes_max, locating=self.chains.asking,
            located_chains=len(self.chains), peers=self._rates.stats(unsettled),
        )  # fmt: skip

    def checks(self) -> Iterator[None]:
        """Assert, a stretch at a time, that jobs, puts, and the keys being read agree."""
        yield from self.chains.checks()
        assert self._session.used_bytes <= self.limits.in_flight_bytes_max
        assert self._session.used_bytes == sum(
            [one.pages.size_bytes for one in self._arrivals.values()]
        ), "bytes that no job has, or that no quota counts"
        assert all(self._by_key.values()), "a shard of which nothing is on its way"
        named, found, before = sum(map(len, self._by_key.values())), 0, self._left()
        yield
        for job, _, _ in before:
            if arrival := self._arrivals.get(job):  # else it has ended meanwhile
                found += yield from arrival.checks(self._by_key, self._table.residents)
        assert found == named or self._left() != before, "a key that no job reads"

    def _left(self) -> list[tuple[int, int, bool]]:
        """Of each job: the pages that have not arrived, and whether it was given up."""
        return [(job, len(one.pages.keys), one.lost) for job, one in self._arrivals.items()]

    # ---- inside -----------------------------------------------------------------------------

    def _pages_of(self, span: Span, shard: int) -> int:
        """How many pages of a span some peer has; 0 or less: none."""
        window = span.chain.space.shards[shard].window_pages
        ends = [span.chain.from_peer(at, span.start, window) for at in span.chain.holdings]
        return min(max(ends, default=0) - span.start, span.pages)

    def _first_missing(self, span: Span, shard: int) -> int:
        """The page to start with: without those before it, most pages are useless."""
        chain = span.chain
        if chain.space.shards[shard].window_pages or not span.start:
            return span.start
        before = chain.keys[: span.start * KEY_BYTES]
        ready, _ = ready_pages(chain.space, shard, before)
        return ready

    def _share(self, fetch: Fetch, space: PrefixTree, shard: int, key: PrefixKey) -> bool:
        """Wait for the job that reads a page; False if there is none, or it may end too late."""
        arrival = self._by_key.get((space.number, shard), {}).get(key)
        if arrival is None or arrival.deadline_ns > fetch.peers_until_ns:
            return False
        self._wait(fetch, arrival)
        return True

    def _wait(self, fetch: Fetch, arrival: Arrival) -> None:
        if fetch not in arrival.waiters:
            arrival.waiters.append(fetch)
            fetch.outstanding += 1

    def _begin_run(
        self, fetch: Fetch, chain: LocatedChain, shard: int, first: int, stop: int
    ) -> tuple[int, bool]:
        """Start jobs for consecutive pages, none of which is here.

        Returns:
            how many pages; and whether the reason to stop was not missing memory.
        """
        of, at = chain.space.shards[shard], first
        while at < stop:
            holders = self._holders(chain, at, of.window_pages)
            if not holders:
                return at - first, True
            end = min([stop, *holders.values()])
            for peer, pages in self._parts(list(holders), end - at, of.page_bytes):
                begun = self._begin(fetch, chain, shard, at, pages, peer)
                at += begun
                if begun < pages:
                    return at - first, self._session.free_bytes < of.slot_bytes
        return at - first, True

    def _holders(self, chain: LocatedChain, at: int, window: int) -> dict[str, int]:
        """The peers that may be asked for a page, and up to which page each has the chain."""
        now_ns = self._table.now_ns
        return {
            peer: end
            for peer in chain.holdings
            if (end := chain.from_peer(peer, at, window)) and not self._rates.is_away(peer, now_ns)
        }

    def _parts(self, peers: list[str], pages: int, page_bytes: int) -> list[tuple[str, int]]:
        """Split a run among peers, in proportion to their speed so far."""
        fastest = sorted(peers, key=lambda peer: -self._rates.of(peer))
        most = max(1, pages * page_bytes // PART_BYTES_MIN)
        chosen = fastest[: min(PARTS_MAX, most, pages)]
        left, rates = pages, sum(self._rates.of(peer) for peer in chosen)
        parts: list[tuple[str, int]] = []
        for peer in chosen[1:]:
            part = min(left - 1, max(1, int(pages * self._rates.of(peer) / rates)))
            if part > 0:
                parts.append((peer, part))
                left -= part
        return [(chosen[0], left), *parts]

    def _begin(
        self, fetch: Fetch, chain: LocatedChain, shard: int, at: int, pages: int, peer: str
    ) -> int:
        """Start a job; returns its number of pages. A fetch without room waits for another job."""
        space, number = chain.space, next(self._number)
        parent = chain.key(at - 1) if at else PrefixKey(b"")
        keys = [chain.key(one) for one in range(at, at + pages)]
        if parent in keys:
            return 0  # no chain: whoever asked made it up
        process = Process(number, Peer(0, remote=True), self._session)
        if self._session.free_bytes >= space.shards[shard].slot_bytes:
            self._table.begin_put(process, number, space, shard, b"".join(keys), parent)
        assert self._session.used_bytes <= self.limits.in_flight_bytes_max
        put = process.puts.get(number)
        if put is None:
            for other in self._arrivals.values():
                if not other.lost and other.deadline_ns <= fetch.peers_until_ns:
                    self._wait(fetch, other)  # its end leaves room
                    break
            return 0
        arrival = Arrival(
            number, number, process, peer, chain, shard, at, fetch.peers_until_ns,
            copies=fetch.copies,
        )  # fmt: skip
        known = self._by_key.setdefault((space.number, shard), {})
        known.update(dict.fromkeys(put.keys, arrival))
        self._wait(fetch, arrival)
        self._submit(arrival)
        return len(put.slots)

    def _submit(self, arrival: Arrival) -> None:
        chain, put = arrival.chain, arrival.pages
        assert arrival.job not in self._arrivals
        assert put.slots
        self._arrivals[arrival.job] = arrival
        self._rates.began(arrival.peer, self._table.now_ns)
        self._table.counts["peer_jobs"] += 1
        self.jobs.append(
            PeerFetch(
                arrival.job, arrival.peer, chain.space.identity,
                chain.space.shards[arrival.shard].spec, chain.keys[: arrival.at * KEY_BYTES],
                b"".join(put.keys), list(put.slots), arrival.deadline_ns,
                arrival.copies,
            )
        )  # fmt: skip

    def _count_end(self, arrival: Arrival, came: int, *, answered: bool = False) -> None:
        """Update the measurements after a job that delivered its first ``came`` pages."""
        put, chain, now_ns = arrival.pages, arrival.chain, self._table.now_ns
        missing = len(put.slots) - came
        assert missing >= 0
        size = put.space.shards[put.shard].page_bytes
        self._rates.ended(arrival.peer, came, missing, size, now_ns, answered=answered)
        self._table.counts["peer_missing_pages"] += missing
        if missing:
            self.chains.lacks(chain, arrival.peer, arrival.at + came, now_ns)

    def _store(self, arrival: Arrival, digests: bytes, kept: Sequence[Retention]) -> None:
        """The first pages of a job are READY: pin them for fetches, keep as ``kept`` says."""
        self._not_coming(arrival, arrival.pages.keys[: len(kept)])
        for keep, alike in groupby(kept):
            pages = len(list(alike))
            self._store_part(arrival, digests[: pages * DIGEST_BYTES], keep)
            digests = digests[pages * DIGEST_BYTES :]
            arrival.at += pages

    def _store_part(self, arrival: Arrival, digests: bytes, keep: Retention) -> None:
        """Store the first of the remaining pages, which are kept alike."""
        put, process, came = arrival.pages, arrival.process, len(digests) // DIGEST_BYTES
        slots, part = put.slots[:came], arrival.put
        if came < len(put.slots):
            part = next(self._number)
            process.puts[part] = put.part(came)
        statuses = self._table.commit_put(process, part, digests, keep, peer=arrival.peer)
        owner = self._table.residents.owner
        stored = [
            slot
            for slot, status in zip(slots, statuses, strict=True)
            # Their writes may have begun to reclaim the segment of their head: they were dropped.
            if status is PageStatus.STORED and owner(slot) is not None
        ]
        for fetch in arrival.waiters:
            if not fetch.ended:
                self._table.fetches.keep(fetch, stored)

    def _try_another(self, arrival: Arrival) -> bool:
        """Request the rest of a job from another holder; False if there is none, or no time."""
        assert not arrival.lost, "it may still write to the slots"
        put, chain, now_ns = arrival.pages, arrival.chain, self._table.now_ns
        holders = self._holders(chain, arrival.at, put.space.shards[put.shard].window_pages)
        able = [peer for peer, end in holders.items() if end >= arrival.at + len(put.slots)]
        if (
            not able
            or now_ns >= arrival.deadline_ns
            or not any(not fetch.ended for fetch in arrival.waiters)
            # What lost its head meanwhile may be on its way again, by another job.
            or any(self._table.residents.owner(slot) is None for slot in put.slots)
        ):
            return False
        del self._arrivals[arrival.job]
        arrival.job = next(self._number)
        self._rates.retried(arrival.peer, len(put.slots))
        arrival.peer = max(able, key=self._rates.of)
        self._table.counts["peer_retried_pages"] += len(put.slots)
        self._submit(arrival)
        return True

    def _abandon(self, arrival: Arrival) -> None:
        """A job is over, and nothing writes any more: pages that did not arrive are aborted."""
        if arrival.put in arrival.process.puts:
            self._not_coming(arrival, arrival.pages.keys)
        self._settle(arrival)
        self._release(arrival)

    def _lose(self, arrival: Arrival) -> None:
        """Nothing waits for a job any more, but it may still write."""
        assert not arrival.lost
        self._not_coming(arrival, arrival.pages.keys)
        self._table.counts["peer_unsettled_jobs"] += 1
        arrival.lost = True
        self._table.lose(arrival.process)
        assert arrival.pages.lost
        self._release(arrival)

    def _settle(self, arrival: Arrival) -> None:
        del self._arrivals[arrival.job]
        self._table.end(arrival.process, sys.maxsize)
        assert arrival.process.idle, "its slots would never be free"

    def _release(self, arrival: Arrival) -> None:
        waiters, arrival.waiters = arrival.waiters, []
        self._table.fetches.came(waiters)

    def _not_coming(self, arrival: Arrival, keys: Iterable[PrefixKey]) -> None:
        """These pages can no longer be waited for."""
        of = arrival.chain.space.number, arrival.shard
        known = self._by_key.get(of, {})
        for key in keys:
            if known.get(key) is arrival:  # dropped with its head, it may be on its way again
                del known[key]
        if not known:
            self._by_key.pop(of, None)


def _present(chain: LocatedChain, shard: int, at: int) -> bool:
    node = chain.space.index.get(chain.key(at))
    return node is not None and bool(node.present >> shard & 1)
