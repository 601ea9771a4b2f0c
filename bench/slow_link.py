"""A link of a limited rate between decode and prefill: a process that relays TCP connections.

``python -m bench.slow_link HOST:PORT`` prints ``listening on HOST:PORT`` and relays each connection
to the given address. A line on stdin is the rate from there to here, in bytes per second, for all
connections together; until the first one it is not limited. It ends with stdin.
"""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from typing import Final, Self

from bench.cluster import LISTENING, READY_TIMEOUT_S, ClusterError

_STEP_BYTES: Final = 64 * 1024
_END_WAIT_S: Final = 10.0


class SlowLink:
    """The process; a context manager that ends it.

    Args:
        target: ``host:port``.

    Attributes:
        address: where it listens, ``host:port``.

    Raises:
        ClusterError: it does not start.
    """

    def __init__(self, target: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.slow_link", target],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        late = threading.Timer(READY_TIMEOUT_S, self._process.kill)
        late.start()
        said = self._process.stdout.readline()
        late.cancel()
        late.join()
        if not said.startswith("listening on "):
            self.close()
            raise ClusterError(f"the link to {target} does not start: {said!r}, not {LISTENING}")
        self.address = said.split()[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def limit(self, rate: float) -> None:
        """Let so many bytes per second through, from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{rate}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class Bucket:
    """Lets bytes through at a rate; any thread may take from it.

    Attributes:
        free_at: when all that was taken has passed, by ``time.perf_counter``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rate = float("inf")
        self.free_at = 0.0

    def limit(self, rate: float) -> None:
        """So many bytes per second."""
        with self._lock:
            self._rate = rate

    def take(self, size: int) -> None:
        """Return when so many bytes have passed; they pass one after the other."""
        with self._lock:
            self.free_at = max(self.free_at, time.perf_counter()) + size / self._rate
            until = self.free_at
        while (left := until - time.perf_counter()) > 0:
            time.sleep(left)


def _relay(source: socket.socket, target: socket.socket, bucket: Bucket | None) -> None:
    buffer = memoryview(bytearray(_STEP_BYTES))
    with contextlib.suppress(OSError):  # one side has closed it
        while size := source.recv_into(buffer):
            if bucket is not None:
                bucket.take(size)
            target.sendall(buffer[:size])
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, host: str, port: int, bucket: Bucket) -> None:
    while True:
        near, _ = listener.accept()
        far = socket.create_connection((host, port))
        for one in (near, far):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for arguments in ((far, near, bucket), (near, far, None)):
            threading.Thread(target=_relay, args=arguments, daemon=True).start()


def _main(target: str) -> None:
    host, _, port = target.rpartition(":")
    bucket = Bucket()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, host, int(port), bucket), daemon=True).start()
    sys.stdout.write(f"listening on 127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        bucket.limit(float(line))


if __name__ == "__main__":
    _main(sys.argv[1])
