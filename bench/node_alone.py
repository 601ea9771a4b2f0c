"""A node at its desk, alone: messages come in, answers go out, and nothing else moves.

Memory is a promise, a connection is a list of answers, and an SSD tier ends every job well. What
takes time is the node's own code. This is the one place of these benches that knows how a node is
put together.
"""

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Final, Protocol, TypeVar

from kvstore.config import AdminConfig, HostConfig, SSDConfig
from kvstore.node.desk import Desk
from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
from kvstore.node.ssd import IN_FLIGHT_BYTES_MAX
from kvstore.protocol import wire
from kvstore.protocol.counts import NO_RECORDS, SsdCounts
from kvstore.protocol.page import KEY_BYTES, CanonicalLayout, ShardSpec, SpaceIdentity
from kvstore.state.choice.admission import Admission
from kvstore.state.choice.ghosts import Ghosts
from kvstore.state.disk.jobs import DiskRules, SyncPolicy, WritePolicy
from kvstore.state.disk.log import SegmentLog
from kvstore.state.disk.pages import DiskPages
from kvstore.state.tree.actions import Action, PageStatus
from kvstore.state.tree.sessions import Peer
from kvstore.state.tree.slots import Replacement, SlotTable

T = TypeVar("T")

PAGE_TOKENS: Final = 64
PAGE_BYTES: Final = 64 << 10
LARGE_PAGE_BYTES: Final = 8 << 20
EXTENT_BYTES: Final = 256 << 20
EXTENTS_MIN: Final = 16
WAIT_MS: Final = 10_000
TICKS_MAX: Final = 100_000
"""Ticks that one request waits for its answer."""
POLLED_MAX: Final = 32
"""Jobs that one look at the SSD tier finds ended: what an SSD does in some milliseconds."""
_DIGEST: Final = bytes(range(16))
_TOKENS: Final = bytes(range(256))
_LAYERS: Final = {
    PAGE_BYTES: ShardSpec(layout=CanonicalLayout(128), layers=(0, 4), heads=(0, 1)),
    LARGE_PAGE_BYTES: ShardSpec(layout=CanonicalLayout(128), layers=(0, 32), heads=(0, 16)),
}


class Turn(Protocol):
    """Takes one turn of the loop: calls what it is given, and may look at what that costs."""

    def __call__(self, name: str, call: Callable[..., T], *arguments: Any) -> T:
        """Call it; ``name`` says what it is."""
        ...


def plainly(name: str, call: Callable[..., T], *arguments: Any) -> T:  # noqa: ARG001
    """A turn that nobody looks at."""
    return call(*arguments)


