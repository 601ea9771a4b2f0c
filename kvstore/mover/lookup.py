"""Reads the table of the prefix index in C (``_table.c``), without the GIL.

:mod:`kvstore.index.table` and :mod:`kvstore.index.runs` say what is found, and do the same where
the library is absent.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.mover.binary import LIBRARY, load
from kvstore.mover.chains import WordBuffer

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_ROW_WORDS: Final = 16
_ROOM_LEAST: Final = 4_096


class _Table(ctypes.Structure):
    """``struct index_table``."""

    _fields_ = (
        ("states", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("region_lines", ctypes.c_int64),
        ("sets", ctypes.c_int64),
        ("factor", ctypes.c_uint64),
        ("segment_shift", ctypes.c_int64),
        ("tag_shift", ctypes.c_int64),
    )


class _Needs(ctypes.Structure):
    """``struct prefix_needs``."""

    _fields_ = (
        ("candidates", ctypes.c_int64),
        ("parts", ctypes.c_void_p),
        ("words", ctypes.c_void_p),
        ("windows", ctypes.c_void_p),
        ("at", ctypes.c_void_p),
        ("masks", ctypes.c_void_p),
        ("since", ctypes.c_void_p),
    )


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]  # half the time of `ctypes.data`
    return address


class TableAddresses:
    """Where the parts of a table are; keeps them mapped.

    Args:
        arrays: states, rows (uint64 [sets, 16]) and slots.
        region_lines: lines in a region.
        factor: with which chains are multiplied.
        shifts: of the segment and of the tag.
    """

    def __init__(
        self,
        arrays: tuple[Words, Words, Words],
        region_lines: int,
        factor: int,
        shifts: tuple[int, int],
    ) -> None:
        self._arrays = arrays
        states, rows, slots = map(_address, arrays)
        self._table = _Table(states, rows, slots, region_lines, len(arrays[1]), factor, *shifts)
        self.address = ctypes.addressof(self._table)


class NativeNeeds:
    """The requirements of candidates, as ``_table.c`` reads them. For one thread at a time.

    Args:
        library: the built one.
        candidates: the parts of each: the window (0 = none), and word of a row → bits that can
            provide it.
    """

    def __init__(
        self, library: ctypes.CDLL, candidates: Sequence[Sequence[tuple[int, Mapping[int, int]]]]
    ) -> None:
        size, memory = ctypes.c_int64, ctypes.c_void_p
        self._usable = library.kv_usable_prefixes
        self._usable.restype = size
        self._usable.argtypes = [memory, memory, memory, size, memory, memory, memory]
        self._candidates = len(candidates)
        parts = [part for one in candidates for part in one]
        pairs = [pair for _, masks in parts for pair in masks.items()]
        assert all(0 <= word < _ROW_WORDS for word, _ in pairs), "the library reads at these words"
        self._kept = (
            np.cumsum([0, *map(len, candidates)], dtype=np.int64),
            np.cumsum([0, *(len(masks) for _, masks in parts)], dtype=np.int64),
            np.array([window for window, _ in parts], dtype=np.int64),
            np.array([word for word, _ in pairs], dtype=np.int32),
            np.array([mask for _, mask in pairs], dtype=np.uint64),
            np.zeros(len(parts), dtype=np.int64),
        )
        self._needs = _Needs(self._candidates, *[_address(one) for one in self._kept])
        self._address = ctypes.addressof(self._needs)

    def usable(self, rows: Words, ends: Numbers) -> tuple[Numbers, Numbers, Bytes, int]:
        """How far prefixes are usable.

        Args:
            rows: uint64 [k, 16], contiguous, the holders of each run.
            ends: int64 [k], contiguous, the number of blocks up to the end of each.

        Returns:
            Of each candidate: blocks of its longest usable prefix, int64; leading blocks that have
            all its parts, int64; whether each run has them, uint8 [candidates, k]; then the number
            of candidates that have them in a run after one that has not.
        """
        usable, leading = np.empty((2, self._candidates), dtype=np.int64)
        there = np.empty((self._candidates, len(ends)), dtype=np.uint8)
        torn: int = self._usable(
            self._address, _address(rows), _address(ends), len(ends), _address(usable),
            _address(leading), _address(there),
        )  # fmt: skip
        return usable, leading, there, torn


class NativeLookup:
    """``_table.c``, called through ctypes. For one thread at a time: each reader has its own."""

    def __init__(self, library: ctypes.CDLL) -> None:
        size, memory = ctypes.c_int64, ctypes.c_void_p
        self._find = library.kv_table_find
        self._find.restype = size
        self._find.argtypes = [memory, memory, size, size, memory, memory, memory, memory]
        self._make_room(_ROOM_LEAST)

    def _make_room(self, blocks: int) -> None:
        self._room = blocks
        self._sets = WordBuffer(blocks, np.uint32)
        self._ends = np.zeros(blocks, dtype=np.int64)
        self._rows = np.zeros((blocks, _ROW_WORDS), dtype=np.uint64)
        self._undecided = np.zeros(1, dtype=np.int64)
        self._addresses = tuple(
            map(_address, (self._sets.array, self._ends, self._rows, self._undecided))
        )

    def find(self, table: TableAddresses, chains: Words, tries: int) -> tuple[Numbers, Words, int]:
        """Find the holders of one prompt's blocks.

        Args:
            table: to read.
            chains: uint64 [n], contiguous.
            tries: how often a segment that has moved is looked at again.

        Returns:
            Ends of runs of blocks with equal holders, int64 [k]; their rows, uint64 [k, 16]; and
            how many blocks count as absent because their segments have moved again and again.
        """
        chains = np.ascontiguousarray(chains)
        count = len(chains)
        if count > self._room:
            self._make_room(2 * count)
        runs: int = self._find(table.address, _address(chains), count, tries, *self._addresses)
        return self._ends[:runs].copy(), self._rows[:runs].copy(), int(self._undecided[0])


LOOKUP: Final = load(LIBRARY)
"""The library; None if it is absent."""
