"""Pages that were removed on purpose, until the log has their tombstones. Pure.

Their records stay in the segment files until those are reclaimed; a tombstone keeps a start from
finding them. It applies to every older record of its keys, so a page that is stored again must not
be written before it: :meth:`Graves.holds` says which pages have to wait.

At most one tombstone per (space, shard) is being written at a time; keys that are removed meanwhile
share the next one.
"""

from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from kvstore.protocol.errors import CapacityError, KVStoreError, TierUnavailable
from kvstore.protocol.page import ALL_KEYS, KEY_BYTES, PrefixKey
from kvstore.state.disk.jobs import DiskTombstone, Durable
from kvstore.state.disk.log import SegmentLog
from kvstore.state.disk.queue import DiskQueue
from kvstore.state.disk.syncs import Syncs
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree

BURIED: Final = frozenset({"operator", "cleared", "corrupt"})
"""Causes of a removal that a restart must not undo."""
RECORD_KEYS_MAX = 1024
"""Keys in one tombstone: 36 KiB on disk."""
KEYS_MAX = 65_536
"""Maximum waiting keys; if the disk accepts no tombstones, further removals are not recorded."""
ATTEMPTS_MAX: Final = 8
"""Failed attempts after which a tombstone is given up."""

_Pair = tuple[int, int]
"""Space and shard number."""


@dataclass(slots=True, eq=False)
class _Grave:
    """The waiting keys of one (space, shard), in order of removal."""

    space: PrefixTree
    shard: int
    keys: dict[bytes, None] = field(default_factory=dict)
    waiters: list[Durable] = field(default_factory=list)
    attempts: int = 0


