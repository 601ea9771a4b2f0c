"""Puts pages into the node's memory: with two round trips, or with one into a reserved slot."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from time import monotonic, sleep
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore import mover
from kvstore.client.ahead import ReservedSlot, ReservedSlots
from kvstore.client.device import BlocksOnDevice
from kvstore.client.loads import DISK_WAIT_S, names
from kvstore.client.mapping import Use
from kvstore.client.node_link import NodeLink
from kvstore.client.resources import Opened, StoreResources
from kvstore.client.results import PutResult
from kvstore.protocol import wire
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.page import PrefixKeys, page_seeds
from kvstore.state.table.slab import PageSet
from kvstore.state.tree.actions import PageStatus

TURN_WAIT_S = 1.0
"""Maximum wait for a page that another writer should put before this writer's next one."""
ALONE_S: Final = 10.0
"""How long a writer puts all pages itself after it has waited in vain."""
BUSY_PAUSE_S: Final = 0.1
"""Pause before a busy node is asked again that did not let a put wait."""
_REFUSED: Final = (PageStatus.NO_ROOM, PageStatus.NO_PARENT, PageStatus.DROPPED)


class Keep(NamedTuple):
    """How long pages are kept, and in which tiers; see :meth:`kvstore.client.space.Space.put`."""

    ttl_s: float = 0.0
    read_once: bool = False
    memory_only: bool = False


class ShardPages(NamedTuple):
    """Pages of one shard, to be put with those of other shards.

    Attributes:
        keys: consecutive keys of a chain.
        source: the pages.
        shard: index of the shard in the space.
    """

    keys: PrefixKeys
    source: mover.Pieces
    shard: int


class Backoff:
    """When a put asks a busy node again: until 2 seconds after it last decided on a page."""

    def __init__(self) -> None:
        self._until = monotonic() + DISK_WAIT_S

    def is_over(self, decided: int, wait_s: float) -> bool:
        """Whether to give up; pauses before the next question if the last one could have waited.

        Args:
            decided: number of pages on which the node has decided now.
            wait_s: seconds that the node could have waited; perhaps it refused at once.
        """
        if decided:
            self._until = monotonic() + DISK_WAIT_S
            return False
        over = monotonic() > self._until
        if wait_s and not over:
            sleep(BUSY_PAUSE_S)
        return over


