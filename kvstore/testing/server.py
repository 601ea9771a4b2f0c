"""A real ``kvstore-server`` in a separate process, for tests and benches that harm it."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from kvstore.server import client
from kvstore.server.auth import token_file

START_WAIT_S: Final = 60.0
END_WAIT_S: Final = 30.0
ANSWER_WAIT_S: Final = 10.0
PAUSE_S: Final = 0.002
_READY: Final = re.compile(
    r"(?m)^kvstore-server ready: socket (\S+) http (\S+) .*\badmin unix://(\S+)"
)
_never: Final = threading.Event()


class ServerError(RuntimeError):
    """The daemon did not behave as expected; the message contains the end of its log."""


def wait_for(condition: Callable[[], object], timeout_s: float) -> bool:
    """Check ``condition`` repeatedly until it is true (True) or the time is up (False)."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        _never.wait(PAUSE_S)
    return True


class Server:
    """One daemon, as a context manager that leaves no process behind.

    Args:
        folder: existing folder for its output.
        settings: dotted configuration key → value.
        module: module to run, and its first arguments.

    Attributes:
        pid: its process id.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, object],
        module: Sequence[str] = ("kvstore.server.daemon",),
    ) -> None:  # fmt: skip
        command = [sys.executable, "-m", *module, "--set", "http.port=0"]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        earlier = len(list(folder.glob("server-*.out")))  # earlier daemons may still run, and write
        self._out, self._err = (folder / f"server-{earlier}.{end}" for end in ("out", "err"))
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        self.pid = self._child.pid
        self._ready: re.Match[str] | None = None

    def wait_ready(self) -> None:
        """Wait until it is ready.

        Raises:
            ServerError: it ended, or was not ready in time.
        """

        def decided() -> bool:
            ended = self.ended
            self._ready = _READY.search(self._out.read_text())
            return self._ready is not None or ended

        wait_for(decided, START_WAIT_S)
        if self._ready is None:
            raise ServerError(f"the daemon did not get ready ({self.status})\n{self.errors}")

    @property
    def address(self) -> str:
        """Address of its socket, for :meth:`kvstore.client.store.KVStore.connect`."""
        assert self._ready is not None, "wait_ready() comes first"
        return self._ready.group(1)

    @property
    def http(self) -> str:
        """URL of its HTTP API: scheme, host and port."""
        assert self._ready is not None, "wait_ready() comes first"
        return self._ready.group(2)

    @property
    def admin(self) -> str:
        """URL of its admin API over the Unix socket, for ``kvstore --url``; needs no token."""
        assert self._ready is not None, "wait_ready() comes first"
        return f"unix://{self._ready.group(3)}"

    @property
    def token_file(self) -> Path:
        """Path of its generated token for HTTP over TCP; not created if a token is configured."""
        assert self._ready is not None, "wait_ready() comes first"
        return token_file(Path(self._ready.group(3)))

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._child.poll() is not None

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._child.poll()

    @property
    def errors(self) -> str:
        """What it wrote to standard error."""
        return self._err.read_text(errors="replace")

    def get(self, path: str) -> Any:
        """GET a path of its admin API; returns the decoded JSON.

        Raises:
            OSError: no answer.
            ServerError: the status is not 200.
        """
        return json.loads(self.fetch(path))

    def fetch(self, path: str) -> bytes:
        """GET a path of its admin API; returns the body."""
        status, body = client.send(self.admin, "GET", path, timeout_s=ANSWER_WAIT_S)
        if status != 200:
            raise ServerError(f"{path}: {status} {body.decode(errors='replace')}")
        return body

    def open_files(self) -> list[str]:
        """Targets of its open descriptors."""
        found = []
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            try:
                found.append(str(entry.readlink()))
            except OSError:
                continue  # closed meanwhile
        return found

    def resident_bytes(self) -> tuple[int, int]:
        """Memory in use: its own, and the part shared with clients."""
        fields = dict(
            line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines()
        )
        own = int(fields["RssAnon"].split()[0]) + int(fields["RssFile"].split()[0])
        return own << 10, int(fields["RssShmem"].split()[0]) << 10

    def kill(self) -> None:
        """Send SIGKILL, and wait."""
        self._child.kill()
        self._child.wait(END_WAIT_S)

    def wait_end(self) -> int:
        """Wait for its end; returns its exit status.

        Raises:
            ServerError: it did not end in time.
        """
        if not wait_for(lambda: self.ended, END_WAIT_S):
            raise ServerError(f"the daemon does not end\n{self.errors}")
        return self._child.wait(END_WAIT_S)

    def stop(self) -> int:
        """Send SIGTERM, and wait; returns the exit status."""
        if not self.ended:
            os.kill(self.pid, signal.SIGTERM)
        return self.wait_end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.ended:
            self.kill()
