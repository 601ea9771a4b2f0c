"""When written records are synced to survive a power cut, and who is notified. Pure.

A sync covers everything written before it began. At most one is in progress: with the policy
``always``, everything written meanwhile shares the next one.
"""

from collections import deque
from typing import Final

from kvstore.protocol.errors import CapacityError, KVStoreError
from kvstore.state.disk.durability import pages_of, places_of
from kvstore.state.disk.jobs import INTERVAL, NO_SYNC, DiskRules, DiskSync, Durable
from kvstore.state.disk.log import SegmentLog
from kvstore.state.disk.queue import DiskQueue

DURABLES_STEP: Final = 8
"""Durable puts that one step acknowledges; a turn has some tens of steps."""
DURABLES_PAGES: Final = 512
"""Pages of these; the last put may have more."""
SYNCS_MAX: Final = 8
"""Syncs that a put waits for, if pages of it leave the disk and return during each of them."""
LEFT: Final = "a page left the store before its sync; put it again"


class Syncs:
    """The syncs of one disk tier.

    Args:
        rules: when to sync.
        log: which segments are no longer synced.
        queue: gets jobs for the tier; :meth:`completed` gets their ends.

    Attributes:
        ended: durable puts and removals that are synced, or failed; the owner removes them.
    """

    def __init__(self, rules: DiskRules, log: SegmentLog, queue: DiskQueue) -> None:
        self.ended: deque[Durable] = deque()
        self._rules = rules
        self._log = log
        self._queue = queue
        #: Whether something was written since the last sync began, and whether one is under way.
        self._unsynced = False
        self._under_way = False
        self._due_ns = 0
        #: How many syncs have begun.
        self.begun = 0
        #: Puts whose places have to be noted before the next sync.
        self._unnoted: deque[Durable] = deque()
        #: Who waits for the next one, and who for the one under way.
        self._next: list[Durable] = []
        self._present: list[Durable] = []

    def take_some(self) -> list[Durable]:
        """Remove the first of ``ended``, as many as one step acknowledges."""
        found: list[Durable] = []
        pages = 0
        while self.ended and len(found) < DURABLES_STEP and pages < DURABLES_PAGES:
            found.append(self.ended.popleft())
            pages += pages_of(found[-1])
        return found

    def wrote(self) -> None:
        """A record was written."""
        self._unsynced = True

    def part_ended(self, durable: Durable, error: KVStoreError | None) -> None:
        """One of the records of a durable put or removal was written, or cannot be."""
        durable.outstanding -= 1
        assert durable.outstanding >= 0
        durable.error = durable.error or error
        if not durable.outstanding:
            self.wait(durable)

    def wait(self, durable: Durable) -> None:
        """All records of a durable put or removal were written, or cannot be.

        With the policy ``none``, it ends now.
        """
        assert not durable.outstanding
        if durable.error is not None or self._rules.sync is NO_SYNC:
            self.ended.append(durable)
        elif durable.pages and self._log.removals != durable.removals:
            self._unnoted.append(durable)
        else:
            self._next.append(durable)
            self._unsynced = True

    def note_some(self) -> None:
        """Note where the pages of some puts are, if pages have left the disk since they began.

        Only then the next sync is theirs. As many as one step acknowledges.
        """
        left = DURABLES_PAGES
        while self._unnoted and left > 0:
            durable = self._unnoted.popleft()
            left -= pages_of(durable)
            places = places_of(durable)
            if places is None:
                durable.error = CapacityError(LEFT)
                self.ended.append(durable)
                continue
            durable.removals, durable.places = self._log.removals, places
            self._next.append(durable)
            self._unsynced = True

    def covers(self, durable: Durable) -> bool:
        """Whether what has ended its sync may end, maybe with an error; if not, it waits again.

        A page that left the disk during the sync, and was stored and written again, is there at its
        end, but the sync need not have covered its new record. A record that was carried is safe:
        the original was there when the sync began, and stays until the copy is synced.
        """
        if durable.error is not None or not durable.pages:
            return True
        places = places_of(durable)
        if places is None:
            durable.error = CapacityError(LEFT)
            return True
        left = self._log.removals != durable.removals and places != durable.places
        if not left or self._rules.sync is NO_SYNC:
            return True
        if durable.syncs >= SYNCS_MAX:
            durable.error = CapacityError("its pages left the SSDs again and again: put it again")
            return True
        durable.syncs += 1
        self.wait(durable)
        return False

    def advance(self, now_ns: int) -> None:
        """Start a sync if one is due."""
        if self._under_way or not self._unsynced or self._rules.sync is NO_SYNC:
            return
        if self._rules.sync is INTERVAL and now_ns < self._due_ns:
            return
        self._due_ns = now_ns + self._rules.sync_interval_ns
        self._unsynced, self._under_way = False, True
        self.begun += 1
        assert not self._present
        self._present, self._next = self._next, []
        job = DiskSync(self._queue.number(), frozenset(self._log.given_up))
        self._queue.submit(job)

    @property
    def idle(self) -> bool:
        """Whether everything written is synced, or never will be."""
        if self._rules.sync is NO_SYNC:
            return True
        return not (self._unsynced or self._under_way or self._unnoted)

    @property
    def never(self) -> bool:
        """Whether nothing is ever synced."""
        return self._rules.sync is NO_SYNC

    @property
    def behind(self) -> bool:
        """Whether there is more to do now than one step does."""
        return bool(self.ended or self._unnoted)

    def hurry(self) -> None:
        """Start the next sync at once."""
        self._due_ns = 0

    def completed(self, error: KVStoreError | None) -> None:
        """The sync in progress has ended."""
        assert self._under_way
        self._under_way = False
        present, self._present = self._present, []
        for durable in present:
            durable.error = error
            self.ended.append(durable)

    def doubt(self, error: KVStoreError) -> None:
        """A segment is no longer synced: removals that wait for the next sync have failed.

        Pages need not fail: what is in no segment that is synced is not on disk by then.
        """
        removals = [durable for durable in self._next if not durable.pages]
        self._next = [durable for durable in self._next if durable.pages]
        for durable in removals:
            assert durable.error is None
            durable.error = error
            self.ended.append(durable)

    def next_deadline_ns(self) -> int:
        """When :meth:`advance` may start a sync by the clock; 0 = none waits for it."""
        waits = self._unsynced and not self._under_way
        return self._due_ns if waits and self._rules.sync is INTERVAL else 0
