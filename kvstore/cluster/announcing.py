"""Which announcements a node must send to a directory that nodes share. Pure.

A :class:`PageAnnouncement` reports all pages under one number: first those of a snapshot, then
every change. Whenever something may have been missed (the number was lost, the store was emptied,
events have a gap), a new one starts under a new number, and everything reported under the old
number becomes void. Because entries expire, a new one also starts from time to time; the current
one continues until the new one is complete.

:class:`Announcing` says what to do next. A failed call is repeated: a store carries out a batch
once, however often it is sent.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kvstore.cluster.entries import NAME_BYTES, SIGNS, EntryNames
from kvstore.cluster.page_store import AnnouncedNumber, ChangedPages
from kvstore.index.blocks import Workspace
from kvstore.index.keys import packed_keys
from kvstore.index.payload import AllCleared, BlocksStored, read_payload

BATCH_PAGES: Final = 2_048
_BATCH_RUNS: Final = 512
PENDING_PAGES_MAX = 1_000_000
"""Maximum waiting pages of an announcement; with more, no events are read."""
_RUN_PAGES: Final = 16
"""A run of pages needs as much memory as this many pages."""
_RUN_BYTES_MAX: Final = 1 << 16
SNAPSHOT_PAGES_S: Final = 50_000
"""Pages of snapshots that are announced per second; live changes are not slowed down."""
RENEW_NS: Final = 3_000_000_000
AGAIN_NS: Final = 25 * 60 * 1_000_000_000
"""After this time all pages are announced again."""
_PAUSE_NS_MIN: Final = 100_000_000
_PAUSE_NS_MAX: Final = 5_000_000_000
_STEP_EVENTS: Final = 256


class _Run:
    """Consecutive changes of one kind."""

    __slots__ = ("names", "paced", "sign", "start", "stored")

    def __init__(self, stored: bool, sign: str, paced: bool, names: bytes) -> None:  # noqa: FBT001
        self.stored = stored
        self.sign = sign
        self.paced = paced
        self.names = bytearray(names)
        self.start = 0


class PageAnnouncement:
    """One announcement of all pages; a feed for the follower of the node's own events.

    Args:
        token: see there.
        names: names the pages.
        workspace: buffers for decoding events; None = its own.

    Attributes:
        token: names it at the store; unique.
        number: its number; 0 = none yet.
        batch: number of the next batch, starting with 1.
        waiting: pages that are not announced yet.
        over: something may have been missed, so it is void.
        left_out: always 0: nothing is left out.
        published: publication time of the newest batch of events, seconds since the epoch.
    """

    left_out = 0

    def __init__(self, token: str, names: EntryNames, workspace: Workspace | None = None) -> None:
        self.token = token
        self.number = 0
        self.batch = 1
        self.waiting = 0
        self.over = False
        self.published = 0.0
        self.workspace = workspace or Workspace(0)
        self._names = names
        self._runs: deque[_Run] = deque()
        self._sent: list[ChangedPages] = []  # the batch that is on its way
        self._taken = 0  # pages taken out of the queue, ever
        self._complete_at: int | None = None
        self._has_pages = False

    # ---- what the follower tells ------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether no further events should be read now."""
        return self.waiting + _RUN_PAGES * len(self._runs) >= PENDING_PAGES_MAX

    def add(self, space: str, shard: str, medium: str, keys: bytes) -> None:
        """Add pages of a snapshot."""
        self._put(stored=True, medium=medium, paced=True, names=self._names.of(space, shard, keys))

    def apply(self, payload: bytes) -> Iterator[None]:
        """Apply one batch of events in steps.

        Raises:
            UnreadableError: it cannot be read.
        """
        space = self.workspace
        self.published, events, _ = read_payload(payload, space.chains, space.spots)
        for number, event in enumerate(events, 1):
            if isinstance(event, AllCleared):
                self.clear()
            elif event.space is not None and event.shard_digest is not None:
                keys = packed_keys(event.block_hashes)
                self._put(
                    stored=isinstance(event, BlocksStored), medium=event.medium or "", paced=False,
                    names=self._names.of(event.space, event.shard_digest, keys),
                )  # fmt: skip
            if not number % _STEP_EVENTS:
                yield

    def clear(self) -> None:
        """Something was missed, or the node has lost all pages."""
        if self._has_pages:
            self.over = True
            self._runs.clear()
            self._sent = []
            self.waiting = 0

    def live(self, *, counts: bool) -> None:
        """``counts``: whether all of the node's pages have been reported here."""
        if counts and self._complete_at is None:
            self._complete_at = self._taken + self.waiting

    def _put(self, *, stored: bool, medium: str, paced: bool, names: bytes) -> None:
        sign = SIGNS.get(medium)
        if sign is None or not names or self.over:
            return
        self._has_pages = True
        self.waiting += len(names) // NAME_BYTES
        last = self._runs[-1] if self._runs else None
        if (
            last is not None
            and (last.stored, last.sign, last.paced) == (stored, sign, paced)
            and len(last.names) < _RUN_BYTES_MAX
        ):
            last.names += names
        else:
            self._runs.append(_Run(stored, sign, paced, names))

    # ---- what is announced ------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether all pages that existed when it started are announced."""
        return self._complete_at is not None and not self._sent and self._taken >= self._complete_at

    @property
    def is_paced(self) -> bool:
        """Whether the next pages belong to a snapshot."""
        return not self._sent and bool(self._runs) and self._runs[0].paced

    @property
    def has_more(self) -> bool:
        """Whether there is something to announce."""
        return bool(self._sent or self._runs)

    def next_changes(self) -> list[ChangedPages]:
        """The next batch; repeated until :meth:`sent` is called."""
        if not self._sent:
            room, paced = BATCH_PAGES, self.is_paced
            while self._runs and room and len(self._sent) < _BATCH_RUNS:
                run = self._runs[0]
                if run.paced and not paced:
                    break
                end = min(run.start + room * NAME_BYTES, len(run.names))
                names = bytes(run.names[run.start : end])
                self._sent.append(ChangedPages(run.stored, run.sign, names))
                room -= len(names) // NAME_BYTES
                run.start = end
                if end == len(run.names):
                    self._runs.popleft()
            self._taken += BATCH_PAGES - room
            self.waiting -= BATCH_PAGES - room
        return self._sent

    def sent(self) -> int:
        """The batch was carried out; returns its number of pages."""
        pages = sum(len(one.names) for one in self._sent) // NAME_BYTES
        self._sent = []
        self.batch += 1
        return pages


