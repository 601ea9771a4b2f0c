"""The contract of all tiers, as checks that need no test framework.

::

    contract = TierContract(open_holder)
    for check in TierContract.CHECKS:
        getattr(contract, check)()      # AssertionError says what was broken

The checks use a tier through a **holder**, an adapter with one interface for all tiers:
:class:`HostHolder`, :class:`LogHolder`, :class:`SlabHolder`.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from itertools import count
from random import Random
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

import numpy as np

from kvstore import mover
from kvstore.client.embedded import Embedded
from kvstore.client.resources import StoreResources
from kvstore.client.space import Space
from kvstore.config import HostConfig
from kvstore.protocol import wire
from kvstore.protocol.errors import CapacityError, KVStoreError, PageCorrupt
from kvstore.protocol.page import PrefixKeys, ShardSpec
from kvstore.state.table.slab import PageSet
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.places import Place, record_bytes
from kvstore.testing.tiers import SHARD, SPACE, WAIT_S, PageInMemory, TierDriver
from kvstore.tier.base import Tier

if TYPE_CHECKING:
    from kvstore.tier.slab import DeviceSlab

PAGE_BYTES: Final = (512, 4096, 12_288, 65_536)
"""Page sizes of the checks; smaller and larger than a slot's alignment."""


def new_page(random: Random, page_bytes: int) -> PageInMemory:
    """A random page of this size, in a shard of matching size."""
    heads = page_bytes // SHARD.page_bytes(SPACE)
    shard = ShardSpec(layout=SHARD.layout, layers=SHARD.layers, heads=(0, heads))
    return PageInMemory.random(random, page_bytes, shard=shard)


class Holder(Protocol):
    """One tier, open and empty."""

    def write(self, pages: Sequence[PageInMemory]) -> list[KVStoreError | None]:
        """Write pages together; returns the error of each, None = it is stored."""

    def read(self, page: PageInMemory) -> tuple[KVStoreError | None, bytes]:
        """Read the page with this name and digest; returns its error, or None and its bytes."""

    def damage(self, page: PageInMemory) -> None:
        """Change a byte of a stored page in place, without the tier's knowledge."""

    def fill(self) -> None:
        """Use all space, so that another page does not fit."""

    def drain(self, timeout_s: float) -> bool:
        """Wait until the tier is idle; returns False on timeout."""

    def close(self) -> None:
        """Release every resource."""


class TierContract:
    """The checks.

    Args:
        open_holder: opens an empty tier of at least 512 KiB.
    """

    CHECKS: ClassVar[tuple[str, ...]] = (
        "check_pages_come_back_byte_for_byte",
        "check_wrong_bytes_are_never_given_out",
        "check_a_page_is_given_out_only_under_its_own_name",
        "check_many_writers_each_get_one_answer",
        "check_a_full_tier_says_so_and_keeps_what_it_has",
        "check_a_closed_tier_leaves_nothing_behind",
    )

    def __init__(self, open_holder: Callable[[], Holder]) -> None:
        self._open = open_holder

    def check_pages_come_back_byte_for_byte(self) -> None:
        """Pages of all sizes are read as they were written, repeatedly."""
        random, holder = Random(1), self._open()
        pages = [new_page(random, size) for size in PAGE_BYTES]
        assert holder.write(pages) == [None] * len(pages)
        for page in (*pages, *pages):
            error, found = holder.read(page)
            assert error is None, f"{page.record.page_bytes} bytes: {error}"
            assert found == page.content, "other bytes came back"
        holder.close()

    def check_wrong_bytes_are_never_given_out(self) -> None:
        """Pages with wrong bytes, before or after the write, are errors, without any bytes."""
        random, holder = Random(2), self._open()
        pages = [new_page(random, 4096) for _ in range(4)]
        content = [page.content for page in pages]
        pages[1].memory[100] ^= 1
        written = [holder.write([page])[0] for page in pages]
        assert [written[at] for at in (0, 2, 3)] == [None] * 3, "a neighbour is not written"
        holder.damage(pages[2])
        for at, page in enumerate(pages):
            error, found = holder.read(page)
            assert (error is None) is (at in (0, 3)), f"page {at}: {error}"
            assert error is not None or found == content[at]
        holder.close()

    def check_a_page_is_given_out_only_under_its_own_name(self) -> None:
        """Reading another key is an error."""
        random, holder = Random(3), self._open()
        here, other = new_page(random, 4096), new_page(random, 4096)
        assert holder.write([here]) == [None]
        assert holder.read(other)[0] is not None
        assert holder.read(here)[0] is None
        holder.close()

    def check_many_writers_each_get_one_answer(self) -> None:
        """Pages that are written together are each stored, with one completion."""
        random, holder = Random(4), self._open()
        pages = [new_page(random, 512) for _ in range(24)]
        ended = holder.write(pages)
        assert ended == [None] * len(pages)
        assert all(holder.read(page) == (None, page.content) for page in pages)
        assert holder.drain(WAIT_S), "the tier is idle"
        holder.close()

    def check_a_full_tier_says_so_and_keeps_what_it_has(self) -> None:
        """A page that does not fit is refused with CapacityError, which is retryable."""
        random, holder = Random(5), self._open()
        first, late = new_page(random, 4096), new_page(random, 4096)
        assert holder.write([first]) == [None]
        holder.fill()
        (error,) = holder.write([late])
        assert isinstance(error, CapacityError), f"{error!r}"
        assert error.retryable
        assert holder.read(first) == (None, first.content)
        assert holder.read(late)[0] is not None
        holder.close()

    def check_a_closed_tier_leaves_nothing_behind(self) -> None:
        """Closing takes a limited time, may be repeated, and ends every thread."""
        threads = set(threading.enumerate())
        holder = self._open()
        assert holder.write([new_page(Random(6), 4096)]) == [None]
        closing = threading.Thread(target=holder.close)
        closing.start()
        closing.join(WAIT_S)
        assert not closing.is_alive(), "close does not return"
        holder.close()
        assert set(threading.enumerate()) <= threads, "threads are left"


