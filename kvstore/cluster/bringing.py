"""The requests of one session that ask the other node to fetch pages; pure.

A request goes through these stages, and its end is reported once, at its deadline at the latest::

    OPENING ──SpaceOpened──► ASKED ──Brought──► reported
       │ refused, link lost    │ refused, link lost, deadline
       └──────► reported       └──► reported; a later answer is ignored

The other node fetches the pages over its own session with this node. Pages that it got after this
side gave up stay there: it reports them the next time it is asked.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kvstore.protocol import wire
from kvstore.protocol.errors import (
    CapacityError,
    KVStoreError,
    PeerUnreachable,
    ProtocolError,
    TransferTimeout,
)
from kvstore.protocol.page import ShardSpec, SpaceIdentity
from kvstore.state.remote.jobs import BringEnd, PeerBring

BRINGS_MAX: Final = 32
"""Maximum requests of one session that have not ended."""
UNANSWERED_MAX: Final = 1024
"""Maximum answers that are still expected although the requests were given up."""
_MS: Final = 1_000_000
_ANSWER_MS: Final = 50
"""The other node stops waiting this long before the deadline, but at most a quarter of the time
before, so that its answer arrives in time."""

OpenedPair = tuple[SpaceIdentity, ShardSpec]


@dataclass(frozen=True, slots=True)
class BringEnded:
    """Report that the other node has pages, or does not answer."""

    end: BringEnd


class Bringing:
    """All such requests of one session.

    Args:
        peer: name of the other node.
        numbers: of requests.
        tell: gets the ends.
    """

    def __init__(
        self, peer: str, numbers: Iterator[int], tell: Callable[[BringEnded], None]
    ) -> None:
        self._peer = peer
        self._numbers = numbers
        self._tell = tell
        #: Not ended, by their own numbers.
        self._jobs: dict[int, PeerBring] = {}
        #: Asked, by the id of the request.
        self._asked: dict[int, PeerBring] = {}
        #: Ids of requests that nobody waits for any more.
        self._unanswered: set[int] = set()

    def begin(self, job: PeerBring, now_ns: int, minor: int | None) -> bool:
        """Start a request, which waits for :meth:`opened` or :meth:`ask`; False if it has ended.

        ``minor``: minor version of the other node's protocol; None = there is no session with it.
        """
        assert job.number not in self._jobs
        self._jobs[job.number] = job
        why: KVStoreError | None = None
        if minor is None:
            why = PeerUnreachable(f"no session with node {self._peer}")
        elif minor < wire.COPIES_MINOR:
            spoken = f"protocol {wire.PROTOCOL_MAJOR}.{minor}"
            why = ProtocolError(f"node {self._peer} speaks {spoken}: it brings no pages when asked")
        elif len(self._jobs) > BRINGS_MAX:
            why = CapacityError(f"node {self._peer} brings pages for {BRINGS_MAX} requests")
        elif now_ns >= job.deadline_ns:
            why = self._timeout()
        if why is not None:
            self._end(job, 0, why)
        return why is None

    def ask(self, job: PeerBring, numbers: tuple[int, int], now_ns: int) -> wire.Bring:
        """The message of a request whose space and shard are open."""
        request = next(self._numbers)
        self._asked[request] = job
        left_ms = (job.deadline_ns - now_ns) // _MS
        wait_ms = max(0, left_ms - min(_ANSWER_MS, left_ms // 4)) if not job.gone else 0
        return wire.Bring(
            request, *numbers, job.keys, job.first, wait_ms, job.idle_ms, job.gone
        )  # fmt: skip

    def opened(
        self, pair: OpenedPair, numbers: tuple[int, int], now_ns: int
    ) -> list[wire.Bring]:  # fmt: skip
        """The messages of the requests that waited for a space and shard."""
        return [self.ask(job, numbers, now_ns) for job in self._waiting(pair)]

    def refused(self, pair: OpenedPair, why: KVStoreError) -> None:
        """The other node does not open a space and shard."""
        for job in self._waiting(pair):
            self._end(job, 0, why)

    def answered(self, answer: wire.Brought) -> bool:
        """The other node has answered; False if the request is unknown."""
        if answer.id in self._unanswered:
            self._unanswered.remove(answer.id)
            return True
        job = self._asked.get(answer.id)
        if job is None or not 0 <= answer.pages <= len(job.keys) // 32 - job.first:
            return False
        del self._asked[answer.id]
        self._end(job, answer.pages, None)
        return True

    def failed(self, request: int, why: KVStoreError) -> bool:
        """The other node has refused a request; False if the request is unknown."""
        if request in self._unanswered:
            self._unanswered.remove(request)
            return True
        job = self._asked.pop(request, None)
        if job is None:
            return False
        self._end(job, 0, why)
        return True

    def lost(self, why: KVStoreError) -> None:
        """The connection was lost: all requests end."""
        self._asked.clear()
        self._unanswered.clear()
        for job in list(self._jobs.values()):
            self._end(job, 0, why)

    def advance(self, now_ns: int) -> bool:
        """Apply all deadlines up to ``now_ns``; False if too many requests are unanswered."""
        late = [job for job in self._jobs.values() if now_ns >= job.deadline_ns]
        for job in late:
            for request in [id_ for id_, one in self._asked.items() if one is job]:
                del self._asked[request]
                self._unanswered.add(request)
            self._end(job, 0, self._timeout())
        return len(self._unanswered) <= UNANSWERED_MAX

    def deadlines(self) -> list[int]:
        """When to call :meth:`advance`."""
        return [job.deadline_ns for job in self._jobs.values()]

    def _waiting(self, pair: OpenedPair) -> list[PeerBring]:
        """Requests that have not been sent, of one space and shard."""
        sent = {job.number for job in self._asked.values()}
        return [
            job
            for job in self._jobs.values()
            if job.number not in sent and (job.identity, job.shard) == pair
        ]

    def _timeout(self) -> TransferTimeout:
        return TransferTimeout(f"node {self._peer} did not bring the pages in time")

    def _end(self, job: PeerBring, pages: int, why: KVStoreError | None) -> None:
        del self._jobs[job.number]
        self._tell(BringEnded(BringEnd(job.number, pages, why)))
