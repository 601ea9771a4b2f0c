"""Histories of one node with its disk, beside the model of it.

Each job of the disk ends when the history says so. The page table
keeps runs; :mod:`tests.state.disk.plain_pages` keeps single pages in dicts, and says by itself what
a start must find.
"""

from contextlib import suppress
from random import Random

import pytest

from kvstore.protocol.errors import (
    CapacityError,
    DurabilityUnavailable,
)
from kvstore.state.ask.traversal import Removal
from kvstore.state.disk.jobs import (
    DiskDrop,
    DiskJob,
    LeftDisk,
)
from kvstore.state.table.adopt import adopt
from kvstore.state.table.announce import Announcement
from kvstore.state.table.invariants import check
from kvstore.state.table.tiers import apply_effects
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.node import PrefixNode, Retention
from kvstore.state.tree.sessions import Fetch
from kvstore.state.tree.slots import Slot
from tests.state.disk.disk_world import DiskWorld
from tests.state.disk.plain_disk import PlainDisk
from tests.state.disk.plain_files import Content, PlainFiles
from tests.state.disk.plain_pages import MODELS, Kept, Names, OpenPut, PlainPages, Reading
from tests.state.single_pages import DEPTH, PATH_OF, SHARDS, WINDOW_SHARD, Page, longest
from tests.state.world import chain, key

SEGMENTS, SEGMENT_BYTES = 8, 112 << 10
"""Of twelve records each."""
WEIGHTS = {
    "store": 12, "begin": 3, "commit": 3, "abort": 1, "lookup": 3, "acquire": 4,
    "release": 5, "load": 4, "end_fetch": 2, "persist": 2, "drop": 2, "clear": 1,
    "look_closely": 1, "pass_time": 2, "sweep": 3, "spill": 2, "lose": 3, "end_jobs": 8,
    "end_all_jobs": 3, "rot": 1, "restart": 2,
}  # fmt: skip
"""Actions, and how often each is drawn."""
Slow = type[DiskJob] | tuple[()]
DRAWN = [name for name, weight in WEIGHTS.items() for _ in range(weight)]


