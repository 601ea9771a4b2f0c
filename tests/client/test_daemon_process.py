"""Goal: a daemon starts where it may, says why where it may not, and leaves nothing behind."""

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvstore.protocol.errors import TierUnavailable
from kvstore.server.daemon import take_back
from kvstore.state.tree.slots import SlotTable
from kvstore.tier.host import HostMemory
from tests.client.conftest import (
    READY,
    SIZE,
    TIMEOUT_S,
    Daemon,
    arguments,
    content,
    new_keys,
    open_space,
    still_serves,
)


def test_a_second_daemon_on_the_same_socket_is_refused_and_does_no_harm(daemon, spawn):
    record = Path(f"{daemon.socket}.memory")
    before = (record.stat().st_ino, record.read_bytes())

    second = spawn(arguments(daemon.socket))

    assert second.wait(TIMEOUT_S) == 2
    told = second.stderr.splitlines()[-1]
    who = f"another kvstore-server (pid {daemon.process.pid})"
    assert told == (
        f"kvstore-server: config: socket.path={daemon.socket}: {who} uses it: stop it, or set"
        " socket.path"
    )
    assert still_serves(daemon)
    assert (record.stat().st_ino, record.read_bytes()) == before, "its restart needs the record"


def test_something_else_at_the_sockets_path_is_left_alone(spawn, tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")

    refused = spawn(arguments(path))

    assert refused.wait(TIMEOUT_S) == 2
    assert "is not a socket" in refused.stderr
    assert path.read_text() == "data"


def test_sigterm_ends_it_cleanly_and_removes_the_socket(own_daemon):
    with own_daemon.connect() as store:
        space = open_space(store)
        keys = new_keys(space, 2)
        space.put(keys, content(2, SIZE))

        assert own_daemon.process.stop() == 0

        assert not own_daemon.socket.exists()
        assert space.lookup(keys).pages == 0, "a miss, not an error"
    assert "Traceback" not in own_daemon.process.stderr


def test_a_daemon_that_was_killed_leaves_a_socket_that_the_next_one_takes(own_daemon, spawn):
    own_daemon.process.kill()
    assert own_daemon.socket.exists()

    again = Daemon(spawn(arguments(own_daemon.socket), ready=READY))

    assert still_serves(again)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "host.capacity_byte=1",
            "unknown key host.capacity_byte; did you mean host.capacity_bytes",
        ),
        ("host.capacity_bytes=big", "host.capacity_bytes"),
        ("host.extent_bytes=1000", "host.extent_bytes"),
        ("nonsense", "expected key=value"),
        ("events.endpoint=foo", "config: events.endpoint"),
        ("events.replay_endpoint=tcp://1.2.3.4:1", "events.follow_token"),
        ("events.replay_endpoint=ipc://@everybody", "config: events.replay_endpoint"),
    ],
)
def test_a_wrong_setting_ends_it_with_2_and_the_keys_name(spawn, tmp_path, setting, said):
    refused = spawn([*arguments(tmp_path / "s.sock"), "--set", setting])

    assert refused.wait(TIMEOUT_S) == 2
    assert said in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "s.sock").exists()


def test_the_effective_configuration_can_be_printed(spawn, tmp_path):
    command = [*arguments(tmp_path / "s.sock"), "--print-config"]
    printed = spawn(command, env={"KVSTORE__NODE__NAME": "from-env"})

    assert printed.wait(TIMEOUT_S) == 0
    assert 'name = "from-env"  # KVSTORE__NODE__NAME' in printed.stdout
    assert "capacity_bytes = 67108864  # --set host.capacity_bytes" in printed.stdout


def test_it_does_not_run_without_its_assertions(spawn):
    refused = spawn([sys.executable, "-O", "-m", "kvstore.server.daemon", "--print-config"])

    assert refused.wait(TIMEOUT_S) == 2
    assert "python -O" in refused.stderr


def test_too_few_descriptors_end_the_start_and_say_what_to_raise(spawn, tmp_path):
    command = arguments(tmp_path / "own.sock", host__extent_bytes="64KiB")
    process = spawn(["sh", "-c", 'ulimit -n 100; exec "$@"', "sh", *command])

    assert process.wait() == 2
    assert "ulimit -n" in process.stderr
    assert "Traceback" not in process.stderr


def test_memory_that_cannot_be_taken_back_yet_ends_nobody(caplog):
    slots, made = SlotTable(1 << 16, 1, withheld=3), list[int]()

    class Memory(HostMemory):
        def __init__(self, room: int) -> None:
            self.room = room

        def create(self, numbers: Iterable[int]) -> None:
            for number in numbers:
                if len(made) == self.room:
                    raise TierUnavailable("too many open files")
                made.append(number)

    assert take_back(slots, Memory(1), 3) == 1
    assert (slots.withheld, made, len(slots.extents)) == (2, [1], 2)
    assert "too many open files" in caplog.text

    assert take_back(slots, Memory(9), 3) == 2
    assert (slots.withheld, made) == (0, [1, 2, 3])
    assert [extent.number for extent in slots.extents] == [0, 1, 2, 3]
    assert take_back(slots, Memory(9), -1) == 0
