"""Starts and supervises the admin process, which serves HTTP: health, metrics, the admin API.

HTTP clients use descriptors, memory and CPU time of a process, so this is not the node's process
but a child (:mod:`kvstore.server.admin`). The child sends short operations to the node
(:mod:`kvstore.server.dispatch`). The node keeps the listening sockets. If the child ends, it is
restarted with the same sockets. If the node ends, for whatever reason, the child ends too.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
import sys
from time import monotonic
from typing import Any, Final

from kvstore.config import Loaded, ServerConfig, values
from kvstore.node.desk import Desk
from kvstore.process import privatefile
from kvstore.process.listeners import Endpoint, Listener, Tcp, Unix
from kvstore.process.logs import event
from kvstore.protocol.counts import AdminCounts
from kvstore.protocol.errors import ConfigError, InvalidArgument, TierUnavailable
from kvstore.server.auth import make_token, token_file, tokens_of
from kvstore.server.channel import (
    ALIVE_S,
    ASK_BYTES_MAX,
    Abandon,
    Answered,
    Ask,
    Begin,
    Channel,
    FromAdmin,
    Refused,
    Said,
    Serving,
)
from kvstore.server.dispatch import Dispatcher
from kvstore.server.environment import admin_socket, child_environment
from kvstore.server.status import NodeStatus
from kvstore.server.turns import Turns
from kvstore.tier.host import HostMemory

log = logging.getLogger(__name__)

START_S: Final = 60.0
"""Maximum time for the start of the child; a busy machine is slow."""
SILENT_S: Final = 30.0
"""A child that sends nothing for so long is killed and restarted."""
END_S: Final = 3.0
PAUSE_S: Final = 0.1
PAUSE_MAX_S: Final = 10.0
STEADY_S: Final = 60.0
"""A child that ran for so long is restarted at once when it ends."""
_MODULE: Final = ("-P", "-m", "kvstore.server.admin")


class HttpServer:
    """The child that serves HTTP, and its operations.

    Args:
        loaded: the configuration, with the sources of its values.
        desk: the node's desk.
        memory: the bytes of the host tier.
        status: the node's status.

    Attributes:
        url: its TCP address.
        admin_url: its Unix socket.
        restarts: how often the child was restarted.
    """

    def __init__(
        self, loaded: Loaded[ServerConfig], desk: Desk, memory: HostMemory, status: NodeStatus
    ) -> None:
        """Listen at the TCP address; serve nothing yet.

        Raises:
            ConfigError: the address is not available, or a token cannot be read.
        """
        config = loaded.config
        self.restarts = 0
        self._config = config.http
        self._loaded = loaded
        self._socket_path = admin_socket(config)
        self._group = config.socket.group_access
        self._tenants = bool(config.socket.tenants)
        self._tokens = tokens_of(config.http)
        self._made_token = not self._tokens
        self._tcp = _listen("http.port", Tcp(config.http.host, config.http.port))
        self.url = str(self._tcp.endpoint).replace("tcp:", "http:")
        self.admin_url = f"unix://{self._socket_path}"
        self._turns = Turns(desk)
        self._dispatcher = Dispatcher(desk.node, memory, status, self._turns, self._send)
        self._unix: Listener | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._mine: socket.socket | None = None
        self._serving = asyncio.Event()
        self._lost = asyncio.Event()
        self._silent_s = 0.0
        self._stopping = False

    async def start(self) -> None:
        """Create the Unix socket and the token, and start the child.

        Raises:
            ConfigError: the socket or the file cannot be created.
            TierUnavailable: the child does not start.
        """
        mode = 0o660 if self._group else 0o600
        self._unix = _listen("http.socket_path", Unix(str(self._socket_path)), mode)
        if self._made_token:
            self._tokens["operate"] = make_token(token_file(self._socket_path))
        await self._begin()

    async def watch(self) -> None:
        """Restart the child whenever it ends, until cancelled."""
        pause = PAUSE_S
        while True:
            began = monotonic()
            await self._until_lost()
            if self._stopping:
                return
            self._dispatcher.forget()
            status = await self._reaped()
            self.restarts += 1
            pause = PAUSE_S if monotonic() - began >= STEADY_S else min(PAUSE_MAX_S, 2 * pause)
            event(log, logging.ERROR, "admin process ended", status=_status(status),
                  again_in_s=pause, why="HTTP is not served until then; engines are")  # fmt: skip
            await asyncio.sleep(pause)
            try:
                await self._begin()
            except TierUnavailable as error:
                event(log, logging.ERROR, "admin process not started", why=str(error))
                self._lost.set()  # retry after a longer pause

    def stop(self) -> None:
        """Stop the child and its operations; waits for a limited time."""
        self._stopping = True
        self._turns.close()
        self._dispatcher.close()
        if self._mine is not None:
            with contextlib.suppress(OSError):
                self._mine.shutdown(socket.SHUT_RDWR)  # the loop, which would close it, has ended
        if self._channel is not None:
            self._channel.close()
        self._reap()
        self._tcp.close()
        if self._unix is not None:
            self._unix.close()
        if self._made_token and "operate" in self._tokens:
            text = self._tokens["operate"] + "\n"
            privatefile.remove(token_file(self._socket_path), text)

    def stats(self) -> AdminCounts:
        """The child process, 0 = none, and its restarts."""
        pid = self._child.pid if self._child is not None else 0
        return AdminCounts(pid=pid, restarts=self.restarts)

    # ---- the child --------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Start a child, and wait until it is ready."""
        self._lost.clear()
        self._serving.clear()
        self._silent_s = 0.0
        try:
            self._mine = mine = self._spawn()
        except OSError as error:  # no process or descriptor available
            raise TierUnavailable(f"the admin process cannot be started: {error}") from error
        channel = self._channel = Channel(FromAdmin, self._received, self._lost.set, ASK_BYTES_MAX)
        await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=mine)
        channel.send(
            Begin(
                listeners=self._listeners(),
                tokens={str(role): text for role, text in self._tokens.items()},
                group=self._group,
                tenants=self._tenants,
                open_metrics=self._made_token and self._config.is_loopback,
                token_file=str(token_file(self._socket_path)) if self._made_token else "",
                values=_printable(values(self._loaded)),
            )
        )
        waits = [asyncio.create_task(one.wait()) for one in (self._serving, self._lost)]
        await asyncio.wait(waits, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if not self._serving.is_set():
            channel.close()
            status = await self._reaped()
            raise TierUnavailable(f"the admin process does not serve HTTP ({_status(status)})")

    def _spawn(self) -> socket.socket:
        """Start a child; returns this end of the channel to it."""
        mine, its = socket.socketpair()
        with its:
            try:
                self._child = subprocess.Popen(
                    [sys.executable, *_MODULE, str(its.fileno())],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    env=child_environment(), pass_fds=[its.fileno(), *self._listeners()],
                )  # fmt: skip
            except OSError:
                mine.close()
                raise
        mine.setblocking(False)  # noqa: FBT003
        return mine

    def _listeners(self) -> list[int]:
        assert self._unix is not None
        return [self._tcp.socket.fileno(), self._unix.socket.fileno()]

    async def _until_lost(self) -> None:
        """Wait for the child's end; kill it if it is silent for too long."""
        while not self._lost.is_set():
            # Not wait_for: before Python 3.12 it may swallow a cancellation that arrives at the
            # end.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ALIVE_S):
                    await self._lost.wait()
            self._silent_s += ALIVE_S  # not the clock: this loop may have been stopped
            if self._silent_s >= SILENT_S and self._channel is not None:
                event(log, logging.ERROR, "admin process silent", silent_s=SILENT_S)
                self._channel.close()

    def _reap(self) -> int | None:
        """Wait for a child that was told to end; returns its exit status."""
        child, self._child = self._child, None
        if child is None:
            return None
        try:
            return child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel still holds it
            return child.wait(END_S)
        return None

    async def _reaped(self) -> int | None:
        """:meth:`_reap` in a thread; without one, the child is killed and not waited for."""
        try:
            return await asyncio.to_thread(self._reap)
        except RuntimeError:  # no more threads
            child, self._child = self._child, None
            if child is None:
                return None
            child.kill()
            return child.poll()

    def _received(self, message: FromAdmin) -> None:
        self._silent_s = 0.0
        match message:
            case Ask():
                self._dispatcher.ask(message)
            case Abandon():
                self._dispatcher.abandon(message)
            case Serving():
                self._serving.set()
            case Said(level, name, text):
                logging.getLogger(name).log(level, "%s", text)

    def _send(self, message: Answered | Refused) -> None:
        if self._channel is not None:
            self._channel.send(message)


def _status(status: int | None) -> str:
    if status is None:
        return "none"
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:  # most real-time signals have no name
        return f"killed by signal {-status}"


def _printable(value: Any) -> Any:
    """A configured value as valid text: file names may be any bytes."""
    if isinstance(value, dict):
        return {name: _printable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(one) for one in value]
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    return value


def _listen(key: str, endpoint: Endpoint, mode: int = 0o600) -> Listener:
    """Open a listening socket; connections wait there until the child accepts them.

    Raises:
        ConfigError: the address is not available; names its key.
    """
    try:
        return Listener(key, endpoint, mode)
    except InvalidArgument as error:
        raise ConfigError(str(error)) from error
