"""Goal: more pages than the disk takes slow the writers down; memory stays, and nothing is lost."""

from pathlib import Path

import pytest

from kvstore.testing import flood
from kvstore.testing.flood import MIB, Flood
from kvstore.testing.server import Server

MEMORY_BYTES = 256 * MIB
DISK_BYTES = 2048 * MIB


PACE = ("kvstore.testing.paced", "4e8")
"""A daemon whose disk takes 0.4 GB/s: less than the writers offer on any machine."""


def run(folder: Path, seconds: float) -> None:
    settings = flood.settings(folder, MEMORY_BYTES, DISK_BYTES)
    with Server(folder, settings, PACE) as server:
        server.wait_ready()
        result = Flood(server).run(seconds)
        stats = server.get("/v1/stats")
        server.kill()
        assert "Traceback" not in server.errors

    assert result.memory_bytes_max <= 1.05 * MEMORY_BYTES
    stored = len(result.puts) * flood.PUT_BYTES
    assert stored > 2 * MEMORY_BYTES, "memory was never full"
    assert not result.refused, "back-pressure, also on durable puts, and no refusals"
    assert result.written_bytes > stored - 2 * MEMORY_BYTES, "what left memory went to disk"
    assert not stats["counts"].get("removed_evicted"), "no page was dropped instead of written"
    assert not stats["ssd"]["errors"]
    kept = result.kept(DISK_BYTES)
    assert kept
    with Server(folder, settings) as server:
        server.wait_ready()
        assert flood.missing_puts(server.address, kept) == []


def test_a_flood_stays_within_memory_and_loses_nothing_durable(tmp_path: Path):
    run(tmp_path, 3.0)


@pytest.mark.soak("crash", minutes=2)
def test_a_minute_of_flood_stays_within_memory_and_loses_nothing_durable(tmp_path: Path):
    run(tmp_path, 60.0)
