"""The block hashes of one engine: name → chain value and holders. Pure.

A name stands for a block hash (:mod:`kvstore.mover.chains`). A block has a mask of **bits**, one
for each of the engine's holders that has it; without any it is removed. With the library a block
takes 17 bytes (up to 8 holders, then 18, 20 or 24) in arrays that are 73 to 87 % full.
"""

import ctypes
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.index.scope import ChainValues
from kvstore.mover.chains import Chains, NativeChains, WordBuffer

BITS_MAX: Final = 64
"""Maximum holders of one engine."""
_SLOTS_MIN: Final = 64
_MASKS: Final[dict[int, type[np.unsignedinteger[Any]]]] = {
    1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64,
}  # fmt: skip
Masks = npt.NDArray[np.uint64]


class _Table(ctypes.Structure):
    """``struct blocks`` in ``_chains.c``."""

    _fields_ = (
        ("names", ctypes.c_void_p),
        ("chains", ctypes.c_void_p),
        ("masks", ctypes.c_void_p),
        ("slots", ctypes.c_int64),
        ("used", ctypes.c_int64),
        ("width", ctypes.c_int64),
    )


class NativeBlockMap:
    """A hash table with linear probing, in arrays that ``_chains.c`` reads and writes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        size, memory = ctypes.c_int64, ctypes.c_void_p
        self._find = library.kv_blocks_find
        self._find.restype = size
        self._find.argtypes = [memory, memory, size, memory, memory]
        self._store = library.kv_blocks_store
        self._store.restype = size
        self._store.argtypes = [memory, memory, memory, size, size]
        self._remove = library.kv_blocks_remove
        self._remove.restype = size
        self._remove.argtypes = [memory, memory, size, size, memory]
        self._copy = library.kv_blocks_copy
        self._copy.restype = None
        self._copy.argtypes = [memory, memory]
        self._chain = library.kv_block_chain
        self._chain.restype = ctypes.c_uint64
        self._chain.argtypes = [memory, ctypes.c_uint64]
        self.clear()

    def __len__(self) -> int:
        used: int = self._table.used
        return used

    def clear(self) -> None:
        """Forget all blocks."""
        self._allocate(_SLOTS_MIN, 1)

    def chain(self, name: int) -> int:
        """Chain value of a block; 0 if it is unknown."""
        chain: int = self._chain(self._address, name)
        return chain

    def find(self, names: WordBuffer, count: int) -> tuple[ChainValues, Masks]:
        """Chain value and mask of each of the ``count`` first names; 0 and 0 if it is unknown."""
        chains, masks = np.empty(count, np.uint64), np.empty(count, np.uint64)
        self._find(self._address, names.address, count, chains.ctypes.data, masks.ctypes.data)
        return chains, masks

    def store(self, names: WordBuffer, count: int, chains: WordBuffer, at: int, bit: int) -> int:
        """Add a holder to blocks.

        Args:
            names: names of the blocks.
            count: number of blocks.
            chains: chain value of block i at ``at + i``.
            at: see ``chains``.
            bit: the holder.

        Returns:
            The number of blocks that are known with another chain value; they are left as they are.
        """
        table = self._table
        if (table.used + count) * 8 > table.slots * 7 or bit >= 8 * table.width:
            self._make_room(count, bit)
        conflicts: int = self._store(
            self._address, names.address, chains.address + 8 * at, count, bit
        )
        return conflicts

    def remove(self, names: WordBuffer, count: int, bit: int, out: WordBuffer, at: int) -> int:
        """Remove a holder from blocks, and write the chain values of those that had it.

        Args:
            names: names of the blocks.
            count: number of blocks.
            bit: the holder.
            out: gets the chain values, from ``at`` on.
            at: see ``out``.

        Returns:
            The number of chain values.
        """
        removed: int = self._remove(self._address, names.address, count, bit, out.address + 8 * at)
        return removed

    def _allocate(self, slots: int, width: int) -> None:
        self._arrays = (
            np.zeros(slots, np.uint64), np.zeros(slots, np.uint64), np.zeros(slots, _MASKS[width]),
        )  # fmt: skip
        names, chains, masks = (array.ctypes.data for array in self._arrays)
        self._table = _Table(names, chains, masks, slots, 0, width)
        self._address = ctypes.addressof(self._table)

    def _make_room(self, count: int, bit: int) -> None:
        table, arrays = self._table, self._arrays
        slots, width = table.slots, table.width
        if (table.used + count) * 8 > slots * 7:
            slots = max(slots * 6 // 5, (table.used + count) * 8 // 7 + 1)
        while bit >= 8 * width:
            width *= 2
        self._allocate(slots, width)
        self._copy(ctypes.addressof(table), self._address)
        del arrays  # kept until it was read


class PlainBlockMap:
    """The same in a dict, larger."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """As :meth:`NativeBlockMap.clear`."""
        self._blocks = {}

    def chain(self, name: int) -> int:
        """As :meth:`NativeBlockMap.chain`."""
        return self._blocks.get(name, (0, 0))[0]

    def find(self, names: WordBuffer, count: int) -> tuple[ChainValues, Masks]:
        """As :meth:`NativeBlockMap.find`."""
        found = [self._blocks.get(name, (0, 0)) for name in names.array[:count].tolist()]
        both = np.array(found, np.uint64).reshape(count, 2)
        return both[:, 0], both[:, 1]

    def store(self, names: WordBuffer, count: int, chains: WordBuffer, at: int, bit: int) -> int:
        """As :meth:`NativeBlockMap.store`."""
        conflicts = 0
        pairs = zip(
            names.array[:count].tolist(), chains.array[at : at + count].tolist(), strict=True
        )
        for name, chain in pairs:
            known, mask = self._blocks.get(name, (chain, 0))
            if known == chain:
                self._blocks[name] = (chain, mask | 1 << bit)
            else:
                conflicts += 1
        return conflicts

    def remove(self, names: WordBuffer, count: int, bit: int, out: WordBuffer, at: int) -> int:
        """As :meth:`NativeBlockMap.remove`."""
        removed = 0
        for name in names.array[:count].tolist():
            chain, mask = self._blocks.get(name, (0, 0))
            rest = mask & ~(1 << bit)
            if rest == mask:
                continue
            out.array[at + removed] = chain
            removed += 1
            if rest:
                self._blocks[name] = (chain, rest)
            else:
                del self._blocks[name]
        return removed


BlockMap = NativeBlockMap | PlainBlockMap


def block_map(chains: Chains) -> BlockMap:
    """An empty map, of the same implementation."""
    return NativeBlockMap(chains.binary) if isinstance(chains, NativeChains) else PlainBlockMap()
