"""One life of a node on a disk: from its start to a power cut, with one engine.

Node, page table, disk side and SSD log are the real ones. The engine never waits, and records what
the node has acknowledged.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Final

import numpy as np

from kvstore import mover
from kvstore.config import SSDConfig
from kvstore.node.desk import Desk
from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
from kvstore.node.ssd import IN_FLIGHT_BYTES_MAX, DiskTier
from kvstore.protocol import wire
from kvstore.protocol.page import (
    CanonicalLayout,
    PrefixKey,
    PrefixKeys,
    ShardSpec,
    SpaceIdentity,
    digest_seed,
    page_seeds,
)  # fmt: skip
from kvstore.state.ask.traversal import Removal
from kvstore.state.disk.jobs import Durable, SyncPolicy
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.places import record_bytes
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Peer
from kvstore.state.tree.slots import SlotTable
from kvstore.testing.failing_power import FailingPower, UnorderedLog, WaitedMemory
from kvstore.testing.timeline import EXTENT_BYTES, PAGE_BYTES, page_content
from kvstore.tier.directories import Directory
from kvstore.tier.host import HostMemory

EXTENTS: Final = 5
WAIT_MS: Final = 40
TICK_NS: Final = 2_000_000
SETTLE_STEPS_MAX: Final = 3_000
_IDENTITY: Final = SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=1)
_LAYOUT: Final = CanonicalLayout(2048)
SHARDS: Final = [ShardSpec(layout=_LAYOUT, layers=(0, 1), heads=(at, at + 1)) for at in (0, 1)]
_SEEDS: Final = [digest_seed(_IDENTITY, spec) for spec in SHARDS]

Page = tuple[int, bytes]
"""Shard and prefix key."""


@dataclass
class Toll:
    """Counts of a run; tests assert that each of these has occurred.

    Attributes:
        cuts: power cuts.
        acknowledged: pages whose durable put was acknowledged.
        stepwise: pages of these that were more than may be written at a time.
        survived: acknowledged pages found after a cut.
        late: pages reclaimed between their sync and its acknowledgement.
        removed: acknowledged pages that were reclaimed later.
        read: pages whose bytes were compared.
        written: ordinary pages that had been written when the power failed.
        lost: written pages that were missing afterwards.
        reclaimed: segments that were reclaimed.
        evicted: pages whose eviction by an operator was acknowledged.
        gone: evicted pages that were missing after a cut, as they must be.
        doubtful: pages with an eviction that was not acknowledged when the power failed.
        returned: doubtful pages that were found afterwards.
    """

    cuts: int = 0
    acknowledged: int = 0
    stepwise: int = 0
    survived: int = 0
    late: int = 0
    removed: int = 0
    read: int = 0
    written: int = 0
    lost: int = 0
    reclaimed: int = 0
    evicted: int = 0
    gone: int = 0
    doubtful: int = 0
    returned: int = 0


@dataclass
class Promises:
    """What a node has acknowledged in its lives so far.

    Attributes:
        acknowledged: pages whose durable put was acknowledged, and that were not reclaimed.
        evicted: pages whose eviction was acknowledged, and that were not stored again.
        toll: counts.
    """

    acknowledged: dict[Page, None] = field(default_factory=dict)
    evicted: set[Page] = field(default_factory=set)
    toll: Toll = field(default_factory=Toll)


class Life:
    """One node from its start to its power cut, with one engine that never waits.

    Args:
        random: source of all choices.
        config: configuration of the SSD tier.
        disk: disk of the tier.
        prompts: all prompts that may be stored.
        promises: what earlier lives have acknowledged; this one adds to it.
        in_flight_bytes_max: maximum bytes being written at a time.
    """

    def __init__(
        self, random: Random, config: SSDConfig, disk: FailingPower,
        prompts: Sequence[PrefixKeys], promises: Promises,
        in_flight_bytes_max: int = IN_FLIGHT_BYTES_MAX,
    ) -> None:  # fmt: skip
        """Start the node and recover its pages.

        Raises:
            PowerCut: the power failed during the start.
        """
        self._random = random
        self._prompts = prompts
        self._promises = promises
        self._toll = promises.toll
        #: Evictions that are not acknowledged → their pages, except those stored again since.
        self.evictions: list[tuple[Durable, set[Page]]] = []
        self._overtaken: set[int] = set()
        self._now_ns = 1_000_000_000
        boot = self._random.randbytes(16)
        slots = SlotTable(EXTENT_BYTES, EXTENTS)
        limits = NodeLimits(EXTENTS * EXTENT_BYTES, 1_000_000)
        self.node = Node("node", boot, slots, limits, lambda: self._random.randbytes(16))
        self.memory = HostMemory("power-cut", boot, EXTENT_BYTES, prefault=False)
        self.desk = Desk(self.node, WaitedMemory(self.memory), lambda _: None, lambda: self._now_ns)
        self._asked: dict[int, tuple[wire.Request, int, PrefixKeys, bool]] = {}
        self._numbers = count(1)
        self._leases: list[int] = []
        self._known = {key for keys in prompts for key in keys}
        self._answers: list[tuple[wire.Acquired, int, PrefixKeys]] = []
        try:
            self.memory.create(extent.number for extent in slots.extents)
            home = Directory(Path(config.directories[0]), config.capacity_bytes)
            log = UnorderedLog(random, home, config.segment_bytes, disk)
            self.disk = DiskTier(
                config, self.node, self.memory, lambda: None, log,
                in_flight_bytes_max=in_flight_bytes_max,
            )  # fmt: skip
            self.desk.disk = self.disk
            self._introduce()
        except BaseException:
            self.memory.close()
            raise

    def _introduce(self) -> None:
        major, minor = wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR
        self._connection = self.desk.connect(Peer(0), self)
        for request in (
            wire.Hello(1, major, minor, "engine", b"", b"origin"),
            wire.OpenSpace(2, _IDENTITY, SHARDS),
        ):
            self.desk.receive(self._connection, request)

    # ---- the engine -------------------------------------------------------------------------

    def put(self, keys: PrefixKeys, shard: int, *, durable: bool) -> None:
        """Start to store pages; they are copied when their slots are granted."""
        number, wait_ms = next(self._numbers), self._random.choice((0, WAIT_MS))
        request = wire.BeginPut(
            0, number, self._space, self._shards[shard], keys.packed, b"", b"", wait_ms
        )
        self._ask(request, shard, keys, durable=durable)

    def read(self, keys: PrefixKeys, shard: int) -> None:
        """Start to read pages."""
        number = next(self._numbers)
        request = wire.Acquire(
            0, number, self._space, self._shards[shard], keys.packed, 10_000, WAIT_MS
        )
        self._ask(request, shard, keys)

    def release_one(self) -> None:
        """Release a lease."""
        if self._leases:
            number = self._leases.pop(self._random.randrange(len(self._leases)))
            self.desk.receive(self._connection, wire.Release(number))

    def evict(self, key: PrefixKey | None, cause: str) -> None:
        """Drop a page and its descendants, as an operator does; None = all pages."""
        tree = self._tree()
        top = tree.root if key is None else tree.nodes.get(key)
        if top is None:
            return
        before = self._ready()
        removal = Removal(top, cause)
        while self.node.operate(lambda table: removal.turn(table, 3), self._now_ns):
            pass
        pages = before - self._ready()
        if key is None and not tree.nodes:
            pages |= {(shard, name) for shard in range(len(SHARDS)) for name in self._known}
        durable = self.node.operate(lambda _: self.disk.pages.graves.await_written(0), self._now_ns)
        self.evictions.append((durable, pages))
        # Earlier puts are dropped too; their acknowledgements do not apply to later puts.
        self._overtaken |= self._asked.keys()
        self._note_removed()

    def _ready(self) -> set[Page]:
        return {
            (self._shards.index(shard), key)
            for key, node in self._tree().nodes.items()
            for shard in node.digests
        }

    def _note_evicted(self) -> None:
        for durable, pages in [one for one in self.evictions if one[0].ended]:
            self.evictions.remove((durable, pages))
            if durable.error is None and self.disk.pages.rules.sync is not SyncPolicy.NONE:
                self._promises.evicted |= pages
                self._toll.evicted += len(pages)

    def _ask(
        self, request: wire.Request, shard: int, keys: PrefixKeys, *, durable: bool = False
    ) -> None:
        number = request.id = next(self._numbers) + 10  # type: ignore[union-attr]
        self._asked[number] = (request, shard, keys, durable)
        self.desk.receive(self._connection, request)

    def step(self) -> None:
        """Advance time, the tier and answers, by random amounts."""
        self._now_ns += self._random.randrange(TICK_NS)
        if self._random.random() < 0.5:
            self.desk.advance()
        if self._random.random() < 0.6:
            self.desk.poll_disk()
        self.desk.flush()
        self._note_removed()
        self._note_evicted()

    def answer(self, answer: wire.Answer) -> None:
        """Continue after an answer of the node."""
        if isinstance(answer, wire.Welcome):
            return
        if isinstance(answer, wire.SpaceOpened):
            self._space, self._shards = answer.space, answer.shards
            return
        request, shard, keys, durable = self._asked.pop(answer.id)  # type: ignore[union-attr]
        match answer:
            case wire.PutGranted():
                assert isinstance(request, wire.BeginPut)
                self._granted(answer, request, shard, keys, durable=durable)
            case wire.Committed() if durable:
                self._persist(shard, keys)
            case wire.Acquired():
                assert isinstance(request, wire.Acquire)
                self._compare(answer, shard, keys)
                if answer.digests:
                    self._leases.append(request.lease)
            case wire.Persisted() if answer.id not in self._overtaken:
                self._note_durable(shard, keys)
            case _:
                pass  # refused

    def cut(self) -> None:
        """Fail: the node never closes the connection of a correct client."""
        raise AssertionError("disconnected")

    def _granted(
        self, answer: wire.PutGranted, request: wire.BeginPut, shard: int, keys: PrefixKeys, *,
        durable: bool,
    ) -> None:  # fmt: skip
        granted = [
            key
            for key, status in zip(keys, answer.statuses, strict=True)
            if status == PageStatus.GRANTED
        ]
        again = {(shard, key) for key in granted}
        for pages in (self._promises.evicted, *(pages for _, pages in self.evictions)):
            pages -= again
        addresses = [self._address(at) for at in _addresses(answer.addresses)]
        for key, address in zip(granted, addresses, strict=True):
            ctypes.memmove(address, content(key, shard), PAGE_BYTES)
        if granted:
            seeds = page_seeds(b"".join(granted), _SEEDS[shard])
            digests = mover.digest(np.array(addresses, np.uint64), PAGE_BYTES, seeds).tobytes()
            self._ask(wire.CommitPut(0, request.put, digests), shard, keys, durable=durable)
        elif durable:
            self._persist(shard, keys)

    def _persist(self, shard: int, keys: PrefixKeys) -> None:
        named = keys if self._random.random() < 0.5 else keys[-1:]  # those before it come with it
        request = wire.Persist(0, self._space, self._shards[shard], named.packed, WAIT_MS)
        self._ask(request, shard, keys)

    def _compare(self, answer: wire.Acquired, shard: int, keys: PrefixKeys) -> None:
        for key, at in zip(keys, _addresses(answer.addresses), strict=False):
            found = ctypes.string_at(self._address(at), PAGE_BYTES)
            assert found == content(key, shard), f"wrong bytes under {key.hex()[:8]}"
            self._toll.read += 1
        self._answers.append((answer, shard, keys))

    def _address(self, at: tuple[int, int, int]) -> int:
        extent, _, offset = at
        return self.memory.address(extent) + offset

    # ---- expectations -----------------------------------------------------------------------

    def on_disk(self) -> set[Page]:
        """Pages that are on disk, according to the page table."""
        return {
            (self._shards.index(shard), key)
            for key, node in self._tree().nodes.items()
            for shard in node.disk
        }

    def _is_on_disk(self, page: Page) -> bool:
        shard, key = page
        node = self._tree().nodes.get(PrefixKey(key))
        return node is not None and self._shards[shard] in node.disk

    def _tree(self) -> PrefixTree:
        return next(iter(self.node.pages.spaces))

    def _note_durable(self, shard: int, keys: PrefixKeys) -> None:
        most_bytes = self.disk.pages.rules.in_flight_bytes_max
        if len(keys) * record_bytes(PAGE_BYTES) > most_bytes:
            self._toll.stepwise += len(keys)
        for key in keys:
            if self._is_on_disk((shard, key)):
                self._promises.acknowledged[shard, key] = None
                self._toll.acknowledged += 1
            else:  # dropped between its sync and this answer, as any page may be
                counts = self.node.pages.counts
                left = ("reclaimed_pages", "removed_operator", "removed_corrupt")
                assert any(counts[name] for name in left), "acknowledged, not written"
                self._toll.late += 1

    def _note_removed(self) -> None:
        gone = [page for page in self._promises.acknowledged if not self._is_on_disk(page)]
        for page in gone:
            del self._promises.acknowledged[page]
        self._toll.removed += len(gone)

    def read_everything(self) -> set[Page]:
        """Read every prompt until its whole run was read; returns the pages, byte-equal.

        Raises:
            AssertionError: a wrong byte, or a read that never completes.
        """
        found: set[Page] = set()
        for shard in range(len(SHARDS)):
            for keys in self._prompts:
                found |= {(shard, key) for key in keys[: self._read_fully(keys, shard)]}
        return found

    def _read_fully(self, keys: PrefixKeys, shard: int) -> int:
        """Number of pages of the run that were read."""
        for _ in range(SETTLE_STEPS_MAX):
            self.read(keys, shard)
            while self._asked:
                self.step()
            while self._leases:
                self.release_one()
            answers, self._answers = self._answers, []
            last = [answer for answer, of, names in answers if (of, names) == (shard, keys)][-1:]
            if last and not last[0].more:
                return len(last[0].digests) // 16
        raise AssertionError(f"{len(keys)} pages are neither read nor missed")

    def close(self) -> None:
        """End the process: release its memory."""
        self.memory.close()


def content(key: PrefixKey, shard: int) -> bytes:
    """The only correct bytes of a page."""
    return page_content(key[shard:] + key[:shard])


def _addresses(packed: bytes) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = np.frombuffer(packed, dtype=wire.ADDRESS).tolist()
    return found
