"""A scan finds the same records however the segment is cut into windows."""

from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from kvstore.state.tree.places import Place, record_bytes
from kvstore.testing.disk import DiskFault, FaultyDisk, SimulatedDisk
from kvstore.testing.tiers import PageInMemory, TierDriver
from kvstore.tier import window
from kvstore.tier.record import segment_name
from kvstore.tier.recovery import load_segment
from tests.tier.ssd.conftest import HOME, SEGMENT_BYTES, open_log, recovered


def segment_with_gaps(random: Random) -> tuple[SimulatedDisk, bytes]:
    """Records of many sizes, some torn, with gaps between some."""
    disk = SimulatedDisk()
    log = recovered(disk)
    driver = TierDriver(log)
    offset, torn = 0, []
    while True:
        page = PageInMemory.random(random, random.choice((100, 4096, 9000, 30_000, 70_000)))
        size = record_bytes(page.record.page_bytes)
        if offset + size > SEGMENT_BYTES:
            break
        assert driver.write((Place(0, offset), page))[0].error is None
        if random.random() < 0.3:
            torn.append(offset + random.randrange(4096 + page.record.page_bytes))
        offset += size + random.choice((0, 0, 0, 4096, 65_536))
    log.close()

    def tear(content: bytearray) -> None:
        for at in torn:
            content[at] ^= 1

    disk.change(HOME / "0" / segment_name(0), tear)
    return disk, log.log_id


@pytest.mark.parametrize("seed", range(25))
def test_a_scan_finds_the_same_in_small_windows_that_are_read_ahead(seed, monkeypatch):
    random = Random(f"window {seed}")
    disk, log_id = segment_with_gaps(random)
    descriptor = disk.open(HOME / "0" / segment_name(0), direct=True)
    whole = load_segment(disk, descriptor, 0, log_id)
    monkeypatch.setattr(window, "WINDOW_BYTES", random.choice((4096, 12_288, 49_152)))
    monkeypatch.setattr(window, "PIECE_BYTES", random.choice((4096, 16_384)))
    monkeypatch.setattr(window, "CARRY_BYTES", random.choice((4096, 16_384, 131_072)))

    with ThreadPoolExecutor(3) as readers:
        ahead = load_segment(disk, descriptor, 0, log_id, readers)
    small = load_segment(disk, descriptor, 0, log_id)

    assert len(whole.entries) >= 1
    for other in (ahead, small):
        assert other.entries.tobytes() == whole.entries.tobytes()
        assert (other.pairs, other.end) == (whole.pairs, whole.end)
    disk.close(descriptor)


def test_a_read_error_ahead_ends_the_scan_with_that_error(monkeypatch):
    disk, log_id = segment_with_gaps(Random(1))
    monkeypatch.setattr(window, "WINDOW_BYTES", 16_384)
    faulty = FaultyDisk(disk)
    descriptor = faulty.open(HOME / "0" / segment_name(0), direct=True)
    faulty.arm("read", DiskFault.IO_ERROR, after=4)

    with ThreadPoolExecutor(2) as readers, pytest.raises(OSError, match="Input/output"):
        load_segment(faulty, descriptor, 0, log_id, readers)
    faulty.close(descriptor)


def test_a_log_with_threads_recovers_from_a_disk_as_one_without():
    disk, _ = segment_with_gaps(Random(2))
    found = []
    for threads in (0, 2):
        log = open_log(disk, threads=threads)
        found.append([one.entries.tobytes() for one in log.recover().segments])
        log.close()
    assert found[0] == found[1]
