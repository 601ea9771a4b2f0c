"""A page table with everything a test needs around it: names, spaces, processes, short calls."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

from kvstore.protocol.page import CanonicalLayout, PrefixKey, ShardSpec, SpaceIdentity
from kvstore.state.ask.traversal import Removal, Steps
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.actions import PageStatus, Removed, Stored
from kvstore.state.tree.node import ORDINARY, PrefixNode, Retention
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Lease, Peer, Process, Put, Session
from kvstore.state.tree.slots import Slot, SlotTable

T = TypeVar("T")

PAGE = 4096
ROOT = PrefixKey(b"")
DIGEST = bytes(range(16))

FULL = ShardSpec(layout=CanonicalLayout(2048), layers=(0, 1), heads=(0, 1))
FULL_2 = ShardSpec(layout=CanonicalLayout(2048), layers=(0, 1), heads=(1, 2))
WINDOW = ShardSpec(
    layout=CanonicalLayout(4096), layers=(1, 2), heads=(0, 1), group="window", window_pages=2
)
STATE = ShardSpec(
    layout=CanonicalLayout(4096), layers=(2, 3), heads=(0, 1), group="state", window_pages=1
)


def identity(tenant: str = "red", model: str = "m") -> SpaceIdentity:
    return SpaceIdentity(tenant=tenant, model=model, kv_dtype="uint8", page_tokens=1)


def key(path: str) -> PrefixKey:
    """The key of the page that a path of letters leads to; the empty path is the chain's start."""
    return PrefixKey(hashlib.sha256(path.encode()).digest()) if path else ROOT


def chain(path: str, start: int = 0) -> list[PrefixKey]:
    """Keys of all pages of a path from its letter ``start`` on."""
    return [key(path[:end]) for end in range(start + 1, len(path) + 1)]


def hold(checks: Iterable[object]) -> None:
    """Assert all that some checks assert a stretch at a time."""
    for _ in checks:
        pass


def ended(steps: Steps[T]) -> T:
    """The result of steps that are taken all at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found


def drop_below(table: PageTable, top: PrefixNode, cause: str) -> tuple[int, int]:
    """All turns of a removal: pages taken out, and nodes that stay."""
    removal = Removal(top, cause)
    while removal.turn(table):
        pass
    return removal.dropped, removal.kept


class World:
    """One page table; sessions and processes by name."""

    def __init__(
        self, extents: int = 4, slots_each: int = 4, withheld: int = 0, quota: int = 1 << 40
    ) -> None:
        self.slots = SlotTable(slots_each * PAGE, extents, withheld)
        self.table = PageTable(self.slots)
        self.quota = quota
        self.sessions: dict[str, Session] = {}
        self._connections = 0
        self._numbers = 0

    def process(self, session: str = "engine", pid: int = 1) -> Process:
        self._connections += 1
        owner = self.sessions.setdefault(session, Session(session.encode(), session, self.quota))
        process = Process(self._connections, Peer(pid, pid), owner)
        owner.processes[process.connection] = process
        return process

    def end(self, process: Process) -> None:
        while not process.idle:
            self.table.end(process, 3)
        del process.session.processes[process.connection]

    def space(
        self, process: Process, shards: Sequence[ShardSpec] = (FULL,), tenant: str = "red"
    ) -> PrefixTree:
        return self.table.spaces.open(process.session, identity(tenant), list(shards))[0]

    def begin(
        self, process: Process, space: PrefixTree, path: str, *, start: int = 0, shard: int = 0
    ) -> tuple[int, list[PageStatus], Put]:
        """Ask for the pages of ``path`` from letter ``start`` on; returns the put's number too."""
        self._numbers += 1
        keys = b"".join(chain(path, start))
        tokens = path[start:].encode("utf-32-le")
        statuses, put = self.table.begin_put(
            process, self._numbers, space, shard, keys, key(path[:start]), tokens
        )
        return self._numbers, statuses, put

    def commit(self, process: Process, number: int, keep: Retention = ORDINARY) -> list[PageStatus]:
        digests = DIGEST * len(process.puts[number].slots)
        return self.table.commit_put(process, number, digests, keep)

    def store(
        self, process: Process, space: PrefixTree, path: str, *, start: int = 0, shard: int = 0,
        keep: Retention = ORDINARY,
    ) -> list[PageStatus]:  # fmt: skip
        """Begin and commit at once; returns what the begin said."""
        number, statuses, put = self.begin(process, space, path, start=start, shard=shard)
        if put.slots:
            self.commit(process, number, keep)
        return statuses

    def lookup(self, space: PrefixTree, path: str, shards: Sequence[int] = (0,)) -> tuple[int, int]:
        return self.table.lookup(space, list(shards), b"".join(chain(path)))

    def acquire(
        self,
        process: Process,
        space: PrefixTree,
        path: str,
        *,
        shard: int = 0,
        until_ns: int = 1 << 60,
    ) -> tuple[int, Lease]:
        self._numbers += 1
        packed = b"".join(chain(path))
        leased = self.table.acquire(process, self._numbers, space, shard, packed, until_ns)
        return self._numbers, leased.lease

    def leased_keys(self, slots: Sequence[Slot]) -> list[PrefixKey]:
        """Keys of the pages in these slots."""
        found: list[PrefixKey] = []
        for slot in slots:
            node = self.table.residents.owner(slot)
            assert node is not None
            found += [
                key
                for shard in node.slot_columns
                for key, mine in zip(node.key_list(), node.slots_of(shard), strict=True)
                if mine == slot
            ]
        return found

    def removed(self, cause: str = "") -> list[PrefixKey]:
        """Keys of all Removed actions so far, in order; empties the actions."""
        actions, self.table.actions[:] = list(self.table.actions), []
        found: list[PrefixKey] = []
        for action in actions:
            if isinstance(action, Removed) and cause in ("", action.cause):
                found += action.keys
        return found

    def stored(self) -> list[Stored]:
        """All Stored actions so far; empties the actions."""
        actions, self.table.actions[:] = list(self.table.actions), []
        return [action for action in actions if isinstance(action, Stored)]
