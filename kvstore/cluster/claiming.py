"""How a node claims the record of its name in a store, and when it must not. Pure.

A name belongs to the node whose record is there, as long as that node lives. A node that finds the
record of another one asks at its endpoint: it replaces the record of a dead node at once, that of a
silent one after its lease has expired, and that of a live one never.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvstore.cluster.records import NodeRecord, read_record, write_record

PUT_MAX: Final = 8
"""Maximum values that a process may have put, and that it withdraws when it leaves."""


class Presence(Enum):
    """The answer at the endpoint of another node's record."""

    LIVE = "live"
    """That node answers."""
    DEAD = "dead"
    """Nothing listens there, or another node does."""
    SILENT = "silent"
    """No answer in time, or none that identifies a node."""


@dataclass(frozen=True, slots=True)
class PutRecord:
    """Put the own record in place of this one; None = there is none."""

    expected: bytes | None


@dataclass(frozen=True, slots=True)
class AskThere:
    """Ask at the endpoint of this record whether its node lives."""

    record: NodeRecord


@dataclass(frozen=True, slots=True)
class TryLater:
    """Look again a moment later."""

    why: str


@dataclass(frozen=True, slots=True)
class RefuseName:
    """The name is that of another node."""

    why: str


class OwnRecord(Enum):
    """The state of the own record."""

    KEPT = "kept"
    LOST = "lost"


ClaimStep = PutRecord | AskThere | TryLater | RefuseName


class NameClaim:
    """The claim of one process to the name of its node.

    Args:
        record: of this node.

    Attributes:
        record: the record of this node.
        value: the same as stored.
        put: the values that this process may have put there since the store last confirmed one,
            including that; the last :data:`PUT_MAX`, oldest first.
    """

    def __init__(self, record: NodeRecord) -> None:
        """Nothing is known of the store yet.

        Args:
            record: of this node.
        """
        self._boots: set[bytes] = set()
        #: Boot id of the node that has replaced this one's record.
        self._heir = b""
        self.put: tuple[bytes, ...] = ()
        self.change(record)

    def change(self, record: NodeRecord) -> None:
        """The node has a new record; values of the old one still count as its own."""
        self.record = record
        self.value = write_record(record)
        self._boots.add(record.boot)

    def asked(self, value: bytes) -> None:
        """The store was asked to put this value: from now on it may be there."""
        self.put = (*(one for one in self.put if one != value), value)[-PUT_MAX:]

    def confirmed(self, value: bytes) -> None:
        """The store has put this value: all earlier ones are gone."""
        self.put = (value,)

    def there(self, found: bytes) -> ClaimStep:
        """What to do about the record under the own name; empty = there is none.

        A record with the own endpoint belongs to an earlier process, because this one has the
        listening socket now. But if it has replaced the own record, two machines use the same
        address, and the newer process keeps the name.
        """
        if not found:
            return PutRecord(None)
        try:
            record = read_record(self.record.name, found)
        except ValueError:
            return RefuseName("there is a record of this name that cannot be read")
        if record.boot in self._boots:
            return PutRecord(found)
        if record.endpoint != self.record.endpoint:
            return AskThere(record)
        if record.boot == self._heir:
            return self._refused(record)
        return PutRecord(found)

    def answered(self, found: bytes, presence: Presence) -> ClaimStep:
        """What to do about a record whose endpoint was asked.

        Args:
            found: that record.
            presence: the answer.
        """
        record = read_record(self.record.name, found)
        assert record.boot not in self._boots, "nobody asks for itself"
        if presence is Presence.DEAD:
            return PutRecord(found)
        if presence is Presence.LIVE:
            return self._refused(record)
        return TryLater(
            f"the node {record.name} at {record.endpoint} has this name and does not answer;"
            " its lease has not run out"
        )

    def seen(self, found: bytes | None) -> OwnRecord | RefuseName:
        """The consequence of finding this under the own name, after the own record was put there.

        Args:
            found: a record; None = there is none.
        """
        if found == self.value:
            return OwnRecord.KEPT
        try:
            record = read_record(self.record.name, found or b"")
        except ValueError:
            return OwnRecord.LOST
        if record.boot in self._boots:
            return OwnRecord.LOST
        self._heir = record.boot
        return self._refused(record)

    def _refused(self, record: NodeRecord) -> RefuseName:
        return RefuseName(
            f"another live node is called {record.name!r}: boot {record.boot.hex()} at"
            f" {record.endpoint}"
        )
