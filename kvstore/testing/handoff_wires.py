"""The wires of simulated handoffs: what is sent, when it arrives, what lands after its end."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvstore.handoff.effects import Effect, EndLink, Landing, PushJob, SendTo, Submit
from kvstore.handoff.greeting import PROTOCOL, Greeter, LinkGreeting
from kvstore.handoff.memory import digests_of, landing_places
from kvstore.handoff.messages import (
    HandoffPing,
    RangesHead,
    encode_message,
    read_from_decode,
    read_from_prefill,
)
from kvstore.handoff.peers import PeerRank, peer_ranks
from kvstore.handoff.places import PushRange, pack_numbers
from kvstore.handoff.registry import RankRecord
from kvstore.handoff.staging import Staging
from kvstore.handoff.states import FailureCode, HandoffFailure, HandoffSide, Layer
from kvstore.mover.memory import memory_at
from kvstore.mover.ranges import Places
from kvstore.protocol.errors import InvalidArgument, KVStoreError
from kvstore.testing.handoff_links import HandoffLink, HandoffLinks
from kvstore.testing.handoff_processes import SECOND, HandoffOutcome, HandoffProcess
from kvstore.testing.timeline import Timeline

if TYPE_CHECKING:
    from kvstore.testing.handoff import HandoffFaults
    from kvstore.testing.handoff_engines import DecodeRank, PrefillRank

SILENCE_NS: Final = SECOND
"""A link on which nothing has come for so long is closed."""
_MOMENT_NS: Final = SECOND // 50
_PING_NS: Final = SECOND // 5
_PING: Final = encode_message(HandoffPing())
_CLOSED: Final = FailureCode.PEER_CLOSED


class _Parcel(NamedTuple):
    """A head and its bytes, on their way."""

    job: PushJob
    head: bytes
    data: list[bytes]


class HandoffWires:
    """All links of a simulation; carries out the effects of both cores."""

    def __init__(
        self, time: Timeline, faults: "HandoffFaults", outcome: HandoffOutcome,
        find: Callable[[str, int], "PrefillRank"], registered: Callable[[str], list[RankRecord]],
    ) -> None:  # fmt: skip
        self._time = time
        self._faults = faults
        self._outcome = outcome
        self._find = find
        self._registered = registered
        self._links: dict[bytes, HandoffLink] = {}
        self._peers: dict[tuple[HandoffProcess, str], HandoffLinks] = {}
        self._cut: dict[tuple[str, str], int] = {}
        self._healed = False

    @property
    def under_way(self) -> bool:
        """Whether ranges are on their way."""
        return any(link.jobs or link.landing for link in self._links.values())

    # ---- the world --------------------------------------------------------------------------

    def want(self, decode: "DecodeRank", peer: str) -> None:
        """A rank of decode has a request from a peer: make links unless there are some."""
        if (decode, peer) in self._peers:
            return
        links = self._peers[decode, peer] = HandoffLinks(decode, peer)
        self._later(decode, lambda: self._connect(links, 0))

    def carry_out(self, by: HandoffProcess, effects: Sequence[Effect]) -> None:
        """Carry out what a core wants done."""
        for effect in effects:
            match effect:
                case SendTo(link=number, message=message):
                    self._send(by, number, encode_message(message))
                case Submit(job=job):
                    self._push(job)
                case EndLink(link=number):
                    self._outcome.given_up += 1
                    self._links[number].check_end()
                    self._close_at_decode(self._links[number].links, FailureCode.PEER_CLOSED)

    def cut(self, prefill: str, decode: str, for_ns: int) -> None:
        """Let nothing through between two processes for a time."""
        self._cut[prefill, decode] = self._time.now_ns + for_ns

    def died(self, process: HandoffProcess) -> None:
        """The kernel closes the connections of a dead process; bytes under way still land."""
        for link in list(self._links.values()):
            if process is link.prefill:
                self._later(
                    link.decode,
                    partial(self._close_at_decode, link.links, FailureCode.PEER_CLOSED),
                )
            if process is link.decode:
                self._later(
                    link.prefill,
                    partial(self._close_at_prefill, link, FailureCode.PEER_CLOSED),
                )

    def heal(self) -> None:
        """No more faults."""
        self._healed = True
        self._cut.clear()

    def tick(self) -> None:
        """Pings, and links that have heard nothing."""
        now = self._time.now_ns
        for link in list(self._links.values()):
            for number, room in link.coming.items():
                link.check_held(number, room)
            if link.open_at_prefill:
                link.prefill.do(partial(self._watch, link, by_prefill=True))
            if link.open_at_decode:
                link.decode.do(partial(self._watch, link, by_prefill=False))
            over = not (link.open_at_prefill or link.open_at_decode or link.landing or link.jobs)
            if over and now - max(link.heard_ns) > 5 * SECOND:
                del self._links[link.number]

    def _watch(self, link: HandoffLink, *, by_prefill: bool) -> None:
        side, now = (0 if by_prefill else 1), self._time.now_ns
        if not (link.open_at_prefill if by_prefill else link.open_at_decode):
            return
        if now - link.heard_ns[side] > SILENCE_NS:
            if by_prefill:
                self._close_at_prefill(link, FailureCode.PEER_SILENT)
            elif link.links.is_up:  # before, nobody reads
                self._close_at_decode(link.links, FailureCode.PEER_SILENT)
        elif now >= link.ping_ns[side]:
            link.ping_ns[side] = now + _PING_NS
            self._send(link.prefill if by_prefill else link.decode, link.number, _PING)

    # ---- links ------------------------------------------------------------------------------

    def _connect(self, links: HandoffLinks, tries: int) -> None:
        """Ask the registry, and begin to connect to all ranks that it names."""
        group, shape = links.decode.group, links.decode.memory.pool.shape
        records = self._registered(links.peer)
        self._outcome.registry_away += not records
        try:
            ranks = peer_ranks(records, group, shape)
        except InvalidArgument as error:
            raise AssertionError("all engines of a simulation fit") from error
        except KVStoreError:
            self._try_again(links, tries)
        else:
            self._make(links, ranks, tries)

    def _make(self, links: HandoffLinks, left: list[PeerRank], tries: int) -> None:
        """Connect to the next rank, if it still has the boot that is registered."""
        one, decode = left[0], links.decode
        prefill = self._find(links.peer, one.record.rank)
        is_other = one.record.boot != prefill.boot.hex()
        self._outcome.registry_late += is_other
        away = prefill.is_stopped or self._is_cut(prefill.name, decode.name) or self._chance(0.05)
        if prefill.dead or is_other or away or links.is_closed:
            self._try_again(links, tries)
            return
        pool = decode.memory.pool
        greeting = LinkGreeting(
            PROTOCOL, "messages", b"", b"", "", b"", pool.shape, pool.group, one.share.part,
            one.share.has_aux, one.states, b"",
        )  # fmt: skip
        greeter = Greeter(b"", b"", prefill.memory.pool.shape, prefill.group)
        link = HandoffLink(self._time.random.randbytes(16), prefill, decode, links)
        self._links[link.number] = link
        links.made.append((one, link))
        self._outcome.links += 1
        prefill.senders.linked(link.number, greeter.target(greeting))
        if left[1:]:
            self._later(decode, lambda: self._make(links, left[1:], tries))
            return
        links.is_up = True
        for _, each in links.made:
            each.heard_ns[1] = self._time.now_ns
        sources = {each.number: rank.source for rank, each in links.made}
        effects = decode.receivers.linked(links.peer, sources, self._time.now_ns)
        self.carry_out(decode, effects)

    def _try_again(self, links: HandoffLinks, tries: int) -> None:
        """Not all links could be made."""
        decode = links.decode
        for _, link in links.made:
            link.open_at_decode = False
            self._later(link.prefill, partial(self._close_at_prefill, link, _CLOSED))
        links.made.clear()
        links.is_closed = False
        if tries < 2:
            again = partial(self._connect, links, tries + 1)
            self._time.at(SECOND // 5, lambda: decode.do(again))
            return
        del self._peers[decode, links.peer]
        now = self._time.now_ns
        code = FailureCode.UNREACHABLE
        self.carry_out(decode, decode.receivers.unreachable(links.peer, code, "no answer", now))

    def _close_at_prefill(self, link: HandoffLink, code: FailureCode) -> None:
        if not link.open_at_prefill:
            return
        link.open_at_prefill = False
        now, prefill = self._time.now_ns, link.prefill
        self.carry_out(prefill, prefill.senders.closed(link.number, code, "closed", now))
        if link.open_at_decode:
            self._later(link.decode, lambda: self._close_at_decode(link.links, _CLOSED))
        for number in sorted(link.jobs):  # its writer ends, after a while
            self._later(prefill, partial(self._completed, link, number, lost=True))

    def _close_at_decode(self, links: HandoffLinks, code: FailureCode) -> None:
        if links.is_closed:
            return
        links.is_closed = True
        if not links.is_up:  # who makes them finds it
            return
        decode, now = links.decode, self._time.now_ns
        del self._peers[decode, links.peer]
        self._outcome.links_closed += len(links.made)
        for _, link in links.made:
            link.open_at_decode = False
        for _, link in links.made:
            self.carry_out(decode, decode.receivers.closed(link.number, code, "closed", now))
            self._later(link.prefill, partial(self._close_at_prefill, link, _CLOSED))
            self._settle(link)

    def _settle(self, link: HandoffLink) -> None:
        """The reader of a closed link has ended when nothing lands any more."""
        if link.landing:
            self._later(link.decode, lambda: self._settle(link))
        else:
            link.decode.receivers.settled(link.number)

    # ---- messages ---------------------------------------------------------------------------

    def _send(self, by: HandoffProcess, number: bytes, body: bytes) -> None:
        link = self._links.get(number)
        if link is None:
            return
        to: HandoffProcess = link.decode if by is link.prefill else link.prefill
        if self._chance(self._faults.lost):
            self._outcome.lost += 1
            return
        for _ in range(1 + self._chance(self._faults.doubled)):
            self._time.at(self._delay(), lambda: to.do(lambda: self._receive(link, by, body)))

    def _receive(self, link: HandoffLink, by: HandoffProcess, body: bytes) -> None:
        if self._is_cut(link.prefill.name, link.decode.name):
            return
        now = self._time.now_ns
        if by is link.prefill and link.open_at_decode:
            link.heard_ns[1] = now
            message = read_from_prefill(body)
            assert not isinstance(message, RangesHead)
            self.carry_out(link.decode, link.decode.receivers.received(link.number, message, now))
        elif by is link.decode and link.open_at_prefill:
            link.heard_ns[0] = now
            effects = link.prefill.senders.received(link.number, read_from_decode(body), now)
            self.carry_out(link.prefill, effects)

    # ---- bytes ------------------------------------------------------------------------------

    def _push(self, job: PushJob) -> None:
        """Read the bytes of a job a little later, and send them."""
        link = self._links[job.link]
        link.jobs.add(job.number)
        link.coming[job.number] = job.room
        delay_ns = self._delay()
        if self._chance(self._faults.hung):
            self._outcome.hung += 1
            delay_ns += self._time.random.randrange(4, 9) * SECOND
        self._time.at(delay_ns, lambda: link.prefill.do(lambda: self._read(link, job)))

    def _read(self, link: HandoffLink, job: PushJob) -> None:
        """Digest what is in prefill's pool now, and send it."""
        if job.number not in link.jobs or not link.open_at_prefill:
            return
        pool = link.prefill.memory.pool
        staging = Staging()
        places: Places
        if job.share.is_staged and not job.aux:
            places, digests = staging.gather(pool, job)
        else:
            held = np.frombuffer(job.aux, dtype=np.uint8)
            places = [(int(held.ctypes.data), len(held))]
            if not job.aux:
                places = pool.places(job.ranges, job.sources)
            digests = digests_of(job.share.seed_of(job.room), job.ranges, places)
        if not pool.is_unchanged(job):
            assert job.room in link.prefill.careless_rooms, "a block was free while it was read"
            self._outcome.reused += 1
            self._completed(link, job.number, lost=True)
            return
        data = [bytes(memory_at(*place)) for place in places]
        if self._chance(self._faults.flipped):
            self._outcome.flipped += 1
            at = self._time.random.randrange(len(data[-1]))
            data[-1] = data[-1][:at] + bytes([data[-1][at] ^ 1]) + data[-1][at + 1 :]
        ranges = job.ranges
        if self._chance(self._faults.misplaced):  # one of its ranges claims another's place
            self._outcome.misplaced += 1
            plane, first, size = ranges[-1]
            ranges = [*ranges[:-1], PushRange(plane, first + 1, size)]
        packed = pack_numbers([number for one in ranges for number in one])
        head = encode_message(RangesHead(job.room, packed, digests))
        parcel = _Parcel(job, head, data)
        if self._chance(self._faults.lost):
            self._outcome.lost += 1
            del link.coming[job.number]
            self._later(link.prefill, lambda: self._completed(link, job.number, lost=False))
            return
        twice = self._chance(self._faults.doubled)
        self._time.at(self._delay(), lambda: self._arrive(link, parcel))
        if twice:
            self._time.at(self._delay(), lambda: self._arrive(link, parcel))

    def _arrive(self, link: HandoffLink, parcel: _Parcel) -> None:
        """The head of some ranges is at decode; its bytes land from now on."""

        def begin() -> None:
            number, room = parcel.job.number, parcel.job.room
            if link.coming.pop(number, None) is not None:
                link.check_held(number, room)
            if not link.open_at_decode or self._is_cut(link.prefill.name, link.decode.name):
                self._later(link.prefill, lambda: self._completed(link, number, lost=True))
                return
            head = read_from_prefill(parcel.head)
            assert isinstance(head, RangesHead)
            decode, now = link.decode, self._time.now_ns
            link.heard_ns[1] = now
            landing, size, effects = decode.receivers.arriving(link.number, head, now)
            assert size == sum(map(len, parcel.data))
            self.carry_out(decode, effects)
            if landing is None:
                self._later(link.prefill, lambda: self._completed(link, number, lost=False))
                return
            link.landing += 1
            self._land(link, parcel, landing, 0)

        link.decode.do(begin)

    def _land(self, link: HandoffLink, parcel: _Parcel, landing: Landing, at: int) -> None:
        """Write one range; also when the process is stopped, or its link was closed."""
        decode, job = link.decode, parcel.job
        if decode.dead:
            return
        if at < len(parcel.data):
            if not link.open_at_decode:
                self._outcome.landed_late += 1
            if not landing.is_staged:
                place = landing_places(decode.memory.pool, decode.aux, landing)[at]
                memory_at(*place)[:] = parcel.data[at]
            stalled = self._chance(self._faults.stalled)
            delay_ns = self._time.random.randrange(3 * SECOND) if stalled else _MOMENT_NS // 4
            self._time.at(delay_ns, lambda: self._land(link, parcel, landing, at + 1))
            return

        def end() -> None:
            code = None if _is_right(decode, landing, parcel.data) else FailureCode.DIGEST
            link.landing -= 1
            now = self._time.now_ns
            effects = decode.receivers.landed(landing, code, "another digest", now)
            self.carry_out(decode, effects)
            self._later(link.prefill, lambda: self._completed(link, job.number, lost=False))

        decode.do(end)

    def _completed(self, link: HandoffLink, number: int, *, lost: bool) -> None:
        if number not in link.jobs:
            return
        link.jobs.discard(number)
        link.coming.pop(number, None)
        failure = HandoffFailure(
            FailureCode.PEER_CLOSED, HandoffSide.PREFILL, 0, Layer.TRANSPORT, "lost"
        )
        now, prefill = self._time.now_ns, link.prefill
        effects = prefill.senders.completed(number, failure if lost else None, now)
        self.carry_out(prefill, effects)

    # ---- chance -----------------------------------------------------------------------------

    def _later(self, process: HandoffProcess, call: Callable[[], None]) -> None:
        self._time.at(self._delay(), lambda: process.do(call))

    def _delay(self) -> int:
        return self._time.random.randrange(_MOMENT_NS // 4, 2 * _MOMENT_NS)

    def _chance(self, probability: float) -> bool:
        return not self._healed and self._time.random.random() < probability

    def _is_cut(self, prefill: str, decode: str) -> bool:
        return self._time.now_ns < self._cut.get((prefill, decode), 0)


def _is_right(decode: "DecodeRank", landing: Landing, data: list[bytes]) -> bool:
    """Whether what has landed matches its digests; heads of some ranks are scattered first."""

    def receive(places: Places, _seeds: bytes) -> bytes:
        for place, held in zip(places, data, strict=True):
            memory_at(*place)[:] = held
        return b""

    come = receive if landing.is_staged else None  # others are in the pool already
    return Staging().land(decode.memory.pool, decode.aux, landing, come)
