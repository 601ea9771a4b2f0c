"""Simulated processes of engines: their requests to a node, and their use of its memory.

They copy bytes in pieces, so that other events happen between two pieces, and compare the bytes
they read with those that follow from the page's key.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from itertools import count
from random import Random
from typing import Final

import numpy as np

from kvstore import mover
from kvstore.protocol import wire
from kvstore.protocol.page import (
    CanonicalLayout,
    PrefixKeys,
    ShardSpec,
    SpaceIdentity,
    digest_seed,
    page_keys,
    page_seeds,
)
from kvstore.state.tree.actions import PageStatus
from kvstore.testing.followers import page_token
from kvstore.testing.timeline import PAGE_BYTES, Timeline, page_content

PIECES: Final = 4
DELAY_NS_MAX: Final = 2_000_000
WAIT_MS: Final = 30
LEASE_MS_MAX: Final = 20
_SHARD: Final = ShardSpec(layout=CanonicalLayout(2048), layers=(0, 1), heads=(0, 1))
SHARDS: Final = (
    _SHARD,
    ShardSpec(layout=CanonicalLayout(2048), layers=(0, 1), heads=(1, 2)),
    ShardSpec(
        layout=CanonicalLayout(2048), layers=(0, 1), heads=(2, 3), group="window", window_pages=2
    ),
)
"""Two ranks, and a KV group of which a hit needs the last two pages."""
_ORIGINS: Final = count(1)

Script = Generator[int | wire.Request, wire.Answer | None, None]
"""A script yields nanoseconds to wait, or a request; it gets the answer, None if it is lost."""


@dataclass(eq=False)
class Actor:
    """One simulated process of an engine.

    Attributes:
        pid: its simulated process id.
        tenant: its tenant.
        session: token of its session; empty before its first Welcome.
        connection: number of the open connection; 0 = none.
        mapped: extents it has mapped; it uses them even after its connection broke.
        watched: the node is notified when it ends.
        boot: boot id of the node that welcomed it.
        earlier: boot id of this node before it restarted; empty if it has not.
        shards: numbers that this node gave to the shards of its habits.
    """

    pid: int
    tenant: str
    session: bytes = b""
    connection: int = 0
    alive: bool = True
    watched: bool = True
    boot: bytes = b""
    earlier: bytes = b""
    shards: tuple[int, ...] = (0,)
    mapped: dict[int, bytearray] = field(default_factory=dict)
    origin: bytes = field(default_factory=lambda: next(_ORIGINS).to_bytes(8, "little"))
    awaited: int = 0
    script: Script | None = None
    serial: int = 0
    names: "count[int]" = field(default_factory=lambda: count(1))


def _sha256(_identity: SpaceIdentity, _key: bytes, content: bytes, _shard: ShardSpec) -> bytes:
    return sha256(content).digest()[:16]


@dataclass(frozen=True)
class Habits:
    """What engines do.

    Attributes:
        actions: one is chosen each time.
        wait_ms: for how long reads may wait; one is chosen each time.
        ttl_ms: lifetime of pages, 0 = unlimited; one is chosen each time.
        pause_ns: longest pause between two actions.
        digest: computes the digest of a page from its space, key, bytes and shard.
        shards: that they open; they put and read one at a time.
    """

    actions: tuple[str, ...] = ("put", "put", "read", "read", "wait", "persist")
    wait_ms: tuple[int, ...] = (0, WAIT_MS - 1)
    ttl_ms: tuple[int, ...] = (0, 0, 5)
    pause_ns: int = DELAY_NS_MAX
    digest: Callable[[SpaceIdentity, bytes, bytes, ShardSpec], bytes] = _sha256
    shards: tuple[ShardSpec, ...] = (_SHARD,)


class Engines:
    """The scripts of engine processes.

    Args:
        time: timeline of the simulation.
        extents: the node's memory, by number.
        connect: opens a connection of a process.
        tell: sends a message of a process that has no answer.
        habits: what they do.
        prompts: tenant → its prompts; None = prompts that no other node has.

    Attributes:
        sessions: tenant → the latest session token of its engine.
    """

    def __init__(
        self, time: Timeline, extents: dict[int, bytearray],
        connect: Callable[[Actor], int], tell: Callable[[Actor, wire.Request], None],
        habits: Habits = Habits(), prompts: dict[str, list[PrefixKeys]] | None = None,
    ) -> None:  # fmt: skip
        self.sessions: dict[str, bytes] = {}
        self._time = time
        self._random = time.random
        self._faults = time.faults
        self._outcome = time.outcome
        self._extents = extents
        self._connect_process = connect
        self._tell = tell
        self._habits = habits
        self._actions = {
            "put": self._put, "read": self._read, "restore": self._restore, "wait": self._wait,
            "persist": self._persist, "replicate": self._replicate,
        }  # fmt: skip
        self._prompts = prompts if prompts is not None else make_prompts(time.random)

    def live(self, process: Actor) -> Script:
        """The script of a process, from its start; it never returns."""
        identity = _identity(process.tenant)
        space = -1
        while True:
            if not process.connection:
                space = yield from self._connect(process, identity)
                continue
            keys = self._prompt(process.tenant)
            action = self._actions[self._random.choice(self._habits.actions)]
            yield from action(process, space, keys)
            yield self._random.randrange(self._habits.pause_ns)

    def _connect(self, process: Actor, identity: SpaceIdentity) -> Generator[
        int | wire.Request, wire.Answer | None, int
    ]:  # fmt: skip
        yield self._random.randrange(DELAY_NS_MAX)
        number = self._connect_process(process)
        hello = wire.Hello(
            0, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, "simulated", process.session,
            process.origin, number,
        )  # fmt: skip
        welcome = yield hello
        if not isinstance(welcome, wire.Welcome):
            return -1
        if welcome.boot != process.boot:  # what it has mapped was memory of another boot
            process.mapped.clear()
            process.earlier, process.boot = process.boot, welcome.boot
        process.session = self.sessions[process.tenant] = welcome.session
        # A script does one thing at a time: no copy of an earlier connection is in progress.
        self._tell(process, wire.Settled(number))
        opened = yield wire.OpenSpace(0, identity, list(self._habits.shards))
        if not isinstance(opened, wire.SpaceOpened):
            return -1
        process.shards = tuple(opened.shards)
        return opened.space

    def _rank(self) -> int:
        """Which of the shards is put or read."""
        count = len(self._habits.shards)
        return self._random.randrange(count) if count > 1 else 0

    def _put(self, process: Actor, space: int, keys: PrefixKeys) -> Script:
        put = next(process.names)
        identity = _identity(process.tenant)
        wait_ms = self._random.choice((0, WAIT_MS))
        follows = wait_ms > 0 and put % 5 == 0 and len(keys) > 1
        if follows:  # the first page is another one's to write
            keys = keys[1:]
        tokens = b"".join(map(page_token, keys)) if put % 3 else b""
        rank = self._rank()
        shard, number = self._habits.shards[rank], process.shards[rank]
        granted = yield wire.BeginPut(
            0, put, space, number, keys.packed, keys.parent, tokens, wait_ms, follows
        )
        if not isinstance(granted, wire.PutGranted) or not granted.addresses:
            return
        chosen = [
            key
            for key, status in zip(keys, granted.statuses, strict=True)
            if status == PageStatus.GRANTED
        ]
        places = self._map(process, granted.addresses)
        digests = b""
        for key, place in zip(chosen, places, strict=True):
            content = page_content(key, shard)
            for start in range(0, PAGE_BYTES, PAGE_BYTES // PIECES):
                if place is not None:
                    memory, offset = place
                    piece = content[start : start + PAGE_BYTES // PIECES]
                    memory[offset + start : offset + start + len(piece)] = piece
                    self._outcome.late_pieces += not process.connection
                yield self._piece_ns()
            digests += self._habits.digest(identity, key, content, shard)
        if self._random.random() < 0.1 or None in places:
            self._tell(process, wire.AbortPut(put))
            return
        ttl_ms = self._random.choice(self._habits.ttl_ms)
        commit = wire.CommitPut(0, put, digests, ttl_ms, self._random.random() < 0.1)
        if len(chosen) < len(keys) or len(keys) % 2:
            commit.ahead = next(process.names)
        committed = yield commit
        if isinstance(committed, wire.Committed):
            self._outcome.pages_stored += committed.statuses.count(PageStatus.STORED)
            if committed.ahead:
                yield from self._put_ahead(process, space, rank, commit.ahead, committed.ahead)

    def _put_ahead(self, process: Actor, space: int, rank: int, put: int, address: bytes) -> Script:
        """Put pages into slots that are reserved ahead, and give the last one back."""
        shard, number = self._habits.shards[rank], process.shards[rank]
        identity = _identity(process.tenant)
        for _ in range(3):
            key = self._prompt(process.tenant)[0]
            [place] = self._map(process, address)
            if place is None:
                break
            content = page_content(key, shard)
            memory, offset = place
            memory[offset : offset + len(content)] = content
            yield self._piece_ns()
            digest = self._habits.digest(identity, key, content, shard)
            store = wire.StorePage(0, put, space, number, key, b"", digest)
            store.ahead = next(process.names)
            stored = yield store
            if not isinstance(stored, wire.Committed):
                return
            self._outcome.pages_stored += stored.statuses.count(PageStatus.STORED)
            put, address = store.ahead, stored.ahead
            if not address:
                return
        self._tell(process, wire.AbortPut(put))

    def _read(self, process: Actor, space: int, keys: PrefixKeys) -> Script:
        lease = next(process.names)
        lease_ms = self._random.randrange(1, LEASE_MS_MAX + 1)
        wait_ms = self._random.choice(self._habits.wait_ms)
        rank = self._rank()
        shard, number = self._habits.shards[rank], process.shards[rank]
        if shard.window_pages:  # only these are fetched
            keys = keys[max(0, len(keys) - shard.window_pages) :]
        leased = yield wire.Acquire(0, lease, space, number, keys.packed, lease_ms, wait_ms)
        if not isinstance(leased, wire.Acquired):
            return
        places = self._map(process, leased.addresses)
        if process.earlier and leased.addresses and self._random.random() < 0.2:
            # A report of the node's earlier boot, in which the generation happened to be the same.
            _, generation, _ = wire.unpack_addresses(leased.addresses)[0]
            self._tell(process, wire.Corrupt(space, number, keys[0], generation, process.earlier))
        for key, place in zip(keys, places, strict=False):
            if place is None:
                break
            memory, offset = place
            content = page_content(key, shard)
            for start in range(0, PAGE_BYTES, PAGE_BYTES // PIECES):
                stop = start + PAGE_BYTES // PIECES
                seen = memory[offset + start : offset + stop]
                assert seen == content[start:stop], f"wrong bytes under {key.hex()[:8]}"
                yield self._piece_ns()
            self._outcome.pages_read += 1
        self._tell(process, wire.Release(lease))

    def _restore(self, process: Actor, space: int, keys: PrefixKeys) -> Script:
        """Look a prompt up, and read what is to be had of it, here or elsewhere."""
        wait_ms = self._random.choice(self._habits.wait_ms)
        found = yield wire.Lookup(0, space, [*process.shards], keys.packed, wait_ms)
        if isinstance(found, wire.Found) and found.pages + found.pending + found.remote:
            yield from self._read(process, space, keys)

    def _wait(self, process: Actor, space: int, keys: PrefixKeys) -> Script:
        before_ns = self._time.now_ns
        wait_ms = self._random.randrange(WAIT_MS)
        found = yield wire.Lookup(0, space, [*process.shards], keys.packed, wait_ms)
        if isinstance(found, wire.Found):
            assert found.pages + found.pending <= len(keys)
            self._outcome.lookups_waited += self._time.now_ns - before_ns > 2 * DELAY_NS_MAX

    def _persist(self, process: Actor, space: int, keys: PrefixKeys) -> Script:
        number = process.shards[self._rank()]
        named = keys if process.serial % 2 else keys[-1:]  # those before it come with it
        answer = yield wire.Persist(0, space, number, named.packed, WAIT_MS - 1)
        if isinstance(answer, wire.Persisted):
            self._outcome.pages_persisted += len(keys)

    def _replicate(self, _process: Actor, space: int, keys: PrefixKeys) -> Script:
        copies = self._random.randrange(1, 4)
        answer = yield wire.Replicate(0, space, 0, keys.packed, copies, WAIT_MS - 1)
        if isinstance(answer, wire.Replicated):
            assert 1 <= answer.copies <= copies
            self._outcome.copies_made += answer.copies - 1

    def _map(self, process: Actor, addresses: bytes) -> list[tuple[bytearray, int] | None]:
        """Memory of the slots; None if an extent is gone and was not mapped before."""
        places: list[tuple[bytearray, int] | None] = []
        for extent, _, offset in np.frombuffer(addresses, dtype=wire.ADDRESS).tolist():
            if extent not in process.mapped and extent in self._extents:
                process.mapped[extent] = self._extents[extent]
            memory = process.mapped.get(extent)
            places.append(None if memory is None else (memory, offset))
        return places

    def _piece_ns(self) -> int:
        slow = self._random.random() < self._faults.slowness
        return LEASE_MS_MAX * 1_500_000 if slow else self._random.randrange(300_000)

    def _prompt(self, tenant: str) -> PrefixKeys:
        keys = self._random.choice(self._prompts[tenant])
        return keys[: self._random.randrange(1, len(keys) + 1)]


def make_prompts(random: Random, count: int = 6) -> dict[str, list[PrefixKeys]]:
    """So many prompts of each tenant that branch: common starts, many ends."""
    prompts: dict[str, list[PrefixKeys]] = {}
    for tenant in ("red", "blue"):
        common = [len(tenant), 1, 2]
        ends = [[random.randrange(3) for _ in range(6)] for _ in range(count)]
        prompts[tenant] = [page_keys(common + end, 1) for end in ends]
    return prompts


@cache
def digest_of_page(identity: SpaceIdentity, key: bytes, content: bytes, shard: ShardSpec) -> bytes:
    """The digest that a transport compares with."""
    page = np.frombuffer(content, dtype=np.uint8)
    seeds = page_seeds(key, digest_seed(identity, shard))
    places = np.array([page.ctypes.data], dtype=np.uint64)
    return mover.digest(places, len(content), seeds).tobytes()


def _identity(tenant: str) -> SpaceIdentity:
    return SpaceIdentity(tenant=tenant, model="m", kv_dtype="uint8", page_tokens=1)
