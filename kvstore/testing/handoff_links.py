"""The links of simulated handoffs: what is sent, when it arrives, what lands after its end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.handoff.effects import Effect, EndLink, Landing, PushJob, SendTo, Submit
from kvstore.handoff.memory import digests_of, landing_places
from kvstore.handoff.messages import (
    HandoffPing,
    RangesHead,
    encode_message,
    read_from_decode,
    read_from_prefill,
)
from kvstore.handoff.places import PushRange, pack_numbers
from kvstore.handoff.states import FailureCode, HandoffFailure, HandoffProgress, HandoffSide, Layer
from kvstore.mover.ranges import Places
from kvstore.testing.timeline import Timeline
from kvstore.tier.vectored import memory_at

if TYPE_CHECKING:
    from kvstore.testing.handoff import DecodeProcess, HandoffFaults, PrefillProcess

SECOND: Final = 1_000_000_000
SILENCE_NS: Final = SECOND
"""A link on which nothing has come for so long is closed."""
_MOMENT_NS: Final = SECOND // 50


@dataclass
class HandoffOutcome:
    """Counts of a run; tests assert that each of these has occurred."""

    requests: int = 0
    refused: int = 0
    succeeded: int = 0
    decode_failed: int = 0
    prefill_failed: int = 0
    aborted: int = 0
    limbo: int = 0
    landed_late: int = 0
    lost: int = 0
    flipped: int = 0
    reused: int = 0
    misplaced: int = 0
    links: int = 0
    links_closed: int = 0
    killed: int = 0
    stopped: int = 0
    partitions: int = 0
    registry_away: int = 0
    registry_late: int = 0
    registrations_refused: int = 0
    wrong_prompt: int = 0


@lru_cache(8_192)
def content_of(room: int, plane: int, position: int) -> npt.NDArray[np.uint8]:
    """The only right bytes of one position of one plane of a request."""
    seed = (room * 1_000_003 + plane) * 1_000_003 + position
    return np.random.Generator(np.random.PCG64(seed)).integers(0, 256, 64, dtype=np.uint8)


class HandoffProcess:
    """A process that can be stopped and killed: what it should do then waits, or never happens."""

    def __init__(self, time: Timeline, name: str) -> None:
        """Start it."""
        self.time = time
        self.name = name
        self.dead = False
        self._stopped_ns = 0  # until when
        self._pauses: list[tuple[int, int]] = []

    def do(self, call: Callable[[], None]) -> None:
        """Do something now, or when it goes on."""
        if self.dead:
            return
        if self.time.now_ns < self._stopped_ns:
            self.time.at(self._stopped_ns - self.time.now_ns, lambda: self.do(call))
        else:
            call()

    def stop(self, for_ns: int) -> None:
        """Stop it for a time."""
        self._pauses.append((self.time.now_ns, self.time.now_ns + for_ns))
        self._stopped_ns = max(self._stopped_ns, self.time.now_ns + for_ns)

    def kill(self) -> None:
        """End it at once."""
        self.dead = True

    @property
    def is_stopped(self) -> bool:
        """Whether it stands now."""
        return self.time.now_ns < self._stopped_ns

    def check_time(self, progress: HandoffProgress, opened_ns: int, longest_ns: int) -> None:
        """Assert that a handoff has ended in time, not counting what its process stood."""
        stood_ns = sum(
            stop - max(start, opened_ns) for start, stop in self._pauses if stop > opened_ns
        )
        if not progress.ended:
            took_ns = self.time.now_ns - opened_ns - stood_ns
            assert took_ns < longest_ns, "a handoff outlasts its deadline"


class HandoffLink:
    """One link: two processes, and what is under way between them."""

    def __init__(self, number: bytes, prefill: "PrefillProcess", decode: "DecodeProcess") -> None:
        self.number = number
        self.prefill = prefill
        self.decode = decode
        self.open_at_prefill = self.open_at_decode = False
        self.heard_ns = [0, 0]  # by prefill, by decode
        self.landing = 0
        self.jobs: set[int] = set()


class _Parcel(NamedTuple):
    """A head and its bytes, on their way."""

    job: PushJob
    head: bytes
    data: list[bytes]


class HandoffWires:
    """All links of a simulation; carries out the effects of both cores."""

    def __init__(
        self, time: Timeline, faults: "HandoffFaults", outcome: HandoffOutcome,
        find: Callable[[str], HandoffProcess], registered: Callable[[str], bytes],
    ) -> None:  # fmt: skip
        self._time = time
        self._faults = faults
        self._outcome = outcome
        self._find = find
        self._registered = registered
        self._links: dict[bytes, HandoffLink] = {}
        self._wanted: set[tuple[HandoffProcess, str]] = set()
        self._cut: dict[tuple[str, str], int] = {}
        self._healed = False

    @property
    def under_way(self) -> bool:
        """Whether ranges are on their way."""
        return any(link.jobs or link.landing for link in self._links.values())

    # ---- the world --------------------------------------------------------------------------

    def want(self, decode: "DecodeProcess", peer: str) -> None:
        """A decode engine has a request from a peer: make a link unless there is one."""
        has = any(
            link.decode is decode and link.prefill.name == peer and link.open_at_decode
            for link in self._links.values()
        )
        if has or (decode, peer) in self._wanted:
            return
        self._wanted.add((decode, peer))
        self._time.at(self._delay(), lambda: decode.do(lambda: self._connect(decode, peer, 0)))

    def carry_out(self, by: HandoffProcess, effects: Sequence[Effect]) -> None:
        """Carry out what a core wants done."""
        for effect in effects:
            match effect:
                case SendTo(link=number, message=message):
                    self._send(by, number, encode_message(message))
                case Submit(job=job):
                    self._push(job)
                case EndLink(link=number):
                    self._close_at_decode(self._links[number], FailureCode.PEER_CLOSED)

    def cut(self, prefill: str, decode: str, for_ns: int) -> None:
        """Let nothing through between two processes for a time."""
        self._cut[prefill, decode] = self._time.now_ns + for_ns

    def died(self, process: HandoffProcess) -> None:
        """The kernel closes the connections of a dead process; bytes under way still land."""
        for link in list(self._links.values()):
            if process is link.prefill:
                self._later(
                    link.decode,
                    partial(self._close_at_decode, link, FailureCode.PEER_CLOSED),
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
            if link.open_at_prefill:
                link.prefill.do(partial(self._watch, link, by_prefill=True))
            if link.open_at_decode:
                link.decode.do(partial(self._watch, link, by_prefill=False))
            over = not (link.open_at_prefill or link.open_at_decode or link.landing or link.jobs)
            if over and now - max(link.heard_ns) > 5 * SECOND:
                del self._links[link.number]

    def _watch(self, link: HandoffLink, *, by_prefill: bool) -> None:
        side = 0 if by_prefill else 1
        if not (link.open_at_prefill if by_prefill else link.open_at_decode):
            return
        if self._time.now_ns - link.heard_ns[side] > SILENCE_NS:
            close = self._close_at_prefill if by_prefill else self._close_at_decode
            close(link, FailureCode.PEER_SILENT)
        else:
            self._send(
                link.prefill if by_prefill else link.decode,
                link.number,
                encode_message(HandoffPing()),
            )

    # ---- links ------------------------------------------------------------------------------

    def _is_there(self, decode: "DecodeProcess", prefill: "PrefillProcess") -> bool:
        """Whether the registry names the process that is at the address, and it answers."""
        boot = self._registered(prefill.name)
        self._outcome.registry_away += not boot
        self._outcome.registry_late += boot not in (b"", prefill.boot)
        cut = self._is_cut(prefill.name, decode.name) or self._chance(0.05)
        return boot == prefill.boot and not cut and not prefill.is_stopped

    def _connect(self, decode: "DecodeProcess", peer: str, tries: int) -> None:
        """Ask the registry, connect to the process that has the name now."""
        prefill: PrefillProcess = self._find(peer)  # type: ignore[assignment]
        if not self._is_there(decode, prefill):
            if tries < 2:
                self._time.at(
                    SECOND // 5, lambda: decode.do(lambda: self._connect(decode, peer, tries + 1))
                )
                return
            self._wanted.discard((decode, peer))
            code, now = FailureCode.UNREACHABLE, self._time.now_ns
            self.carry_out(decode, decode.receivers.unreachable(peer, code, "no answer", now))
            return
        self._wanted.discard((decode, peer))
        link = HandoffLink(self._time.random.randbytes(16), prefill, decode)
        self._links[link.number] = link
        self._outcome.links += 1
        link.open_at_prefill = link.open_at_decode = True
        link.heard_ns = [self._time.now_ns] * 2
        effects = decode.receivers.linked(peer, link.number, self._time.now_ns)
        self.carry_out(decode, effects)

    def _close_at_prefill(self, link: HandoffLink, code: FailureCode) -> None:
        if not link.open_at_prefill:
            return
        link.open_at_prefill = False
        now, prefill = self._time.now_ns, link.prefill
        self.carry_out(prefill, prefill.senders.closed(link.number, code, "closed", now))
        self._later(link.decode, lambda: self._close_at_decode(link, FailureCode.PEER_CLOSED))
        for number in sorted(link.jobs):  # its writer ends, after a while
            self._later(prefill, partial(self._completed, link, number, lost=True))

    def _close_at_decode(self, link: HandoffLink, code: FailureCode) -> None:
        if not link.open_at_decode:
            return
        link.open_at_decode = False
        self._outcome.links_closed += 1
        decode, now = link.decode, self._time.now_ns
        self.carry_out(decode, decode.receivers.closed(link.number, code, "closed", now))
        self._later(link.prefill, lambda: self._close_at_prefill(link, FailureCode.PEER_CLOSED))
        self._settle(link)

    def _settle(self, link: HandoffLink) -> None:
        """The reader of a closed link has ended when nothing lands any more."""
        if link.landing:
            self._later(link.decode, lambda: self._settle(link))
        else:
            link.decode.receivers.settled(link.number)
            for prompt in link.decode.prompts.values():
                if not prompt.progress.ended:
                    self.want(link.decode, link.prefill.name)

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
        self._time.at(self._delay(), lambda: link.prefill.do(lambda: self._read(link, job)))

    def _read(self, link: HandoffLink, job: PushJob) -> None:
        """Digest what is in prefill's pool now, and send it."""
        if job.number not in link.jobs or not link.open_at_prefill:
            return
        pool = link.prefill.memory.pool
        places: Places
        if job.aux:
            held = np.frombuffer(job.aux, dtype=np.uint8)
            places = [(int(held.ctypes.data), len(held))]
        else:
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
            self._later(link.prefill, lambda: self._completed(link, job.number, lost=False))
            return
        twice = self._chance(self._faults.doubled)
        self._time.at(self._delay(), lambda: self._arrive(link, parcel))
        if twice:
            self._time.at(self._delay(), lambda: self._arrive(link, parcel))

    def _arrive(self, link: HandoffLink, parcel: _Parcel) -> None:
        """The head of some ranges is at decode; its bytes land from now on."""

        def begin() -> None:
            if not link.open_at_decode or self._is_cut(link.prefill.name, link.decode.name):
                self._later(
                    link.prefill, lambda: self._completed(link, parcel.job.number, lost=True)
                )
                return
            head = read_from_prefill(parcel.head)
            assert isinstance(head, RangesHead)
            decode, now = link.decode, self._time.now_ns
            link.heard_ns[1] = now
            landing, size, effects = decode.receivers.arriving(link.number, head, now)
            assert size == sum(map(len, parcel.data))
            self.carry_out(decode, effects)
            if landing is None:
                self._later(
                    link.prefill, lambda: self._completed(link, parcel.job.number, lost=False)
                )
                return
            link.landing += 1
            self._land(link, parcel, landing, 0)

        link.decode.do(begin)

    def _land(self, link: HandoffLink, parcel: _Parcel, landing: Landing, at: int) -> None:
        """Write one range; also when the process is stopped, or its link was closed."""
        decode, job = link.decode, parcel.job
        if decode.dead:
            return
        places = landing_places(decode.memory.pool, decode.aux, landing)
        if at < len(places):
            if not link.open_at_decode:
                self._outcome.landed_late += 1
            memory_at(*places[at])[:] = parcel.data[at]
            stalled = self._chance(self._faults.stalled)
            delay_ns = self._time.random.randrange(3 * SECOND) if stalled else _MOMENT_NS // 4
            self._time.at(delay_ns, lambda: self._land(link, parcel, landing, at + 1))
            return

        def end() -> None:
            seed = landing.share.seed_of(landing.room)
            right = digests_of(seed, landing.ranges, places) == landing.digests
            code = None if right else FailureCode.DIGEST
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
