"""A node in the test's own loop, with memory and everything that other nodes see of it."""

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from kvstore import mover
from kvstore.cluster.greeting import LocalNode
from kvstore.cluster.membership import LocalMembership, Membership
from kvstore.cluster.side import Peers
from kvstore.mover.memory import memory_at
from kvstore.node.describe import describe
from kvstore.node.desk import Desk
from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
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
from kvstore.server.loans import Loans
from kvstore.server.peers import PeerService
from kvstore.state.remote.jobs import FetchEnd, Holding, Locate, PeerFetch, PeerJob, SpreadEnd
from kvstore.state.table.invariants import check
from kvstore.state.tree.sessions import Peer
from kvstore.state.tree.slots import Slot, SlotTable
from kvstore.tier.host import HostMemory
from tests.cluster.fake_transport import FakeTransport, Network
from tests.loops import eventually

IDENTITY = SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=2)
SHARD = ShardSpec(layout=CanonicalLayout(1024), layers=(0, 1), heads=(0, 1))
PAGE_BYTES = SHARD.page_bytes(IDENTITY)
KEYS = page_keys(range(12), 2)
SCHEME = "sha256/xxh3_128 1"
NODES = ("a", "b", "c")
FILES = Path(__file__).parent / "certificates"


def local(name: str) -> LocalNode:
    return LocalNode("blue", name, name.encode() * 16, SCHEME)


def context(purpose: int, who: str = "node") -> ssl.SSLContext:
    made = ssl.SSLContext(purpose)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(FILES / "authority.pem")
    made.load_cert_chain(FILES / f"{who}.pem", FILES / f"{who}.key")
    return made


class ByHand:
    """The line of an engine that asks one thing at a time."""

    def __init__(self, node: "WholeNode", tenant: str) -> None:
        self.identity = SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=2, tenant=tenant)
        self.got: list[wire.Answer] = []
        self._desk = node.desk
        self._ids = count(1)
        self.number = node.desk.connect(Peer(next(node.pids)), self)
        self.ask(wire.Hello(0, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, "engine"))
        opened = self.ask(wire.OpenSpace(0, self.identity, [SHARD]))
        assert isinstance(opened, wire.SpaceOpened)
        self.space = opened.space

    def ask(self, request: Any) -> Any:
        request.id = next(self._ids)
        self._desk.receive(self.number, request)
        return self.got.pop()

    def answer(self, answer: wire.Answer) -> None:
        self.got.append(answer)

    def cut(self) -> None:
        raise AssertionError


