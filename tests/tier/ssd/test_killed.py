"""A process that is killed while it writes leaves a log that the next one finds whole."""

import sys
from pathlib import Path

from kvstore.state.tree.places import Place
from kvstore.testing.tiers import TierDriver
from kvstore.tier.directories import Directory
from kvstore.tier.ssd import SSDLog
from tests.tier.ssd.writer import SEGMENT_BYTES, page

LIVES = 4


def test_every_page_that_was_durable_is_found_after_each_kill(tmp_path: Path, spawn, wait_until):
    path = tmp_path / "log"
    durable = {}
    for life in range(LIVES):
        writer = spawn(
            [sys.executable, "-m", "tests.tier.ssd.writer", path, str(life)], r"durable \d+"
        )
        wanted = 20 + 40 * life
        wait_until(lambda w=writer, n=wanted: w.stdout.count("\n") >= n, 20)
        writer.kill()
        lines = writer.stdout.rpartition("\n")[0].splitlines()
        for number in range(len(lines)):
            one = page(life, number)
            durable[one.record.key] = one

        log = SSDLog("node", [Directory(path, 1 << 30)], SEGMENT_BYTES, threads=2)
        found = log.recover()
        driver = TierDriver(log)
        there = {
            key: Place(segment.number, offset)
            for segment in found.segments
            for key, offset in zip(
                segment.entries["key"].tolist(), segment.entries["offset"].tolist(), strict=True
            )
        }
        assert durable.keys() <= there.keys()
        for key, one in durable.items():
            ended, target = driver.read(there[key], one)
            assert ended.error is None
            assert target.content == one.content
        assert len(there) <= len(durable) + life + 1, "at most one page a life was under way"
        log.close()
