"""How a node claims the record of its name in a store, and when it must not. Pure.

A name belongs to the node whose record is there, as long as that node lives. Who finds the record
of another one asks at its endpoint, and takes the place of the dead at once, of the silent when
their lease has run out, and of the living never.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvstore.cluster.records import NodeRecord, read_record, write_record

PUT_MAX: Final = 8
"""Values that a process may have put, and that it takes away when it leaves."""


class Presence(Enum):
    """What a node finds where the record of another one says that it is."""

    LIVE = "live"
    """That node answers."""
    DEAD = "dead"
    """Nobody listens there, or another node does."""
    SILENT = "silent"
    """No answer in time, or none that says who answers."""


@dataclass(frozen=True, slots=True)
class PutRecord:
    """Put the own record where this one is; None = where none is."""

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
    """What has become of the own record."""

    KEPT = "kept"
    LOST = "lost"


ClaimStep = PutRecord | AskThere | TryLater | RefuseName


class NameClaim:
    """The claim of one process to the name of its node.

    Attributes:
        record: the record of this node.
        value: the same as it is to be in the store.
        put: what this process may have put there since the store last confirmed a value, the
            confirmed one included; the last :data:`PUT_MAX`, oldest first.
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
        """The node has another record from now on; what it had before is its own still."""
        self.record = record
        self.value = write_record(record)
        self._boots.add(record.boot)

    def asked(self, value: bytes) -> None:
        """The store is asked to put this value: from now on it may be there."""
        self.put = (*(one for one in self.put if one != value), value)[-PUT_MAX:]

    def confirmed(self, value: bytes) -> None:
        """The store has put this value: whatever was asked for before is gone."""
        self.put = (value,)

    def there(self, found: bytes) -> ClaimStep:
        """What to do about the record that is under the own name; empty = there is none.

        A record with the own endpoint is that of an earlier process, for this one has its
        listening socket now; but not one that has come in place of the own record: then two
        machines say the same address, and the newer process keeps the name.
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
        """What to do about a record whose endpoint has been asked.

        Args:
            found: that record.
            presence: what was found there.
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
        """What it means that this is under the own name now, after it had been put there.

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
