"""The files of a log as a model knows them: what was handed to the disk, and what a start reads."""

from dataclasses import dataclass, field
from itertools import count
from random import Random

import numpy as np
from hypothesis import strategies as st

from kvstore.state.disk import choices, plans
from kvstore.state.disk import segments as keeper
from kvstore.state.disk.jobs import DiskSync
from kvstore.state.table.adopt import FoundSegment
from kvstore.state.tree.places import Place, footer_bytes, record_bytes
from tests.state.world import DIGEST, PAGE, key

SEGMENTS = 5
SEGMENT_BYTES = 112 << 10
"""Four or five records and a footer."""
RECORD = record_bytes(PAGE)
NAMES = ("a", "ab", "abc", "b", "c", "cd", "e", "f", "g", "h")
PATH_OF = {key(name): name for name in NAMES}
DROPS_MAX, COPIES_MAX, COPIES_A_JOB = keeper.DROPS_MAX, keeper.COPIES_MAX, keeper.COPIES_A_JOB
STEP_PAGES = plans.STEP_PAGES
STEPS = st.tuples(
    st.sampled_from((1, DROPS_MAX)),
    st.sampled_from((1, 2, COPIES_MAX)),
    st.sampled_from((1, STEP_PAGES)),
)
"""For :func:`set_steps`."""


def set_steps(drops: int = DROPS_MAX, copies: int = COPIES_MAX, runs: int = STEP_PAGES) -> None:
    """How many pages a reclaim drops and copies at a time, and at how many runs a step looks."""
    keeper.DROPS_MAX = drops
    keeper.COPIES_MAX, keeper.COPIES_A_JOB = copies, min(copies, COPIES_A_JOB)
    plans.STEP_PAGES = choices.STEP_PAGES = runs


@dataclass(eq=False)
class Record:
    """What was handed to the disk; it is in the file at the latest when it is ``synced``."""

    place: Place
    size: int
    sequence: int
    names: tuple[str, ...]
    tombstone: bool = False
    synced: bool = False
    written: bool = False


@dataclass
class File:
    """A segment on the disk."""

    records: list[Record] = field(default_factory=list)
    sealed: bool = False


class Files:
    """All segments on the disk, by number.

    Attributes:
        used_numbers: of segments that there are, and were.
    """

    def __init__(self) -> None:
        self.by_number: dict[int, File] = {}
        self.used_numbers: set[int] = set()
        self._sequences = count(1)

    def record(
        self, place: Place, size: int, names: tuple[str, ...], *, tombstone: bool = False
    ) -> Record:
        """Put a record where the log says; nothing else may ever have been there."""
        if place.segment not in self.by_number:
            assert place.segment not in self.used_numbers, "a number is used once"
            self.used_numbers.add(place.segment)
            self.by_number[place.segment] = File()
        file = self.by_number[place.segment]
        assert not file.sealed
        end = max((one.place.offset + one.size for one in file.records), default=0)
        assert place.offset >= end, "a place is given away once"
        room = footer_bytes(len(file.records) + 1)
        assert place.offset + size + room <= SEGMENT_BYTES
        made = Record(place, size, next(self._sequences), names, tombstone)
        file.records.append(made)
        return made

    def synced(self) -> set[Place]:
        """Places of the records that no power cut takes."""
        return {one.place for one in self.records() if one.synced}

    def records(self) -> list[Record]:
        """Every record there is."""
        return [one for file in self.by_number.values() for one in file.records]

    def covered(self, job: DiskSync) -> list[Record]:
        """What a sync that begins now makes durable."""
        written = [one for one in self.records() if one.written]
        return [one for one in written if one.place.segment not in job.given_up]

    def cut_power(self, chance: Random) -> None:
        """What was not synced is there afterwards, or not."""
        for file in self.by_number.values():
            file.records = [one for one in file.records if one.synced or chance.random() < 0.5]
            for one in file.records:
                one.synced = one.written = True

    def found(self) -> list[FoundSegment]:
        """What a start reads, by the words of the format."""
        every = self.records()
        newest: dict[str, int] = {}
        for one in every:
            for name in one.names:
                newest[name] = max(newest.get(name, 0), one.sequence)
        found = []
        for number, file in sorted(self.by_number.items()):
            pages = [one for one in file.records if not one.tombstone]
            stand = [one for one in pages if newest[one.names[0]] == one.sequence]
            names = [one.names[0] for one in stand]
            found.append(
                FoundSegment(
                    number, SEGMENT_BYTES, file.sealed,
                    max((one.place.offset + one.size for one in file.records), default=0),
                    len(file.records), b"".join(key(name) for name in names),
                    b"".join(key(name[:-1]) or bytes(32) for name in names), DIGEST * len(stand),
                    np.array([one.place.offset for one in stand], np.uint64),
                    np.zeros(len(stand), np.uint16),
                    min((one.sequence for one in pages), default=0),
                    max((one.sequence for one in file.records if one.tombstone), default=0),
                )
            )  # fmt: skip
        return found
