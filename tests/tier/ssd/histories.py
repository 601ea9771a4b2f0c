"""Random histories of a log on a disk that loses its power, and what must hold after each life."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvstore.state.tree.places import Place, footer_bytes, record_bytes
from kvstore.testing.disk import SimulatedDisk
from kvstore.testing.tiers import PageInMemory, TierDriver, laid_out
from kvstore.tier.record import Kind
from kvstore.tier.recovery import RecoveredLog
from kvstore.tier.ssd import SSDLog
from tests.tier.ssd.conftest import SEGMENT_BYTES, open_log

MUTATIONS = {"create", "write", "sync", "remove", "sync_directory", "write_file"}
POOL = [
    PageInMemory.random(Random(f"pool {index}"), size)
    for index in range(12)
    for size in (512, 4096, 5000, 12_288)
]


class PowerCut(BaseException):
    """The machine is off: nothing of the program runs any more."""


class MortalDisk:
    """A disk that goes off before its n-th change."""

    def __init__(self, disk: SimulatedDisk, changes: int) -> None:
        self._disk = disk
        self._changes = changes

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._disk, name)
        if name not in MUTATIONS:
            return call

        def mortal(*args: Any, **named: Any) -> Any:
            self._changes -= 1
            if self._changes < 0:
                raise PowerCut
            return call(*args, **named)

        return mortal


@dataclass
class Expected:
    """What the disk has to give back, and what it may.

    Attributes:
        durable: pages whose write was covered by a sync: key → segment.
        unsynced: writes (segment) and tombstones (None) that completed since, in order.
        maybe_gone: keys whose tombstone or drop may or may not have reached the disk.
        forbidden: keys whose tombstone is durable.
        written: every page that was ever given to a place.
        lost: pages that had been written but never synced, and were not there afterwards.
    """

    durable: dict[bytes, int] = field(default_factory=dict)
    unsynced: list[tuple[bytes, int | None]] = field(default_factory=list)
    maybe_gone: set[bytes] = field(default_factory=set)
    forbidden: set[bytes] = field(default_factory=set)
    written: dict[bytes, PageInMemory] = field(default_factory=dict)
    lost: int = 0

    def note_synced(self) -> None:
        for key, segment in self.unsynced:
            if segment is None:
                self.durable.pop(key, None)
                self.forbidden.add(key)
            else:
                self.durable[key] = segment
                self.forbidden.discard(key)
                self.maybe_gone.discard(key)
        self.unsynced.clear()


class Life:
    """One life of the program: from opening the log until the power goes."""

    def __init__(self, disk: SimulatedDisk, expected: Expected, random: Random) -> None:
        self._random = random
        self._expected = expected
        self._disk = disk
        mortal = MortalDisk(disk, random.randrange(60))
        self._log: SSDLog | None = None
        self._driver: TierDriver
        self._unsealed: dict[int, int] = {}
        """Segment → where its next record goes; only the newest is written."""
        self._counts: dict[int, int] = {}
        self._segments: list[int] = []
        self._where: dict[bytes, Place] = {}
        self._mortal = mortal

    def run(self, steps: int, *, syncs: bool) -> None:
        try:
            self._log = open_log(self._mortal, paths=2)
            found = self._log.recover()
            self._driver = TierDriver(self._log)
            self._continue(found)
            for _ in range(steps):
                self._step(syncs=syncs)
        except PowerCut:
            pass
        if self._random.random() < 0.25:
            self._disk.kill()
        else:
            self._disk.cut_power(self._random)

    def _continue(self, found: RecoveredLog) -> None:
        self._next = found.next_segment
        for segment in found.segments:
            if segment.size_bytes < SEGMENT_BYTES:  # the power went while it was made
                assert not segment.records
                assert self._driver.drop(segment.number).error is None
                continue
            self._segments.append(segment.number)
            if not segment.sealed:
                self._unsealed[segment.number] = segment.end
                self._counts[segment.number] = segment.records
            for entry in segment.entries:
                place = Place(segment.number, int(entry["offset"]))
                self._where[entry["key"].tobytes()] = place

    def _step(self, *, syncs: bool) -> None:
        choice = self._random.randrange(24)
        if choice < 12:
            self._write()
        elif choice < 18:
            if syncs:
                assert self._driver.sync().error is None
                self._expected.note_synced()
        elif choice < 20:
            self._tombstone()
        elif choice < 23 and self._unsealed:
            number = self._random.choice(sorted(self._unsealed))
            del self._unsealed[number]
            ended = self._driver.seal(number)
            assert ended.error is None, ended.error
        elif choice == 23 and self._segments:
            self._drop(self._segments.pop(0))

    def _place(self, size: int, count: int) -> Place:
        """Room at the end of the newest segment, or in a new one.

        Records are numbered as they lie then, so that dropping the oldest segment first never
        takes a tombstone away from an older page.
        """
        number = self._segments[-1] if self._segments else -1
        footer = footer_bytes(self._counts.get(number, 0) + count)
        if self._unsealed.get(number, SEGMENT_BYTES) + size + footer > SEGMENT_BYTES:
            number, self._next = self._next, self._next + 1
            self._segments.append(number)
            self._unsealed[number] = self._counts[number] = 0
        start = self._unsealed[number]
        self._unsealed[number] += size
        self._counts[number] += count
        return Place(number, start)

    def _write(self) -> None:
        pages = self._random.sample(POOL, self._random.randint(1, 4))
        size = sum(record_bytes(page.record.page_bytes) for page in pages)
        number, start = self._place(size, len(pages))
        self._expected.written |= {page.record.key: page for page in pages}
        for page in pages:  # a write that is cut off may bring back what was taken out
            self._expected.forbidden.discard(page.record.key)
        placed = laid_out(number, pages, start)
        for ended in self._driver.write(*placed):
            assert ended.error is None, ended.error
        for place, page in placed:
            self._where[page.record.key] = place
            self._expected.unsynced.append((page.record.key, number))

    def _tombstone(self) -> None:
        count = min(len(self._where), self._random.randint(1, 3))
        keys = self._random.sample(sorted(self._where), count)
        if not keys:
            return
        packed = b"".join(keys)
        place = self._place(record_bytes(len(packed)), 1)
        self._expected.maybe_gone |= set(keys)
        assert self._driver.tombstone(place, packed).error is None
        for key in keys:
            del self._where[key]
            self._expected.unsynced.append((key, None))

    def _drop(self, number: int) -> None:
        expected = self._expected
        self._unsealed.pop(number, None)
        for key, segment in expected.durable.items():
            if segment == number:  # also when a copy elsewhere is not synced yet
                expected.maybe_gone.add(key)
        self._where = {key: at for key, at in self._where.items() if at.segment != number}
        expected.unsynced = [one for one in expected.unsynced if one[1] != number]
        assert self._driver.drop(number).error is None
        expected.durable = {key: at for key, at in expected.durable.items() if at != number}


def check_what_is_left(disk: SimulatedDisk, expected: Expected) -> None:
    """Open the log anew: all that was promised is there, and nothing is wrong."""
    log = open_log(disk, paths=2)
    found = log.recover()
    assert not found.untouched
    driver = TierDriver(log)
    there: dict[bytes, int] = {}
    for segment in found.segments:
        assert segment.end <= segment.size_bytes
        for entry in segment.entries:
            assert entry["kind"] == Kind.PAGE
            key = entry["key"].tobytes()
            assert key not in there, "a page is recovered once"
            page = expected.written[key]
            there[key] = segment.number
            ended, target = driver.read(Place(segment.number, int(entry["offset"])), page)
            assert ended.error is None, f"what is recovered can be read: {ended.error}"
            assert target.content == page.content
    for key in expected.durable:
        assert key in there or key in expected.maybe_gone, "a page that was synced is lost"
    assert not there.keys() & expected.forbidden, "a page that was taken out is back"
    expected.lost += sum(key not in there for key, at in expected.unsynced if at is not None)
    # What is there now has been made durable by the recovery.
    expected.durable = there
    expected.unsynced.clear()
    expected.maybe_gone.clear()
    log.close()
    assert disk.open_files() == 0


def live_and_die(seed: int, *, syncs: bool = True) -> int:
    """Three lives on one disk.

    Returns:
        pages that had been written but never synced, and were lost.
    """
    random = Random(seed)
    disk, expected = SimulatedDisk(seed=seed), Expected()
    for _ in range(3):
        Life(disk, expected, random).run(random.randrange(40), syncs=syncs)
        check_what_is_left(disk, expected)
    return expected.lost