class Storer:
    """The puts of one space.

    Args:
        resources: resources of the store.
        pages: the pages of each shard.
        numbers: the numbers of the space and its shards on a connection.
    """

    def __init__(
        self, resources: StoreResources, pages: Sequence[PageSet],
        numbers: Callable[[NodeLink], Opened],
    ) -> None:  # fmt: skip
        self._resources = resources
        self._pages = pages
        self._numbers = numbers
        #: Shard → until when this writer puts all of its pages, because others did not come.
        self._alone_until: dict[int, float] = {}

    def put(
        self, keys: PrefixKeys, source: mover.Pieces | BlocksOnDevice, shard: int, keep: Keep,
        link: NodeLink, wait_s: float, *, follows: bool = False,
    ) -> tuple[PutResult, bool]:  # fmt: skip
        """Put pages on one connection; also returns whether slots for refused pages become free.

        ``follows``: also wait for the preceding page, which another writer puts.
        """
        # Open the space before using the memory, so that both belong to the same connection.
        opened = self._numbers(link)
        single = len(keys) == 1 and not wait_s and link.node_minor >= wire.AHEAD_MINOR
        reserved = link.reserved if single else None
        if reserved is not None:
            stored = self._put_reserved(keys, source, shard, keep, link, opened, reserved)
            if stored is not None:
                return stored, False
        put, ahead = next(names), 0
        tokens = b"" if keys.tokens is None else keys.tokens.tobytes()
        with link.moving() as memory:
            number = opened.shards[shard]
            request = wire.BeginPut(
                0, put, opened.space, number, keys.packed, keys.parent, tokens, int(wait_s * 1000),
                follows,
            )  # fmt: skip
            try:
                granted = link.request(request, self._resources.timeout_s + wait_s, opened.epoch)
                assert isinstance(granted, wire.PutGranted)
                statuses = granted.statuses
                if granted.addresses:
                    digests = self._write(memory, granted, keys, source, shard)
                    commit = wire.CommitPut(
                        0, put, digests, int(keep.ttl_s * 1000), keep.read_once, keep.memory_only
                    )
                    if reserved is not None and reserved.is_worth_asking(opened.space, number):
                        commit.ahead = ahead = next(names)
                    committed = link.request(commit, self._resources.timeout_s, opened.epoch)
                    assert isinstance(committed, wire.Committed)
                    statuses += committed.statuses
                    if committed.ahead and reserved is not None:
                        slot = ReservedSlot(
                            ahead, opened.epoch, opened.space, number, committed.ahead
                        )
                        _keep(link, reserved, slot)
            except BaseException:
                link.send(wire.AbortPut(put), opened.epoch)  # nothing of it is being written
                if ahead:
                    link.send(wire.AbortPut(ahead), opened.epoch)
                raise
        waits = PageStatus.NO_PARENT not in statuses and PageStatus.DROPPED not in statuses
        return _result(statuses), granted.busy and waits

    def put_together(
        self, parts: Sequence[ShardPages], keep: Keep, link: NodeLink
    ) -> list[PutResult | KVStoreError]:
        """Put pages of several shards: all ask for slots together, and are committed together.

        Returns:
            For each its result, in which pages may be refused, or why it was not put.

        Raises:
            KVStoreError: why none was put.
        """
        opened = self._numbers(link)
        begins = [
            wire.BeginPut(
                0, next(names), opened.space, opened.shards[part.shard], part.keys.packed,
                part.keys.parent, b"" if part.keys.tokens is None else part.keys.tokens.tobytes(),
            )
            for part in parts
        ]  # fmt: skip
        results: list[PutResult | KVStoreError] = []
        free: dict[int, wire.PutGranted] = {}
        with link.moving() as memory:
            try:
                answers = link.request_all(begins, self._resources.timeout_s, opened.epoch)
                for at, granted in enumerate(answers):
                    if isinstance(granted, KVStoreError):
                        results.append(granted)
                        continue
                    assert isinstance(granted, wire.PutGranted)
                    results.append(_result(granted.statuses))
                    if granted.addresses:
                        free[at] = granted
                digests = self._write_all(memory, [(parts[at], free[at]) for at in free])
                commits = [
                    wire.CommitPut(
                        0, begins[at].put, found, int(keep.ttl_s * 1000), keep.read_once,
                        keep.memory_only,
                    )
                    for at, found in zip(free, digests, strict=True)
                ]  # fmt: skip
                ends = self._commit(link, commits, opened)
                for at, end in zip(free, ends, strict=True):
                    before = results[at]
                    assert isinstance(before, PutResult)
                    results[at] = end if isinstance(end, KVStoreError) else summed([before, end])
            except BaseException:
                for begin in begins:
                    link.send(wire.AbortPut(begin.put), opened.epoch)  # nothing is being written
                raise
        return results

    def put_turns(
        self, keys: PrefixKeys, source: mover.Pieces | BlocksOnDevice, shard: int, keep: Keep,
        only: range,
    ) -> PutResult | None:  # fmt: skip
        """Put the pages with these indexes; each waits for the preceding page of another writer.

        Returns:
            None: put all pages. A preceding page did not arrive in time, now or recently, or the
            node does not support such waits.
        """
        # Not the connection of loads, which must not wait behind another writer.
        link = self._resources.waiting_link("store")
        opened = self._numbers(link)
        old = link.node_minor < wire.TURNS_MINOR
        if old or monotonic() < self._alone_until.get(opened.shards[shard], 0.0):
            return None
        parts = [PutResult(0)]
        for at in only:
            one, pages = keys[at : at + 1], source.pages(at, at + 1)
            part, _ = self.put(one, pages, shard, keep, link, TURN_WAIT_S, follows=True)
            if part.refused:
                self._alone_until[opened.shards[shard]] = monotonic() + ALONE_S
                return None
            parts.append(part)
        return summed(parts)

    def _commit(
        self, link: NodeLink, commits: Sequence[wire.CommitPut], opened: Opened
    ) -> list[PutResult | KVStoreError]:
        """Commit puts together; those that are refused are aborted."""
        if not commits:
            return []
        ends: list[PutResult | KVStoreError] = []
        answers = link.request_all(commits, self._resources.timeout_s, opened.epoch)
        for commit, answer in zip(commits, answers, strict=True):
            if isinstance(answer, KVStoreError):
                link.send(wire.AbortPut(commit.put), opened.epoch)
                ends.append(answer)
            else:
                assert isinstance(answer, wire.Committed)
                ends.append(_result(answer.statuses))
        return ends

    def _put_reserved(
        self, keys: PrefixKeys, source: mover.Pieces | BlocksOnDevice, shard: int, keep: Keep,
        link: NodeLink, opened: Opened, reserved: ReservedSlots,
    ) -> PutResult | None:  # fmt: skip
        """Put one page into a reserved slot, in one round trip.

        Returns:
            None: there is no such slot, or the node has to make room first; put it with two.
        """
        number = opened.shards[shard]
        slot = reserved.take(opened.epoch, opened.space, number)
        if slot is None:
            return None
        following = next(names)
        with link.moving() as memory:
            if link.epoch != slot.epoch:  # a move of another connection does not keep the slot
                return None
            try:
                there = wire.PutGranted(0, bytes([PageStatus.GRANTED]), slot.address)
                digest = self._write(memory, there, keys, source, shard)
                tokens = b"" if keys.tokens is None else keys.tokens.tobytes()
                request = wire.StorePage(
                    0, slot.put, opened.space, number, keys.packed, keys.parent, digest, tokens,
                    int(keep.ttl_s * 1000), keep.read_once, keep.memory_only, following,
                )  # fmt: skip
                answer = link.request(request, self._resources.timeout_s, opened.epoch)
                assert isinstance(answer, wire.Committed)
            except BaseException:
                link.send(wire.AbortPut(slot.put), opened.epoch)  # nothing is being written
                link.send(wire.AbortPut(following), opened.epoch)
                raise
        [status] = answer.statuses
        if status == PageStatus.STORED:
            reserved.is_worth_asking(opened.space, number)
        else:  # the copy was in vain: ask before the next one
            reserved.forget(opened.space, number)
        if answer.ahead:
            kept = ReservedSlot(following, slot.epoch, slot.space, number, answer.ahead)
            if status == PageStatus.STORED:
                _keep(link, reserved, kept)
            else:
                link.send(wire.AbortPut(following), opened.epoch)
        return None if status == PageStatus.NO_ROOM else _result(answer.statuses)

    def _write(
        self, memory: Use, granted: wire.PutGranted, keys: PrefixKeys,
        source: mover.Pieces | BlocksOnDevice, shard: int,
    ) -> bytes:  # fmt: skip
        size = self._pages[shard].page_bytes
        targets = memory.locate(granted.addresses, size, write=True)
        seeds = page_seeds(keys.packed, self._pages[shard].seed)
        chosen = _granted(granted, len(keys))
        if chosen is not None:
            source, seeds = source.choose(chosen), seeds[chosen]
        if isinstance(source, BlocksOnDevice):
            return source.gather(targets, size, seeds).tobytes()
        return mover.gather(targets, size, source, seeds).tobytes()

    def _write_all(
        self, memory: Use, grants: Sequence[tuple[ShardPages, wire.PutGranted]]
    ) -> list[bytes]:
        """Write pages of several shards; pages of the same size in one pass.

        Returns:
            The digests of each shard's pages.
        """
        if len({self._pages[part.shard].page_bytes for part, _ in grants}) != 1:
            return [
                self._write(memory, granted, part.keys, part.source, part.shard)
                for part, granted in grants
            ]
        size = self._pages[grants[0][0].shard].page_bytes
        targets = memory.locate(b"".join(one.addresses for _, one in grants), size, write=True)
        sources, seeds = [], []
        for part, granted in grants:
            source, own = part.source, page_seeds(part.keys.packed, self._pages[part.shard].seed)
            chosen = _granted(granted, len(part.keys))
            if chosen is not None:
                source, own = source.choose(chosen), own[chosen]
            sources.append(source)
            seeds.append(own)
        found = mover.gather(targets, size, mover.Pieces.joined(sources), np.concatenate(seeds))
        ends = accumulate(len(own) for own in seeds)
        return [found[end - len(own) : end].tobytes() for own, end in zip(seeds, ends, strict=True)]


def _granted(granted: wire.PutGranted, pages: int) -> npt.NDArray[np.intp] | None:
    """Numbers of the pages that got a slot; None = all of them."""
    if granted.statuses.count(PageStatus.GRANTED) == pages:
        return None
    return np.flatnonzero(np.frombuffer(granted.statuses, dtype=np.uint8) == PageStatus.GRANTED)


def summed(parts: Sequence[PutResult]) -> PutResult:
    """The sum of one or more results."""
    return PutResult(*map(sum, zip(*parts, strict=True)))


def _keep(link: NodeLink, reserved: ReservedSlots, slot: ReservedSlot) -> None:
    """Keep a slot for the next page, or give it back."""
    if not reserved.keep(slot):
        link.send(wire.AbortPut(slot.put), slot.epoch)


def _result(statuses: bytes) -> PutResult:
    """The result of a put whose pages have these statuses."""
    count = statuses.count
    stored = count(PageStatus.STORED)
    if stored + count(PageStatus.GRANTED) == len(statuses):  # nearly always
        return PutResult(stored)
    refused = sum(map(count, _REFUSED))
    return PutResult(stored, count(PageStatus.EXISTS), count(PageStatus.PENDING), refused)
