"""A fetch of a session from request to end, and the space of its pages. Pure."""

from dataclasses import dataclass, field
from enum import Enum

from kvstore.protocol import wire
from kvstore.state.remote.jobs import PeerFetch


class FetchStage(Enum):
    """What a fetch waits for."""

    OPENING = 0
    LEASING = 1
    READING = 2
    UNSETTLED = 3


@dataclass(slots=True, eq=False)
class SessionFetch:
    """One fetch; ``connection``: the number of the connection that has its lease.

    ``asked_ns``: when its lease was requested.
    """

    job: PeerFetch
    stage: FetchStage = FetchStage.OPENING
    connection: int = 0
    request: int = 0
    lease: int = 0
    asked_ns: int = 0
    lent: wire.Lent | None = None


@dataclass(slots=True)
class OpenedPlace:
    """A space and shard on this connection; ``numbers`` None = not answered yet."""

    numbers: tuple[int, int] | None = None
    waiting: list[SessionFetch] = field(default_factory=list)
