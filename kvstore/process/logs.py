"""A program's log on standard error: one line per event, as text or as JSON.

An event has a fixed name, and fields for the variable parts::

    event(log, logging.INFO, "engine came", engine="vllm-0", pid=4711)

    2026-10-12 10:00:00,123 INFO kvstore.server.watch: engine came engine=vllm-0 pid=4711
    {"time": "2026-10-12T10:00:00.123Z", "level": "info", "logger": "kvstore.server.watch",
     "event": "engine came", "engine": "vllm-0", "pid": 4711}

Logging never blocks: a thread writes the lines, and if the reader does not keep up, lines are
dropped and counted. Lines of one kind are limited in rate, because clients can cause many of them;
suppressed lines are counted too.
"""

import json
import logging
import queue
import re
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from time import monotonic
from typing import Final, Literal, TextIO

Form = Literal["text", "json"]

WINDOW_S: Final = 10.0
LINES_MAX: Final = 50
"""Maximum lines of one kind in a window."""
_KINDS_MAX: Final = 1000
_QUEUE_MAX: Final = 10_000
_END_TIMEOUT_S: Final = 2.0
_RESERVED: Final = frozenset({"time", "level", "logger", "event", "exception"})
_BARE: Final = re.compile(r"[\w./:@+*,-]+")


def event(log: logging.Logger, level: int, name: str, **fields: object) -> None:
    """Log an event.

    Args:
        log: logger of the calling module.
        level: a level of :mod:`logging`.
        name: name of the event; a fixed text.
        fields: the variable parts; values that are not JSON types are converted to text.
    """
    assert not fields.keys() & _RESERVED, "these are of every line"
    log.log(level, name, extra={"fields": fields})


def audit(log: logging.Logger, name: str, /, **fields: object) -> None:
    """Log a change by an operator: an :func:`event` without a rate limit."""
    assert not fields.keys() & _RESERVED, "these are of every line"
    log.log(logging.INFO, name, extra={"fields": fields, "spared": True})


def start(level: str, form: Form) -> Callable[[], None]:
    """Write the log of this process to standard error; returns a function that stops it."""
    lines = _Lines(sys.stderr)
    lines.setFormatter(_Json() if form == "json" else _Text())
    lines.addFilter(Sparing())
    root = logging.getLogger()
    root.addHandler(lines)
    root.setLevel(level)

    def end() -> None:
        root.removeHandler(lines)
        lines.end()

    return end


class Sparing(logging.Filter):
    """Passes a limited number of lines of one kind per window of time, and counts the others.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._clock = clock
        #: Kind → start of its window, and its lines since then. Protected by the lock.
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """See :class:`logging.Filter`."""
        if record.levelno >= logging.CRITICAL or getattr(record, "spared", False):
            return True
        now = self._clock()
        kind = (record.name, str(record.msg))
        with self._lock:
            since, count = self._seen.pop(kind, (now, 0))
            left_out = 0
            if now - since >= WINDOW_S:
                since, count, left_out = now, 0, max(0, count - LINES_MAX)
            self._seen[kind] = (since, count + 1)
            if len(self._seen) > _KINDS_MAX:
                del self._seen[next(iter(self._seen))]
        if left_out:
            _add(record, left_out_before=left_out)
        if count + 1 == LINES_MAX:
            _add(record, more=f"left out for {max(0.0, since + WINDOW_S - now):.0f} s")
        return count < LINES_MAX


class _Lines(logging.Handler):
    """Writes lines in a separate thread."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._queue: queue.Queue[str | None] = queue.Queue(_QUEUE_MAX)
        self._lost = 0
        self._thread = threading.Thread(target=self._write, name="kvstore-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """See :class:`logging.Handler`."""
        if self._lost:
            _add(record, lost_before=self._lost)
        try:
            self._queue.put_nowait(self.format(record))
            self._lost = 0
        except queue.Full:
            self._lost += 1

    def end(self) -> None:
        """Write the queued lines, for a limited time; later lines are not written.

        This is not ``close``, because configuring :mod:`logging` (uvicorn does) closes all
        handlers.
        """
        try:
            self._queue.put(None, timeout=_END_TIMEOUT_S)
            self._thread.join(_END_TIMEOUT_S)
        except queue.Full:
            pass  # no reader; the thread ends with the process
        self.close()

    def _write(self) -> None:
        while (line := self._queue.get()) is not None:
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                continue  # standard error is closed


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """See :class:`logging.Formatter`; unprintable characters are escaped."""
        fields = "".join(f" {name}={_shown(value)}" for name, value in _fields(record).items())
        return _printable(super().formatMessage(record) + fields)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """See :class:`logging.Formatter`."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, "fields", {})
    return fields


def _add(record: logging.LogRecord, **more: object) -> None:
    record.__dict__["fields"] = {**_fields(record), **more}


def _shown(value: object) -> str:
    if isinstance(value, dict):
        parts = " ".join(f"{name}={_shown(one)}" for name, one in value.items())
        return json.dumps(parts, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return ",".join(map(_shown, value)) or "-"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if isinstance(value, bool):
        return text.lower()
    return text if _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
