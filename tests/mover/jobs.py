"""Random jobs on a library of the mover: ``python -m tests.mover.jobs LIBRARY SEED SECONDS``.

All memory of a job comes from ``malloc``, one allocation for each page, piece and list, so that a
sanitizer sees the first byte outside. Every job's outcome is compared with a model.
"""

import ctypes
import random
import sys
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from time import monotonic

import numpy as np
import xxhash

from kvstore.mover import Mode, MoverJob, Native, Pieces, Progress
from kvstore.mover.binary import load

libc = ctypes.CDLL(None)
libc.memalign.restype = ctypes.c_void_p
libc.memalign.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

SHIFTS = (0, 0, 0, 16, 32, 48, 1, 7)
SEGMENTS = (1, 1, 2, 3, 8)


class Memory:
    """Allocations of one job."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._starts: list[int] = []

    def take(self, content: bytes) -> int:
        """An address of just so many bytes, aligned in any way."""
        shift = self._dice.choice(SHIFTS)
        start = libc.memalign(64, len(content) + shift)
        self._starts.append(start)
        ctypes.memmove(start + shift, content, len(content))
        return int(start) + shift

    def free(self) -> None:
        for start in self._starts:
            libc.free(start)


def page_bytes(dice: random.Random) -> int:
    kind = dice.random()
    if kind < 0.4:
        return dice.randint(1, 320)
    if kind < 0.65:
        return 64 * dice.randint(1, 64)
    if kind < 0.9:
        return dice.randint(1, 6000)
    return 64 * dice.randint(3000, 9000) + dice.choice((0, 0, 1, 63))


def cut(dice: random.Random, size: int) -> list[int]:
    """Lengths of the pieces of a page."""
    cuts = {dice.randrange(1, size) for _ in range(dice.randint(0, 8))} if size > 1 else set()
    if dice.random() < 0.6:
        cuts = {at // 64 * 64 for at in cuts} - {0}
    return [b - a for a, b in pairwise([0, *sorted(cuts), size])]


class Case:
    """One job with all of its memory, and what must come of it."""

    def __init__(self, dice: random.Random) -> None:
        self.memory = Memory(dice)
        self.mode = dice.choice(list(Mode))
        self.size = page_bytes(dice)
        self.content = [dice.randbytes(self.size) for _ in range(dice.randint(1, 5))]
        self.seeds = [dice.getrandbits(64) for _ in self.content]
        segments = dice.choice(SEGMENTS) if self.mode is not Mode.DIGEST else 1
        self.lengths = [cut(dice, self.size) for _ in self.content]
        self.ends: list[int] = []
        for lengths in self.lengths:
            before = self.ends[-1] if self.ends else 0
            inner = sorted(dice.randint(0, len(lengths)) for _ in range(segments - 1))
            self.ends += [before + end for end in [*inner, len(lengths)]]
        gathers = self.mode is Mode.GATHER
        self.pages = [self.memory.take(bytes(self.size) if gathers else c) for c in self.content]
        self.pieces = [
            [self.memory.take(part if gathers else bytes(len(part))) for part in parts]
            for parts in map(parts_of, self.content, self.lengths)
        ]
        self.digests = [
            xxhash.xxh3_128_digest(c, seed)
            for c, seed in zip(self.content, self.seeds, strict=True)
        ]
        self.wrong = {page for page in range(len(self.pages)) if dice.random() < 0.2}
        self.progress = Progress() if dice.random() < 0.5 else None
        self.cancelled = self.progress is not None and dice.random() < 0.1
        self.segments = segments

    def job(self) -> MoverJob:
        flat = [length for lengths in self.lengths for length in lengths]
        pieces = Pieces(
            np.array([at for page in self.pieces for at in page], np.uint64),
            np.array(flat, np.uint64), np.array(self.ends, np.int64), self.segments,
        )  # fmt: skip
        digests = np.zeros((len(self.pages), 16), np.uint8)
        ok = np.zeros(len(self.pages), np.bool_) if self.mode >= Mode.SCATTER else None
        if ok is not None:
            digests[:] = np.frombuffer(b"".join(self.digests), np.uint8).reshape(-1, 16)
            digests[sorted(self.wrong), 3] ^= 1
        if self.cancelled and self.progress is not None:
            self.progress.cancel()
        return MoverJob(
            self.mode, self.size, np.array(self.pages, np.uint64), np.array(self.seeds, np.uint64),
            digests, pieces if self.mode is not Mode.DIGEST else None, ok, self.progress,
        )  # fmt: skip

    def check(self, job: MoverJob, done: int) -> None:
        if self.cancelled:
            assert done == 0, done
            return
        assert done == len(self.pages), done
        for page, content in enumerate(self.content):
            if job.ok is None:
                assert job.digests[page].tobytes() == self.digests[page]
            else:
                assert bool(job.ok[page]) == (page not in self.wrong)
            if self.mode is Mode.GATHER:
                assert ctypes.string_at(self.pages[page], self.size) == content
            if job.ok is not None and job.ok[page]:
                parts = zip(self.pieces[page], self.lengths[page], strict=True)
                assert b"".join(ctypes.string_at(*part) for part in parts) == content


def parts_of(content: bytes, lengths: list[int]) -> Iterator[bytes]:
    return (content[end - n : end] for n, end in zip(lengths, accumulate(lengths), strict=True))


def spoiled(dice: random.Random, pieces: Pieces) -> Pieces:
    """Lists that make no job any more, or another one."""
    address, length, end = pieces.address.copy(), pieces.length.copy(), pieces.end.copy()
    edge = (0, 1, 63, 1 << 20, 1 << 40, (1 << 63) - 1)
    match dice.randrange(3):
        case 0:
            end[dice.randrange(len(end))] = dice.choice((-1, -(1 << 63), *edge))
        case 1:
            length[dice.randrange(len(length))] = dice.choice((*edge, (1 << 64) - 64))
        case 2:
            address[dice.randrange(len(address))] = dice.choice((0, (1 << 64) - 1))
    return pieces._replace(address=address, length=length, end=end)


def main() -> int:
    library, *arguments = sys.argv[1:]
    loaded = load(Path(library))
    assert loaded is not None, f"{library} is no mover"
    natives = [Native(loaded, isa) for isa in range(loaded.kv_best_isa() + 1)]
    if arguments == ["overread"]:
        return overread(natives[0])
    seed, seconds = int(arguments[0]), float(arguments[1])
    count, stop = 0, monotonic() + seconds
    while monotonic() < stop:
        dice = random.Random(f"{seed} {count}")
        case, native = Case(dice), dice.choice(natives)
        job = case.job()
        if job.pieces is not None and dice.random() < 0.2:
            bad = job._replace(pieces=spoiled(dice, job.pieces))
            native.move(bad)  # refused, or harmless; what matters is what it touches
        else:
            case.check(job, native.move(job))
        case.memory.free()
        count += 1
    sys.stdout.write(f"{count} jobs on {', '.join(each.description for each in natives)}\n")
    return 0


def overread(native: Native) -> int:
    """A page said to be longer than its memory."""
    memory = Memory(random.Random(0))
    page = np.array([memory.take(bytes(100))], np.uint64)
    digests = np.zeros((1, 16), np.uint8)
    native.move(
        MoverJob(Mode.DIGEST, 4096, page, np.zeros(1, np.uint64), digests, None, None, None)
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
