"""Goal: HTTP is a process of its own: whatever becomes of it, engines are served."""

import asyncio
import os
import signal
import socket
import stat
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.config import EventsConfig, ServerConfig, SocketConfig, load
from kvstore.node.desk import Desk
from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
from kvstore.protocol.errors import ConfigError, TierUnavailable
from kvstore.server import client, http
from kvstore.server.admin.connections import TCP_MAX
from kvstore.server.http import HttpServer
from kvstore.server.publish import Publication
from kvstore.server.status import NodeStatus
from kvstore.state.tree.slots import SlotTable
from tests.client.conftest import READY, Daemon, arguments
from tests.server.conftest import TIMEOUT_S, Api, Stored


@pytest.fixture
def own(spawn, tmp_path) -> Daemon:
    """A daemon that a test may harm."""
    return Daemon(spawn(arguments(tmp_path / "own.sock"), ready=READY))


def admin_pid(daemon: Daemon) -> int:
    pid = Api(daemon).get("/v1/stats")["admin"]["pid"]
    assert isinstance(pid, int)
    return pid


def answers(daemon: Daemon) -> bool:
    try:
        return client.send(daemon.admin, "GET", "/healthz", timeout_s=TIMEOUT_S)[0] == 200
    except OSError:
        return False


def gone(pid: int) -> bool:
    try:
        return (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) in "ZX"
    except OSError:
        return True


# The child's life


def test_a_child_that_is_killed_is_started_again_and_engines_do_not_notice(own, wait_until):
    with own.connect() as store:
        mine = Stored(store)
        keys = mine.put(4)
        before = admin_pid(own)
        os.kill(before, signal.SIGKILL)
        assert mine.space.lookup(keys).pages == 4

        wait_until(lambda: answers(own), what="HTTP is there again, at the same place")

        assert mine.space.lookup(keys).pages == 4
    stats = Api(own).get("/v1/stats")
    assert stats["admin"]["restarts"] == 1
    assert stats["admin"]["pid"] != before
    assert b"kvstore_admin_restarts_total 1.0" in own.ask("/metrics")
    assert 'admin process ended status="killed by SIGKILL"' in own.process.stderr
    assert client.send(own.http, "GET", "/healthz", timeout_s=TIMEOUT_S)[0] == 200


def test_a_job_outlives_the_child_that_asked_for_it(own, wait_until):
    with own.connect() as store:
        mine = Stored(store)
        mine.put(1000)
        job = Api(own).post("/v1/clear", space=mine.label)
        os.kill(admin_pid(own), signal.SIGKILL)
        wait_until(lambda: answers(own))

        ended = Api(own).ended(job)
    assert (ended["state"], ended["result"]["dropped"]) == ("done", 1000)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_that_a_group_of_processes_gets_are_the_nodes(own, number):
    os.kill(admin_pid(own), number)

    assert answers(own)
    assert Api(own).get("/v1/stats")["admin"]["restarts"] == 0
    assert own.process.stop() == 0


def test_no_child_outlives_its_node(own, wait_until):
    child = admin_pid(own)
    own.process.kill()

    wait_until(lambda: gone(child), what="the child of a killed node ends")


def test_a_child_that_is_stopped_ends_with_a_killed_node_too(own, wait_until):
    child = admin_pid(own)
    os.kill(child, signal.SIGSTOP)
    own.process.kill()

    wait_until(lambda: gone(child), what="a stopped child of a killed node ends")


def test_a_node_that_is_stopped_is_not_healthy_and_is_when_it_goes_on(own, wait_until):
    own.process.send_signal(signal.SIGSTOP)
    try:
        status, told = Api(own, "").send("GET", "/healthz")
        assert (status, told["error"]["code"]) == (503, "unavailable")
    finally:
        own.process.send_signal(signal.SIGCONT)

    wait_until(lambda: answers(own))


