"""Who can open an endpoint: permissions from the first moment on, and whose place is taken."""

import errno
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.process import listeners
from kvstore.process.listeners import Listener, Tcp, Unix, advice, parse_endpoint
from kvstore.protocol.errors import InvalidArgument

NOBODY = 65_534


@contextmanager
def listening(path: Path, mode: int = 0o600) -> Iterator[Listener]:
    listener = Listener("endpoint", Unix(str(path)), mode)
    try:
        yield listener
    finally:
        listener.close()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("ipc:///run/a", Unix("/run/a")), ("tcp://127.0.0.1:*", Tcp("127.0.0.1", 0)),
        ("tcp://*:80", Tcp("", 80)), ("tcp://[::1]:5", Tcp("::1", 5)), ("tcp://h:0", Tcp("h", 0))
    ],
)  # fmt: skip
def test_an_endpoint_means_what_zeromq_means_by_it(text, meant):
    assert parse_endpoint("endpoint", text) == meant


@pytest.mark.parametrize(
    "text",
    [
        "", "foo", "ipc://", "ipc://@abstract", "ipc://*", "ipc:///" + "x" * 107, "ipc:///a\0b",
        "tcp://", "tcp://h", "tcp://:5", "tcp://h:", "tcp://h:65536", "tcp://h:-1", "tcp://h:5/x",
        "inproc://x", "udp://h:5", "tcp://h:٣",
    ],
)  # fmt: skip
def test_what_is_no_endpoint_is_refused_by_name(text):
    with pytest.raises(InvalidArgument) as refused:
        parse_endpoint("endpoint", text)

    assert refused.value.field == "endpoint"


@pytest.mark.parametrize("umask", [0o000, 0o077])
@pytest.mark.parametrize("mode", [0o600, 0o660])
def test_a_unix_socket_is_never_wider_than_it_should_be(tmp_path, monkeypatch, umask, mode):
    path, seen = tmp_path / "s", []
    chmod = Path.chmod

    def look(self: Path, wanted: int) -> None:
        seen.append(mode_of(path))  # as bind has made it
        chmod(self, wanted)

    monkeypatch.setattr(Path, "chmod", look)
    before = os.umask(umask)
    try:
        with listening(path, mode):
            assert mode_of(path) == mode
            assert sorted(tmp_path.iterdir()) == [path], "no lock is left"
    finally:
        os.umask(before)

    assert seen == [mode & ~umask]
    assert not path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize(("mode", "group", "let_in"), [(0o600, 0, False), (0o660, 0, True)])
def test_others_are_let_in_by_the_group_only(open_folder, mode, group, let_in):
    connect = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    with listening(open_folder / "s", mode):
        stranger, member = (
            subprocess.run(
                ["/usr/bin/env", "python3", "-c", connect, str(open_folder / "s")],
                user=NOBODY, group=NOBODY, extra_groups=groups, capture_output=True, check=False,
                timeout=30,
            )
            for groups in ([], [group])
        )  # fmt: skip

    assert b"Permission" in stranger.stderr
    assert (member.returncode == 0) == let_in


def test_a_dead_process_leaves_a_socket_that_the_next_one_takes(tmp_path, wait_until):
    path = tmp_path / "s"
    code = "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]);"
    code += "s.listen(); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as dead:
        assert dead.stdout is not None
        dead.stdout.readline()
        with pytest.raises(InvalidArgument, match="listens there"), listening(path):
            pass
        dead.send_signal(signal.SIGKILL)
        dead.wait()
    assert path.is_socket()

    with listening(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_something_else_at_the_path_is_left_alone(tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")

    with pytest.raises(InvalidArgument, match="is not a socket"), listening(path):
        pass

    assert path.read_text() == "data"


def test_of_many_that_start_at_once_one_listens_and_no_other_takes_its_place(tmp_path):
    for turn in range(20):
        path = tmp_path / f"s{turn}"
        if turn % 2:  # what a dead one left
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(path))
        gate, won, lost = threading.Barrier(6), [], []

        def start(path=path, gate=gate, won=won, lost=lost) -> None:
            gate.wait(10)
            try:
                won.append(Listener("endpoint", Unix(str(path)), 0o600))
            except InvalidArgument as error:
                lost.append(error)

        threads = [threading.Thread(target=start) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)

        assert (len(won), len(lost)) == (1, 5)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            won[0].socket.accept()[0].close()
        won[0].close()


def test_a_lock_that_is_not_given_back_ends_the_wait_with_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(listeners, "_LOCK_WAIT_S", 0.05)
    held = listeners._try_lock(f"{tmp_path}/s.lock")
    assert held is not None
    try:
        with pytest.raises(InvalidArgument, match="lock is locked"), listening(tmp_path / "s"):
            pass
    finally:
        os.close(held)

    with listening(tmp_path / "s"):
        assert not (tmp_path / "s.lock").exists(), "a lock that nobody holds is taken and removed"


def test_a_lock_whose_file_was_removed_meanwhile_is_none(tmp_path, monkeypatch):
    lock = tmp_path / "s.lock"
    flock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        lock.unlink()  # its holder has given it back, and somebody else has made a new one
        lock.touch()
        flock(descriptor, operation)

    monkeypatch.setattr(listeners.fcntl, "flock", late)
    assert listeners._try_lock(str(lock)) is None
    monkeypatch.undo()

    held = listeners._try_lock(str(lock))
    assert held is not None
    os.close(held)


def test_closing_removes_no_socket_of_another(tmp_path):
    path = tmp_path / "s"
    first = Listener("endpoint", Unix(str(path)), 0o600)
    path.unlink()
    with listening(path):
        first.close()
        assert path.is_socket()


@pytest.mark.parametrize(
    ("endpoint", "code", "said"),
    [
        (Tcp("127.0.0.1", 80), errno.EADDRINUSE, ": another program listens there: stop it, or"),
        (Tcp("127.0.0.1", 80), errno.EACCES, ": choose a port of 1024 or more"),
        (Tcp("192.0.2.1", 80), errno.EADDRNOTAVAIL, ": no interface of this machine has that"),
        (Unix("/a/b.sock"), errno.EACCES, ": give this user write access to /a, or choose another"),
        (Unix("/a/b.sock"), errno.EEXIST, ": /a is not a directory: choose another path"),
    ],
)  # fmt: skip
def test_the_usual_reasons_not_to_listen_come_with_what_to_do(endpoint, code, said):
    assert advice(endpoint, OSError(code, os.strerror(code))).startswith(said)
    assert advice(endpoint, OSError(errno.EIO, "Input/output error")) == ""


def test_a_folder_that_is_a_file_is_named_with_what_to_do(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(InvalidArgument, match="file is not a directory: choose another path"):
        Listener("endpoint", Unix(str(tmp_path / "file" / "a.sock")), 0o600)


def test_a_file_that_cannot_be_removed_keeps_no_socket_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    listener = Listener("endpoint", Unix(str(tmp_path / "a.sock")), 0o600)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", read_only)
        listener.close()
    assert listener.socket.fileno() < 0
    assert "a.sock stays behind: Read-only file system" in caplog.text
