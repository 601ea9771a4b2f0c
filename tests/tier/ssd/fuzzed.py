"""A log's files, damaged in any way a disk, a person or another program could think of.

A :class:`Corpus` is a log of two directories with everything a log has: sealed and unsealed
segments, chains of pages, tombstones, a page that was written twice. A :class:`Case` is a copy of
it with a few damages that a seed decides; :meth:`Case.check` starts on it and says what must hold.
"""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any, Final

import numpy as np
import xxhash

from kvstore.config import SSDConfig
from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
from kvstore.node.ssd import DiskTier
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.page import PrefixKey
from kvstore.state.disk.jobs import PageRecord
from kvstore.state.table.invariants import check
from kvstore.state.tree.places import BLOCK_BYTES, FOOTER_TABLE_BYTES, Place
from kvstore.state.tree.slots import SlotTable
from kvstore.testing.tiers import PageInMemory, TierDriver
from kvstore.tier.host import HostMemory
from kvstore.tier.record import IDENTITY_NAME, segment_name
from kvstore.tier.ssd import SSDLog
from tests.tier.ssd.corpus import PAGE_BYTES, SEGMENT_BYTES, Corpus, UnsyncedDisk, open_log

START_S_MAX: Final = 20.0
EDGES: Final = (0, 1, 2, 63, 64, 4095, 4096, (1 << 31) - 1, 1 << 32, 1 << 47, (1 << 63) - 1)


