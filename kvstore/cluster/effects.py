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
    """Read leased pages; the transfer has the number of the fetch.

    Attributes:
        fetch: its leading slots get the pages.
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
    """Cancel the transfer of a fetch that was given up."""

    job: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Report that a fetch has ended."""

    end: FetchEnd


@dataclass(frozen=True, slots=True)
class SlotsSettled:
    """Report that nothing writes into the slots of an ended fetch any more."""

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
    """Report that a session with this boot of the other node is up.

    ``boot`` empty = it is down.
    """

    peer: str
    boot: bytes


CarriedOut = StartTransfer | CancelTransfer | Ended | SlotsSettled | PeerStanding | BringEnded
"""Effects that are carried out for the node; the others concern the connection."""
Effect = Send | CloseLink | CarriedOut
