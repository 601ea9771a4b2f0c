"""A log with everything a log has, to be damaged: two directories, and what its pages hold."""

import shutil
from pathlib import Path
from random import Random
from typing import Final

from kvstore.protocol.page import CanonicalLayout, ShardSpec
from kvstore.state.tree.places import Place, record_bytes
from kvstore.testing.tiers import SPACE, PageInMemory, TierDriver, laid_out
from kvstore.tier.directories import Directory
from kvstore.tier.disk import OSDisk
from kvstore.tier.ssd import SSDLog

SEGMENT_BYTES: Final = 160 << 10


CAPACITY_BYTES: Final = 16 * SEGMENT_BYTES


SHARD: Final = ShardSpec(layout=CanonicalLayout(head_dim=256), layers=(0, 1), heads=(0, 1))
PAGE_BYTES: Final = SHARD.page_bytes(SPACE)


class Corpus:
    """Files of a log and of a stranger's, by directory and name; what its pages hold."""

    def __init__(self, folder: Path) -> None:
        self.content: dict[bytes, bytes] = {}
        self.digests: dict[bytes, bytes] = {}
        self.files = self._make(folder / "own", Random("own"), "node")
        self.foreign = self._make(folder / "foreign", Random("foreign"), "stranger")
        shutil.rmtree(folder / "own")
        shutil.rmtree(folder / "foreign")

    def _make(self, folder: Path, random: Random, node: str) -> dict[tuple[int, str], bytes]:
        log = open_log(folder, node)
        log.recover()
        driver = TierDriver(log)
        parent = b""
        for number in range(5):
            pages = []
            for _ in range(random.randint(2, 6)):
                pages.append(PageInMemory.random(random, PAGE_BYTES, parent, SHARD))
                parent = pages[-1].record.key if random.random() < 0.9 else b""
            for page in pages:
                self.content[page.record.key] = page.content
                self.digests[page.record.key] = page.record.digest
            if number == 3:
                pages.append(pages[0])
            placed = laid_out(number, pages)
            assert all(one.error is None for one in driver.write(*placed))
            if number in (1, 4):
                end = placed[-1][0].offset + record_bytes(PAGE_BYTES)
                gone = b"".join(page.record.key for page in pages[1:2])
                assert driver.tombstone(Place(number, end), gone, SHARD).error is None
            if number < 3:
                assert driver.seal(number).error is None
        assert driver.sync().error is None
        log.close()
        return {
            (at, path.name): path.read_bytes()
            for at in range(2)
            for path in sorted((folder / str(at)).iterdir())
        }


class UnsyncedDisk(OSDisk):
    """This machine's disk through the page cache; its power is not cut here."""

    def takes_direct_io(self, path: Path) -> bool:
        """Its files are small and read at once."""
        return False

    def sync(self, descriptor: int) -> None:
        """Nothing."""

    def sync_directory(self, path: Path) -> None:
        """Nothing."""


def open_log(folder: Path, node: str = "node") -> SSDLog:
    directories = [Directory(folder / str(at), CAPACITY_BYTES) for at in range(2)]
    return SSDLog(node, directories, SEGMENT_BYTES, threads=0, disk=UnsyncedDisk())