class Graves:
    """The tombstones of one log that are not written yet.

    Args:
        log: the places of records.
        queue: gets jobs for the tier; :meth:`completed` gets their ends.
        syncs: make written tombstones durable.
        counts: counters.

    Attributes:
        waiting_keys: keys whose tombstone is not written.
        lost_keys: keys that could not wait; only grows.
    """

    def __init__(
        self, log: SegmentLog, queue: DiskQueue,
        syncs: Syncs, counts: dict[str, int],
    ) -> None:  # fmt: skip
        self.waiting_keys = self.lost_keys = 0
        self._log = log
        self._queue = queue
        self._syncs = syncs
        self._counts = counts
        #: What gathers, and what is being written; a key is in one of them at most.
        self._gathering: dict[_Pair, _Grave] = {}
        self._writing: dict[_Pair, _Grave] = {}
        self._jobs: dict[int, _Pair] = {}
        #: Segment → what was written there since the last sync that ended well began, and how many
        #: syncs had begun by then.
        self._unsynced: dict[int, list[tuple[int, _Grave]]] = {}
        self._unsynced_keys = 0

    def holds(self, node: PrefixNode, shard: int) -> bool:
        """Whether pages must not be written before the tombstone of one of their keys."""
        return self.holds_any(node.space, shard, node.keys)

    def holds_any(self, space: PrefixTree, shard: int, keys: bytes) -> bool:
        """The same for packed keys."""
        if not self.waiting_keys:
            return False
        pair = space.number, shard
        return any(
            self._knows(pair, keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)
        )

    def waits_for(self, space: PrefixTree) -> bool:
        """Whether a tombstone of a space is still to be written, or maybe once more."""
        graves = [*self._gathering.values(), *self._writing.values()]
        graves += [grave for written in self._unsynced.values() for _, grave in written]
        return any(grave.space is space for grave in graves)

    def bury(self, node: PrefixNode, shard: int) -> None:
        """Pages were removed on purpose: write tombstones, so that no record of them returns."""
        for key in node.key_list():
            assert key != ALL_KEYS, ("it would bury every page of the space and shard", node)
            self._add(node.space, shard, key)

    def bury_all(self, space: PrefixTree) -> None:
        """A space was emptied: no record of it must return, indexed or not."""
        for shard in range(len(space.shards)):
            self._add(space, shard, ALL_KEYS)

    def await_written(self, lost_keys: int) -> Durable:
        """A handle that ends once all tombstones so far are written, and synced if the node syncs.

        Its error is CapacityError if a key could not wait since :attr:`lost_keys` was read.
        """
        durable = Durable()
        for grave in (*self._gathering.values(), *self._writing.values()):
            grave.waiters.append(durable)
            durable.outstanding += 1
        if self.lost_keys != lost_keys:
            durable.error = CapacityError(
                f"more than {KEYS_MAX} removals waited for the SSDs: clear the space once they work"
            )
        if not durable.outstanding:
            self._syncs.hurry()
            self._syncs.wait(durable)
        return durable

    def write(self) -> None:
        """Write the waiting tombstones, as far as the log has room."""
        for pair, grave in list(self._gathering.items()):
            if pair in self._writing:
                continue
            keys = list(islice(grave.keys, RECORD_KEYS_MAX))
            place = self._log.place_tombstone(grave.space, grave.shard, len(keys))
            if place is None:
                return  # room is being made; it is asked for again when a job has ended
            if len(keys) < len(grave.keys):
                grave = _leading(grave, keys)
            else:
                del self._gathering[pair]
            assert 0 < len(grave.keys) <= RECORD_KEYS_MAX
            self._writing[pair] = grave
            of = grave.space.shards[grave.shard].spec
            job = DiskTombstone(
                self._queue.number(), place, grave.space.identity, of, b"".join(grave.keys)
            )
            self._jobs[job.job] = pair
            self._queue.submit(job)

    def completed(self, job: DiskTombstone, error: KVStoreError | None) -> None:
        """A tombstone was written, or failed; a failed one is retried later."""
        self._log.wrote(job.place)
        pair = self._jobs.pop(job.job)
        grave = self._writing.pop(pair)
        if error is not None and grave.attempts + 1 < ATTEMPTS_MAX:
            self._try_again(pair, grave)
            return
        self.waiting_keys -= len(grave.keys)
        assert self.waiting_keys >= 0
        if error is None:
            self._counts["tombstone_keys"] += len(grave.keys)
            self._syncs.wrote()
            self._keep(job.place.segment, grave)
        else:
            self._counts["tombstone_keys_lost"] += len(grave.keys)
        if grave.waiters:
            self._syncs.hurry()  # somebody waits who does so once in a while
        for durable in grave.waiters:
            self._syncs.part_ended(durable, error)

    def synced(self) -> None:
        """The sync in progress has ended well: it covered what was written before it began."""
        begun = self._syncs.begun
        for segment, graves in list(self._unsynced.items()):
            left = [(number, grave) for number, grave in graves if number >= begun]
            keys = sum(len(grave.keys) for _, grave in graves)
            self._unsynced_keys -= keys - sum(len(grave.keys) for _, grave in left)
            if left:
                self._unsynced[segment] = left
            else:
                del self._unsynced[segment]
        assert self._unsynced_keys >= 0

    def doubt(self, segment: int) -> None:
        """A segment is no longer synced: tombstones in it may be lost, and are written once more.

        Who waits for one, or for a sync, is told. A page that is on disk again needs none: its new
        record is later than those that the tombstone removes. That a space was emptied is not
        written again: it would remove later records, too.
        """
        for _, grave in self._unsynced.pop(segment, []):
            self._unsynced_keys -= len(grave.keys)
            for key in grave.keys:
                node = grave.space.index.get(PrefixKey(key))
                is_there = node is not None and (node.on_disk | node.to_disk) >> grave.shard & 1
                if key != ALL_KEYS and not is_there:
                    self._add(grave.space, grave.shard, key)
        error = TierUnavailable(
            "a segment of the SSDs failed: after a power cut the removed pages may be found again;"
            " remove them once more"
        )
        for grave in (*self._gathering.values(), *self._writing.values()):
            for durable in grave.waiters:
                durable.error = durable.error or error
        self._syncs.doubt(error)

    def check(self) -> None:
        """Assert that the counts add up."""
        graves = [*self._gathering.values(), *self._writing.values()]
        assert self.waiting_keys == sum(len(grave.keys) for grave in graves)
        assert len(self._jobs) == len(self._writing)
        written = [grave for graves in self._unsynced.values() for _, grave in graves]
        assert self._unsynced_keys == sum(len(grave.keys) for grave in written) <= KEYS_MAX

    def _keep(self, segment: int, grave: _Grave) -> None:
        """Keep what a written tombstone removes until a sync has covered it."""
        if not self._syncs.never and self._unsynced_keys + len(grave.keys) <= KEYS_MAX:
            written = _Grave(grave.space, grave.shard, grave.keys)
            self._unsynced.setdefault(segment, []).append((self._syncs.begun, written))
            self._unsynced_keys += len(grave.keys)

    def _add(self, space: PrefixTree, shard: int, key: bytes) -> None:
        pair = (space.number, shard)
        if not self._log.segments or self._knows(pair, key):
            return  # there is no older record, or none that the tombstone on its way leaves
        if self.waiting_keys >= KEYS_MAX and key != ALL_KEYS:
            self.lost_keys += 1
            self._counts["tombstone_keys_lost"] += 1
            return
        grave = self._gathering.get(pair)
        if grave is None:
            grave = self._gathering[pair] = _Grave(space, shard)
        if key == ALL_KEYS:
            self.waiting_keys -= len(grave.keys)
            grave.keys.clear()
        grave.keys[key] = None
        self.waiting_keys += 1
        assert self.waiting_keys > 0

    def _knows(self, pair: _Pair, key: bytes) -> bool:
        for graves in (self._gathering, self._writing) if self.waiting_keys else ():
            grave = graves.get(pair)
            if grave is not None and (key in grave.keys or ALL_KEYS in grave.keys):
                return True
        return False

    def _try_again(self, pair: _Pair, grave: _Grave) -> None:
        """Return the keys of a failed tombstone to the waiting ones."""
        assert pair not in self._writing
        grave.attempts += 1
        later = self._gathering.get(pair)
        if later is not None:
            grave.keys |= later.keys
            for durable in later.waiters:
                if durable in grave.waiters:
                    durable.outstanding -= 1
                    assert durable.outstanding > 0, "it still waits for this one"
                else:
                    grave.waiters.append(durable)
        self._gathering[pair] = grave


def _leading(grave: _Grave, keys: list[bytes]) -> _Grave:
    """Take the first ``keys`` out of a grave, for a tombstone; waiters wait for both.

    The others, of which there may be many, stay where they are.
    """
    first = _Grave(
        grave.space, grave.shard, dict.fromkeys(keys), list(grave.waiters), grave.attempts
    )
    grave.attempts = 0
    for key in keys:
        del grave.keys[key]
    assert grave.keys
    assert len(first.keys) == len(keys)
    for durable in grave.waiters:
        durable.outstanding += 1
    return first
