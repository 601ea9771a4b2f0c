"""Columns: the data of each page of a run, packed in bytes. Pure."""

import struct
from array import array
from collections.abc import Sequence
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from kvstore.state.tree.places import Place
from kvstore.state.tree.slots import Slot

SLOT_COLUMN: Final = 8
"""Bytes of a slot."""
PLACE_COLUMN: Final = 16
"""Bytes of a place."""
_PLACE: Final = struct.Struct("<QQ")
_FEW: Final = 17
_SLOTS: Final = tuple([struct.Struct(f"<{count}Q") for count in range(_FEW)])
"""Columns of so many slots: of few they take less time than arrays."""
_SLOT: Final = _SLOTS[1]
_EMPTY: Final[dict[int, bytes]] = {}
_SPARSE: Final = 16
"""Entries of a table for each value that is marked in it."""
_TABLE_BITS_MAX: Final = 26
"""A table has at most two to the power of this entries, of a byte each."""


def no_columns() -> dict[int, bytes]:
    """The columns of a node without pages; shared by all such nodes, and never changed."""
    return _EMPTY


def pack_slots(slots: Sequence[Slot]) -> bytes:
    """A column of slots."""
    return _SLOTS[len(slots)].pack(*slots) if len(slots) < _FEW else array("Q", slots).tobytes()


def unpack_slots(column: bytes) -> list[Slot]:
    """The slots of a column."""
    count = len(column) // SLOT_COLUMN
    if count < _FEW:
        return list(_SLOTS[count].unpack(column))
    return cast("list[Slot]", memoryview(column).cast("Q").tolist())


def last_slots(column: bytes, count: int) -> list[Slot]:
    """The last ``count`` slots of a column, one or more."""
    return unpack_slots(column[-count * SLOT_COLUMN :])


def last_slot(column: bytes) -> Slot:
    """The last slot of a column."""
    (slot,) = _SLOT.unpack_from(column, len(column) - SLOT_COLUMN)
    return Slot(slot)


def pack_place(place: Place) -> bytes:
    """A column of one place."""
    return _PLACE.pack(place.segment, place.offset)


def pack_places(place: Place, each: int, count: int) -> bytes:
    """A column of ``count`` adjacent records of ``each`` bytes; ``place`` is the first one's."""
    if count == 1:
        return pack_place(place)
    column = array("Q", [place.segment]) * (2 * count)
    column[1::2] = array("Q", range(place.offset, place.offset + count * each, each))
    return column.tobytes()


def pack_records(segment: int, offsets: npt.NDArray[np.uint64]) -> bytes:
    """A column of records of one segment that start at these offsets."""
    column = np.empty((len(offsets), 2), "<u8")
    column[:, 0], column[:, 1] = segment, offsets
    return column.tobytes()


def unpack_place(column: bytes, number: int = 0) -> Place:
    """The place of one page of a column."""
    segment, offset = _PLACE.unpack_from(column, number * PLACE_COLUMN)
    return Place(segment, offset)


def unpack_places(column: bytes) -> list[Place]:
    """The places of a column."""
    return [Place(segment, offset) for segment, offset in _PLACE.iter_unpack(column)]


def replace_place(column: bytes, number: int, place: Place) -> bytes:
    """The column with a new place for one of its pages."""
    at = number * PLACE_COLUMN
    return column[:at] + pack_place(place) + column[at + PLACE_COLUMN :]


def with_column(columns: dict[int, bytes], shard: int, column: bytes) -> dict[int, bytes]:
    """The columns, with another one for a shard."""
    return {**columns, shard: column} if columns else {shard: column}


def without(columns: dict[int, bytes], shard: int) -> dict[int, bytes]:
    """The columns of all other shards."""
    if len(columns) == 1:
        assert shard in columns
        return _EMPTY
    return {at: column for at, column in columns.items() if at != shard}


def leading(columns: dict[int, bytes], size: int) -> dict[int, bytes]:
    """The first ``size`` bytes of each column."""
    if not columns:
        return _EMPTY
    return {at: column[:size] for at, column in columns.items()}


def between(columns: dict[int, bytes], begin: int, end: int) -> dict[int, bytes]:
    """The bytes of each column from ``begin`` up to ``end``."""
    if not columns:
        return _EMPTY
    return {at: column[begin:end] for at, column in columns.items()}


def trailing(columns: dict[int, bytes], size: int) -> dict[int, bytes]:
    """Each column without its first ``size`` bytes."""
    if not columns:
        return _EMPTY
    return {at: column[size:] for at, column in columns.items()}


def come_again(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """For each value: whether an equal one comes before it."""
    again = np.zeros(len(values), np.bool_)
    ordered = np.sort(values)  # much faster than with their order, and mostly all are different
    if (ordered[1:] == ordered[:-1]).any():
        order = np.argsort(values, kind="stable")
        ordered = values[order]
        again[order[1:]] = ordered[1:] == ordered[:-1]
    return again


def may_be_in(
    values: npt.NDArray[np.uint64], some: npt.NDArray[np.uint64]
) -> npt.NDArray[np.bool_]:
    """For each value: whether it may be in ``some``; of those that are not, few may."""
    bits = np.uint64((1 << min((len(some) * _SPARSE).bit_length(), _TABLE_BITS_MAX)) - 1)
    marked = np.zeros(int(bits) + 1, np.bool_)
    marked[some & bits] = True
    found: npt.NDArray[np.bool_] = marked[values & bits]
    return found