class LogHolder:
    """Holder of the log: writes adjacent pages to its segments.

    Args:
        tier: open tier, with segments of at least 256 KiB.
        damage: changes a byte of the payload of the record at a place.
        fill: uses all space of the log.
    """

    def __init__(
        self, tier: Tier, damage: Callable[[Place], None], fill: Callable[[], None]
    ) -> None:
        self._tier = tier
        self._driver = TierDriver(tier)
        self._damage = damage
        self.fill = fill
        self._places: dict[bytes, Place] = {}
        self._next = Place(0, 0)

    def write(self, pages: Sequence[PageInMemory]) -> list[KVStoreError | None]:
        """See :class:`Holder`."""
        placed = [(self._place(page), page) for page in pages]
        return [ended.error for ended in self._driver.write(*placed)]

    def read(self, page: PageInMemory) -> tuple[KVStoreError | None, bytes]:
        """See :class:`Holder`."""
        ended, target = self._driver.read(self._places.get(page.record.key, Place(0, 0)), page)
        return ended.error, target.content

    def damage(self, page: PageInMemory) -> None:
        """See :class:`Holder`."""
        self._damage(self._places[page.record.key])

    def drain(self, timeout_s: float) -> bool:
        """See :class:`Holder`."""
        return self._tier.drain(timeout_s)

    def close(self) -> None:
        """See :class:`Holder`."""
        self._tier.close()

    def _place(self, page: PageInMemory) -> Place:
        place, size = self._next, record_bytes(page.record.page_bytes)
        if place.offset + size > 200 << 10:
            place = Place(place.segment + 1, 0)
        self._places[page.record.key] = place
        self._next = Place(place.segment, place.offset + size)
        return place


