"""Goal: what fails at a start ends the process at once, is said last, and leaves nothing behind."""

import asyncio
import gc
import json
import os
import socket
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kvstore.config import ServerConfig, load
from kvstore.protocol.errors import KVStoreError
from kvstore.server.daemon import Daemon, serve
from kvstore.tier.disk import OSDisk
from tests.client.conftest import READY, arguments

END_S = 30.0


@pytest.fixture
def taken(tmp_path):
    """Things of this machine that somebody else has already, by name."""
    with ExitStack() as stack:
        tcp = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        unix = stack.enter_context(closing(socket.socket(socket.AF_UNIX)))
        unix.bind(str(tmp_path / "listened.sock"))
        unix.listen()
        (tmp_path / "file").write_text("short")
        (tmp_path / "locked").mkdir()
        stack.callback(os.close, OSDisk().lock(tmp_path / "locked"))
        yield {"port": tcp.getsockname()[1], "here": tmp_path}


STEPS = {
    "the events endpoint is none": ({"events__endpoint": "foo"}, "events.endpoint"),
    "the port of events is taken": (
        {"events__endpoint": "tcp://127.0.0.1:{port}"}, "events.endpoint"),
    "the port of replays is taken": (
        {"events__replay_endpoint": "tcp://127.0.0.1:{port}"}, "events.replay_endpoint"),
    "the port of HTTP is taken": ({"http__port": "{port}"}, "http.port"),
    "the address of HTTP is of another machine": (
        {"http__host": "192.0.2.1", "http__read_token": "0123456789abcdef"}, "192.0.2.1"),
    "a program listens at the socket": (
        {"socket.path": "{here}/listened.sock"}, "listened.sock: another program listens there"),
    "a file is where the socket goes": (
        {"socket.path": "{here}/file"}, "is not a socket: remove it"),
    "the folder of the socket cannot be made": (
        {"socket.path": "{here}/file/kv.sock"},
        "config: socket.path={here}/file/kv.sock: File exists: {here}/file is not a directory"),
    "the path of the socket is too long": ({"socket.path": "{here}/" + "x" * 120}, "too long"),
    "the path of the node's own socket is too long": (
        {"socket.path": "{here}/" + "x" * 120, "http__socket_path": "{here}/admin",
         "events__endpoint": "", "events__replay_endpoint": ""}, "too long"),
    "the SSD directory is a file": (
        {"ssd__directories": "{here}/file"}, "ssd.directories: {here}/file is not a directory"),
    "the SSD directory is another process's": (
        {"ssd__directories": "{here}/locked"}, "ssd.directories: {here}/locked: another process"),
    "the token file is missing": (
        {"http__read_token_file": "{here}/none"},
        "http.read_token_file={here}/none: No such file or directory"),
    "a file is where the admin socket goes": (
        {"http__socket_path": "{here}/file"}, "http.socket_path"),
    "the token is short": (
        {"http__operate_token_file": "{here}/file"},
        "http.operate_token_file={here}/file has 5 characters"),
    "a setting is unknown": ({"http__prot": "1"}, "did you mean http.port"),
    "a setting is not allowed": ({"host__policy": "arc"}, "one of kvstore, lru"),
    "the machine is too small": (
        {"host__capacity_bytes": "15TiB"}, "host.capacity_bytes=15TiB: memory:"),
}  # fmt: skip


def small(tmp_path: Path, settings: dict[str, object], *more: str) -> list[str]:
    """The command line of a daemon with an SSD, whose threads all run by the time it fails."""
    values = {
        "host__prefault": "true", "ssd__directories": tmp_path / "ssd",
        "ssd__capacity_bytes": "64MiB", "ssd__segment_bytes": "16MiB", **settings,
    }  # fmt: skip
    return [*arguments(tmp_path / "kv.sock", **values), *more]


def refused(process) -> str:
    """What a process that does not start says last."""
    assert process.wait(END_S) == 2, process.report()
    assert "ready" not in process.stdout
    assert "ended without waiting" not in process.stderr, "its threads have ended by themselves"
    return process.stderr.splitlines()[-1]


@pytest.mark.parametrize("step", STEPS)
def test_whatever_fails_ends_the_process_with_its_message_last(spawn, tmp_path, taken, step):
    settings, said = STEPS[step]
    settings = {name: value.format(**taken) for name, value in settings.items()}
    before = set(tmp_path.iterdir())

    told = refused(spawn(small(tmp_path, settings)))

    assert told.startswith("kvstore-server: ")
    assert said.format(**taken) in told
    made = {
        path.name
        for path in set(tmp_path.iterdir()) - before
        if path.suffix not in (".lock", ".memory")
    }
    assert made <= {"ssd", "process-0.out", "process-0.err"}, "no socket is left"
    assert (tmp_path / "listened.sock").is_socket(), "another node's socket stays"


@pytest.mark.parametrize(("limit", "said"), [("-f 1000", "ulimit -f"), ("-n 40", "ulimit -n")])
def test_memory_that_the_system_refuses_is_said(spawn, tmp_path, limit, said):
    command = small(tmp_path, {"host__extent_bytes": "1MiB" if "-n" in limit else "16MiB"})
    limited = ["bash", "-c", f'ulimit {limit} && exec "$@"', "bash", *command]

    assert said in refused(spawn(limited))


