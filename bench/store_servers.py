"""Real servers of etcd and Redis on loopback, each with a data directory of its own."""

import base64
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from bench import store_programs
from kvstore.testing.server import wait_for

HOST: Final = "127.0.0.1"
START_WAIT_S: Final = 20.0
_ATTEMPTS: Final = 3
_ANSWER_S: Final = 5.0
_LOG_BYTES: Final = 4_096
REDIS_RIGHTS: Final = (
    "~kvstore:{blue}:* ~k????????????? +eval +evalsha +script|load +time +get +set +del +mget"
    " +pexpire +zadd +zrem +zrange +zrangebyscore +zremrangebyscore +hget +hset +hmget"
)
"""What a user of Redis needs for the membership and the directory of cluster ``blue``
(docs/cluster.md). A page has 14 bytes there."""


class ServerTls(NamedTuple):
    """The PEM files of a server with TLS.

    Attributes:
        certificate: of the server, for 127.0.0.1.
        key: its private key.
        authority: that has signed it; clients need a certificate of it too.
    """

    certificate: Path
    key: Path
    authority: Path


class ServerStartError(RuntimeError):
    """A server did not start; the message has the end of its log."""


class _StoreServer:
    """One process; ended by its own id."""

    PROGRAM: str
    PORTS: int
    DATA: tuple[str, ...]

    def __init__(
        self, folder: Path, tls: ServerTls | None = None, login: tuple[str, str] | None = None
    ) -> None:
        """Start it.

        Args:
            folder: for its data and its log; is made.
            tls: its certificate; None = no TLS.
            login: user and password that it wants to see; None = none.

        Raises:
            NoProgramError: there is no such program.
            ServerStartError: it does not start.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._program = store_programs.find(self.PROGRAM)
        self._folder = folder
        self._tls = tls
        self._login = login
        self._process: subprocess.Popen[bytes] | None = None
        for attempt in range(_ATTEMPTS):
            self._ports = _free_ports(self.PORTS)
            try:
                self.start()
            except ServerStartError:  # somebody else may have taken a port
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.kill()

    @property
    def endpoint(self) -> str:
        """``host:port`` for clients."""
        return f"{HOST}:{self._ports[0]}"

    def start(self) -> None:
        """Start it with the data that it has; returns when it answers.

        Raises:
            ServerStartError: it does not.
        """
        with (self._folder / "log").open("ab") as log:
            self._process = process = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd=self._folder, env={**os.environ, **self._program.environment},
            )  # fmt: skip
        wait_for(lambda: process.poll() is not None or self._answers(), START_WAIT_S)
        if process.poll() is not None or not self._answers():
            self.kill()
            text = (self._folder / "log").read_text(errors="replace")
            raise ServerStartError(f"{self.PROGRAM} does not start:\n{text[-_LOG_BYTES:]}")

    def kill(self) -> None:
        """SIGKILL; its data stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """Delete the data of a killed server: it starts as a new one."""
        for name in self.DATA:
            path = self._folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def stop(self) -> None:
        """SIGSTOP; its connections stay."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        state = "T" if number is signal.SIGSTOP else "RSD"
        status = Path(f"/proc/{self._process.pid}/stat")
        wait_for(lambda: status.read_text().rpartition(")")[2].split()[0] in state, _ANSWER_S)

    def _command(self) -> Sequence[str | Path]:
        raise NotImplementedError

    def _answers(self) -> bool:
        raise NotImplementedError


class EtcdServer(_StoreServer):
    """An etcd of one member."""

    PROGRAM = "etcd"
    PORTS = 2
    DATA = ("data",)

    def start(self) -> None:
        """See the base class; the users are there too then."""
        super().start()
        if self._login is not None and not (self._folder / "users").exists():
            self._add_users()
            (self._folder / "users").touch()

    def empty(self) -> None:
        """Delete all keys."""
        self._ask("kv/deleterange", key=_base64(b"\0"), range_end=_base64(b"\0"))

    def put(self, key: str, value: bytes, lease_s: float) -> None:
        """Put a value under a lease of its own."""
        lease = self._ask("lease/grant", TTL=round(lease_s))["ID"]
        self._ask("kv/put", key=_base64(key.encode()), value=_base64(value), lease=lease)

    def get(self, key: str) -> bytes | None:
        """A value; None = there is none."""
        found = self._ask("kv/range", key=_base64(key.encode())).get("kvs", [])
        return base64.b64decode(found[0]["value"]) if found else None

    def _command(self) -> Sequence[str | Path]:
        scheme = "https" if self._tls else "http"
        client, peer = f"{scheme}://{HOST}:{self._ports[0]}", f"http://{HOST}:{self._ports[1]}"
        command: list[str | Path] = [
            self._program.path, "--name", "one", "--data-dir", self._folder / "data",
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"one={peer}",
        ]  # fmt: skip
        if self._tls:
            command += [
                "--cert-file", self._tls.certificate, "--key-file", self._tls.key,
                "--trusted-ca-file", self._tls.authority, "--client-cert-auth",
            ]  # fmt: skip
        return command

    def _answers(self) -> bool:
        try:
            return bool(json.loads(self._send("/health", None))["health"] == "true")
        except (OSError, ValueError, LookupError):
            return False

    def _add_users(self) -> None:
        """A user who may use the keys of cluster ``blue``, and root with the same password."""
        assert self._login is not None
        user, password = self._login
        keys = {"key": _base64(b"/kvstore/blue/"), "range_end": _base64(b"/kvstore/blue0")}
        self._ask("auth/role/add", name="nodes")
        self._ask("auth/role/grant", name="nodes", perm={"permType": "READWRITE", **keys})
        for name, role in ((user, "nodes"), ("root", "root")):
            self._ask("auth/user/add", name=name, password=password)
            self._ask("auth/user/grant", user=name, role=role)
        self._ask("auth/enable")

    def _ask(self, method: str, **body: object) -> dict[str, Any]:
        """A call of etcd's gateway for JSON."""
        answer: dict[str, Any] = json.loads(self._send(f"/v3/{method}", json.dumps(body).encode()))
        return answer

    def _send(self, path: str, body: bytes | None) -> bytes:
        context = None
        if self._tls:
            context = ssl.create_default_context(cafile=str(self._tls.authority))
            context.load_cert_chain(self._tls.certificate, self._tls.key)
        scheme = "https" if self._tls else "http"
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if context is not None:
            handlers.append(urllib.request.HTTPSHandler(context=context))
        opener = urllib.request.build_opener(*handlers)
        with opener.open(f"{scheme}://{self.endpoint}{path}", body, _ANSWER_S) as answer:
            read: bytes = answer.read()
        return read


