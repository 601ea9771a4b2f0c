"""The decisions of the session with one other node; its owner carries them out. Pure."""

from dataclasses import dataclass

from kvstore.cluster.bringing import BringEnded
from kvstore.cluster.ways import Way
from kvstore.protocol import wire
from kvstore.state.remote.jobs import FetchEnd, PeerFetch


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the other node."""

    message: wire.Request


@dataclass(frozen=True, slots=True)
class StartTransfer:
    """Read leased pages; its number is that of the fetch.

    Attributes:
        fetch: whose leading slots get the pages.
        ways: the transports of both nodes, the preferred one first; at least one.
        lent: the lease.
        deadline_ns: end of the transfer.
    """

    fetch: PeerFetch
    ways: tuple[Way, ...]
    lent: wire.Lent
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class CancelTransfer:
    """Nobody waits for the transfer of this fetch any more."""

    job: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Tell the node that a fetch has ended."""

    end: FetchEnd


@dataclass(frozen=True, slots=True)
class SlotsSettled:
    """Tell the node that nothing writes into the slots of an ended fetch any more."""

    job: int


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Close the connection.

    Attributes:
        cause: ``refused``, ``protocol``, ``silent`` or ``spaces``.
        why: description for the log.
        field: what differs between the two nodes, if that refuses the session.
    """

    cause: str
    why: str
    field: str = ""


@dataclass(frozen=True, slots=True)
class PeerStanding:
    """Tell the node that a session with this boot of the other node is up.

    ``boot`` empty = none is any more.
    """

    peer: str
    boot: bytes


CarriedOut = StartTransfer | CancelTransfer | Ended | SlotsSettled | PeerStanding | BringEnded
"""What is carried out for the node; the rest concerns the connection."""
Effect = Send | CloseLink | CarriedOut
