"""How long does a node's snapshot take, and how long do snapshots and audits hold up the node?

The node stands alone in memory that is a promise, full, and is written to all the time; its events
are published as in a daemon. The follower is another process; run as a script this is it.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from bench.measure import Progress, Report, Result
from bench.node_watch import TURN_S_MAX, Span, WatchedLoop
from bench.node_world import World
from kvstore.config import EventsConfig, SocketConfig
from kvstore.events.questions import KEYS_MAX
from kvstore.index.snapshot import SnapshotEnd, SnapshotPages, audit, read_snapshot, sample
from kvstore.process.collector import spare_the_old
from kvstore.server.publish import Publication
from kvstore.server.questions import FollowerQuestions

PAGES: Final = 1_000_000
PUTS_S: Final = 0.002
"""A prompt of 32 pages is put so often; as many pages leave."""
AUDITS: Final = 20
WAIT_S: Final = 300.0
_SECONDS_MAX: Final = 5.0
_FLOOR: Final = "floor"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this group."""
    parser.add_argument("--pages", type=int, default=PAGES,
                        help=f"pages in the node; default: {PAGES:,}")  # fmt: skip
    parser.add_argument("--ssd", action="store_true",
                        help="keep seven eighths of the pages on disk only")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    report = Report(json=options.json)
    with TemporaryDirectory() as folder, Progress("snapshot", 1) as progress:
        progress.step(f"a node of {options.pages:,} pages")
        measured, turns = _followed(Path(folder), options.pages, ssd=options.ssd)
    size = f"{options.pages // 1000}k" + ("/ssd" if options.ssd else "")
    limit_s = _SECONDS_MAX * max(1.0, options.pages / PAGES)
    _add(report, f"snapshot/{size}/seconds", measured["snapshot_s"], limit_s, "s")
    for name, turn in turns.items():
        if not turn.cpu_s:
            continue  # as of the collector when it did not look
        sys.stderr.write(f"the longest turn of a {name}: {turn}\n")
        _add(
            report, f"snapshot/{size}/longest_{name}_turn", 1e3 * turn.cpu_s, 1e3 * TURN_S_MAX, "ms"
        )
    _add(report, f"snapshot/{size}/audit_{KEYS_MAX}", 1e3 * measured["audit_s"], 1e4, "ms")
    _add(report, f"snapshot/{size}/sample_{KEYS_MAX}", 1e3 * measured["sample_s"], 1e4, "ms")
    report.close()
    return 0


def _add(report: Report, case: str, value: float, most: float, unit: str) -> None:
    report.add(Result(case, value, unit, _FLOOR, most, most / value))


def _followed(folder: Path, pages: int, *, ssd: bool) -> tuple[dict[str, float], dict[str, Span]]:
    """What a follower measures, and the longest turns by name."""
    with ExitStack() as undo:
        undo.callback(spare_the_old())
        socket = SocketConfig(path=str(folder / "node.sock"))
        publication = Publication(EventsConfig(), socket, "alone", bytes(16))
        undo.callback(publication.close)
        child = undo.enter_context(_Follower(publication.replay_endpoint))
        world = World(pages, "lru", ssd=ssd)
        undo.callback(world.close)
        world.fill()
        world.put()  # the first one after all pages have grown old takes longer
        while ssd and world.lone.stored() < 0.9 * pages:
            world.put()
        undo.enter_context(world.collector)  # not before: filling a node makes many objects
        loop = WatchedLoop(world.watch)
        undo.callback(loop.close)
        loop.name = "question"
        world.lone.publish = publication.publish
        start = time.thread_time()
        turns = _answer(world, loop, publication, child)
        total_s, collector = time.thread_time() - start, world.collector
        turns["collector"] = collector.longest
        sys.stderr.write(
            f"the collector looked {collector.pauses} times,"
            f" {1e3 * collector.total.cpu_s:.1f} ms of {1e3 * total_s:.0f} ms of the node's CPU\n"
        )
        return child.measured(), turns


def _answer(
    world: World, loop: WatchedLoop, publication: Publication, child: "_Follower"
) -> dict[str, Span]:
    """Answer until the follower has ended; the longest turns by name."""

    async def begin() -> FollowerQuestions:
        return FollowerQuestions(world.lone.desk, publication)

    longest = dict.fromkeys(("put", "question"), Span())
    answers = loop.run_until_complete(begin())
    deadline = loop.time() + WAIT_S
    child.begin()
    try:
        while not child.ended:
            assert loop.time() < deadline, "the follower does not end"
            for name, work in (("put", world.put), ("question", partial(_run, loop))):
                world.begin()
                work()
                longest[name] = max(longest[name], world.watch.longest)
    finally:
        answers.close()
    return longest


class _Follower:
    """The process that asks; it is ended with this context."""

    def __init__(self, endpoint: str) -> None:
        root = Path(__file__).resolve().parent.parent
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "bench.snapshot", endpoint]
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=root)

    def begin(self) -> None:
        """Let it ask."""
        assert self._child.stdin is not None
        self._child.stdin.write(b"\n")
        self._child.stdin.flush()

    @property
    def ended(self) -> bool:
        """Whether it has no more questions."""
        return self._child.poll() is not None

    def measured(self) -> dict[str, float]:
        """What it has measured."""
        said, _ = self._child.communicate()
        assert self._child.returncode == 0, "the follower failed"
        measured: dict[str, float] = json.loads(said)
        return measured

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.ended:
            self._child.kill()
        self._child.communicate()


def _run(loop: WatchedLoop) -> None:
    """Let the loop run until the next put."""
    loop.call_later(PUTS_S, loop.stop)
    loop.run_forever()


# The follower


async def _follow(endpoint: str) -> dict[str, Any]:
    """Seconds of each question."""
    spaces: dict[tuple[str, str], bytes] = {}
    sys.stdin.readline()
    start = time.perf_counter()
    async for part in read_snapshot(endpoint):
        if isinstance(part, SnapshotPages):
            spaces[part.space, part.shard] = part.keys[: 32 * KEYS_MAX]
        elif isinstance(part, SnapshotEnd):
            pages = part.pages
    found = {"pages": pages, "snapshot_s": time.perf_counter() - start}
    ((space, shard), keys), *_ = spaces.items()
    start = time.perf_counter()
    for _ in range(AUDITS):
        audited = await audit(endpoint, "", space, shard, keys)
        assert np.count_nonzero(audited.places) == audited.end.pages
    found["audit_s"] = (time.perf_counter() - start) / AUDITS
    start = time.perf_counter()
    for _ in range(AUDITS):
        await sample(endpoint)
    found["sample_s"] = (time.perf_counter() - start) / AUDITS
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(_follow(sys.argv[1]))))