class History:
    """One node, one engine, 12 pages of memory, an SSD of a few segments; and the model of it.

    Args:
        write: when pages are written to disk.
        in_flight_max: bytes that may be on their way there.
        slow: jobs of this kind end only with all others.
    """

    def __init__(self, write: str, in_flight_max: int, slow: Slow = ()) -> None:
        self.write, self.in_flight_max, self.slow = write, in_flight_max, slow
        self.files = PlainFiles(SEGMENT_BYTES, frozenset({WINDOW_SHARD}))
        self.now_ns = self.numbers = 0
        self._boot()
        self._set_time()

    def _boot(self) -> None:
        """A new process: nothing in memory, and what the files have."""
        self.world = DiskWorld(
            self.write, extents=3, segments=SEGMENTS, segment_bytes=SEGMENT_BYTES,
            in_flight_max=self.in_flight_max,
        )  # fmt: skip
        self.table, self.me = self.world.table, self.world.me
        self.fetches: list[Fetch] = []
        pairs = [(model, shard) for model in MODELS for shard in SHARDS]
        adopt(self.table, self.files.found(len(SHARDS)), pairs, self.files.last_number + 1)
        self.names = Names.open(self.table, self.me)
        self.model = PlainPages(self.names, self.files)
        self.disk = PlainDisk(self.files, self.model)

    def act(self, action: str, chance: Random) -> None:
        """One step."""
        getattr(self, action)(chance)
        self._go_on()
        self.model.check()
        check(self.table)

    def _set_time(self) -> None:
        self.table.moment.now_ns = self.model.now_ns = self.now_ns
        while self.table.expire(self.now_ns):
            pass
        self.table.tiers.advance(self.now_ns)

    def _go_on(self) -> None:
        """What the node does after each message."""
        self.table.tiers.go_on()
        if self.table.disk.loads.may_go_on:
            self.table.room.load_more()
        self._see()

    def _see(self) -> None:
        """Take the jobs for the disk, and the actions."""
        jobs = list(self.world.disk.jobs)
        self.world.disk.jobs.clear()
        for job in jobs:
            self.disk.begin(job)
        self.model.follow(self.table)

    def _choose(self, chance: Random) -> tuple[int, str, int]:
        """A space, a path and a shard; often one that was taken out, or goes on from one there."""
        gone = self.model.buried | self.model.gone
        if gone and chance.random() < 0.15:
            return chance.choice(sorted(gone))
        at, shard = chance.choice((0, 0, 0, 1)), chance.choice((0, 0, 0, 1, 2))
        mine = sorted({page[1] for page in self.model.pages if page[0] == at})
        path = chance.choice(mine) if mine and chance.random() < 0.5 else ""
        path += "".join(chance.choices("ab", k=chance.randint(0 if path else 1, DEPTH)))
        return at, path[:DEPTH], shard

    # ---- the disk -----------------------------------------------------------------------------

    def _end_job(self, number: int, *, fails: bool = False) -> None:
        ended = self.disk.end(number, fails=fails)
        self.table.tiers.completed(ended.job, ended.error, ended.tokens, ended.failed)
        self._go_on()

    def end_jobs(self, chance: Random) -> None:
        """Some jobs end, in any order; one may fail."""
        for at in range(chance.randint(1, 6)):
            numbers = sorted(
                number for number, job in self.disk.open.items() if not isinstance(job, self.slow)
            )
            if numbers:
                number = numbers[0] if chance.random() < 0.5 else chance.choice(numbers)
                self._end_job(number, fails=not at and chance.random() < 0.1)

    def end_all_jobs(self, _chance: Random) -> None:
        """All jobs end in their order, well, and all that leaves in turns has left."""
        self._sweep(10_000)
        for _ in range(10_000):
            if not self.disk.open:
                break
            self._end_job(min(self.disk.open))
            self._sweep(10_000)
        assert not self.model.holes
        assert not self.disk.open, "jobs without an end"
        self.model.check_settled(self.table.disk.log)

    def sweep(self, chance: Random) -> None:
        """Some of what follows pages that left leaves too."""
        self._sweep(chance.randint(1, 6))

    def _sweep(self, steps: int) -> None:
        self.table.residents.drop_orphans(steps)
        self._go_on()
        self.model.check()

    def _nodes(self, tier: int) -> list[PrefixNode]:
        """Runs on disk; ``tier``: 1 = those in memory too, 0 = the others."""
        nodes = {id(one): one for space in self.names.spaces for one in space.index.values()}
        return [one for one in nodes.values() if one.on_disk and (one.memory > 0) == tier]

    def spill(self, chance: Random) -> None:
        """Runs leave memory that are on disk too."""
        for _ in range(chance.randint(1, 3)):
            if nodes := self._nodes(1):
                self.table.residents.release_memory(chance.choice(nodes))

    def lose(self, chance: Random) -> None:
        """A run leaves the disk, as when a reclaim finds no place for it; often with a tail."""
        if nodes := self._nodes(0):
            node = max(chance.choices(nodes, k=3), key=lambda one: one.count)
            shard = chance.choice(list(node.place_columns))
            self._continue(node, shard, chance)
            self.world.disk.effects.append(LeftDisk(node.space, shard, node.keys, "reclaimed"))
            apply_effects(self.table.residents)

    def _continue(self, node: PrefixNode, shard: int, chance: Random) -> None:
        """Put pages behind a run, as many as there may be."""
        at, path = self.names.spaces.index(node.space), PATH_OF[node.key]
        more = "".join(chance.choices("ab", k=DEPTH - len(path)))
        if more:
            of = at, path + more, self.names.shards[at].index(shard)
            number = self._begin(chance, (of, len(path)))
            if number is not None:
                self._commit(number, chance)

    def rot(self, chance: Random) -> None:
        """The disk returns other bytes for a record than were written."""
        written = [one for one in self.files.records() if one.written and not one.tombstone]
        if written and chance.random() < 0.3:
            chance.choice(written).rotten = True

    # ---- what engines ask for -----------------------------------------------------------------

    def store(self, chance: Random) -> None:
        """Begin and commit with nothing between, as most puts are."""
        number = self._begin(chance)
        if number is not None:
            self._commit(number, chance)

    def begin(self, chance: Random) -> None:
        """Ask for slots, and take one's time to fill them."""
        self._begin(chance)

    def _begin(self, chance: Random, of: tuple[Page, int] | None = None) -> int | None:
        """``of``: the last page, and how many before it are not put."""
        if of is not None:
            (at, path, shard), start = of
        else:
            at, path, shard = self._choose(chance)
            start = chance.choice((0, 0, 0, chance.randrange(len(path))))
        if shard == WINDOW_SHARD:
            start = 0  # a page whose head is not known hangs nowhere for a while
        self.numbers += 1
        tokens = path[start:].encode("utf-32-le") if chance.random() < 0.8 else b""
        ready, writing = set(self.model.pages), self.model.writing()
        statuses, put = self.table.begin_put(
            self.me, self.numbers, self.names.spaces[at], self.names.shards[at][shard],
            b"".join(chain(path, start)), key(path[:start]), tokens,
        )  # fmt: skip
        self._see()
        granted, mine = iter(put.slots), list[tuple[Page, Slot]]()
        for end, status in enumerate(statuses, start + 1):
            page, head = (at, path[:end], shard), (at, path[: end - 1], shard)
            match status:
                case PageStatus.EXISTS:
                    assert page in ready, "told to exist, and it does not"
                case PageStatus.PENDING:
                    assert page in writing
                case PageStatus.GRANTED:
                    assert page not in self.model.pages, "granted, and there"
                    assert page not in writing, "granted twice"
                    assert page not in self.model.holes, "granted before pages that leave"
                    mine.append((page, next(granted)))
                case PageStatus.NO_PARENT:
                    assert shard != WINDOW_SHARD
                    assert end > start + 1 or head not in self.model.pages
                    break
                case _:
                    assert status is PageStatus.NO_ROOM
                    break
        assert next(granted, None) is None
        self.disk.take_slots([slot for _, slot in mine])
        if not mine:
            return None
        self.model.puts[self.numbers] = OpenPut(mine, {page for page, _ in mine})
        return self.numbers

    def commit(self, chance: Random) -> None:
        """The bytes are there."""
        if self.model.puts:
            self._commit(chance.choice(sorted(self.model.puts)), chance)

    def _commit(self, number: int, chance: Random) -> None:
        put = self.model.puts.pop(number)
        keep = Retention()
        if chance.random() < 0.1:
            keep = Retention(self.now_ns + chance.randint(1, 9), memory_only=True)
        elif chance.random() < 0.1:
            keep = Retention(0, read_once=True, memory_only=True)
        digests = [(number << 32 | at).to_bytes(16, "big") for at in range(len(put.pages))]
        for (page, slot), digest in zip(put.pages, digests, strict=True):
            self.model.content[slot] = (page, digest)
            if page in put.alive:
                self.model.committing[page] = Kept(digest, {"host"}, keep)
        statuses = self.table.commit_put(self.me, number, b"".join(digests), keep)
        assert statuses == [
            PageStatus.STORED if page in put.alive else PageStatus.DROPPED for page, _ in put.pages
        ]
        self._see()
        assert not self.model.committing, "committed, and no event tells of it"

    def abort(self, chance: Random) -> None:
        """The writer gives up; pages behind its own, which others wrote, lose their head."""
        if self.model.puts:
            number = chance.choice(sorted(self.model.puts))
            for page in self.model.puts.pop(number).alive:
                self.model.leave(page, "head_lost")
            self.model.may_leave.add("head_lost")
            self.table.abort_put(self.me, number)

    def lookup(self, chance: Random) -> None:
        """How much of a prompt is there."""
        at, path, _ = self._choose(chance)
        shards = sorted(chance.sample(range(3), chance.randint(1, 3)))
        numbers = [self.names.shards[at][shard] for shard in shards]
        pages, pending = self.table.lookup(self.names.spaces[at], numbers, b"".join(chain(path)))
        ready = set(self.model.pages)
        assert pages == longest(ready, at, path, shards)
        present = ready | self.model.writing()
        assert pages + pending == longest(present, at, path, shards)

    def acquire(self, chance: Random) -> None:
        """Read the leading pages that are in memory."""
        at, path, shard = self._choose(chance)
        start = chance.choice((0, 0, chance.randrange(len(path))))
        expected: list[Content] = []
        for end in range(start + 1, len(path) + 1):
            kept = self.model.pages.get((at, path[:end], shard))
            if kept is None or "host" not in kept.tiers:
                break
            expected.append(((at, path[:end], shard), kept.digest))
        self.numbers += 1
        until_ns = self.now_ns + chance.randint(1, 9)
        leased = self.table.acquire(
            self.me, self.numbers, self.names.spaces[at], self.names.shards[at][shard],
            b"".join(chain(path, start)), until_ns,
        )  # fmt: skip
        slots = list(leased.lease.slots)
        assert [self.model.content[slot] for slot in slots] == expected, "the bytes of other pages"
        assert leased.digests == b"".join(digest for _, digest in expected)
        if slots:
            of = list(zip(slots, expected, strict=True))
            self.model.leases[self.numbers] = Reading(until_ns, of)

    def release(self, chance: Random) -> None:
        """A reader is done."""
        if self.model.leases:
            number = chance.choice(sorted(self.model.leases))
            del self.model.leases[number]
            self.table.release(self.me, number)

    def load(self, chance: Random) -> None:
        """Bring a prefix to memory, or begin to."""
        at, path, shard = self._choose(chance)
        fetch = self.table.begin_fetch(self.me, 0)
        self.table.room.fetch(
            fetch, self.names.spaces[at], self.names.shards[at][shard], b"".join(chain(path))
        )
        self.fetches.append(fetch)
        if chance.random() < (0.2 if self.slow else 0.6):
            self.end_all_jobs(chance)
            assert fetch in self.table.fetches.ended
            self.end_fetch(chance)

    def end_fetch(self, chance: Random) -> None:
        """Whoever waited has what it wanted, or gives up."""
        if self.fetches:
            fetch = self.fetches.pop(chance.randrange(len(self.fetches)))
            self.table.end_fetch(self.me, fetch)

    def persist(self, chance: Random) -> None:
        """A durable put, of pages that are there already."""
        at, path, shard = self._choose(chance)
        number = self.names.shards[at][shard]
        run = self.table.residents.ready_run(self.names.spaces[at], number, b"".join(chain(path)))
        pages = {(at, path[:end], shard) for end in range(1, len(run) + 1)}
        if not self.names.spaces[at].shards[number].window_pages and chance.random() < 0.5:
            run = run[-1:]  # those before it come with it
        if any(self.model.pages[page].keep.memory_only for page in pages):
            with pytest.raises(DurabilityUnavailable):
                self.table.tiers.make_durable(run, number)
            return
        with suppress(CapacityError):  # the disk is full, or fails at the moment
            self.model.await_durable(self.table.tiers.make_durable(run, number), pages)

    # ---- what operators do, and time ----------------------------------------------------------

    def drop(self, chance: Random) -> None:
        """A reader found a page corrupt, or an operator takes a page and what follows it."""
        if not self.model.pages:
            return
        at, path, shard = chance.choice(sorted(self.model.pages))
        node = self.names.spaces[at].nodes[key(path)]
        if chance.random() < 0.5:
            self.model.may_leave.add("corrupt")
            self.table.residents.drop(node, self.names.shards[at][shard], "corrupt")
            self._see()
            assert (at, path, shard) not in self.model.pages
        else:
            self._remove(Removal(node, "operator"), "operator")

    def clear(self, chance: Random) -> None:
        """An operator empties a space."""
        if chance.random() < 0.3:
            space = chance.choice(self.names.spaces)
            self._remove(Removal(space.root, "cleared"), "cleared")

    def _remove(self, removal: Removal, cause: str) -> None:
        self.model.may_leave.add(cause)
        lost_keys = self.world.disk.graves.lost_keys
        while removal.turn(self.table):
            pass
        self._see()
        self.model.await_buried(self.world.disk.graves.await_written(lost_keys))

    def look_closely(self, chance: Random) -> None:
        """Listings and reports make single pages of runs."""
        at, path, _ = self._choose(chance)
        node = self.names.spaces[at].nodes.get(key(path))
        assert node is None or node.count == 1

    def pass_time(self, chance: Random) -> None:
        """Leases and pages expire; now and then a disk that failed is tried again."""
        self.now_ns += chance.choice((1, 2, 4, 10_000))
        self._set_time()
        self._see()
        for kept in self.model.pages.values():
            assert not 0 < kept.keep.expires_ns <= self.now_ns, "it outlived its time"

    def restart(self, chance: Random) -> None:
        """The process is killed, or the power fails; the next start finds what is on disk."""
        for job in self.disk.open.values():
            if isinstance(job, DiskDrop) and chance.random() < 0.5:
                del self.files.by_number[job.segment]
        self.files.stop(chance, power=chance.random() < 0.5)
        before = self.model
        self._boot()
        self.model.found_at_start(before)
        announcement = Announcement(self.table)
        while not announcement.done:
            announcement.step(self.table)
        self._see()
        for kept in self.model.pages.values():
            assert kept.tiers == {"ssd"}, "found, and not told of"
        self._set_time()
