"""Flipped bits and cut-off files are noticed: the page is gone, and everything else is there."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from kvstore.protocol.errors import KVStoreError, PageCorrupt
from kvstore.state.tree.places import HEADER_BYTES, Place, footer_bytes, record_bytes
from kvstore.testing.disk import SimulatedDisk
from kvstore.testing.tiers import PageInMemory, TierDriver, laid_out
from kvstore.tier.record import segment_name
from kvstore.tier.ssd import SSDLog
from tests.tier.ssd.conftest import HOME, SEGMENT_BYTES, open_log

SEALED, UNSEALED = 0, 1
RECORDS = 10


class Corpus:
    """One sealed and one unsealed segment, damaged and repaired again for every case."""

    def __init__(self) -> None:
        random = Random("corpus")
        self.disk = SimulatedDisk()
        log = open_log(self.disk)
        log.recover()
        driver = TierDriver(log)
        sizes = [random.choice((100, 4096, 5000, 12_288)) for _ in range(RECORDS)]
        self.placed: dict[Place, PageInMemory] = {}
        for segment in (SEALED, UNSEALED):
            pages = [PageInMemory.random(random, size) for size in sizes]
            self.placed |= dict(laid_out(segment, pages))
        for ended in driver.write(*self.placed.items()):
            assert ended.error is None
        assert driver.seal(SEALED).error is None
        assert driver.sync().error is None
        log.close()
        self.end = sum(map(record_bytes, sizes))

    @staticmethod
    def path(segment: int) -> Path:
        return HOME / "0" / segment_name(segment)

    def damaged(self, segment: int, edit: Callable[[bytearray], None]) -> "Outcome":
        """Damage one file, start on it, read every page, and put the file back."""
        original = self.disk.read_file(self.path(segment))
        self.disk.change(self.path(segment), edit)
        log = open_log(self.disk)
        try:
            return Outcome(self, log)
        finally:
            log.close()

            def put_back(content: bytearray) -> None:
                content[:] = original

            self.disk.change(self.path(segment), put_back)

    def hit(self, segment: int, at: int) -> Place | None:
        """The record whose header or page the byte belongs to."""
        for place, page in self.placed.items():
            end = place.offset + HEADER_BYTES + page.record.page_bytes
            if place.segment == segment and place.offset <= at < end:
                return place
        return None


class Outcome:
    """Which pages a start found, and which could be read; asserts that none was wrong."""

    def __init__(self, corpus: Corpus, log: SSDLog) -> None:
        found = log.recover()
        self.found = {
            Place(segment.number, offset)
            for segment in found.segments
            for offset in segment.entries["offset"].tolist()
        }
        self.sealed = [segment.number for segment in found.segments if segment.sealed]
        assert not found.untouched
        assert self.found <= corpus.placed.keys()
        self.errors: dict[Place, KVStoreError] = {}
        driver = TierDriver(log)
        for place, page in corpus.placed.items():
            ended, target = driver.read(place, page)
            if ended.error is not None:
                self.errors[place] = ended.error
            else:
                assert target.content == page.content, "wrong bytes were returned"


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus()


def check_bit_flips(corpus: Corpus, seeds: range) -> None:
    for seed in seeds:
        random = Random(seed)
        segment = random.choice((SEALED, UNSEALED))
        footer_at = SEGMENT_BYTES - footer_bytes(RECORDS)
        in_footer = segment == SEALED and random.random() < 0.3
        at = (
            random.randrange(footer_at, SEGMENT_BYTES)
            if in_footer
            else random.randrange(corpus.end)
        )
        bit = random.randrange(8)

        def flip(content: bytearray, at: int = at, bit: int = bit) -> None:
            content[at] ^= 1 << bit

        outcome = corpus.damaged(segment, flip)

        hit = corpus.hit(segment, at)
        assert set(outcome.errors) == ({hit} if hit else set()), f"seed {seed}"
        assert all(isinstance(error, PageCorrupt) for error in outcome.errors.values())
        assert outcome.sealed == ([] if in_footer else [SEALED])
        missing = corpus.placed.keys() - outcome.found
        # What a footer lists is found; its bytes are looked at when they are read.
        assert missing == ({hit} if hit and segment == UNSEALED else set())


def check_truncations(corpus: Corpus, seeds: range) -> None:
    for seed in seeds:
        random = Random(f"truncate {seed}")
        segment = random.choice((SEALED, UNSEALED))
        length = random.choice(
            [random.randrange(SEGMENT_BYTES), random.randrange(corpus.end), 0, 4096]
        )

        def cut(content: bytearray, length: int = length) -> None:
            del content[length:]

        outcome = corpus.damaged(segment, cut)

        kept = {
            place
            for place, page in corpus.placed.items()
            if place.segment != segment
            or place.offset + record_bytes(page.record.page_bytes) <= length
        }
        assert outcome.found == kept, f"seed {seed}: cut at {length}"
        assert set(outcome.errors) == corpus.placed.keys() - kept
        assert all(isinstance(error, PageCorrupt) for error in outcome.errors.values())


def test_three_hundred_flipped_bits_are_noticed(corpus):
    check_bit_flips(corpus, range(300))


def test_a_hundred_truncations_are_noticed(corpus):
    check_truncations(corpus, range(100))


@pytest.mark.soak("log", minutes=2)
def test_ten_thousand_flipped_bits_and_truncations_are_noticed(corpus):
    check_bit_flips(corpus, range(1_000, 9_000))
    check_truncations(corpus, range(1_000, 3_000))
