"""What does a node do when pages come faster than its disk takes them?

First three writers put new pages as fast as they can into a node without a disk: what they offer.
Then into one with a small memory and write-back, whose disk takes half of that (it is slowed down,
unless it is that slow anyway); one of them puts durably. Its memory must stay within its capacity,
nothing that is awaiting its sync may be lost, and the puts slow down to what the disk takes: their
latency second by second is on stderr. ``flood/disk`` is what the tier wrote against what the disk
takes; ``flood/put_*`` are the ordinary puts' latencies against what the disk needs for their bytes,
before memory was full and after.
"""

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from bench import measure
from bench.measure import Progress, Report, Result
from kvstore.testing import flood
from kvstore.testing.flood import MIB, PUT_BYTES, Flood, Flooded
from kvstore.testing.server import Server
from kvstore.tier.disk import OSDisk
from kvstore.tier.ssd import THREADS
from kvstore.tier.vectored import aligned

MEMORY_MIB: Final = 512
DISK_MIB: Final = 4096
RAW_CHUNK_BYTES: Final = 8 * MIB
RAW_BYTES: Final = 1024 * MIB
MEMORY_PERCENT_MAX: Final = 105.0
OFFERED_S: Final = 3.0
_BOUND: Final = "the disk"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this group."""
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the flood")
    parser.add_argument("--memory-mib", type=int, default=MEMORY_MIB, help="node memory, MiB")
    parser.add_argument("--disk-mib", type=int, default=DISK_MIB, help="size of its SSD tier, MiB")
    parser.add_argument("--directory", type=Path,
                        help="directory on the disk to flood; default: /tmp")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Flood, measure, and look for what was acknowledged; 1 when something is missing."""
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-flood-", dir=options.directory) as name,
        Report(json=options.json) as report,
        Progress("flood", 4) as progress,
    ):
        folder = Path(name)
        progress.step("the bare disk")
        raw = raw_write(folder)
        memory_bytes = options.memory_mib * MIB
        settings = flood.settings(folder, memory_bytes, options.disk_mib * MIB)
        progress.step("what the writers offer a node without a disk")
        offered = _offered(folder, settings)
        pace = min(raw, offered / 2)
        progress.note(
            f"bare disk {raw / 1e9:.2f} GB/s, offered {offered / 1e9:.2f} GB/s;"
            f" the node's disk takes {pace / 1e9:.2f} GB/s"
        )
        progress.step(f"{options.seconds:g} s of puts")
        with Server(folder, settings, ("kvstore.testing.paced", str(pace))) as server:
            server.wait_ready()
            result = Flood(server, lambda at, puts: _say(progress, at, puts)).run(options.seconds)
            server.kill()
        kept = result.kept(options.disk_mib * MIB)
        progress.step(f"{len(kept)} durable puts after a kill")
        with Server(folder, settings) as server:
            server.wait_ready()
            missing = flood.missing_puts(server.address, kept)
        progress.note(
            f"{len(result.puts)} puts, {result.refused} refused for want of room,"
            f" {result.stats['counts'].get('removed_evicted', 0)} pages dropped unwritten;"
            f" {len(kept)} durable puts looked for, {len(missing)} missing"
        )
        for case in _cases(result, pace, memory_bytes):
            report.add(case)
    if missing or not kept:
        sys.stderr.write("acknowledged puts are missing\n" if missing else "nothing to verify\n")
        return 1
    return 0


def _offered(folder: Path, settings: dict[str, object]) -> float:
    """Bytes a second that the writers put when no disk holds them up."""
    memory_only = {key: value for key, value in settings.items() if not key.startswith("ssd.")}
    with Server(folder, memory_only) as server:
        server.wait_ready()
        result = Flood(server, durable=False).run(OFFERED_S)
    return len(result.puts) * PUT_BYTES / result.seconds


def _say(progress: Progress, at: int, seconds: list[float]) -> None:
    if not seconds:
        progress.note(f"{at:4d} s: no put ended")
        return
    p50, p99 = (measure.percentile(seconds, percent) * 1e3 for percent in (50, 99))
    rate = len(seconds) * PUT_BYTES / 1e9
    progress.note(f"{at:4d} s: put p50 {p50:8.1f} ms  p99 {p99:8.1f} ms  {rate:6.2f} GB")


def _cases(result: Flooded, pace: float, memory_bytes: int) -> list[Result]:
    need_ms = PUT_BYTES / pace * 1e3
    cases = []
    for name, room in (("before", True), ("after", False)):
        seconds = [put.seconds for put in result.puts if not put.durable and put.room is room]
        for percent in (50, 99) if seconds else ():
            value = measure.percentile(seconds, percent) * 1e3
            case = f"flood/put_p{percent}/{name}"
            cases.append(Result(case, value, "ms", f"{_BOUND}: a put", need_ms, need_ms / value))
    rate, bound = result.written_bytes / result.seconds / 1e9, pace / 1e9
    cases.append(Result("flood/disk", rate, "GB/s", _BOUND, bound, rate / bound))
    used = 100 * result.memory_bytes_max / memory_bytes
    most = MEMORY_PERCENT_MAX
    cases.append(Result("flood/memory", used, "%", "capacity + 5 %", most, most / used))
    return cases


def raw_write(folder: Path) -> float:
    """Bytes a second that threads write to a new file past the page cache."""
    disk, path = OSDisk(), folder / "raw"
    descriptor = disk.create(path, RAW_BYTES, direct=disk.takes_direct_io(folder))
    page = aligned(RAW_CHUNK_BYTES)
    page[:] = os.urandom(RAW_CHUNK_BYTES)

    def write(offset: int) -> None:
        assert disk.write(descriptor, [page], offset) == RAW_CHUNK_BYTES

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            start = time.perf_counter()
            list(pool.map(write, range(0, RAW_BYTES, RAW_CHUNK_BYTES)))
            disk.sync(descriptor)
            return RAW_BYTES / (time.perf_counter() - start)
    finally:
        disk.close(descriptor)
        with suppress(FileNotFoundError):
            path.unlink()
