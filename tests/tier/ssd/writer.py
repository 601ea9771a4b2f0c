"""``python -m tests.tier.ssd.writer DIRECTORY LIFE``: writes until killed, says what is durable."""

import sys
from itertools import count
from pathlib import Path
from random import Random

from kvstore.state.tree.places import Place, footer_bytes, record_bytes
from kvstore.testing.tiers import PageInMemory, TierDriver
from kvstore.tier.directories import Directory
from kvstore.tier.ssd import SSDLog

SEGMENT_BYTES = 1 << 20


def page(life: int, number: int) -> PageInMemory:
    """The page of that number, the same in every process."""
    random = Random(f"writer {life} {number}")
    return PageInMemory.random(random, random.choice((4096, 10_000, 40_000)))


def main(path: Path, life: int) -> None:
    log = SSDLog("node", [Directory(path, 1 << 30)], SEGMENT_BYTES, threads=2)
    segment = log.recover().next_segment
    driver = TierDriver(log)
    offset = in_segment = 0
    for number in count():
        one = page(life, number)
        size = record_bytes(one.record.page_bytes)
        if offset + size + footer_bytes(in_segment + 1) > SEGMENT_BYTES:
            assert driver.seal(segment).error is None
            segment, offset, in_segment = segment + 1, 0, 0
        assert driver.write((Place(segment, offset), one))[0].error is None
        offset, in_segment = offset + size, in_segment + 1
        assert driver.sync().error is None
        sys.stdout.write(f"durable {number}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