def in_a_group_of(limit_bytes: int, tmp_path: Path, command: list[str]) -> list[str]:
    """A daemon that finds itself in a control group with that limit."""
    for name, text in (
        ("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 8388608 kB\n"),
        ("proc/self/cgroup", "0::/pod/container\n"),
        ("sys/fs/cgroup/pod/memory.max", f"{limit_bytes}\n"),
        ("sys/fs/cgroup/pod/container/memory.max", "max\n"),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    program = (
        "import functools, pathlib, kvstore.server.daemon as daemon\n"
        f"at = pathlib.Path({str(tmp_path)!r})\n"
        "daemon.memory_checks = functools.partial(\n"
        "    daemon.memory_checks, proc=at / 'proc', system=at / 'sys')\n"
        "raise SystemExit(daemon.main())\n"
    )
    return [sys.executable, "-c", program, *command[3:]]


def test_more_memory_than_the_control_group_has_is_refused_by_what_doctor_knows(spawn, tmp_path):
    command = small(tmp_path, {})

    told = refused(spawn(in_a_group_of(64 << 20, tmp_path, command)))
    assert "host.capacity_bytes=64MiB: cgroup: " in told
    assert f"64.0 MiB of memory ({tmp_path}/sys/fs/cgroup/pod/memory.max)" in told
    assert "lower host.capacity_bytes" in told


def test_memory_that_is_just_enough_is_warned_of(spawn, tmp_path):
    command = small(tmp_path, {})
    process = spawn(in_a_group_of(200 << 20, tmp_path, command), ready=READY)

    assert process.stop() == 0
    assert "memory is scarce" in process.stderr


def test_the_message_is_json_like_every_line_where_that_was_asked_for(spawn, tmp_path):
    command = small(tmp_path, {"events__endpoint": "foo"}, "--log-format", "json")
    process = spawn(command)

    last = json.loads(refused(process))
    assert (last["level"], last["event"]) == ("critical", "not started")
    assert last["why"].startswith("config: events.endpoint")
    assert all(json.loads(line)["time"] for line in process.stderr.splitlines())


def test_a_thread_that_hangs_does_not_keep_the_process(spawn, tmp_path):
    patch = (
        "import threading\n"
        "daemon.END_WAIT_S = 0.1\n"
        "def fail(*_arguments, **_options):\n"
        "    threading.Thread(target=threading.Event().wait, name='stuck').start()\n"
        "    raise daemon.TierUnavailable('nothing works')\n"
        "daemon.Publication = fail"
    )
    process = spawn(in_a_process(patch, tmp_path))

    assert process.wait(END_S) == 2
    assert "ended without waiting for threads threads=stuck" in process.stderr
    assert process.stderr.splitlines()[-1] == "kvstore-server: tier_unavailable: nothing works"


def in_a_process(patch: str, tmp_path: Path) -> list[str]:
    """A daemon with something of it replaced."""
    program = f"import kvstore.server.daemon as daemon\n{patch}\nraise SystemExit(daemon.main())"
    return [sys.executable, "-c", program, *small(tmp_path, {})[3:]]


def test_what_breaks_while_it_serves_ends_it_loudly(spawn, tmp_path):
    patch = (
        "async def tick(self):\n"
        "    raise ValueError('nobody thought of this')\n"
        "daemon.Daemon._tick = tick"
    )
    process = spawn(in_a_process(patch, tmp_path))

    assert process.wait(END_S) == 1
    assert "CRITICAL kvstore.server.daemon: the node failed" in process.stderr
    assert "ValueError: nobody thought of this" in process.stderr
    assert not (tmp_path / "kv.sock").exists()


def test_a_call_without_an_error_of_ours_is_said_in_one_line_too(spawn, tmp_path):
    patch = (
        "def fail(*_arguments):\n"
        "    raise OSError(24, 'Too many open files')\n"
        "daemon.HttpServer = fail"
    )

    told = refused(spawn(in_a_process(patch, tmp_path)))
    assert told == "kvstore-server: internal: [Errno 24] Too many open files"


def test_events_that_do_not_end_do_not_hide_why_it_failed(spawn, tmp_path):
    patch = (
        "def fail(*_arguments):\n"
        "    raise daemon.ConfigError('this is why')\n"
        "def hang(self, real=daemon.Publication.close):\n"
        "    real(self)\n"
        "    raise daemon.TierUnavailable('it does not end')\n"
        "daemon.HttpServer = fail\n"
        "daemon.Publication.close = hang"
    )
    process = spawn(in_a_process(patch, tmp_path))

    assert refused(process) == "kvstore-server: config: this is why"
    assert "events did not end" in process.stderr


@pytest.mark.parametrize(
    "step",
    ["the path of the node's own socket is too long", "a file is where the admin socket goes"],
)
def test_a_daemon_that_fails_late_gives_back_what_it_had(tmp_path, taken, step):
    settings, said = STEPS[step]
    words = small(tmp_path, {name: value.format(**taken) for name, value in settings.items()})
    loaded = load(ServerConfig, None, {}, words[4::2])

    try:
        with pytest.raises(KVStoreError, match=said):
            asyncio.run(serve(loaded, None))
    finally:
        gc.unfreeze()  # a node has the process for itself
    assert not (tmp_path / "kv.sock").exists()
    os.close(OSDisk().lock(tmp_path / "ssd"))
    # Threads and descriptors are what the leak check of every test looks at.


def test_a_daemon_that_cannot_be_made_gives_back_what_it_had(tmp_path):
    overrides = [f"socket.path={tmp_path / 'kv.sock'}", "host.capacity_bytes=2MiB",
                 "host.extent_bytes=1MiB", "events.endpoint=foo"]  # fmt: skip
    loaded = load(ServerConfig, None, {}, overrides)

    with pytest.raises(KVStoreError, match=r"events\.endpoint"), ExitStack() as undo:
        Daemon(loaded, undo)
    # Threads and descriptors are what the leak check of every test looks at.