@dataclass(frozen=True, slots=True)
class Claim:
    """Get a number for an announcement, then :meth:`Announcing.claimed`."""

    announcement: PageAnnouncement


@dataclass(frozen=True, slots=True)
class ChangeEntries:
    """Send the next batch of an announcement, then :meth:`Announcing.changed`."""

    announcement: PageAnnouncement


@dataclass(frozen=True, slots=True)
class Renew:
    """Renew these numbers, then :meth:`Announcing.renewed`.

    Attributes:
        numbers: each with its token and last batch.
    """

    numbers: dict[int, AnnouncedNumber]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Make a number void, then :meth:`Announcing.withdrawn`."""

    number: int
    token: str


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Do nothing until this time, on the monotonic clock, or until there is news."""

    until_ns: int


Step = Claim | ChangeEntries | Renew | Withdraw | WaitUntil


class Announcing:
    """What to announce next.

    Args:
        begin: creates an announcement without pages, with a new token.

    Attributes:
        present: the announcement that counts; None = none is complete yet.
        coming: one that is not complete yet.
        faults: failures, by cause.
        trouble: the cause of the last failure; empty if the last step succeeded.
        pages: pages announced, changes included.
        completed: announcements that became complete.
    """

    def __init__(self, begin: Callable[[], PageAnnouncement]) -> None:
        self.present: PageAnnouncement | None = None
        self.coming: PageAnnouncement | None = None
        self.faults: Counter[str] = Counter()
        self.trouble = ""
        self.pages = 0
        self.completed = 0
        self._begin = begin
        self._withdrawn: deque[Withdraw] = deque()
        self._renewed_ns: int | None = None
        self._began_ns = 0  # when the present one began
        self._coming_ns = 0
        self._paced_ns = 0  # pages of snapshots must wait until then
        self._not_before_ns = 0
        self._claim_ns = 0
        self._pause_ns = _PAUSE_NS_MIN
        self._claim_pause_ns = _PAUSE_NS_MIN

    @property
    def announcements(self) -> list[PageAnnouncement]:
        """The active announcements with a number."""
        both = (self.present, self.coming)
        return [one for one in both if one is not None and one.number and not one.over]

    def next(self, now_ns: int) -> Step:
        """What to do now; the same until it is done or time passes."""
        if now_ns < self._not_before_ns:
            return WaitUntil(self._not_before_ns)
        self._settle(now_ns)
        live = self.announcements
        if self._renewed_ns is None:
            self._renewed_ns = now_ns
        if live and now_ns >= self._renewed_ns + RENEW_NS:
            return Renew({one.number: AnnouncedNumber(one.token, one.batch - 1) for one in live})
        if self._withdrawn:
            return self._withdrawn[0]
        coming = self.coming
        if coming is not None and not coming.number:
            return Claim(coming) if now_ns >= self._claim_ns else WaitUntil(self._claim_ns)
        until_ns = self._renewed_ns + RENEW_NS
        for one in live:
            if one.has_more:
                if not one.is_paced or now_ns >= self._paced_ns:
                    return ChangeEntries(one)
                until_ns = min(until_ns, self._paced_ns)
        return WaitUntil(until_ns)

    def _settle(self, now_ns: int) -> None:
        """Start and end announcements."""
        present, coming = self.present, self.coming
        if coming is not None and coming.over:
            self._fell("gap", now_ns)
            self._drop(coming)
            coming = self.coming = None
        if coming is not None and coming.complete:
            if present is not None:
                self._drop(present)
            self.present, self._began_ns, self.coming = coming, self._coming_ns, None
            self.completed += 1
            self._claim_pause_ns = _PAUSE_NS_MIN
            present, coming = self.present, None
        if coming is None:
            if present is not None and present.over:
                self._fell("gap", now_ns)
                self._drop(present)
                present = self.present = None
            if present is None or now_ns >= self._began_ns + AGAIN_NS:
                self.coming, self._coming_ns = self._begin(), now_ns

    def _fell(self, cause: str, now_ns: int) -> None:
        """An announcement is void; the next one must not start too soon."""
        self.faults[cause] += 1
        self._claim_ns = now_ns + self._claim_pause_ns
        self._claim_pause_ns = min(2 * self._claim_pause_ns, _PAUSE_NS_MAX)

    def _drop(self, one: PageAnnouncement) -> None:
        if one.number:
            self._withdrawn.append(Withdraw(one.number, one.token))

    # ---- what became of a step --------------------------------------------------------------

    def claimed(self, one: PageAnnouncement, number: int) -> None:
        """An announcement got a number."""
        self._went_well()
        one.number = number

    def changed(self, one: PageAnnouncement, now_ns: int, *, done: bool, paced: bool) -> None:
        """A batch was carried out, or its announcement is lost.

        Args:
            one: the announcement.
            now_ns: the monotonic clock.
            done: True = carried out, False = lost.
            paced: its pages belonged to a snapshot.
        """
        self._went_well()
        if one.over:
            return  # meanwhile
        if not done:
            self._lost(one, now_ns)
            return
        pages = one.sent()
        self.pages += pages
        if paced:
            self._paced_ns = max(self._paced_ns, now_ns - _PAUSE_NS_MIN) + (
                pages * 1_000_000_000 // SNAPSHOT_PAGES_S
            )

    def renewed(self, lost: list[int], now_ns: int) -> None:
        """Numbers were renewed, except the lost ones."""
        self._went_well()
        self._renewed_ns = now_ns
        for one in self.announcements:
            if one.number in lost:
                self._lost(one, now_ns)

    def withdrawn(self) -> None:
        """The first number to withdraw was withdrawn."""
        self._went_well()
        self._withdrawn.popleft()

    def failed(self, cause: str, now_ns: int) -> None:
        """The step failed; it is repeated after a pause."""
        self.faults[cause] += 1
        self.trouble = cause
        self._not_before_ns = now_ns + self._pause_ns
        self._pause_ns = min(2 * self._pause_ns, _PAUSE_NS_MAX)

    def _went_well(self) -> None:
        self._pause_ns = _PAUSE_NS_MIN
        self.trouble = ""

    def _lost(self, one: PageAnnouncement, now_ns: int) -> None:
        """The store no longer has an announcement, or not all of it."""
        self._fell("lost", now_ns)
        one.over = True
        self._drop(one)
        if one is self.present:
            self.present = None
        else:
            self.coming = None
