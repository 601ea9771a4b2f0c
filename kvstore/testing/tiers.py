"""The contract of the log, besides that of all tiers, as checks that need no test framework.

::

    contract = LogContract(open_tier, damage)
    for check in LogContract.CHECKS:
        getattr(contract, check)()      # AssertionError says what was broken
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import ClassVar, Final

import numpy as np

from kvstore import mover
from kvstore.protocol.errors import PageCorrupt
from kvstore.protocol.page import (
    CanonicalLayout,
    PrefixKey,
    ShardSpec,
    SpaceIdentity,
    digest_seed,
    page_seeds,
)
from kvstore.state.disk.jobs import (
    DiskDrop,
    DiskJob,
    DiskRead,
    DiskSeal,
    DiskSync,
    DiskTokens,
    DiskTombstone,
    DiskWrite,
    PageRecord,
)
from kvstore.state.tree.places import BLOCK_BYTES, Place, record_bytes
from kvstore.state.tree.slots import Slot
from kvstore.tier.base import Completion, Tier
from kvstore.tier.vectored import aligned

WAIT_S: Final = 30.0
SLOT: Final = Slot(0)
"""Of pages that are in no slot: a tier looks at their address alone."""
SPACE: Final = SpaceIdentity(model="test", kv_dtype="uint8", page_tokens=16)
SHARD: Final = ShardSpec(layout=CanonicalLayout(head_dim=16), layers=(0, 1), heads=(0, 1))


@dataclass(frozen=True, slots=True)
class PageInMemory:
    """A page and its memory, which exists as long as this object.

    Attributes:
        record: its name and digest.
        memory: its bytes, 4096-aligned, padded to a multiple of 4096.
    """

    record: PageRecord
    memory: memoryview

    @classmethod
    def random(
        cls, random: Random, page_bytes: int, parent: bytes = b"", shard: ShardSpec = SHARD
    ) -> "PageInMemory":
        """A page with random bytes and a random key, in the space SPACE."""
        memory = aligned(-(-page_bytes // BLOCK_BYTES) * BLOCK_BYTES)
        memory[:page_bytes] = random.randbytes(page_bytes)
        key = PrefixKey(random.randbytes(32))
        seeds = page_seeds(key, digest_seed(SPACE, shard))
        found = mover.digest(np.array([_address(memory)]), page_bytes, seeds)
        tokens = np.arange(16, dtype="<u4").tobytes()
        digest = found.tobytes()
        return cls(
            PageRecord(key, PrefixKey(parent), SPACE, shard, page_bytes, digest, tokens), memory
        )

    @property
    def address(self) -> int:
        """Address of its first byte."""
        return _address(self.memory)

    @property
    def content(self) -> bytes:
        """Its bytes."""
        return bytes(self.memory[: self.record.page_bytes])

    def empty(self) -> "PageInMemory":
        """Memory of the same size for the same page, with other bytes."""
        memory = aligned(len(self.memory))
        memory[:] = b"\xa5" * len(memory)
        return PageInMemory(self.record, memory)


def _address(memory: memoryview) -> int:
    address: int = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    return address


class TierDriver:
    """Submits jobs to a tier and waits for them; each job must complete exactly once.

    Attributes:
        tier: the tier.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self._jobs = count(1)

    def run(self, *make: Callable[[int], DiskJob]) -> list[Completion]:
        """Submit the jobs ``make(number)`` together; returns their completions, in this order."""
        jobs = [one(next(self._jobs)) for one in make]
        self.tier.submit(jobs)
        assert self.tier.drain(WAIT_S), "drain returns when the tier is idle"
        ended = self.tier.poll()
        numbers = [job.job for job in jobs]
        assert sorted(one.job for one in ended) == numbers, "every job ends exactly once"
        by_job = {one.job: one for one in ended}
        return [by_job[number] for number in numbers]

    def write(self, *pages: tuple[Place, PageInMemory]) -> list[Completion]:
        """Write pages."""
        return self.run(*[_writer(place, page) for place, page in pages])

    def read(self, place: Place, page: PageInMemory) -> tuple[Completion, PageInMemory]:
        """Read a page into new memory."""
        target = page.empty()
        (ended,) = self.run(lambda job: DiskRead(job, place, page.record, SLOT, target.address))
        return ended, target

    def read_tokens(self, place: Place, page: PageInMemory) -> Completion:
        """Read the tokens of a page."""
        return self.run(lambda job: DiskTokens(job, place, page.record))[0]

    def tombstone(self, place: Place, keys: bytes, shard: ShardSpec = SHARD) -> Completion:
        """Write a tombstone for these keys."""
        return self.run(lambda job: DiskTombstone(job, place, SPACE, shard, keys))[0]

    def sync(self) -> Completion:
        """Make all writes durable."""
        return self.run(DiskSync)[0]

    def seal(self, segment: int) -> Completion:
        """Seal a segment."""
        return self.run(lambda job: DiskSeal(job, segment))[0]

    def drop(self, segment: int) -> Completion:
        """Drop a segment."""
        return self.run(lambda job: DiskDrop(job, segment))[0]