class SlabHolder:
    """Holder of the device slab, if it serves loads to host memory.

    Args:
        slab: open and empty slab.
        damage: changes a byte of the first page on the device.
    """

    def __init__(self, slab: "DeviceSlab", damage: Callable[[PageSet, PrefixKeys], None]) -> None:
        self._slab = slab
        self._damage = damage

    def write(self, pages: Sequence[PageInMemory]) -> list[KVStoreError | None]:
        """See :class:`Holder`; uses one thread per page, as promotions do."""
        ended: dict[int, KVStoreError | None] = {}

        def promote(at: int) -> None:
            assert at not in ended, "two answers"
            ended[at] = self._promote(pages[at])

        threads = [threading.Thread(target=promote, args=(at,)) for at in range(len(pages))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        return [ended[at] for at in range(len(pages))]

    def read(self, page: PageInMemory) -> tuple[KVStoreError | None, bytes]:
        """See :class:`Holder`."""
        target, size = page.empty(), page.record.page_bytes
        pieces = mover.Pieces.contiguous(np.array([target.address], dtype=np.uint64), size)
        if not self._slab.load(_page_set(page), _keys(page), pieces):
            return PageCorrupt("it is not there, or not any more"), b""
        return None, target.content

    def damage(self, page: PageInMemory) -> None:
        """See :class:`Holder`."""
        self._damage(_page_set(page), _keys(page))

    def fill(self) -> None:
        """See :class:`Holder`; pages that are read for the first time evict no others."""
        random = Random(7)
        while True:
            page = new_page(random, 4096)
            try:
                taken = self._slab.reserve(_page_set(page), _keys(page), page.record.digest)
            except CapacityError:
                break
            sources = np.array([page.address], dtype=np.uint64)
            assert self._slab.fill(taken, _keys(page), sources) == 1

    def drain(self, timeout_s: float) -> bool:
        """See :class:`Holder`."""
        return self._slab.drain(timeout_s)

    def close(self) -> None:
        """See :class:`Holder`."""
        self._slab.close()

    def _promote(self, page: PageInMemory) -> KVStoreError | None:
        keys, sources = _keys(page), np.array([page.address], dtype=np.uint64)
        try:
            taken = self._slab.reserve(_page_set(page), keys, page.record.digest)
        except CapacityError as error:
            return error
        good = self._slab.fill(taken, keys, sources)
        return None if good else PageCorrupt("it did not verify")


class HostHolder:
    """Holder of host memory, through an embedded node: readers verify pages."""

    def __init__(self, capacity_bytes: int) -> None:
        host = HostConfig(
            capacity_bytes=capacity_bytes, extent_bytes=capacity_bytes // 8, prefault=False,
            session_quota_bytes=4 * capacity_bytes,
        )  # fmt: skip
        self._link = Embedded(host, "contract")
        self._resources = StoreResources(self._link, lambda _: self._link, WAIT_S)
        self._numbers = count(1 << 32)
        self._written: list[PageInMemory] = []

    def write(self, pages: Sequence[PageInMemory]) -> list[KVStoreError | None]:
        """See :class:`Holder`; commits the page's given digest, whatever its bytes."""
        return [self._put(page) for page in pages]

    def read(self, page: PageInMemory) -> tuple[KVStoreError | None, bytes]:
        """See :class:`Holder`."""
        target = np.empty(page.record.page_bytes, dtype=np.uint8)
        if not self._space(page).get(_keys(page), [target]):
            return PageCorrupt("it is not there, or not any more"), b""
        return None, target.tobytes()

    def damage(self, page: PageInMemory) -> None:
        """See :class:`Holder`."""
        leased, lease = self._lease(page)
        with self._link.moving() as memory:
            address = int(memory.locate(leased.addresses, 1, write=True)[0])
            ctypes.c_ubyte.from_address(address).value ^= 4
        self._link.send(wire.Release(lease))

    def fill(self) -> None:
        """See :class:`Holder`: leases all stored pages, and begins puts in all other slots."""
        for page in self._written:
            self._lease(page)
        random = Random(8)
        while not isinstance(self._begin(new_page(random, 4096)), CapacityError):
            pass

    def drain(self, timeout_s: float) -> bool:
        """See :class:`Holder`: nothing runs in the background."""
        return timeout_s > 0

    def close(self) -> None:
        """See :class:`Holder`."""
        self._link.close()

    def _space(self, page: PageInMemory) -> Space:
        return Space(self._resources, page.record.space, [page.record.shard])

    def _lease(self, page: PageInMemory) -> tuple[wire.Acquired, int]:
        opened, lease = self._space(page).numbers(), next(self._numbers)
        key = page.record.key
        request = wire.Acquire(0, lease, opened.space, opened.shards[0], key, int(WAIT_S * 1000))
        leased = self._link.request(request, WAIT_S)
        assert isinstance(leased, wire.Acquired)
        return leased, lease

    def _begin(self, page: PageInMemory) -> tuple[wire.PutGranted, int] | KVStoreError:
        opened, put = self._space(page).numbers(), next(self._numbers)
        request = wire.BeginPut(0, put, opened.space, opened.shards[0], page.record.key, b"")
        try:
            granted = self._link.request(request, WAIT_S)
        except CapacityError as error:
            return error
        assert isinstance(granted, wire.PutGranted)
        if granted.statuses != bytes([PageStatus.GRANTED]):
            return CapacityError("no slot is free and none may be evicted")
        return granted, put

    def _put(self, page: PageInMemory) -> KVStoreError | None:
        begun = self._begin(page)
        if isinstance(begun, KVStoreError):
            return begun
        granted, put = begun
        with self._link.moving() as memory:
            size = page.record.page_bytes
            address = int(memory.locate(granted.addresses, size, write=True)[0])
            ctypes.memmove(address, page.address, size)
        self._link.request(wire.CommitPut(0, put, page.record.digest), WAIT_S)
        self._written.append(page)
        return None


def _keys(page: PageInMemory) -> PrefixKeys:
    return PrefixKeys(page.record.key)


def _page_set(page: PageInMemory) -> PageSet:
    return PageSet(page.record.space, page.record.shard)