class RedisServer(_StoreServer):
    """A Redis that writes down every change, unless it is :class:`ForgetfulRedisServer`."""

    PROGRAM = "redis-server"
    PORTS = 1
    DATA = ("appendonlydir",)
    keeps = True

    def empty(self) -> None:
        """Delete all keys."""
        self._send(b"FLUSHALL")

    def put(self, key: str, value: bytes, lease_s: float) -> None:
        """Put a value that expires."""
        self._send(b"SET", key.encode(), value, b"PX", b"%d" % (1_000 * lease_s))

    def get(self, key: str) -> bytes | None:
        """A value; None = there is none."""
        answer = self._send(b"GET", key.encode())
        return None if answer == b"$-1\r\n" else answer.split(b"\r\n", 1)[1][:-2]

    def index(self, key: str, name: str, lease_s: float) -> None:
        """Add a name to a sorted set of names by the ms at which they expire."""
        now_s = int(self._send(b"TIME").split(b"\r\n")[2])
        self._send(b"ZADD", key.encode(), b"%d" % (1_000 * (now_s + lease_s + 1)), name.encode())

    def _command(self) -> Sequence[str | Path]:
        keeping = ["appendonly yes", "appendfsync always"] if self.keeps else []
        lines = [f"bind {HOST}", f"dir {self._folder}", *keeping, 'save ""']
        if self._tls:
            lines += [
                "port 0", f"tls-port {self._ports[0]}", f"tls-cert-file {self._tls.certificate}",
                f"tls-key-file {self._tls.key}", f"tls-ca-cert-file {self._tls.authority}",
            ]  # fmt: skip
        else:
            lines.append(f"port {self._ports[0]}")
        if self._login is not None:
            user, password = self._login
            lines += [f"user {user} on >{password} {REDIS_RIGHTS} +ping", "user default off"]
        settings = self._folder / "redis.conf"
        settings.write_text("\n".join(lines) + "\n")
        return [self._program.path, settings]

    def _answers(self) -> bool:
        try:
            return self._send(b"PING") == b"+PONG\r\n"
        except OSError:
            return False

    def _send(self, *words: bytes) -> bytes:
        """A command; returns its whole answer."""
        with socket.create_connection((HOST, self._ports[0]), _ANSWER_S) as plain:
            if self._tls is None:
                return self._exchange(plain, words)
            context = ssl.create_default_context(cafile=str(self._tls.authority))
            context.load_cert_chain(self._tls.certificate, self._tls.key)
            with context.wrap_socket(plain, server_hostname=HOST) as connection:
                return self._exchange(connection, words)

    def _exchange(self, connection: socket.socket, words: Sequence[bytes]) -> bytes:
        commands = [words, (b"QUIT",)]
        skipped = 0
        if self._login is not None:
            user, password = self._login
            commands.insert(0, (b"AUTH", user.encode(), password.encode()))
            skipped = len(b"+OK\r\n")
        for command in commands:
            parts = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in command)
            connection.sendall(b"*%d\r\n%s" % (len(command), parts))
        answer = b""
        while data := connection.recv(4_096):
            answer += data
        return answer[skipped:].removesuffix(b"+OK\r\n") or b"+OK\r\n"


class ForgetfulRedisServer(RedisServer):
    """A Redis that keeps everything in memory only."""

    keeps = False
    DATA = ("dump.rdb",)

    def save(self) -> None:
        """Write down what it has; it has just that after it was killed and started."""
        self._send(b"SAVE")

    def info(self, name: str) -> int:
        """A number of ``INFO``; of ``db0`` how many keys it has."""
        lines = self._send(b"INFO").decode().split("\r\n")
        found = [line.partition(":")[2] for line in lines if line.startswith(f"{name}:")]
        return int(found[0].removeprefix("keys=").partition(",")[0]) if found else 0


def _free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody uses now."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()