class Clock:
    """A node's time, which passes when it is told to."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def __call__(self) -> int:
        """Nanoseconds."""
        return self.now_ns

    def skip(self, seconds: float) -> None:
        """Let time pass."""
        self.now_ns += int(seconds * 1e9)


class Line:
    """The answers of one connection, in the order they came."""

    def __init__(self) -> None:
        self.answers: deque[wire.Answer] = deque()

    def answer(self, answer: wire.Answer) -> None:
        """See :class:`~kvstore.node.desk.Line`."""
        self.answers.append(answer)

    def cut(self) -> None:
        """See :class:`~kvstore.node.desk.Line`."""


class NoBytes:
    """Memory that is there at once."""

    def replace(self, replaced: list[Replacement]) -> None:
        """See :class:`~kvstore.node.desk.Memory`."""
        replaced.clear()


class TakesAll:
    """An SSD tier that takes all there is, and ends every job well.

    Args:
        node: gets a disk side, with the rules of a ``kvstore-server`` that is told nothing.
        capacity_bytes: of the log; 0 = it never has to give room back.
        at_once: jobs end as soon as they begin; else some at each :meth:`poll`.
    """

    def __init__(self, node: Node, capacity_bytes: int, *, at_once: bool) -> None:
        config = SSDConfig()
        segment_bytes = config.segment_bytes
        if capacity_bytes:  # the log of a small node has as many segments as that of a large one
            segment_bytes = max(1 << 20, min(segment_bytes, capacity_bytes // 64))
        segments = (capacity_bytes or 1 << 60) // segment_bytes
        log = SegmentLog(segments, segment_bytes)
        rules = DiskRules(
            WritePolicy(config.write), SyncPolicy(config.sync),
            int(config.sync_interval_s * 1e9), IN_FLIGHT_BYTES_MAX,
        )  # fmt: skip
        admission = Admission(config.admission, 0, log.capacity_bytes)
        self.pages = node.pages.residents.disk = DiskPages(
            node.pages.residents, log, admission, rules
        )
        keeping = node.pages.keeping
        keeping.pins.disk_budget_bytes = log.capacity_bytes // 4
        keeping.conversations.disk_budget_bytes = log.capacity_bytes // 4
        self._node = node
        self._at_once = at_once
        self._begun: deque[int] = deque()

    def flush(self) -> None:
        """See :class:`~kvstore.node.desk.DiskSide`."""
        self._node.pages.tiers.go_on()
        while self.pages.jobs:
            jobs = list(self.pages.jobs)
            self.pages.jobs.clear()
            self._begun += [job.job for job in jobs]
            if self._at_once:
                self._end(len(self._begun), self._node.pages.now_ns)

    def poll(self, now_ns: int) -> None:
        """See :class:`~kvstore.node.desk.DiskSide`."""
        self._end(POLLED_MAX, now_ns)

    def stats(self) -> SsdCounts:
        """See :class:`~kvstore.node.desk.DiskSide`."""
        return self.pages.stats(NO_RECORDS)

    def _end(self, most: int, now_ns: int) -> None:
        for left in reversed(range(min(most, len(self._begun)))):
            last = not left % POLLED_MAX
            self._node.disk_completed(self._begun.popleft(), None, now_ns, last=last)


class LoneNode:
    """One node and the desk where its decisions are carried out.

    Args:
        pages: small pages that its memory holds, or some more: it has whole extents.
        policy: what leaves memory first.
        clock: its time.
        turn: takes every turn.
        at_once: what one turn does not end is done at once, and jobs of the SSD tier end at once;
            else at the next :meth:`tick`.
        ssd_pages: small pages that an SSD tier has room for; 0 = it always has; None = no tier.

    Attributes:
        desk: where engines are connected.
        pages_max: small pages that its memory holds.
        extent_bytes: bytes of an extent of its memory.
        turn: takes a turn.
        publish: where events go; to nobody, at first.
    """

    def __init__(
        self, pages: int, policy: str, clock: Callable[[], int], turn: Turn = plainly, *,
        at_once: bool = True, ssd_pages: int | None = None,
    ) -> None:  # fmt: skip
        extent_bytes = EXTENT_BYTES
        while extent_bytes > LARGE_PAGE_BYTES and pages * PAGE_BYTES < EXTENTS_MIN * extent_bytes:
            extent_bytes //= 2
        extents = -(-pages * PAGE_BYTES // extent_bytes)
        slots = SlotTable(extent_bytes, extents)
        capacity_bytes = extents * extent_bytes
        limits = NodeLimits(capacity_bytes // 2, int(HostConfig().lease_s_max * 1000))
        tokens = count(1)
        node = Node(
            "alone", bytes(16), slots, limits, lambda: next(tokens).to_bytes(16, "little"), policy
        )
        keeping = node.pages.keeping
        keeping.pins.budget_bytes = keeping.conversations.budget_bytes = capacity_bytes // 4
        node.pages.residents.ghosts = Ghosts(AdminConfig().ghosts_max)
        node.pages.residents.ghosts.policy = policy
        self._later: deque[Callable[[], None]] = deque()
        self.pages_max = capacity_bytes // PAGE_BYTES
        self.extent_bytes = extent_bytes
        self.turn = turn
        self.desk = Desk(
            node, NoBytes(), lambda actions: self.publish(actions), clock,
            None if at_once else self._later.append,
        )  # fmt: skip
        if ssd_pages is not None:
            room_bytes = ssd_pages * (PAGE_BYTES + 4096)
            self.desk.disk = TakesAll(node, room_bytes, at_once=at_once)
        self.publish: Callable[[list[Action]], None] = _to_nobody
        self._random = random.Random(1)

    def tick(self) -> None:
        """What the loop does now and then: what was left, deadlines, what the SSD tier has done."""
        self.go_on()
        if self.desk.disk is not None:
            self.turn("poll_disk", self.desk.poll_disk)
            self.go_on()
        self.turn("advance", self.desk.advance)
        self.go_on()

    def go_on(self) -> None:
        """Take the turns that were asked for."""
        for _ in range(len(self._later)):
            self.turn("go_on", self._later.popleft())

    def counts(self) -> dict[str, int]:
        """What the node has counted since its start."""
        return self.desk.stats().counts

    def stored(self) -> int:
        """Pages in the index, in whatever tier."""
        return self.desk.stats().pages

    def in_memory(self) -> int:
        """Small pages that are READY in memory."""
        return self.desk.stats().host.ready_bytes // PAGE_BYTES

    def kept_pages(self) -> int:
        """Pages that conversations keep."""
        return sum(len(one.nodes) for one in self.desk.node.pages.keeping.conversations)

    def leases(self) -> int:
        """Leases that are not given back."""
        return self.desk.stats().leases

    def reclaimed(self) -> int:
        """Segments of the SSD tier that were given back."""
        ssd = self.desk.stats().ssd
        assert ssd is not None
        return ssd.reclaimed_segments

    def keys(self, pages: int) -> bytes:
        """The keys of a prompt that nobody has seen before."""
        return self._random.randbytes(KEY_BYTES * pages)


class Engine:
    """One process of an engine, in a session of its own. It copies no bytes, and waits for none.

    Args:
        node: that it is connected to.
        identity: of the process; no other has it.
        page_bytes: of the pages of its model: small or large ones.
        model: names it.

    Attributes:
        answers: that came and that nobody has looked at.
    """

    def __init__(
        self, node: LoneNode, identity: int, page_bytes: int = PAGE_BYTES, model: str = "model"
    ) -> None:
        self._node = node
        line = Line()
        self.answers = line.answers
        self._names = count(1)
        self.identity = identity
        self.connection = node.desk.connect(Peer(identity), line)
        minor = wire.PROTOCOL_MINOR
        hello = wire.Hello(1, wire.PROTOCOL_MAJOR, minor, f"engine {identity}", b"", b"", 1)
        assert isinstance(self.ask(hello), wire.Welcome)
        self.model = SpaceIdentity(model=model, kv_dtype="uint8", page_tokens=PAGE_TOKENS)
        spec = _LAYERS[page_bytes]
        assert spec.page_bytes(self.model) == page_bytes
        opened = self.ask(wire.OpenSpace(1, self.model, [spec]))
        assert isinstance(opened, wire.SpaceOpened)
        self.space, (self.shard,) = opened.space, opened.shards

    def say(self, request: wire.Request) -> None:
        """Send what wants no answer."""
        node = self._node
        node.turn(type(request).__name__, node.desk.receive, self.connection, request)
        node.go_on()

    def ask(self, request: wire.Request) -> wire.Answer:
        """Send a request and wait for its answer.

        Raises:
            AssertionError: it is refused, or not answered in :data:`TICKS_MAX` ticks.
        """
        self.say(request)
        for _ in range(TICKS_MAX):
            if self.answers:
                break
            self._node.tick()
        answer = self.answers.popleft()
        assert not isinstance(answer, wire.Failure), answer.message
        return answer

    # ---- messages ---------------------------------------------------------------------------

    def put_messages(
        self, keys: bytes, parent: bytes = b"", ttl_ms: int = 0, *, tokens: bool = False
    ) -> tuple[wire.BeginPut, wire.CommitPut]:
        """Both messages of a put."""
        pages, name = len(keys) // KEY_BYTES, next(self._names)
        token_ids = _TOKENS * pages if tokens else b""
        begin = wire.BeginPut(1, name, self.space, self.shard, keys, parent, token_ids, WAIT_MS)
        return begin, wire.CommitPut(1, name, _DIGEST * pages, ttl_ms)

    def lookup_message(self, keys: bytes) -> wire.Lookup:
        """How long is this prefix?"""
        return wire.Lookup(1, self.space, [self.shard], keys)

    def acquire_message(self, keys: bytes, lease_ms: int = 300_000) -> wire.Acquire:
        """Lease these pages; those that are on disk only are not waited for."""
        return wire.Acquire(1, next(self._names), self.space, self.shard, keys, lease_ms)

    def load(self, keys: bytes) -> int:
        """Let these pages come to memory, and lease and release them; how many these were."""
        name = next(self._names)
        leased = self.ask(
            wire.Acquire(1, name, self.space, self.shard, keys, 300_000, wait_ms=WAIT_MS)
        )
        assert isinstance(leased, wire.Acquired)
        self.release(name)
        return len(leased.addresses) // wire.ADDRESS.itemsize

    # ---- what engines do --------------------------------------------------------------------

    def carry_out(self, begin: wire.BeginPut, commit: wire.CommitPut) -> None:
        """Send both messages of a put; what of it finds no room at once is put again."""
        node, answers = self._node, self.answers
        node.turn("BeginPut", node.desk.receive, self.connection, begin)
        granted = answers.popleft() if answers else None
        if not isinstance(granted, wire.PutGranted) or 2 * len(granted.addresses) != len(
            begin.keys
        ):
            self._put_in_parts(begin, commit, granted)
            return
        node.turn("CommitPut", node.desk.receive, self.connection, commit)
        answers.popleft()

    def put(
        self, keys: bytes, parent: bytes = b"", ttl_ms: int = 0, *, tokens: bool = False
    ) -> None:
        """Store pages."""
        self.carry_out(*self.put_messages(keys, parent, ttl_ms, tokens=tokens))

    def lookup(self, keys: bytes) -> int:
        """How many of these pages are there, from the first on?"""
        found = self.ask(self.lookup_message(keys))
        assert isinstance(found, wire.Found)
        return found.pages

    def in_memory(self, keys: bytes) -> int:
        """How many of these pages that are there are not on disk only?"""
        found = self.ask(self.lookup_message(keys))
        assert isinstance(found, wire.Found)
        return found.pages - found.on_disk

    def acquire(self, keys: bytes, lease_ms: int = 300_000) -> tuple[int, list[int]]:
        """Lease what of these pages is in memory: the lease, and each page's generation."""
        request = self.acquire_message(keys, lease_ms)
        leased = self.ask(request)
        assert isinstance(leased, wire.Acquired)
        return request.lease, [at for _, at, _ in wire.unpack_addresses(leased.addresses)]

    def release(self, lease: int) -> None:
        """The bytes are read."""
        self.say(wire.Release(lease))

    def disconnect(self, *, ended: bool) -> None:
        """The connection breaks; ``ended`` when the process is known to have ended too."""
        node = self._node
        node.turn("disconnect", partial(node.desk.disconnect, self.connection, ended=ended))
        node.go_on()

    def end(self) -> None:
        """The kernel says that the process has ended."""
        self._node.turn("process_ended", self._node.desk.process_ended, self.identity)
        self._node.go_on()

    def _put_in_parts(
        self, begin: wire.BeginPut, commit: wire.CommitPut, granted: wire.Answer | None
    ) -> None:
        """Go on with a put of which a part, or nothing, was granted."""
        keys, parent = begin.keys, begin.parent
        token_bytes = len(begin.tokens) // (len(keys) // KEY_BYTES)
        tokens = begin.tokens
        for _ in range(TICKS_MAX):
            granted = granted or self._answer()
            assert isinstance(granted, wire.PutGranted), granted
            statuses = set(granted.statuses)
            assert statuses <= {PageStatus.GRANTED, PageStatus.NO_ROOM}, statuses
            pages = granted.statuses.count(PageStatus.GRANTED)
            if pages:
                digests = _DIGEST * pages
                self.ask(wire.CommitPut(1, begin.put, digests, commit.ttl_ms))
                parent, keys = keys[: pages * KEY_BYTES][-KEY_BYTES:], keys[pages * KEY_BYTES :]
                tokens = tokens[pages * token_bytes :]
            if not keys:
                return
            assert pages or granted.busy, "there is no room, and none will be"
            begin = wire.BeginPut(
                1, next(self._names), self.space, self.shard, keys, parent, tokens, WAIT_MS
            )
            self.say(begin)
            granted = None
        raise AssertionError("a put finds no room, however long it waits")

    def _answer(self) -> wire.Answer:
        for _ in range(TICKS_MAX):
            if self.answers:
                break
            self._node.tick()
        return self.answers.popleft()


def _to_nobody(_actions: list[Action]) -> None:
    """Where events go that nobody follows."""