class Case:
    """A copy of the corpus in a folder, damaged.

    Attributes:
        damages: what was done, for a failure's message.
    """

    def __init__(self, corpus: Corpus, folder: Path, seed: str) -> None:
        self.corpus, self.folder, self.random = corpus, folder, Random(seed)
        self.damages: list[str] = []
        self.outside = folder / "outside"
        folder.mkdir()
        self.outside.write_bytes(b"what is not the log's" * 1000)
        for (at, name), content in corpus.files.items():
            path = folder / str(at) / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        kinds: list[Callable[[], str]] = [
            self._flip, self._flip, self._truncate, self._stretch, self._zero, self._swap,
            self._duplicate, self._rename, self._foreign, self._other_kind, self._mode,
            self._identity, self._forge_block, self._forge_block, self._forge_footer,
            self._forge_footer, self._remove,
        ]  # fmt: skip
        for _ in range(self.random.choice((1, 1, 2, 3, 6))):
            self.damages.append(self.random.choice(kinds)())

    # ---- what must hold ---------------------------------------------------------------------

    def check(self) -> None:
        """Start on it, read everything, write on, and start again; twice."""
        stored: list[bytes] = []
        for _ in range(2):
            begun = monotonic()
            try:
                log = open_log(self.folder)
            except KVStoreError:
                break
            try:
                stored += self._use(log, stored)
            except KVStoreError:
                break
            finally:
                log.close()
            assert monotonic() - begun < START_S_MAX, "a start took too long"
        self._check_node()
        assert self.outside.read_bytes() == b"what is not the log's" * 1000

    def _use(self, log: SSDLog, stored: list[bytes]) -> list[bytes]:
        """Read all there is, and write on; returns keys that the next start must find."""
        found = log.recover()
        driver = TierDriver(log)
        keys = set[bytes]()
        for segment in found.segments:
            for entry in segment.entries:
                keys.add(entry["key"].tobytes())
                self._read(driver, found.pairs, segment.number, entry)
        assert keys >= set(stored), "what was synced is not found"
        page = PageInMemory.random(self.random, PAGE_BYTES)
        self.corpus.content[page.record.key] = page.content
        place = Place(found.next_segment, 0)
        (ended,) = driver.write((place, page))
        if ended.error is not None:
            return []
        again, target = driver.read(place, page)
        assert again.error is None, again.error
        assert target.content == page.content
        if self.random.random() < 0.5:
            assert driver.seal(place.segment).error is None
        for segment in found.segments[: self.random.randint(0, 1)]:
            driver.drop(segment.number)
        return [page.record.key] if driver.sync().error is None else []

    def _read(self, driver: TierDriver, pairs: list[Any], number: int, entry: Any) -> None:
        """A page that is found reads as what was stored under its key, or not at all."""
        space, spec = pairs[int(entry["pair"])]
        key = PrefixKey(entry["key"].tobytes())
        size = int(entry["payload_bytes"])
        if size > 1 << 24:
            return  # more than any page of this log has; a node would not ask for it
        page = PageInMemory.random(self.random, max(size, 1))
        record = PageRecord(key, PrefixKey(b""), space, spec, size, entry["digest"].tobytes())
        ended, target = driver.read(
            Place(number, int(entry["offset"])), PageInMemory(record, page.memory)
        )
        if ended.error is None:
            assert target.content == self.corpus.content.get(key), "wrong bytes were read"

    def _check_node(self) -> None:
        """A node starts on it, or says why not."""
        limits = NodeLimits(session_quota_bytes=1 << 20, lease_ms_max=1000)
        node = Node("node", bytes(16), SlotTable(1 << 16, 1), limits, lambda: bytes(16))
        memory = HostMemory("fuzz", bytes(16), 1 << 16, prefault=False)
        config = SSDConfig(
            directories=tuple(str(self.folder / str(at)) for at in range(2)),
            capacity_bytes=8 * (1 << 18), segment_bytes=1 << 18, sync="none",
        )  # fmt: skip
        try:
            tier = DiskTier(config, node, memory, lambda: None, device=UnsyncedDisk())
        except KVStoreError:
            return
        finally:
            memory.close()
        try:
            check(node.pages)
        finally:
            tier.close()

    # ---- damages ----------------------------------------------------------------------------

    def _paths(self, pattern: str = "segment-*") -> list[Path]:
        return [
            path
            for at in range(2)
            for path in sorted((self.folder / str(at)).glob(pattern))
            if path.is_file() and not path.is_symlink()
        ]

    def _some(self) -> Path:
        return self.random.choice(self._paths() or self._paths("*") or [self.folder / "0" / "x"])

    def _edit(self, path: Path, edit: Callable[[bytearray], None]) -> None:
        if path.exists() and 0 < path.stat().st_size < 1 << 24:
            content = bytearray(path.read_bytes())
            edit(content)
            path.write_bytes(content)

    def _flip(self) -> str:
        path = self._some()

        def flip(content: bytearray) -> None:
            for _ in range(self.random.choice((1, 1, 8, 200))):
                content[self._place(len(content))] ^= 1 << self.random.randrange(8)

        self._edit(path, flip)
        return f"flip {path.name}"

    def _place(self, size: int) -> int:
        """Rather where headers, footers and trailers are."""
        near = self.random.choice((0, size - BLOCK_BYTES, size - FOOTER_TABLE_BYTES - 8192, -1))
        at = self.random.randrange(size) if near < 0 else near + self.random.randrange(256)
        return min(max(at, 0), size - 1)

    def _truncate(self) -> str:
        path = self._some()
        if path.exists():
            os.truncate(path, self.random.choice((0, 1, 4095, 4096, 65536, SEGMENT_BYTES - 1)))
        return f"truncate {path.name}"

    def _stretch(self) -> str:
        path = self._some()
        size = self.random.choice((SEGMENT_BYTES + 1, 1 << 20, 1 << 23, 1 << 36, 1 << 43))
        if path.exists():
            os.truncate(path, size)
        return f"stretch {path.name} to {size}"

    def _zero(self) -> str:
        path = self._some()

        def zero(content: bytearray) -> None:
            start = self._place(len(content))
            stop = min(len(content), start + self.random.choice((8, 4096, 40_000)))
            content[start:stop] = bytes(stop - start)

        self._edit(path, zero)
        return f"zero {path.name}"

    def _swap(self) -> str:
        """Blocks of one file for those of another, or of itself."""
        one, other = self._some(), self._some()

        def swap(content: bytearray) -> None:
            source = other.read_bytes()
            size = self.random.choice((4096, 8192, 3 * 4096, FOOTER_TABLE_BYTES + 4096))
            at = self.random.randrange(0, len(content), BLOCK_BYTES)
            start = self.random.randrange(0, max(len(source), 1), BLOCK_BYTES)
            part = source[start : start + size]
            content[at : at + len(part)] = part

        if other.exists() and other.stat().st_size < 1 << 24:
            self._edit(one, swap)
        return f"swap {one.name} {other.name}"

    @staticmethod
    def _is_free(target: Path) -> bool:
        """Whether a file can be written there, and nowhere else by that."""
        return not target.is_symlink() and (not target.exists() or target.is_file())

    def _name(self) -> str:
        numbers = (*range(8), 1 << 40, (1 << 60) - 1, 1 << 60, (1 << 64) - 1)
        return segment_name(self.random.choice(numbers))

    def _duplicate(self) -> str:
        path = self._some()
        target = self.folder / str(self.random.randrange(2)) / self._name()
        if path.exists() and path.stat().st_size < 1 << 24 and self._is_free(target):
            target.write_bytes(path.read_bytes())
        return f"duplicate {path.name} as {target}"

    def _rename(self) -> str:
        path = self._some()
        target = path.with_name(self._name())
        if path.exists() and not target.exists() and not target.is_symlink():
            path.rename(target)
        return f"rename {path.name} to {target.name}"

    def _foreign(self) -> str:
        (_, name), content = self.random.choice(sorted(self.corpus.foreign.items()))
        target = self.folder / str(self.random.randrange(2)) / name
        if self._is_free(target):
            target.write_bytes(content)
        return f"foreign {target}"

    def _other_kind(self) -> str:
        """Something that is no file, under a file's name."""
        path = self.random.choice(self._paths("*") or [self.folder / "0" / self._name()])
        kind = self.random.choice(("link", "dangling", "itself", "folder", "fifo", "socket"))
        path.unlink(missing_ok=True)
        match kind:
            case "link":
                path.symlink_to(self.random.choice([self.outside, *self._paths()]))
            case "dangling":
                path.symlink_to(self.folder / "nowhere")
            case "itself":
                path.symlink_to(path)
            case "folder":
                path.mkdir()
            case "fifo":
                os.mkfifo(path)
            case _:
                listener = socket.socket(socket.AF_UNIX)
                here = os.open(path.parent, os.O_RDONLY)
                listener.bind(f"/proc/self/fd/{here}/{path.name}")
                os.close(here)
                listener.close()
        return f"{kind} at {path}"

    def _mode(self) -> str:
        path, mode = self._some(), self.random.choice((0, 0o200, 0o400, 0o644, 0o777, 0o4777))
        if path.exists():
            path.chmod(mode)
        return f"mode {mode:o} of {path.name}"

    def _remove(self) -> str:
        path = self.random.choice(self._paths("*") or [self.folder / "0" / "x"])
        path.unlink(missing_ok=True)
        return f"remove {path.name}"

    def _identity(self) -> str:
        path = self.folder / str(self.random.randrange(2)) / IDENTITY_NAME
        if path.is_symlink() or not path.is_file():
            return "identity is no file"
        known = json.loads(self.corpus.files[int(path.parent.name), IDENTITY_NAME])
        key = self.random.choice(list(known))
        odd = (None, [], {}, "", "x" * 40, -1, 1.5, 1e400, "ff" * 16, True, [1] * 4)
        contents = [
            b"", b"{", b"[" * 100_000, b"\xff\xfe", b"null", b"[]", b"0", b"1e999",
            b'{"format": 1e999}', b" " * (2 << 20), path.read_bytes()[:-3],
            self.corpus.foreign[int(path.parent.name), IDENTITY_NAME],
            json.dumps({**known, key: self.random.choice(odd)}).encode(),
        ]  # fmt: skip
        path.write_bytes(self.random.choice(contents))
        return f"identity of {path.parent.name}"

    # ---- damages whose checksums fit ---------------------------------------------------------

    def _number(self) -> int:
        return self.random.choice((self.random.choice(EDGES), self.random.getrandbits(64)))

    def _forge_block(self) -> str:
        """Change fields of a header or trailer, and close it again."""
        path = self._some()
        place: list[int] = []

        def forge(content: bytearray) -> None:
            starts = [
                at
                for at in range(0, len(content) - BLOCK_BYTES + 1, BLOCK_BYTES)
                if content[at : at + 8] in (b"kvsREC\r\n", b"kvsEND\r\n")
            ]
            if not starts:
                return
            at = self.random.choice(starts)
            place.append(at)
            for _ in range(self.random.choice((1, 1, 3))):
                field = self.random.choice((8, 12, 32, 40, 48, 56, 64, 96, 128, 144, 146, 148, 160))
                size = self.random.choice((1, 2, 8))
                value = self._number().to_bytes(8, "little", signed=False)[:size]
                content[at + field : at + field + size] = value
            self._close(content, at)

        self._edit(path, forge)
        return f"forge a block of {path.name} at {place}"

    def _forge_footer(self) -> str:
        """Change entries, table or numbers of a footer, and close it again."""
        sealed = [path for path in self._paths() if path.stat().st_size == SEGMENT_BYTES]
        path = self.random.choice(sealed or [self._some()])
        done: list[int] = []

        def forge(content: bytearray) -> None:
            trailer = len(content) - BLOCK_BYTES
            if trailer < 0 or content[trailer : trailer + 8] != b"kvsEND\r\n":
                return
            count = int.from_bytes(content[trailer + 40 : trailer + 48], "little")
            body = -(-count * 128 // BLOCK_BYTES) * BLOCK_BYTES + FOOTER_TABLE_BYTES
            start = trailer - body
            if start < 0:
                return
            for _ in range(self.random.choice((1, 1, 4))):
                size = self.random.choice((1, 2, 8))
                if self.random.random() < 0.7 and count:
                    field = self.random.choice((0, 32, 64, 80, 88, 96, 104, 106, 107))
                    at = start + 128 * self.random.randrange(count) + field
                elif self.random.random() < 0.5:
                    at = trailer - FOOTER_TABLE_BYTES + self.random.choice((0, 2, 100, 300))
                else:
                    at = trailer + self.random.choice((40, 48, 56))
                done.append(at)
                content[at : at + size] = self._number().to_bytes(8, "little")[:size]
            count = int.from_bytes(content[trailer + 40 : trailer + 48], "little")
            body = -(-count * 128 // BLOCK_BYTES) * BLOCK_BYTES + FOOTER_TABLE_BYTES
            if body <= trailer:
                found = xxhash.xxh3_128_digest(bytes(content[trailer - body : trailer]))
                content[trailer + 64 : trailer + 80] = found
            self._close(content, trailer)

        self._edit(path, forge)
        return f"forge the footer of {path.name} at {done}"

    @staticmethod
    def _close(content: bytearray, at: int) -> None:
        end = at + BLOCK_BYTES - 8
        found = xxhash.xxh3_64_intdigest(bytes(content[at:end]))
        content[end : end + 8] = np.uint64(found).tobytes()
