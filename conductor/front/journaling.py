"""Writes a journal of the dispatcher's inputs and decisions, to replay them.

A thread encodes and writes, so no disk delays a request. A journal without one of its lines cannot
be replayed further, so it ends when it is full or when a line cannot be written.
"""

import contextlib
import logging
import os
import queue
import threading
from pathlib import Path
from typing import Final

import msgspec

from conductor.front.rotation import begin_file
from conductor.routing.journal import JournalHead, Line
from kvstore.protocol.errors import ConfigError, reason

_WAITING_MAX = 16_384
"""Lines that wait for the disk; the journal ends at the next one."""
_CLOSE_S: Final = 2.0

_log = logging.getLogger(__name__)


class JournalFile:
    """One journal, from the start of its dispatcher; an earlier one is kept as ``.1``.

    Args:
        path: of the file.
        bytes_max: size at which it ends.

    Raises:
        ConfigError: it cannot be written there.

    Attributes:
        ended: why it goes on no longer; empty = it does.
    """

    def __init__(self, path: Path, bytes_max: int) -> None:
        self.ended = ""
        self._bytes_max = bytes_max
        try:
            self._fd = begin_file(path, 2)
        except OSError as error:
            raise ConfigError(f"decisions.journal_file={path}: {reason(error)}") from error
        self._lines: queue.Queue[JournalHead | Line | None] = queue.Queue(_WAITING_MAX)
        self._thread = threading.Thread(target=self._run, name="kvstore-journal", daemon=True)
        self._thread.start()

    def write(self, line: JournalHead | Line) -> None:
        """Add a line, which must not be changed any more; does not wait."""
        if self.ended:
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._end("the disk is too slow")

    def close(self) -> None:
        """Write what waits, and end."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    def _end(self, why: str) -> None:
        self.ended = why
        _log.warning("decisions.journal_file: it ends here: %s", why)

    def _run(self) -> None:
        size, encoder = 0, msgspec.json.Encoder()
        while (line := self._lines.get()) is not None:
            if size < 0:
                continue  # it has ended
            try:
                raw = encoder.encode(line) + b"\n"
                if size + len(raw) > self._bytes_max:
                    raise OSError(0, f"{self._bytes_max} bytes are full")
                size += _write_all(self._fd, raw, size)
            except (OSError, ValueError, OverflowError) as error:  # or it cannot be encoded
                size = -1
                self._end(reason(error))
        os.close(self._fd)


def _write_all(fd: int, raw: bytes, at: int) -> int:
    """Write a whole line, or nothing of it."""
    rest = memoryview(raw)
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, at)
        raise
    return len(raw)