class WholeNode:
    """One node; see :func:`whole_node`.

    Attributes:
        jobs: what its peer side takes next.
        ends: what the peer side told the desk.
    """

    def __init__(self, name: str, network: Network) -> None:
        self.local = local(name)
        self.pids = count(1)
        self.slots = SlotTable(1 << 16, 8)
        limits = NodeLimits(1 << 20, 5_000)
        self.node = Node(name, self.local.boot, self.slots, limits, lambda: os.urandom(16))
        self.memory = HostMemory(name, self.local.boot, 1 << 16, prefault=False)
        self.memory.create(range(8))
        self.desk = Desk(
            self.node, self.memory, lambda actions: None,
            soon=lambda call: asyncio.get_running_loop().call_soon(call), check_every_step=True,
        )  # fmt: skip
        self.transport = FakeTransport(network, f"{name}:1")
        self.loans = Loans(self.memory, [self.transport])
        self.jobs: list[PeerJob] = []
        self.ends: list[FetchEnd] = []
        self.settled: list[int] = []
        self.standing: dict[str, bytes] = {}
        self.spread: list[SpreadEnd] = []
        self.holdings: dict[int, Sequence[Holding]] = {}
        self.peers = Peers(
            self,
            self._take,
            self.slots,
            self.memory,
            [self.transport],
            self,
            self.loans.ticket_ended,
        )
        self._fetches = count(100)

    # what the peer side calls

    def _take(self) -> list[PeerJob]:
        jobs, self.jobs = self.jobs, []
        return jobs

    def locate(self, asked: Locate, found: Any) -> None:
        found(asked.number, [Holding("a", 3)])

    def located(self, number: int, holdings: Sequence[Holding]) -> None:
        self.holdings[number] = holdings

    def peer_fetched(self, end: FetchEnd) -> None:
        self.ends.append(end)

    def peer_settled(self, job: int) -> None:
        self.settled.append(job)

    def peer_standing(self, peer: str, boot: bytes) -> None:
        self.standing[peer] = boot

    def peer_spread(self, end: SpreadEnd) -> None:
        self.spread.append(end)

    # what tests do

    def store(
        self, keys: PrefixKeys = KEYS, tenant: str = "default", *, read_once: bool = False,
        ttl_ms: int = 0,
    ) -> list[bytes]:  # fmt: skip
        """Store pages as an engine does; returns their bytes."""
        engine = ByHand(self, tenant)
        granted = self._begin(engine, keys)
        pages = [os.urandom(PAGE_BYTES) for _ in keys]
        addresses = np.array(granted, dtype=np.uint64)
        for address, page in zip(granted, pages, strict=True):
            memory_at(address, PAGE_BYTES)[:] = page
        seeds = page_seeds(keys.packed, digest_seed(engine.identity, SHARD))
        digests = mover.digest(addresses, PAGE_BYTES, seeds).tobytes()
        commit = wire.CommitPut(0, 1, digests, ttl_ms, read_once)
        assert isinstance(engine.ask(commit), wire.Committed)
        self.desk.disconnect(engine.number, ended=True)
        return pages

    def room(self, keys: PrefixKeys, tenant: str = "default") -> list[Slot]:
        """Slots of pages that are being written."""
        engine = ByHand(self, tenant)
        self._begin(engine, keys)
        return list(self.node.processes[engine.number].puts[1].slots)

    def fetch(
        self, slots: list[Slot], peer: str = "a", wait_s: float = 5.0, tenant: str = "default",
        keys: PrefixKeys = KEYS,
    ) -> int:  # fmt: skip
        """Begin a fetch; returns its number."""
        number = next(self._fetches)
        identity = SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=2, tenant=tenant)
        deadline_ns = _now_ns() + int(wait_s * 1e9)
        self.jobs.append(
            PeerFetch(number, peer, identity, SHARD, b"", keys.packed, slots, deadline_ns)
        )
        self.peers.flush()
        return number

    def end(self, number: int) -> FetchEnd | None:
        return next((one for one in self.ends if one.job == number), None)

    def content(self, slots: Sequence[Slot]) -> list[bytes]:
        places = [self.slots.address(slot) for slot in slots]
        return [
            bytes(memory_at(self.memory.address(extent) + offset, PAGE_BYTES))
            for extent, _, offset in places
        ]

    def stored(self) -> int:
        """Number of its pages."""
        return sum(len(space.nodes) for space in self.node.pages.spaces)

    def pinned_bytes(self) -> int:
        check(self.node.pages)
        found: int = describe(self.node).host.pinned_bytes
        return found

    def up(self, peer: str = "a") -> bool:
        """Whether the peer has welcomed this node."""
        known = self.peers.sessions().get(peer)
        return known is not None and known.up

    def faults(self, peer: str = "a") -> dict[str, int]:
        return self.peers.sessions()[peer].faults

    def _begin(self, engine: ByHand, keys: PrefixKeys) -> list[int]:
        granted = engine.ask(wire.BeginPut(0, 1, engine.space, 0, keys.packed, keys.parent))
        assert isinstance(granted, wire.PutGranted)
        assert set(granted.statuses) == {0}
        return [
            self.memory.address(extent) + offset
            for extent, _, offset in wire.unpack_addresses(granted.addresses)
        ]


def _now_ns() -> int:
    return int(asyncio.get_running_loop().time() * 1e9)


@asynccontextmanager
async def serving(
    node: WholeNode, tls: ssl.SSLContext | None = None, listen: str = "127.0.0.1:0",
    follow: Any = None,
) -> AsyncIterator[PeerService]:  # fmt: skip
    """The peer service of a node."""

    async def no_events(*_: Any) -> None:
        raise AssertionError

    known = frozenset(NODES)
    service = PeerService(
        listen, node.local, known.__contains__, node.desk, node.loans, follow or no_events, tls
    )
    service.listen()
    task = asyncio.create_task(service.serve())
    try:
        yield service
    finally:
        service.close()
        await _ended(task)


@asynccontextmanager
async def reading(
    node: WholeNode, others: Mapping[str, str] | Membership, tls: ssl.SSLContext | None = None
) -> AsyncIterator[None]:
    """The sessions of a node with others: a membership, or name → address of each."""
    membership = LocalMembership(others) if isinstance(others, Mapping) else others
    task = asyncio.create_task(node.peers.run(node.local, membership, tls))
    try:
        yield
    finally:
        await _ended(task)


@asynccontextmanager
async def whole_node(name: str, network: Network) -> AsyncIterator[WholeNode]:
    """A node that nobody serves yet; nothing of it may be left pinned."""
    made = WholeNode(name, network)
    try:
        yield made
    finally:
        made.loans.close()
        made.transport.close()
        made.memory.close()
        await asyncio.sleep(0)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def two_nodes(undo: AsyncExitStack) -> tuple[WholeNode, WholeNode]:
    network = Network()
    return (
        await undo.enter_async_context(whole_node("a", network)),
        await undo.enter_async_context(whole_node("b", network)),
    )


async def linked(undo: AsyncExitStack) -> tuple[WholeNode, WholeNode]:
    """a with its service, and b with a session."""
    a, b = await two_nodes(undo)
    service = await undo.enter_async_context(serving(a))
    await undo.enter_async_context(reading(b, {"a": service.endpoint}))
    await eventually(b.up)
    return a, b
