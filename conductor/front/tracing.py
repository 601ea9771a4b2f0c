"""A trace of requests without their content, in Mooncake's format, for simulations.

Each line is ``{"timestamp", "input_length", "output_length", "hash_ids"}``: milliseconds since the
first request of the file, tokens of prompt and output, and a number for each 512 tokens of the
prompt, equal where the prompt is equal up to there. The numbers are made from the chain values of
the prompt's pages with a salt that is drawn for each file and never written, so nobody can test
whether some text was asked; so files cannot be joined either.

The event loop puts requests in order of arrival; a thread writes, so no disk delays a request.
"""

import contextlib
import logging
import os
import queue
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from conductor.front.rotation import begin_file
from kvstore.index.layout import Words
from kvstore.protocol.errors import ConfigError, reason

BLOCK_TOKENS: Final = 512
TOKENS_MAX: Final = 1 << 24
"""Of a prompt or an output; an engine may say any number."""
_ID_BITS: Final = 53
"""What every reader of JSON can read."""
_SALT_BYTES: Final = 16
_WAITING_MAX = 4096
"""Lines that wait for the disk; further ones are dropped."""
_ORDERED_MAX = 4096
"""Requests that have ended and wait for an earlier one; then that one comes out of order."""
_CLOSE_S: Final = 2.0

_log = logging.getLogger(__name__)


class AnsweredRequest(NamedTuple):
    """What a trace has of a request.

    Attributes:
        arrived_s: time of arrival, on any clock.
        input_tokens: tokens of its prompt.
        output_tokens: tokens of its output.
        keys: a chain value for each leading page of its prompt; empty = unknown.
        page_tokens: tokens of each of these leading pages.
    """

    arrived_s: float
    input_tokens: int
    output_tokens: int
    keys: Words
    page_tokens: int


class TraceFile:
    """Writes requests in order of arrival.

    Attributes:
        counts: requests that were ``written``; ``dropped`` because the disk is slow; ``failed`` to
            be written; and of ``unknown`` length, so that they are not in the trace.
    """

    def __init__(self, path: Path, bytes_max: int, files_max: int) -> None:
        """Begin a new file; one that is there is kept as an older one.

        Args:
            path: of the file; older ones have ``.1``, ``.2`` and so on behind it.
            bytes_max: size from which on a new one is begun.
            files_max: how many are kept, this one included.

        Raises:
            ConfigError: it cannot be written there.
        """
        self._file = _Rotated(path, bytes_max, files_max)
        try:
            self._file.begin()
        except OSError as error:
            raise ConfigError(f"decisions.trace_file={path}: {reason(error)}") from error
        self.counts = {"written": 0, "dropped": 0, "failed": 0, "unknown": 0}
        self._open: OrderedDict[int, AnsweredRequest | None] = OrderedDict()  # None = not ended
        self._lines: queue.Queue[AnsweredRequest | None] = queue.Queue(_WAITING_MAX)
        self._thread = threading.Thread(target=self._write, name="kvstore-trace", daemon=True)
        self._thread.start()

    def began(self, number: int) -> None:
        """A request arrives, after all whose number is lower."""
        self._open[number] = None

    def ended(self, number: int, request: AnsweredRequest | None) -> None:
        """A request has ended; None = its tokens are not known."""
        if request is None:
            self.counts["unknown"] += 1
            self._open.pop(number, None)
        elif number in self._open:
            self._open[number] = request
        else:
            self._put(request)  # others did not wait for it
        while self._open:
            first, ready = next(iter(self._open.items()))
            if ready is None and len(self._open) <= _ORDERED_MAX:
                break
            del self._open[first]
            if ready is not None:
                self._put(ready)

    def _put(self, request: AnsweredRequest) -> None:
        try:
            self._lines.put_nowait(request)
        except queue.Full:
            self.counts["dropped"] += 1

    def close(self) -> None:
        """Write what waits, and end."""
        for request in self._open.values():
            if request is not None:
                self._put(request)
        self._open.clear()
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    def _write(self) -> None:
        failing = False
        while (request := self._lines.get()) is not None:
            try:
                self._file.write(request)
            except OSError as error:
                self.counts["failed"] += 1
                if not failing:
                    _log.warning("decisions.trace_file: %s; lines are dropped", reason(error))
                failing = True
            else:
                self.counts["written"] += 1
                failing = False
        self._file.close()


class _Rotated:
    """The file that is written, and older ones; used by one thread."""

    def __init__(self, path: Path, bytes_max: int, files_max: int) -> None:
        self._path = path
        self._bytes_max = bytes_max
        self._files_max = files_max
        self._fd = -1
        self._size = 0
        self._salt = b""
        self._began_s: float | None = None

    def begin(self) -> None:
        """Begin a new file, with a new salt."""
        self.close()
        self._fd = begin_file(self._path, self._files_max)
        self._size, self._began_s = 0, None
        self._salt = secrets.token_bytes(_SALT_BYTES)

    def write(self, request: AnsweredRequest) -> None:
        """Add a line."""
        if self._fd < 0 or self._size >= self._bytes_max:
            self.begin()
        if self._began_s is None:
            self._began_s = request.arrived_s
        since_s = max(0.0, request.arrived_s - self._began_s)
        line = {
            "timestamp": round(since_s * 1e3),
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": list(self._ids(request)),
        }
        raw = memoryview(msgspec.json.encode(line) + b"\n")
        written = 0
        try:
            while written < len(raw):
                written += os.write(self._fd, raw[written:])
        except OSError:
            with contextlib.suppress(OSError):  # no half line before the next one
                os.ftruncate(self._fd, self._size)
                os.lseek(self._fd, self._size, os.SEEK_SET)
            raise
        self._size += written

    def _ids(self, request: AnsweredRequest) -> Iterator[int]:
        """A number for each block; one of which nothing is known is like no other."""
        for start in range(0, request.input_tokens, BLOCK_TOKENS):
            pages = -(-(start + BLOCK_TOKENS) // max(1, request.page_tokens))
            pages = min(pages, len(request.keys))  # the last block may be partly filled
            if pages * request.page_tokens > start:
                key = request.keys[pages - 1].tobytes() + start.to_bytes(8)
                digest = blake2b(key, digest_size=8, key=self._salt).digest()
                yield int.from_bytes(digest) >> (64 - _ID_BITS)
            else:
                yield secrets.randbits(_ID_BITS)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