def test_a_node_ends_at_once_whoever_is_connected(own):
    address = own.http.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), TIMEOUT_S) as idle:
        idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle.recv(1 << 16).startswith(b"HTTP/1.1 200")
        child = admin_pid(own)
        assert own.process.stop(5.0) == 0
    assert gone(child)


# In this process: a server whose child is harmed in ways that a daemon's cannot be


@pytest.fixture
def parts(tmp_path) -> tuple[Any, ...]:
    """What a server is made of."""
    sets = [f"socket.path={tmp_path / 'in.sock'}", "http.port=0"]
    node = Node("in", b"b" * 16, SlotTable(1 << 16, 1), NodeLimits(1, 1), lambda: b"t" * 16)
    memory = SimpleNamespace()
    desk = Desk(node, memory, lambda _actions: None)
    loaded = load(ServerConfig, None, {}, sets)
    off = Publication(EventsConfig(endpoint=""), SocketConfig(), "n", bytes(16))
    return loaded, desk, memory, NodeStatus(desk, memory, "lru", 0.0, off)


@pytest.fixture
def quick(monkeypatch) -> None:
    monkeypatch.setattr(http, "PAUSE_S", 0.001)
    monkeypatch.setattr(http, "PAUSE_MAX_S", 0.002)


def test_a_child_that_does_not_come_up_ends_the_start(parts, monkeypatch):
    monkeypatch.setattr(http, "_MODULE", ("-c", "raise SystemExit(7)"))

    async def start() -> None:
        server = HttpServer(*parts)
        try:
            await server.start()
        finally:
            server.stop()

    with pytest.raises(TierUnavailable, match=r"does not serve HTTP \(exit status 7"):
        asyncio.run(start())
    assert list(Path(parts[0].config.socket.path).parent.iterdir()) == []


def test_a_child_that_ends_again_and_again_is_started_at_a_bounded_rate(
    parts, monkeypatch, quick, caplog
):
    pauses: list[float] = []

    async def run() -> None:
        server = HttpServer(*parts)
        sleep = asyncio.sleep

        async def counted(seconds: float) -> None:
            pauses.append(seconds)
            await sleep(0)

        try:
            await server.start()
            monkeypatch.setattr(http, "_MODULE", ("-c", "raise SystemExit(7)"))
            monkeypatch.setattr(http.asyncio, "sleep", counted)
            os.kill(server.stats().pid, signal.SIGKILL)
            watching = asyncio.create_task(server.watch())
            while server.restarts < 4:
                await sleep(0.01)
            watching.cancel()
        finally:
            server.stop()

    monkeypatch.setattr(http, "PAUSE_S", 0.1)
    monkeypatch.setattr(http, "PAUSE_MAX_S", 0.3)
    asyncio.run(run())
    assert pauses[:4] == [0.2, 0.3, 0.3, 0.3]
    assert [one.message for one in caplog.records].count("admin process not started") >= 3


def test_a_child_that_is_silent_is_ended_and_started_again(parts, monkeypatch, quick):
    monkeypatch.setattr(http, "ALIVE_S", 0.5)
    monkeypatch.setattr(http, "SILENT_S", 4.0)
    monkeypatch.setattr(http, "END_S", 0.1)

    async def run() -> None:
        server = HttpServer(*parts)
        try:
            await server.start()
            watching = asyncio.create_task(server.watch())
            silent = server.stats().pid
            os.kill(silent, signal.SIGSTOP)
            async with asyncio.timeout(30):
                while server.stats().pid in (0, silent):  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0)
            assert gone(silent)
            watching.cancel()
        finally:
            server.stop()

    asyncio.run(run())


# Places


def test_a_taken_port_ends_the_start_with_a_message(own, spawn, tmp_path):
    port = own.http.rpartition(":")[2]
    process = spawn(arguments(tmp_path / "other.sock", http__port=port))

    assert process.wait() == 2
    assert f"http.port: cannot listen at tcp://127.0.0.1:{port}" in process.stderr
    assert "stop it, or choose another port" in process.stderr


