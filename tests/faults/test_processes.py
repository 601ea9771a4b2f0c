"""Goal: what a client held comes back when it ends, wherever it runs and whatever the kernel tells.

What it held here is a put that it never committed: its slots are LIMBO until the node knows that
nobody writes there any more.
"""

import asyncio
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from kvstore.protocol import wire
from kvstore.server.handshakes import UNREAD_MAX
from kvstore.server.place import claim
from kvstore.server.processes import Processes
from kvstore.testing.server import wait_for
from tests.conftest import Process, Spawn, WaitUntil
from tests.faults import content
from tests.faults.conftest import READY, Daemon, arguments
from tests.faults.test_connections import HELLO, connect, receive

PAGES = 4
UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def frames(chain: int) -> bytes:
    """What a client sends that begins a put and does not wait for answers."""
    keys = content.keys(chain, PAGES).packed
    messages = [
        HELLO,
        wire.OpenSpace(2, content.IDENTITY, [content.SHARD]),
        wire.BeginPut(3, 1, 0, 0, keys, b""),
    ]
    return b"".join(map(wire.encode, messages))


def in_a_child(work: Callable[[], None]) -> int:
    """Fork; the child does its work and is killed where it stands. Gives the child's pid."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    return pid


def begin_put(daemon: Daemon, chain: int) -> None:
    """In a process that is to be killed: begin a put and wait until it is granted."""
    connection = connect(daemon)
    connection.sendall(frames(chain))
    for _ in range(3):
        receive(connection)


def held(daemon: Daemon) -> int:
    return daemon.host("limbo") + daemon.host("writing")


class Node:
    """A daemon in a PID namespace of its own, or as on an older kernel."""

    def __init__(self, spawn: Spawn, folder: Path, before: list[str], module: list[str]) -> None:
        name, (python, dash_m, daemon, *flags) = arguments(folder)
        program = [*before, python, dash_m, *(module or [daemon]), *flags]
        self._inside = bool(before)
        self.process: Process = spawn(program, ready=READY)
        self.daemon = Daemon(self.process, name)

    def stop(self) -> None:
        """End the daemon itself: ``unshare`` does not hand signals on."""
        if self._inside:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGTERM)
            assert wait_for(lambda: self.process.returncode is not None, 20)


@pytest.fixture
def node(spawn: Spawn, tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(before: list[str] | None = None, module: list[str] | None = None) -> Node:
        made.append(Node(spawn, tmp_path, before or [], module or []))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def test_a_client_outside_of_the_nodes_pid_namespace_gives_back_what_it_held(
    node, wait_until: WaitUntil
):
    daemon = node(before=UNSHARE).daemon

    for chain in range(3):
        os.waitpid(in_a_child(lambda chain=chain: begin_put(daemon, chain)), 0)

    wait_until(lambda: not held(daemon) and not daemon.stats()["sessions"])
    assert daemon.stats()["unwatched_processes"] == 0


@pytest.mark.parametrize("module", [[], ["tests.faults.kernels", "pidfd_open"]])
def test_a_client_that_ended_before_the_node_looked_leaves_nothing(
    node, wait_until: WaitUntil, module: list[str]
):
    made = node(module=module)
    daemon = made.daemon
    os.kill(daemon.pid, signal.SIGSTOP)

    def hurry() -> None:
        connect(daemon).sendall(frames(1))

    for _ in range(3):
        os.waitpid(in_a_child(hurry), 0)
    os.kill(daemon.pid, signal.SIGCONT)

    wait_until(lambda: daemon.stats()["accepted_connections"] == 3)
    wait_until(lambda: not held(daemon) and not daemon.stats()["sessions"])


def test_what_nobody_can_tell_the_end_of_is_said_and_comes_back_after_a_while(
    node, wait_until: WaitUntil
):
    made = node(module=["tests.faults.kernels", "blind"])
    daemon = made.daemon
    extents = daemon.stats()["host"]["capacity_bytes"]

    os.waitpid(in_a_child(lambda: begin_put(daemon, 1)), 0)

    wait_until(lambda: daemon.stats()["counts"].get("retired_extents"))
    wait_until(lambda: not held(daemon) and not daemon.stats()["sessions"])
    assert daemon.host("free") == daemon.stats()["host"]["capacity_bytes"] == extents
    assert daemon.host("retiring") == 0
    assert "cannot be watched" in made.process.stderr
    with connect(daemon) as connection:
        connection.sendall(frames(2))
        *_, granted = [receive(connection) for _ in range(3)]
        assert isinstance(granted, wire.PutGranted)
        assert len(granted.addresses) == 16 * PAGES
        assert daemon.stats()["unwatched_processes"] == 1


def test_a_process_id_that_was_given_away_again_is_another_process(monkeypatch):
    """Before Linux 6.9 a process is known by its number, and numbers come back."""
    monkeypatch.setattr("kvstore.server.processes._inodes_are_unique", lambda: False)
    ended: list[int] = []
    child = in_a_child(lambda: None)
    pidfds = [os.pidfd_open(child), os.pidfd_open(os.getpid())]
    os.waitpid(child, 0)
    monkeypatch.setattr("kvstore.server.processes._open", lambda _socket, _pid: pidfds.pop(0))

    async def scene() -> None:
        processes = Processes(ended.append)
        here, there = socket.socketpair()
        with here, there:
            assert processes.add(here, 4711).identity == 4711
            assert processes.add(here, 4711).identity == 4711
            assert ended == [4711], "what the first one held is given back"
            assert processes.runs(4711)
            processes.close()

    asyncio.run(scene())


def test_where_no_descriptor_is_left_that_is_said_and_later_processes_are_watched(caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def scene() -> None:
        processes = Processes(lambda _identity: None)
        here, there = socket.socketpair()
        with here, there:
            lowest = os.dup(0)
            os.close(lowest)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
            try:
                full = [processes.add(here, pid) for pid in (os.getpid(), os.getpid(), 0)]
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert not any(one.watched for one in full)
            assert len({one.identity for one in full}) == 3
            assert processes.add(here, os.getpid()).watched
            processes.close()

    asyncio.run(scene())
    (said,) = [one.getMessage() for one in caplog.records if one.name == Processes.__module__]
    assert "cannot be watched: Too many open files" in said
    assert "namespace" not in said


# Who may connect


def test_of_two_nodes_on_one_socket_the_second_is_refused_and_the_first_goes_on(
    spawn: Spawn, tmp_path: Path
):
    _, program = arguments(tmp_path)
    first = spawn(program, ready=READY)

    second = spawn(program)

    assert second.wait() == 2
    assert f"another kvstore-server (pid {first.pid})" in second.stderr
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(first.ready.group(1).removeprefix("unix://"))


def test_a_node_waits_for_the_lock_before_it_touches_the_socket(spawn: Spawn, tmp_path: Path):
    """Between looking and listening another node may have made the socket its own."""
    _, program = arguments(tmp_path)
    path = tmp_path / "kv.sock"
    descriptor = claim(path)
    path.write_text("not a socket: whoever got here would say so")
    try:
        late = spawn(program)
        assert late.wait() == 2
        assert f"another kvstore-server (pid {os.getpid()})" in late.stderr
    finally:
        os.close(descriptor)


def said(spawn: Spawn, daemon: Daemon, uid: int, gid: int, groups: str, *tenants: str) -> object:
    path = daemon.address.removeprefix("unix://")
    program = [sys.executable, "-m", "tests.faults.stranger", path, str(uid), str(gid), groups]
    stranger = spawn([*program, *tenants])
    assert stranger.wait() == 0
    return json.loads(stranger.stdout)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_tenants_are_told_apart_by_user_and_group_not_by_what_clients_say(
    spawn: Spawn, open_folder: Path
):
    name, program = arguments(open_folder)
    program += ["--set", "socket.tenants=red=60001,blue=@60002,green=60003"]
    daemon = Daemon(spawn(program, ready=READY), name)

    alone = said(spawn, daemon, 60001, 60001, "", "red", "blue")
    grouped = said(spawn, daemon, 60004, 60004, "60005,60002", "red", "blue")
    nobody = said(spawn, daemon, 60006, 60006, "", "red")
    root = said(spawn, daemon, 0, 0, "", "red", "blue", "other")

    assert alone["red"] == ""
    assert "socket.tenants allows this user only red" in alone["blue"]
    assert grouped["blue"] == ""
    assert "socket.tenants" in grouped["red"]
    assert "socket.tenants has no entry" in nobody["red"]
    assert root == {"red": "", "blue": "", "other": ""}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_the_statistics_tell_a_tenant_nothing_of_others(spawn: Spawn, open_folder: Path):
    name, program = arguments(open_folder)
    program += ["--set", "socket.tenants=red=60001,blue=60002"]
    daemon = Daemon(spawn(program, ready=READY), name)

    red = said(spawn, daemon, 60001, 60001, "", "?red")
    blue = said(spawn, daemon, 60002, 60002, "", "?blue")
    root = said(spawn, daemon, 0, 0, "", "?red")

    assert red == {"?red": ["red", "red"]}
    assert blue == {"?blue": ["blue", "blue"]}
    assert root == {"?red": ["red", "blue", "red", content.IDENTITY.model]}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_without_tenants_other_users_cannot_connect(spawn: Spawn, open_folder: Path):
    name, program = arguments(open_folder)
    daemon = Daemon(spawn(program, ready=READY), name)

    assert said(spawn, daemon, 60001, 60001, "", "red") == {"red": "PermissionError"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_a_user_who_gets_as_far_as_the_socket_is_looked_at_all_the_same(
    spawn: Spawn, open_folder: Path
):
    """The mode of the socket is no more than the first door."""
    name, program = arguments(open_folder)
    daemon = Daemon(spawn([*program, "--set", "socket.group_access=true"], ready=READY), name)
    (open_folder / "kv.sock").chmod(0o666)

    stranger = said(spawn, daemon, 60001, 60001, "", "red")
    member = said(spawn, daemon, 60001, os.getegid(), "", "red")
    further = said(spawn, daemon, 60001, 60001, f"60005,{os.getegid()}", "red")

    assert stranger == {"red": f"user 60001 may not connect: the node runs as {os.geteuid()}"}
    assert member == {"red": ""}
    assert further == {"red": ""}, "a user may be in many groups"


def test_an_extent_goes_to_sessions_of_its_own_tenant_only(spawn: Spawn, tmp_path: Path):
    name, program = arguments(tmp_path)
    daemon = Daemon(spawn(program, ready=READY), name)
    tokens = {}
    with connect(daemon) as red, connect(daemon) as blue:
        for tenant, connection in (("red", red), ("blue", blue)):
            identity = msgspec.structs.replace(content.IDENTITY, tenant=tenant)
            opens = wire.OpenSpace(2, identity, [content.SHARD])
            connection.sendall(wire.encode(HELLO) + wire.encode(opens))
            welcome, _ = receive(connection), receive(connection)
            assert isinstance(welcome, wire.Welcome)
            tokens[tenant] = welcome.session
        red.sendall(wire.encode(wire.BeginPut(3, 1, 0, 0, content.keys(1, 1).packed, b"")))
        granted = receive(red)
        assert isinstance(granted, wire.PutGranted)
        [(extent, _, _)] = wire.unpack_addresses(granted.addresses)

        answers = {}
        for tenant, token in tokens.items():
            with connect(daemon) as short:
                short.sendall(wire.encode(wire.FetchExtents(token, [extent])))
                data, descriptors, *_ = socket.recv_fds(short, 4096, 4)
            answers[tenant] = wire.decode_answer(data[4:]), len(descriptors)
            for descriptor in descriptors:
                os.close(descriptor)

    assert answers["red"] == (wire.ExtentsFollow([extent]), 1)
    refused, count = answers["blue"]
    assert isinstance(refused, wire.Failure)
    assert count == 0


def test_descriptors_that_a_user_does_not_receive_are_so_many(spawn: Spawn, tmp_path: Path):
    """The kernel counts them for the node, which could send none to anybody at its limit."""
    name, program = arguments(tmp_path)
    daemon = Daemon(spawn(program, ready=READY), name)
    with ExitStack() as stack:
        red = stack.enter_context(connect(daemon))
        opens = wire.OpenSpace(2, content.IDENTITY, [content.SHARD])
        red.sendall(wire.encode(HELLO) + wire.encode(opens))
        welcome, _ = receive(red), receive(red)
        assert isinstance(welcome, wire.Welcome)
        red.sendall(wire.encode(wire.BeginPut(3, 1, 0, 0, content.keys(1, 1).packed, b"")))
        granted = receive(red)
        assert isinstance(granted, wire.PutGranted)
        [(extent, _, _)] = wire.unpack_addresses(granted.addresses)

        def ask() -> socket.socket:
            short = stack.enter_context(connect(daemon))
            short.sendall(wire.encode(wire.FetchExtents(welcome.session, [extent] * 64)))
            select.select([short], [], [], 5)
            return short

        unread = [ask() for _ in range(UNREAD_MAX)]
        refused = receive(ask())
        received = receive(unread.pop())
        again = receive(ask())

    assert isinstance(refused, wire.Failure)
    assert refused.code == "capacity"
    assert received == again == wire.ExtentsFollow([extent] * 64)


@pytest.mark.parametrize("entry", ["red", "=root", "red=", "red=@", "red=no-such-user"])
def test_an_entry_for_nobody_ends_the_start(spawn: Spawn, tmp_path: Path, entry: str):
    _, program = arguments(tmp_path)

    refused = spawn([*program, "--set", f"socket.tenants={entry}"])

    assert refused.wait() == 2
    assert "socket.tenants" in refused.stderr.splitlines()[-1]
