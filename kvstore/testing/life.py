"""One life of a node on a disk: from its start until the power fails, with an engine that asks.

The node, its page table, its disk side and the SSD log are the real ones. The engine waits for
nothing, and writes down what it was promised.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Final

import numpy as np

from kvstore import mover, wire
from kvstore.config import SSDConfig
from kvstore.node.desk import Desk
from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
from kvstore.node.ssd import DiskTier
from kvstore.page import (
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
    """What happened in a run; a test asks that each of these did happen somewhere.

    Attributes:
        cuts: power cuts.
        acknowledged: pages, when a put of them was acknowledged as durable.
        survived: acknowledged pages found after a cut.
        late: pages that were reclaimed between their sync and its acknowledgement.
        removed: acknowledged pages that were reclaimed since.
        read: pages whose bytes were compared.
        written: ordinary pages that had been written when the power failed.
        lost: of these, those that were not there afterwards.
        reclaimed: segments.
        evicted: pages, when an operator's eviction of them was acknowledged.
        gone: evicted pages that were not there after a cut.
        doubtful: pages evicted without acknowledgement when the power failed.
        returned: of these, those that were there afterwards.
    """

    cuts: int = 0
    acknowledged: int = 0
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
    """What a node has promised in its lives so far.

    Attributes:
        acknowledged: pages whose put was acknowledged as durable, and that were not reclaimed.
        evicted: pages whose eviction was acknowledged, and that were not stored again.
        toll: what happened.
    """

    acknowledged: dict[Page, None] = field(default_factory=dict)
    evicted: set[Page] = field(default_factory=set)
    toll: Toll = field(default_factory=Toll)


class Life:
    """One node from its start to its power cut, with one engine that asks without waiting.

    Args:
        random: where every choice comes from.
        config: of the SSD tier.
        disk: what the tier is on.
        prompts: all that is ever stored.
        promises: what the lives before this one have promised; this one adds to it.
    """

    def __init__(
        self, random: Random, config: SSDConfig, disk: FailingPower,
        prompts: Sequence[PrefixKeys], promises: Promises,
    ) -> None:  # fmt: skip
        """Start the node; it takes over what the disk has.

        Raises:
            PowerCut: already here.
        """
        self._random = random
        self._prompts = prompts
        self._promises = promises
        self._toll = promises.toll
        #: Evictions that are not acknowledged, and their pages that were not stored again since.
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
            self.disk = DiskTier(config, self.node, self.memory, lambda: None, log)
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

    # ---- what an engine does ----------------------------------------------------------------

    def put(self, keys: PrefixKeys, shard: int, *, durable: bool) -> None:
        """Begin to store pages; they are copied when their slots are granted."""
        number, wait_ms = next(self._numbers), self._random.choice((0, WAIT_MS))
        request = wire.BeginPut(
            0, number, self._space, self._shards[shard], keys.packed, b"", b"", wait_ms
        )
        self._ask(request, shard, keys, durable=durable)

    def read(self, keys: PrefixKeys, shard: int) -> None:
        """Begin to read pages."""
        number = next(self._numbers)
        request = wire.Acquire(
            0, number, self._space, self._shards[shard], keys.packed, 10_000, WAIT_MS
        )
        self._ask(request, shard, keys)

    def release_one(self) -> None:
        """Give a lease back."""
        if self._leases:
            number = self._leases.pop(self._random.randrange(len(self._leases)))
            self.desk.receive(self._connection, wire.Release(number))

    def evict(self, key: PrefixKey | None, cause: str) -> None:
        """Take a page with all that follows it out, as an operator does; None: everything."""
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
        # What was asked for so far is gone; its acknowledgement says nothing of what is put now.
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
        """Let things go on: time, the tier, answers."""
        self._now_ns += self._random.randrange(TICK_NS)
        if self._random.random() < 0.5:
            self.desk.advance()
        if self._random.random() < 0.6:
            self.desk.poll_disk()
        self.desk.flush()
        self._note_removed()
        self._note_evicted()

    def answer(self, answer: wire.Answer) -> None:
        """Go on with what was asked."""
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
                pass  # a refusal is an answer too

    def cut(self) -> None:
        """The node never does that to an engine that asks as it should."""
        raise AssertionError("cut off")

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
        request = wire.Persist(0, self._space, self._shards[shard], keys.packed, WAIT_MS)
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

    # ---- what is expected -------------------------------------------------------------------

    def on_disk(self) -> set[Page]:
        """Pages that count as being on disk."""
        return {
            (self._shards.index(shard), key)
            for key, node in self._tree().nodes.items()
            for shard in node.disk
        }

    def _tree(self) -> PrefixTree:
        return next(iter(self.node.pages.spaces))

    def _note_durable(self, shard: int, keys: PrefixKeys) -> None:
        on_disk = self.on_disk()
        for key in keys:
            if (shard, key) in on_disk:
                self._promises.acknowledged[shard, key] = None
                self._toll.acknowledged += 1
            else:  # between its sync and this answer it left, as any page may
                counts = self.node.pages.counts
                left = ("reclaimed_pages", "removed_operator", "removed_corrupt")
                assert any(counts[name] for name in left), "acknowledged, not written"
                self._toll.late += 1

    def _note_removed(self) -> None:
        gone = self._promises.acknowledged.keys() - self.on_disk()
        for page in gone:
            del self._promises.acknowledged[page]
        self._toll.removed += len(gone)

    def read_everything(self) -> set[Page]:
        """Every page that a reader gets, byte-equal; each prompt is read until its run is there.

        Raises:
            AssertionError: a wrong byte, or a read that does not end.
        """
        found: set[Page] = set()
        for shard in range(len(SHARDS)):
            for keys in self._prompts:
                found |= {(shard, key) for key in keys[: self._read_fully(keys, shard)]}
        return found

    def _read_fully(self, keys: PrefixKeys, shard: int) -> int:
        """Pages of the run that could be read."""
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
        """The process is gone."""
        self.memory.close()


def content(key: PrefixKey, shard: int) -> bytes:
    """The only right bytes of a page."""
    return page_content(key[shard:] + key[:shard])


def _addresses(packed: bytes) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = np.frombuffer(packed, dtype=wire.ADDRESS).tolist()
    return found