def test_a_socket_of_a_living_node_is_not_taken_and_that_of_a_dead_one_is(own, spawn, tmp_path):
    path = own.admin.removeprefix("unix://")
    settings = {"http__socket_path": path}
    process = spawn(arguments(tmp_path / "other.sock", **settings))

    assert process.wait() == 2
    assert f"http.socket_path: {path}: another node listens there" in process.stderr
    assert answers(own)
    own.process.kill()
    heir = Daemon(spawn(arguments(tmp_path / "other.sock", **settings), ready=READY))
    assert (heir.admin, answers(heir)) == (own.admin, True)


def test_what_is_no_socket_is_left_where_it_is(spawn, tmp_path):
    (tmp_path / "file").write_text("mine")
    process = spawn(arguments(tmp_path / "own.sock", http__socket_path=tmp_path / "file"))

    assert process.wait() == 2
    assert "is not a socket" in process.stderr
    assert (tmp_path / "file").read_text() == "mine"


def test_an_ipv6_address_is_served_and_nonsense_is_refused(spawn, tmp_path, parts):
    own = Daemon(spawn(arguments(tmp_path / "own.sock", http__host="::1"), ready=READY))
    assert client.send(own.http, "GET", "/healthz", timeout_s=TIMEOUT_S)[0] == 200

    settings = ["http.host=300.0.0.1", "http.read_token=" + "r" * 16]
    config = load(ServerConfig, None, {}, settings)
    with pytest.raises(ConfigError, match=r"300\.0\.0\.1"):
        HttpServer(config, *parts[1:])


# Who may


def token_of(daemon: Daemon) -> Path:
    return Path(daemon.admin.removeprefix("unix://") + ".token")


def test_only_the_nodes_user_may_use_its_socket_and_read_its_token(own):
    for path, mode in ((Path(own.admin.removeprefix("unix://")), 0o600), (token_of(own), 0o600)):
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert path.stat().st_uid == os.geteuid()
    assert own.process.stop() == 0
    assert not token_of(own).exists()
    assert not Path(own.admin.removeprefix("unix://")).exists()


def test_a_group_that_may_use_the_nodes_socket_may_operate_it(spawn, tmp_path):
    settings = {"socket__group_access": "true"}
    own = Daemon(spawn(arguments(tmp_path / "own.sock", **settings), ready=READY))

    assert stat.S_IMODE(Path(own.admin.removeprefix("unix://")).stat().st_mode) == 0o660
    assert stat.S_IMODE(token_of(own).stat().st_mode) == 0o600


def test_a_file_in_the_tokens_place_is_replaced_and_a_link_not_followed(spawn, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "own.sock.admin.token").symlink_to(victim)
    own = Daemon(spawn(arguments(tmp_path / "own.sock"), ready=READY))

    assert victim.read_text() == "precious"
    assert not token_of(own).is_symlink()
    assert Api(own, token_of(own).read_text().strip()).get("/v1/stats")["node"] == "local"


