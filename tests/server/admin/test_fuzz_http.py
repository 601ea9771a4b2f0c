"""Goal: whatever comes over HTTP, the node answers it, serves engines in time, and holds nothing.

Everything follows from a seed, which a failure names. A soak looks for ten minutes, with
seeds of its own.
"""

import json
import random
import re
import socket
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from kvstore.protocol.errors import KVStoreError
from kvstore.server.admin.routes import ROUTES, Route
from kvstore.state.choice.policies import POLICIES
from tests.client.conftest import READY, Daemon, arguments
from tests.fuzz.test_socket import STALLS_MAX
from tests.looking_up import LookingUp
from tests.server.conftest import TIMEOUT_S, Api, Stored

SECONDS = 3.0
STALL_S = 0.05
STATUSES = {100, 200, 202, 307, 400, 401, 403, 404, 405, 409, 413, 422, 503}
MUST_BE_SEEN = {200, 400, 401, 404}
ODD_HEADERS = (
    b"Content-Length: x", b"Content-Length: 99999999999999999999", b"Expect: 100-continue",
    b"Transfer-Encoding: chunked", b"Upgrade: websocket", b"Connection: upgrade",
    b"X: " + b"y" * 40_000, b"\x00: x", b"Content-Encoding: gzip", b": x",
)  # fmt: skip


