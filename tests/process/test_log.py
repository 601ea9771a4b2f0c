"""Goal: the log says what an operator asks, in one line each, and nobody can fill or stop it."""

import io
import json
import logging
import logging.config
import os
import socket
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest

from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
from kvstore.process import logs
from kvstore.process.logs import LINES_MAX, WINDOW_S, Sparing, event
from kvstore.protocol.wire import PROTOCOL_MAJOR, FrameReader, Hello, OpenSpace
from kvstore.server.channel import Begin, FromAdmin, Said
from kvstore.server.watch import CALM_S, CLOSE_LOOK_TICKS, Watch
from kvstore.state.tree.sessions import Peer
from kvstore.state.tree.slots import SlotTable
from tests.client.conftest import FLAT, READY, Daemon, arguments, identity
from tests.server.conftest import Stored

log = logging.getLogger("test")


@pytest.fixture
def written(monkeypatch):
    """``written(form, say) -> lines``: what is on standard error after ``say()`` has logged."""

    def run(form, say):
        stream = io.StringIO()
        monkeypatch.setattr("sys.stderr", stream)
        end = logs.start("INFO", form)
        try:
            say()
        finally:
            end()
        return stream.getvalue().splitlines()

    return run


def test_both_forms_say_the_same(written):
    def say():
        event(log, logging.WARNING, "engine came", engine="vllm 0", pids=[1, 2], share=0.25)
        log.error("%d went wrong", 3)

    text, json_lines = written("text", say), written("json", say)

    assert text[0].endswith('WARNING test: engine came engine="vllm 0" pids=1,2 share=0.25')
    assert text[1].endswith("ERROR test: 3 went wrong")
    first, second = map(json.loads, json_lines)
    assert first.pop("time").endswith("Z")
    assert first == {"level": "warning", "logger": "test", "event": "engine came",
                     "engine": "vllm 0", "pids": [1, 2], "share": 0.25}  # fmt: skip
    assert second["event"] == "3 went wrong"


def test_a_name_that_a_client_chose_cannot_make_lines_or_move_a_cursor(written):
    def say():
        event(log, logging.INFO, "engine came", engine="a\n2026 CRITICAL fake\x1b[2J\x9b")
        log.warning("refused: %s", "b\nc\r\x85\u2028d")

    for form in ("text", "json"):
        lines = written(form, say)
        assert len(lines) == 2, lines
        assert all(one.isprintable() for one in lines)


def test_the_traceback_of_a_failure_is_there_in_both(written):
    def say():
        try:
            raise ValueError("why")
        except ValueError:
            log.exception("failed")

    assert written("text", say)[-1] == "ValueError: why"
    (line,) = written("json", say)
    assert json.loads(line)["exception"].endswith("ValueError: why")


def test_lines_of_one_kind_are_cut_short_and_counted():
    now = [100.0]
    sparing = Sparing(lambda: now[0])

    def passed(message: str, level: int = logging.WARNING) -> dict | None:
        record = logging.LogRecord("a", level, "", 0, message, None, None)
        return getattr(record, "fields", {}) if sparing.filter(record) else None

    told = [passed("refused: %s") for _ in range(3 * LINES_MAX)]
    assert [one is not None for one in told] == [True] * LINES_MAX + [False] * 2 * LINES_MAX
    assert told[LINES_MAX - 1] == {"more": f"left out for {WINDOW_S:.0f} s"}
    assert passed("another kind") == {}
    assert passed("refused: %s", logging.CRITICAL) == {}, "what ends the node is always said"
    now[0] += WINDOW_S
    assert passed("refused: %s") == {"left_out_before": 2 * LINES_MAX}
    assert passed("refused: %s") == {}
    for number in range(5000):  # names that would be new kinds each time
        passed(f"kind {number}")
    assert len(sparing._seen) <= 1000


def test_whoever_configures_logging_does_not_silence_it(written):
    def say():
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
        log.warning("still here")

    assert written("text", say)[0].endswith("still here")


def test_a_reader_that_takes_nothing_holds_nobody_up(monkeypatch):
    reading, writing = os.pipe()
    monkeypatch.setattr(logs, "LINES_MAX", 10**9)
    monkeypatch.setattr(logs, "_QUEUE_MAX", 10)
    with os.fdopen(writing, "w") as stream, os.fdopen(reading) as reader:
        monkeypatch.setattr("sys.stderr", stream)
        end = logs.start("INFO", "json")
        for _ in range(2000):  # a pipe holds 64 KiB
            event(log, logging.INFO, "much", filling="x" * 200)
        told, sent = [json.loads(reader.readline())], 2000
        while told[-1]["event"] != "again":
            event(log, logging.INFO, "again")
            told.append(json.loads(reader.readline()))
            sent += 1
        monkeypatch.setattr(logs, "_END_TIMEOUT_S", 10.0)
        end()
    lost = sum(one.get("lost_before", 0) for one in told)
    assert lost > 1000
    assert lost + len(told) <= sent