def _writer(place: Place, page: PageInMemory) -> Callable[[int], DiskJob]:
    return lambda job: DiskWrite(job, place, page.record, SLOT, page.address)


def laid_out(
    segment: int, pages: Sequence[PageInMemory], start: int = 0
) -> list[tuple[Place, PageInMemory]]:
    """Adjacent places for pages in a segment."""
    places, offset = [], start
    for page in pages:
        places.append((Place(segment, offset), page))
        offset += record_bytes(page.record.page_bytes)
    return places


class LogContract:
    """The contract of a tier whose jobs name places: see :mod:`kvstore.tier.base`.

    Args:
        open_tier: opens an empty tier, with segments of at least 256 KiB.
        damage: changes a byte of the payload of the record at a place, without the tier's
            knowledge.
    """

    CHECKS: ClassVar[tuple[str, ...]] = (
        "check_pages_come_back_byte_for_byte",
        "check_a_page_that_is_not_its_digest_is_not_written",
        "check_a_damaged_page_is_an_error",
        "check_a_page_is_read_only_under_its_own_name",
        "check_tokens_are_read_without_their_page",
        "check_a_segment_can_be_sealed_and_dropped",
        "check_many_jobs_each_end_once",
        "check_a_closed_tier_leaves_nothing_behind",
    )

    def __init__(self, open_tier: Callable[[], Tier], damage: Callable[[Place], None]) -> None:
        self._open = open_tier
        self._damage = damage

    def check_pages_come_back_byte_for_byte(self) -> None:
        """Pages of several sizes, submitted together, are read as they were written."""
        random, tier = Random(1), self._open()
        driver = TierDriver(tier)
        sizes = (1, 4095, 4096, 4097, 12_288, 512, 4096, 4096)
        placed = laid_out(0, [PageInMemory.random(random, size) for size in sizes])
        assert [one.error for one in driver.write(*placed)] == [None] * len(sizes)
        assert driver.sync().error is None
        for place, page in placed:
            ended, target = driver.read(place, page)
            assert ended.error is None, f"{place}: {ended.error}"
            assert target.content == page.content, f"{place}: other bytes came back"
        tier.close()

    def check_a_page_that_is_not_its_digest_is_not_written(self) -> None:
        """A page whose memory was changed is refused; the pages next to it are written."""
        random, tier = Random(2), self._open()
        driver = TierDriver(tier)
        placed = laid_out(0, [PageInMemory.random(random, 4096) for _ in range(3)])
        placed[1][1].memory[100] ^= 1
        ended = driver.write(*placed)
        assert [type(one.error) for one in ended] == [type(None), PageCorrupt, type(None)]
        for (place, page), good in zip(placed, (True, False, True), strict=True):
            found, target = driver.read(place, page)
            assert (found.error is None) is good
            assert not good or target.content == page.content
        tier.close()

    def check_a_damaged_page_is_an_error(self) -> None:
        """A page whose bytes were changed on disk is never returned."""
        random, tier = Random(3), self._open()
        driver = TierDriver(tier)
        placed = laid_out(0, [PageInMemory.random(random, 4096) for _ in range(2)])
        driver.write(*placed)
        driver.sync()
        self._damage(placed[0][0])
        assert isinstance(driver.read(*placed[0])[0].error, PageCorrupt)
        assert driver.read(*placed[1])[0].error is None
        tier.close()

    def check_a_page_is_read_only_under_its_own_name(self) -> None:
        """A stored record is not returned for another key, digest or place."""
        random, tier = Random(4), self._open()
        driver = TierDriver(tier)
        (place, page), (other_place, other) = laid_out(
            0, [PageInMemory.random(random, 4096) for _ in range(2)]
        )
        driver.write((place, page), (other_place, other))
        for wrong in ((place, other), (other_place, page), (Place(0, 8192 * 4), page)):
            assert isinstance(driver.read(*wrong)[0].error, PageCorrupt)
        tier.close()

    def check_tokens_are_read_without_their_page(self) -> None:
        """Tokens of a record are those it was written with, and returned for its own name only."""
        random, tier = Random(8), self._open()
        driver = TierDriver(tier)
        placed = laid_out(0, [PageInMemory.random(random, 12_288) for _ in range(2)])
        driver.write(*placed)
        self._damage(placed[0][0])
        for place, page in placed:
            ended = driver.read_tokens(place, page)
            assert ended.error is None, "the page's own bytes are not looked at"
            assert ended.tokens == page.record.tokens
        (place, page), (other_place, other) = placed
        for wrong in ((place, other), (other_place, page), (Place(0, 8192 * 4), page)):
            ended = driver.read_tokens(*wrong)
            assert isinstance(ended.error, PageCorrupt)
            assert not ended.tokens
        assert driver.read_tokens(Place(9, 0), page).error is not None, "there is no such segment"
        tier.close()

    def check_a_segment_can_be_sealed_and_dropped(self) -> None:
        """Pages of a sealed segment can be read; those of a dropped one are errors."""
        random, tier = Random(5), self._open()
        driver = TierDriver(tier)
        placed = laid_out(3, [PageInMemory.random(random, 4096) for _ in range(4)])
        driver.write(*placed)
        assert driver.seal(3).error is None
        assert driver.write((Place(3, 131_072), placed[0][1]))[0].error is not None
        assert driver.read(*placed[2])[0].error is None
        assert driver.drop(3).error is None
        assert driver.drop(3).error is None, "a segment that is gone is dropped"
        assert driver.read(*placed[2])[0].error is not None
        tier.close()

    def check_many_jobs_each_end_once(self) -> None:
        """Writes, reads and syncs in one submission."""
        random, tier = Random(6), self._open()
        driver = TierDriver(tier)
        placed = laid_out(0, [PageInMemory.random(random, 512) for _ in range(16)])
        driver.write(*placed)
        targets = [page.empty() for _, page in placed]
        reads = [
            lambda job, i=index: DiskRead(
                job, placed[i][0], placed[i][1].record, SLOT, targets[i].address
            )
            for index in range(16)
        ]
        writes = [_writer(*one) for one in laid_out(1, [page for _, page in placed])]
        ended = driver.run(*reads, DiskSync, *writes, DiskSync)
        assert [one.error for one in ended] == [None] * 34
        assert all(t.content == page.content for t, (_, page) in zip(targets, placed, strict=True))
        tier.close()

    def check_a_closed_tier_leaves_nothing_behind(self) -> None:
        """Closing waits for jobs, ends every thread and closes every descriptor."""
        threads, files = set(threading.enumerate()), _descriptors()
        tier = self._open()
        page = PageInMemory.random(Random(7), 4096)
        tier.submit([DiskWrite(1, Place(0, 0), page.record, SLOT, page.address)])
        tier.close()
        assert [one.job for one in tier.poll()] == [1]
        tier.close()
        assert set(threading.enumerate()) <= threads, "threads are left"
        assert _descriptors() <= files, "descriptors are left"


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