class Stranger:
    """Sends what it likes, and looks at what it is answered."""

    def __init__(self, daemon: Daemon, label: str, keys: list[str], seed: int) -> None:
        self.chance = random.Random(seed)
        self.seed = seed
        self.label, self.keys = label, keys
        host, _, port = daemon.http.removeprefix("http://").rpartition(":")
        self.tcp = (host, int(port))
        self.unix = daemon.admin.removeprefix("unix://")
        self.token = Path(f"{self.unix}.token").read_text().strip()
        self.seen: Counter[int] = Counter()
        self.wrong: list[str] = []
        self.idle: list[socket.socket] = []

    def run(self, end: float) -> None:
        """Until then, and on a busy machine until it was answered in every way that matters."""
        late = end + 3 * SECONDS
        while not self.wrong:
            now, seen_all = monotonic(), self.seen.keys() >= MUST_BE_SEEN
            if now >= (end if seen_all else late):
                break
            kinds = [self._request, self._request, self._request, self._request, self._garbage,
                     self._half, self._many, self._wait, self._prompt]  # fmt: skip
            with suppress(OSError):  # it may be cut off wherever it is
                self.chance.choice(kinds)()
        for one in self.idle:
            one.close()

    def _connect(self) -> socket.socket:
        if self.chance.random() < 0.5:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            made.settimeout(TIMEOUT_S)
            try:
                made.connect(self.unix)
            except OSError:
                made.close()
                raise
            return made
        return socket.create_connection(self.tcp, TIMEOUT_S)

    def _send(self, data: bytes) -> None:
        with self._connect() as to:
            to.sendall(data)
            with suppress(OSError):
                to.shutdown(socket.SHUT_WR)
            self._look(b"".join(iter(lambda: to.recv(1 << 16), b"")), data)

    def _look(self, told: bytes, asked: bytes) -> None:
        """Every answer has a status that is expected, and says why it refuses."""
        for status in re.findall(rb"(?:^|\r\n|}|\n)HTTP/1\.1 (\d{3}) ", told):
            self.seen[int(status)] += 1
            if int(status) not in STATUSES:
                self.wrong.append(f"seed {self.seed}: {asked[:500]!r} -> {told[:500]!r}")

    def _line(self) -> tuple[bytes, bytes]:
        """A request's first line and its body."""
        route = self.chance.choice(ROUTES)
        method = route.method
        if self.chance.random() < 0.1:
            method = self.chance.choice(["GET", "HEAD", "OPTIONS", "TRACE", "PUT", "X", "DELETE"])
        path = re.sub(r"{(\w+)(:\w+)?}", lambda at: self._text(at[1]), route.path)
        fields = self._fields(route)
        if route.has_body:
            body = json.dumps(fields).encode()
            if self.chance.random() < 0.1:
                body = self._scratch(body)
            return f"{method} {path} HTTP/1.1".encode(errors="replace"), body
        query = "&".join(f"{name}={self._text(name, value)}" for name, value in fields.items())
        return f"{method} {path}?{query} HTTP/1.1".encode(errors="replace"), b""

    def _fields(self, route: Route) -> dict[str, Any]:
        names = [
            name for name in route.asks.__struct_fields__
            if f"{{{name}" not in route.path or self.chance.random() < 0.05
        ]  # fmt: skip
        fields = {name: self._value(name) for name in names if self.chance.random() < 0.8}
        if self.chance.random() < 0.05:
            fields[self.chance.choice(["", "x", "type", "\0", "spaces"])] = 1
        return fields

    def _value(self, name: str) -> Any:
        chance = self.chance
        if chance.random() < 0.2:
            nonsense = [None, True, -1, 0, 1 << 62, 1 << 63, 1 << 70, 1e308, -0.5, "", "x" * 5000,
                        "\ud800", "\x00", "NaN", [], {}, [[]], {"a": 1}, "é模", "null"]  # fmt: skip
            return chance.choice(nonsense)
        sane = {
            "space": self.label, "key": chance.choice(self.keys), "prefix": self.keys[0],
            "keys": chance.sample(self.keys, k=min(3, len(self.keys))),
            "tokens": list(range(chance.randint(0, 300))), "all": chance.random() < 0.3,
            "name": chance.choice([*POLICIES, "x"]), "tier": chance.choice(["host", "ssd", "l4"]),
            "to": chance.choice(["host", "ssd"]), "cursor": chance.choice(["0", "7", *self.keys]),
            "deadline_s": chance.choice([1e-6, 0.05]), "ttl_s": chance.choice([0, 1e-3, 60]),
        }  # fmt: skip
        return sane.get(name, chance.choice([0, 1, 5, 1000]))

    def _text(self, name: str, value: Any = None) -> str:
        value = self._value(name) if value is None else value
        text = value if isinstance(value, str) else json.dumps(value)
        return "".join(
            one if one.isalnum() and one.isascii() else f"%{ord(one) & 0xFF:02x}"
            for one in text[:6000]
        )

    def _scratch(self, data: bytes) -> bytes:
        """The same with some bytes changed, doubled or left out."""
        made = bytearray(data)
        for _ in range(self.chance.randint(1, 4)):
            at = self.chance.randrange(len(made) + 1)
            made[at : at + self.chance.randint(0, 3)] = self.chance.randbytes(
                self.chance.randint(0, 3)
            )
        return bytes(made)

    def _headers(self, body: bytes) -> bytes:
        chance = self.chance
        lines = [b"Host: x", b"Connection: close", b"Content-Length: %d" % len(body)]
        if chance.random() < 0.8:
            lines.append(b"Authorization: Bearer " + self.token.encode())
        elif chance.random() < 0.5:
            lines.append(
                b"Authorization: " + chance.randbytes(9).replace(b"\n", b"").hex().encode()
            )
        if chance.random() < 0.1:
            lines.append(chance.choice(ODD_HEADERS))
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _whole(self) -> bytes:
        line, body = self._line()
        return line + b"\r\n" + self._headers(body) + body

    def _request(self) -> None:
        self._send(self._whole())

    def _garbage(self) -> None:
        self._send(self.chance.choice([
            self.chance.randbytes(self.chance.randint(1, 2000)), self._scratch(self._whole()),
            b"GET " + b"/" * 70_000, b"\r\n" * 1000, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ]))  # fmt: skip

    def _half(self) -> None:
        with self._connect() as to:
            data = self._whole()
            to.sendall(data[: self.chance.randrange(len(data))])

    def _many(self) -> None:
        """Requests one behind the other."""
        whole = [self._whole().replace(b"Connection: close\r\n", b"") for _ in range(5)]
        self._send(b"".join(whole))

    def _wait(self) -> None:
        if len(self.idle) < 300:
            self.idle.append(self._connect())

    def _prompt(self) -> None:
        size = self.chance.choice([100, 20_000, 200_000])
        body = json.dumps({"tokens": list(range(size))}).encode()
        self._send(b"POST /v1/explain HTTP/1.1\r\n" + self._headers(body) + body)