# What is seen of a node


@pytest.fixture
def node():
    limits = NodeLimits(1 << 20, 1000)
    return Node("n", bytes(16), SlotTable(1 << 16, 4, 2), limits, lambda: os.urandom(16))


@pytest.fixture
def seen(node, caplog):
    """``seen(now_s=0.0) -> [(event, fields), ...]``: what a watch logs of the node now."""
    caplog.set_level(logging.INFO)
    watch = Watch(node, lambda: "" if node.pages.slots.extents else "no memory")

    def look(now_s: float = 0.0):
        caplog.clear()
        for _ in range(CLOSE_LOOK_TICKS):
            watch.look(int(now_s * 1e9))
        return [(one.message, one.fields) for one in caplog.records]

    return look


def test_engines_come_open_spaces_and_leave(node, seen):
    node.pages.slots.provide(2)
    assert seen() == []
    node.connected(7, Peer(1, 4711))
    node.receive(7, Hello(1, PROTOCOL_MAJOR, 0, "vllm-0"), 0)
    node.receive(7, OpenSpace(2, identity(model="m"), [FLAT]), 0)
    label = next(iter(node.pages.spaces)).label[:12]

    came, opened = seen(1.0)
    assert came == ("engine came", {"engine": "vllm-0", "pids": [4711]})
    assert opened[0] == "engine opened a space"
    assert opened[1].items() >= {"engine": "vllm-0", "space": label, "model": "m"}.items()
    assert seen(2.0) == []
    node.disconnected(7, 0, ended=True)
    ((name, fields),) = seen(3.5)
    assert (name, fields["pids"], fields["spaces"], fields["stayed_s"]) == (
        "engine left", [4711], [label], 2.5,
    )  # fmt: skip


def test_a_visitor_of_one_tick_is_told_of_too(node, caplog):
    caplog.set_level(logging.INFO)
    watch = Watch(node, lambda: "")
    for tick in range(3):
        if tick == 1:
            node.connected(7, Peer(1, 4711))
            node.receive(7, Hello(1, PROTOCOL_MAJOR, 0, "vllm-0"), 0)
            node.receive(7, OpenSpace(2, identity(), [FLAT]), 1)
        if tick == 2:
            node.disconnected(7, 2, ended=True)
        watch.look(tick)

    told = [(one.message, one.fields) for one in caplog.records]
    assert [name for name, _ in told[-3:]] == [
        "engine came", "engine opened a space", "engine left"
    ]  # fmt: skip
    assert told[-1][1]["pids"] == [4711]
    assert len(told[-1][1]["spaces"]) == 1


def test_an_engine_that_comes_back_at_once_is_told_of(node, seen):
    token = bytes(range(16))
    for connection in (7, 8):
        node.connected(connection, Peer(1, 4711))
        node.receive(connection, Hello(1, PROTOCOL_MAJOR, 0, "vllm-0", session=token), 0)
        names = [name for name, _ in seen() if name.startswith("engine")]
        assert names == (["engine came"] if connection == 7 else ["engine left", "engine came"])
        node.disconnected(connection, 0, ended=True)
    assert [name for name, _ in seen()] == ["engine left"]


def test_an_engine_with_many_spaces_is_told_with_its_first_ones(node, seen):
    node.connected(7, Peer(1, 4711))
    node.receive(7, Hello(1, PROTOCOL_MAJOR, 0, "vllm-0"), 0)
    for number in range(40):
        for _ in range(2):
            node.receive(7, OpenSpace(2, identity(model=f"m{number}"), [FLAT]), 0)

    opened = Counter(name for name, _ in seen())["engine opened a space"]
    assert opened == 16


def test_memory_and_readiness_are_told_when_they_change(caplog):
    caplog.set_level(logging.INFO)
    limits = NodeLimits(1 << 20, 1000)
    node = Node("n", bytes(16), SlotTable(1 << 16, 0, 2), limits, lambda: os.urandom(16))
    watch = Watch(node, lambda: "" if node.pages.slots.extents else "no memory")

    def told():
        caplog.clear()
        for _ in range(CLOSE_LOOK_TICKS):
            watch.look(0)
        return {one.message: one.fields for one in caplog.records}

    assert told().keys() == {"host memory withheld", "not ready"}
    assert told() == {}
    node.pages.slots.provide(1)
    assert told() == {
        "host memory returned": {"withheld_bytes": 1 << 16, "returned_bytes": 1 << 16},
        "ready again": {"was": "no memory"},
    }
    node.pages.slots.provide(1)
    assert told().keys() == {"host memory returned"}