def test_without_a_token_tcp_shows_health_and_metrics_and_nothing_else(own):
    nobody, known = Api(own, ""), Api(own, token_of(own).read_text().strip())

    assert nobody.get("/healthz") == {"status": "ok"}
    assert nobody.get("/readyz")["status"] == "ready"
    status, metrics = client.send(own.http, "GET", "/metrics", timeout_s=TIMEOUT_S)
    assert (status, b"kvstore_pages" in metrics) == (200, True)
    for method, path in (
        ("GET", "/v1/stats"), ("GET", "/v1/spaces"), ("GET", "/v1/config"), ("GET", "/v1/jobs"),
        ("POST", "/v1/explain"), ("POST", "/v1/clear"), ("PUT", "/v1/policy"),
    ):  # fmt: skip
        status, told = nobody.send(method, path, {} if method != "GET" else None)
        assert (status, told["error"]["code"]) == (401, "unauthorized"), path
        assert str(token_of(own)) in told["error"]["message"]
    assert known.get("/v1/stats")["node"] == "local"
    assert known.ended(known.post("/v1/clear", all=True))["state"] == "done"


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("127.0.0.1:7780", 200), ("[::1]:7780", 200), ("localhost", 200), ("LOCALHOST:1", 200),
        ("a.example:7780", 401), ("localhost.a.example", 401), ("127.0.0.1.a.example", 401),
        ("", 401), ("[::1", 401), ("x:y:z", 401),
    ],
)  # fmt: skip
def test_a_page_in_a_browser_reads_no_metrics_under_its_own_name(name, status, daemon):
    """It may have its name lead to loopback once it is loaded."""
    host, _, port = daemon.http.removeprefix("http://").rpartition(":")

    def told(more: str = "") -> bytes:
        with socket.create_connection((host, int(port)), TIMEOUT_S) as asking:
            request = f"GET /metrics HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n{more}\r\n"
            asking.sendall(request.encode())
            return b"".join(iter(lambda: asking.recv(1 << 16), b""))

    answer = told()
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert (b"kvstore_pages" in answer) == (status == 200)
    known = told(f"Authorization: Bearer {token_of(daemon).read_text().strip()}\r\n")
    assert b"kvstore_pages" in known, "with a token any name will do"


def as_nobody(url: str, method: str, path: str, groups: Sequence[int] = ()) -> int:
    """What another user, in further groups, gets for a status; 0 = it may not even connect."""
    "".encode("idna")  # a host's name needs it, and the other user may not read Python's library
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        status = 99
        try:
            os.setgroups(groups)
            os.setgid(65_534)
            os.setuid(65_534)
            body = b'{"all": true}' if method == "POST" else None
            status = client.send(url, method, path, body=body, timeout_s=TIMEOUT_S)[0]
        except PermissionError:
            status = 0
        finally:
            os.write(writing, str(status).encode())
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    with os.fdopen(reading) as told:
        return int(told.read())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_of_the_machine_cannot_clear_the_cache(spawn, open_folder):
    own = Daemon(spawn(arguments(open_folder / "own.sock"), ready=READY))
    with own.connect() as store:
        mine = Stored(store)
        keys = mine.put(3)
        assert as_nobody(own.http, "POST", "/v1/clear") == 401
        assert as_nobody(own.admin, "POST", "/v1/clear") == 0
        assert as_nobody(own.http, "GET", "/healthz") == 200
        assert mine.space.lookup(keys).pages == 3
    assert "operation" not in own.process.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_whoever_is_in_the_nodes_group_may_operate_it(spawn, open_folder):
    settings = {"socket__group_access": "true"}
    own = Daemon(spawn(arguments(open_folder / "own.sock", **settings), ready=READY))
    group = [60_005, os.getegid()]  # neither is the first group of that user

    assert as_nobody(own.admin, "GET", "/v1/sessions", group) == 200
    Path(own.admin.removeprefix("unix://")).chmod(0o666)
    assert as_nobody(own.admin, "GET", "/v1/sessions", group[:1]) == 401


# Idle connections


def test_idle_connections_take_nothing_of_the_node_and_keep_nobody_out(own):
    fds = Path(f"/proc/{own.process.pid}/fd")
    child = Path(f"/proc/{admin_pid(own)}/fd")
    before = len(list(fds.iterdir()))
    host, _, port = own.http.removeprefix("http://").rpartition(":")
    idle = [socket.create_connection((host, int(port)), TIMEOUT_S) for _ in range(TCP_MAX + 100)]
    try:
        idle[0].settimeout(TIMEOUT_S)
        assert idle[0].recv(1) == b"", "who has been idle for longest makes room"
        idle[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle[-1].recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert client.send(own.http, "GET", "/healthz", timeout_s=TIMEOUT_S)[0] == 200
        assert answers(own), "over the Unix socket too"
        assert len(list(child.iterdir())) < TCP_MAX + 50
        assert len(list(fds.iterdir())) == before
        with own.connect() as store:
            assert Stored(store).put(1)
    finally:
        for one in idle:
            one.close()
