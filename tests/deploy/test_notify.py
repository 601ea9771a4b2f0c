"""Goal: a service manager hears when a node serves, ends, or hangs, and is never waited for."""

import os
import resource
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.server.notify import ALIVE_SHARE, ServiceManager
from tests.client.conftest import READY, arguments

HEARD_S = 10.0
WATCHDOG_S = 0.4


@pytest.fixture(params=["path", "abstract"])
def heard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[socket.socket]:
    """A service manager's socket."""
    name = str(tmp_path / "notify") if request.param == "path" else f"\0kvstore-test-{os.getpid()}"
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as manager:
        manager.bind(name)
        manager.settimeout(HEARD_S)
        yield manager


def environment(manager: socket.socket, **more: str) -> dict[str, str]:
    name = manager.getsockname()
    if isinstance(name, bytes):
        name = "@" + name[1:].decode()
    return {"NOTIFY_SOCKET": name, **more}


def said(manager: socket.socket) -> dict[str, str]:
    """The next message."""
    return dict(line.split("=", 1) for line in manager.recv(4096).decode().split("\n"))


def until(manager: socket.socket, word: str) -> Iterator[dict[str, str]]:
    """The messages up to the one that has this word; of so many, at least one should."""
    for _ in range(100):
        message = said(manager)
        yield message
        if word in message:
            return
    pytest.fail(f"{word} was not said")


def silent(manager: socket.socket) -> bool:
    return not select.select([manager], [], [], 0)[0]


def test_a_manager_hears_each_change_once(heard: socket.socket):
    with closing(ServiceManager(environment(heard))) as manager:
        manager.status("starting")
        manager.ready("serving")
        manager.status("serving")
        manager.stopping("stopping:\nSIGTERM")

    assert said(heard) == {"STATUS": "starting"}
    assert said(heard) == {"STATUS": "serving", "READY": "1"}
    assert said(heard) == {"STATUS": "stopping: SIGTERM", "STOPPING": "1"}
    assert silent(heard)


def test_a_sign_of_life_comes_four_times_in_each_period_that_the_loop_goes_round(
    heard: socket.socket,
):
    with closing(ServiceManager(environment(heard, WATCHDOG_USEC="30000000"))) as manager:
        assert manager.watchdog_s == 30.0
        for hundredth in range(3000):
            manager.turn(5.0 + hundredth / 100)

    for _ in range(ALIVE_SHARE):
        assert said(heard) == {"WATCHDOG": "1"}
    assert silent(heard)


def test_what_a_busy_manager_does_not_take_is_said_in_a_later_turn(heard: socket.socket):
    with closing(ServiceManager(environment(heard, WATCHDOG_USEC="1000"))) as manager:
        filled = 0
        while manager._send("STATUS=more"):
            filled += 1
            assert filled < 10_000, "it never says that it is full"
        manager.ready("serving")
        manager.turn(1.0)
        for _ in range(filled):
            assert said(heard) == {"STATUS": "more"}
        assert silent(heard)

        manager.turn(1.1)

    assert said(heard) == {"WATCHDOG": "1"}
    assert said(heard) == {"STATUS": "serving", "READY": "1"}


def test_a_manager_that_is_gone_is_warned_of_once_and_heard_of_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    name = str(tmp_path / "notify")
    with closing(ServiceManager({"NOTIFY_SOCKET": name})) as manager:
        manager.ready("serving")
        manager.turn(1.0)
        manager.turn(2.0)
        assert caplog.text.count("cannot be notified") == 1

        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as there:
            there.bind(name)
            manager.turn(3.0)
            assert said(there) == {"STATUS": "serving", "READY": "1"}


@pytest.mark.parametrize(
    ("environ", "warning"),
    [
        ({}, ""),
        ({"WATCHDOG_USEC": "1000"}, ""),
        ({"NOTIFY_SOCKET": "vsock:2:1234"}, "not a Unix socket"),
        ({"NOTIFY_SOCKET": "relative"}, "not a Unix socket"),
    ],
)
def test_without_a_manager_nothing_is_said(environ, warning, caplog: pytest.LogCaptureFixture):
    with closing(ServiceManager(environ)) as manager:
        manager.ready("serving")
        manager.turn(1.0)
        manager.stopping("stopping")

        assert manager.watchdog_s == 0
    assert (warning in caplog.text) if warning else not caplog.text


@pytest.mark.parametrize(
    "environ", [{"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}]
)
def test_no_sign_of_life_comes_where_the_watchdog_is_not_for_this_process(heard, environ):
    with closing(ServiceManager(environment(heard, **environ))) as manager:
        manager.turn(1.0)

    assert silent(heard)


def test_a_node_says_that_it_serves_lives_and_ends(heard: socket.socket, spawn, tmp_path: Path):
    watched = environment(heard, WATCHDOG_USEC=f"{WATCHDOG_S * 1e6:.0f}")

    process = spawn(arguments(tmp_path / "kv.sock"), env=watched)

    messages = list(until(heard, "READY"))
    process.wait_ready(READY, 0.0)  # the line was there before
    assert messages[0] == {"STATUS": "starting"}
    assert messages[-1] == {"STATUS": "serving", "READY": "1"}
    assert [said(heard) for _ in range(5)] == 5 * [{"WATCHDOG": "1"}]
    process.send_signal(signal.SIGTERM)
    messages = list(until(heard, "STOPPING"))
    assert messages[-1] == {"STATUS": "stopping: SIGTERM", "STOPPING": "1"}
    assert process.wait() == 0


def test_a_node_that_its_watchdog_ends_says_where_it_was(
    heard: socket.socket, spawn, tmp_path: Path
):
    watched = environment(heard, WATCHDOG_USEC="30000000")
    process = spawn(arguments(tmp_path / "kv.sock"), ready=READY, env=watched)
    resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))

    process.send_signal(signal.SIGABRT)

    assert process.wait() == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in process.stderr
    assert "daemon.py" in process.stderr