def test_an_ssd_tier_that_fails_again_and_again_is_told_once(node, seen):
    seen()
    disk = node.pages.residents.disk = SimpleNamespace(troubled=True)

    assert [name for name, _ in seen(0.0)] == ["SSD tier degraded"]
    for second in range(1, 20):  # it is tried every five seconds
        disk.troubled = bool(second % 5)
        assert seen(second) == []
    disk.troubled = False
    node.pages.counts["demoted_pages"] += 1
    assert [name for name, _ in seen(20.0)] == ["SSD tier recovered"]
    disk.troubled = True
    assert [name for name, _ in seen(21.0)] == ["SSD tier degraded"]
    disk.troubled = False
    assert seen(21.0 + CALM_S - 1) == []
    assert [name for name, _ in seen(21.0 + CALM_S)] == ["SSD tier recovered"], "and nothing came"


def test_a_policy_that_changed_is_told(node, seen):
    seen()
    node.pages.eviction.change_policy("lfu")

    assert seen() == [("eviction policy changed", {"policy": "lfu", "before": "lru"})]


# Of a real daemon


def events_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_what_ends_the_admin_process_is_in_the_nodes_log_and_not_beside_it():
    mine, its = socket.socketpair()
    with mine, its:
        command = [sys.executable, "-P", "-m", "kvstore.server.admin", str(its.fileno())]
        child = subprocess.Popen(command, pass_fds=[its.fileno()], stderr=subprocess.PIPE)
        its.close()
        begin = msgspec.msgpack.encode(Begin([9999], {}, False, False, False, "", []))
        mine.sendall(len(begin).to_bytes(4, "little") + begin)
        _, beside = child.communicate(timeout=30)
        with mine.makefile("rb") as told:
            frames = FrameReader().feed(told.read())

    assert (child.returncode, beside) == (1, b"")
    messages = [msgspec.msgpack.decode(frame, type=FromAdmin) for frame in frames]
    [said] = [one for one in messages if isinstance(one, Said)]
    assert (said.level, said.logger) == (logging.CRITICAL, "kvstore.server.admin.process")
    assert "Bad file descriptor" in said.text


def test_a_life_of_a_node_can_be_read(spawn, tmp_path, wait_until):
    secret = "never-to-be-printed"
    (tmp_path / "token").write_text(secret + "-either")
    settings = {"http__read_token": secret, "http__operate_token_file": tmp_path / "token"}
    command = [*arguments(tmp_path / "own.sock", **settings), "--log-format", "json"]
    own = Daemon(spawn(command, ready=READY))
    with own.connect(name="engine-7") as store:
        Stored(store, model="Llama").put(1)
        wait_until(lambda: "engine came" in own.process.stderr)  # who leaves at once is not seen
    wait_until(lambda: "engine left" in own.process.stderr)
    assert own.process.stop() == 0

    told = events_of(own.process.stderr)
    names = [one["event"] for one in told]
    in_order = [name for name in names if name != "setting"]
    assert in_order == ["starting", "ready", "engine came", "engine opened a space",
                        "engine left", "stopping", "stopped"]  # fmt: skip
    by_name = {one["event"]: one for one in told}
    assert by_name["starting"].keys() >= {"version", "python", "core", "mover", "msgspec"}
    assert by_name["stopping"]["why"] == "SIGTERM"
    assert by_name["engine came"]["pids"] == [os.getpid()]
    assert by_name["engine opened a space"]["model"] == "Llama"
    set_here = {one["key"]: (one["value"], one["source"]) for one in told if "key" in one}
    assert set_here["host.capacity_bytes"] == (64 << 20, "--set host.capacity_bytes")
    assert set_here["http.read_token"][0] == "***"
    assert secret not in own.process.stderr


def test_the_level_is_taken_in_small_letters_and_wrong_ones_are_refused(spawn, tmp_path):
    quiet = spawn([*arguments(tmp_path / "own.sock"), "--log-level", "error"], ready=READY)
    assert quiet.stop() == 0
    assert quiet.stderr == ""
    wrong = spawn([*arguments(tmp_path / "own.sock"), "--log-level", "loud"])
    assert (wrong.wait(), "WARNING" in wrong.stderr) == (2, True)


def test_fields_of_every_line_cannot_be_taken():
    with pytest.raises(AssertionError):
        event(log, logging.INFO, "x", time=1)