def sockets(pid: int) -> int:
    """How many a process has open."""
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found += str(entry.readlink()).startswith("socket:")
    return found


def running(api: Api) -> list[int]:
    return [one["job"] for one in api.get("/v1/jobs")["jobs"] if one["state"] == "running"]


def be_strange(daemon: Daemon, seeds: list[int], seconds: float, wait_until: Any) -> None:
    api = Api(daemon)
    child = api.get("/v1/stats")["admin"]["pid"]
    before = sockets(daemon.process.pid), sockets(child)
    with daemon.connect(name="fuzz") as store:
        mine = Stored(store)
        keys = [one.hex() for one in mine.put(20)]
        engine = LookingUp(daemon.address, daemon.process.pid)
        strangers = [Stranger(daemon, mine.label, keys, seed) for seed in seeds]
        threads = [
            threading.Thread(target=one.run, args=(monotonic() + seconds,)) for one in strangers
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            with suppress(KVStoreError):  # there may be no room beside what is pinned
                mine.put(20)  # what is cleared comes again
            mine.space.lookup(mine.space.page_keys(range(80))[:20])
            threads[0].join(0.1)
        for thread in threads:
            thread.join()
        waits = engine.waits()
        seen = sum((one.seen for one in strangers), Counter[int]())
        said = f"seeds {seeds}, answers {dict(seen)}, {waits['lookups']} lookups"
        assert not [wrong for one in strangers for wrong in one.wrong], said
        assert seen.keys() >= MUST_BE_SEEN, said
        # What is left of a busy machine comes once or twice: a log that waits for the disk.
        assert [one for one in waits["stalls_s"] if one > STALL_S][STALLS_MAX:] == [], said
        assert waits["lookups"] > 10, said

        for job in running(api):
            api.send("DELETE", f"/v1/jobs/{job}")  # it may wait for what somebody holds
        wait_until(lambda: not running(api), 30.0, what="jobs end when they are cancelled")
        for pin in api.get("/v1/pins")["pins"]:
            api.send("DELETE", f"/v1/pins/{pin['pin']}")
        stats = api.get("/v1/stats")
        assert stats["admin"] == {"pid": child, "restarts": 0}, said
        assert (stats["leases"], stats["puts"], stats["waiting_requests"]) == (0, 0, 0)
        assert stats["host"]["pinned_bytes"] == stats["host"]["writing_bytes"] == 0
        assert not [line for line in daemon.process.stderr.splitlines() if " CRITICAL " in line]
        assert "Traceback" not in daemon.process.stderr
    wait_until(
        lambda: sockets(daemon.process.pid) <= before[0] and sockets(child) <= before[1],
        30.0,
        what="nothing is held",
    )
    assert daemon.process.stop() == 0


@pytest.fixture
def own(spawn, tmp_path) -> Daemon:
    settings = {
        "ssd__directories": tmp_path / "ssd", "ssd__capacity_bytes": "256MiB",
        "ssd__segment_bytes": "16MiB",
    }  # fmt: skip
    return Daemon(spawn(arguments(tmp_path / "own.sock", **settings), ready=READY))


def test_whatever_comes_over_http_the_node_serves_engines_in_time(own, wait_until):
    be_strange(own, [1, 2], SECONDS, wait_until)


@pytest.mark.soak("http", minutes=10)
def test_whatever_comes_over_http_for_long(own, wait_until, soak_s):
    chance = random.SystemRandom()
    be_strange(own, [chance.randrange(1 << 40) for _ in range(2)], soak_s, wait_until)
