"""Goal: closing a segment's file may block or fail, and stops at most the job that closes it."""

import threading
from collections.abc import Iterator

import pytest

from kvstore.state.disk.jobs import DiskDrop, DiskRead, DiskSync, DiskWrite
from kvstore.state.tree.places import Place
from kvstore.testing.disk import DiskFault, FaultyDisk, SimulatedDisk
from kvstore.testing.tiers import SLOT, TierDriver, laid_out
from kvstore.tier import segments
from kvstore.tier.base import Completion
from kvstore.tier.record import segment_name
from kvstore.tier.ssd import SSDLog
from tests.conftest import wait_for
from tests.tier.ssd.conftest import HOME, SEGMENT_BYTES, pages, recovered


class BlockedClose(SimulatedDisk):
    """The next close of a file blocks once ``blocks`` is set, as on a disk that hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.blocked, self.ends = (threading.Event() for _ in range(3))

    def close(self, descriptor: int) -> None:
        if self.blocks.is_set():
            self.blocks.clear()
            self.blocked.set()
            self.ends.wait(30)
        super().close(descriptor)


@pytest.fixture
def blocked_close(monkeypatch) -> Iterator[tuple[BlockedClose, SSDLog]]:
    monkeypatch.setattr(segments, "DESCRIPTORS_MAX", 1)
    disk = BlockedClose()
    log = recovered(disk, threads=2)
    yield disk, log
    disk.ends.set()
    assert log.drain(10)
    log.close()
    assert disk.open_files() == 0, "every file was closed once"


def test_a_close_that_blocks_lets_the_loop_go_on(blocked_close):
    disk, log = blocked_close
    driver = TierDriver(log)
    driver.write(*laid_out(0, pages(1)))
    driver.seal(0)
    disk.blocks.set()
    log.submit([DiskDrop(1001, 0)])
    assert disk.blocked.wait(10)
    went_on = threading.Event()

    def loop() -> None:
        log.stats()
        log.submit([DiskSync(1002)])
        went_on.set()

    threading.Thread(target=loop, daemon=True).start()

    assert went_on.wait(10), "the lock of the table is held while a file is closed"
    disk.ends.set()
    assert log.drain(10)
    assert {one.job: one.error for one in log.poll()} == {1001: None, 1002: None}


def test_a_file_that_is_being_closed_is_opened_again_by_whoever_needs_it(blocked_close):
    disk, log = blocked_close
    driver = TierDriver(log)
    first, second = [(Place(number, 0), page) for number, page in enumerate(pages(2))]
    driver.write(first)
    driver.sync()
    disk.blocks.set()
    place, page = second
    log.submit([DiskWrite(1001, place, page.record, SLOT, page.address)])
    assert disk.blocked.wait(10), "the first file is idle"
    place, page = first
    target = page.empty()

    log.submit([DiskRead(1002, place, page.record, SLOT, target.address)])

    read: list[Completion] = []
    assert wait_for(lambda: read.extend(log.poll()) or read), "the other thread reads it meanwhile"
    assert [(one.job, one.error) for one in read] == [(1002, None)]
    assert target.content == page.content
    disk.ends.set()
    assert log.drain(10)
    assert log.poll() == [Completion(1001)]
    for place, page in (first, second):
        ended, target = driver.read(place, page)
        assert (ended.error, target.content) == (None, page.content)


@pytest.mark.parametrize("threads", [0, 1])
def test_a_close_that_fails_takes_nothing_from_the_tier(disk, caplog, threads):
    faulty = FaultyDisk(disk)
    log = recovered(faulty, threads=threads)
    driver = TierDriver(log)
    (page,) = pages(1)
    for number in range(3):
        assert driver.write((Place(number, 0), page))[0].error is None
    faulty.arm("close", DiskFault.IO_ERROR, times=3)  # two files here, and one when it ends

    assert [driver.drop(number).error for number in range(2)] == [None, None]

    assert faulty.hits == 2
    assert [one.used_bytes for one in log.stats().directories] == [SEGMENT_BYTES]
    assert driver.write((Place(3, 0), page))[0].error is None, "the tier goes on"
    assert driver.sync().error is None
    log.close()
    assert disk.open_files() == 0
    said = [one for one in caplog.messages if "closing it failed" in one]
    assert len(said) == 1, "once for a directory"
    assert f"{HOME / '0' / segment_name(0)}" in said[0]
    recovered(disk).close()
