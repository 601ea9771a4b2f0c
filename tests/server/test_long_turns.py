"""Goal: the log says what a turn did that was so long that engines waited for it."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from types import SimpleNamespace

import pytest

from kvstore.config import ServerConfig, load
from kvstore.protocol import wire
from kvstore.server import daemon as served
from kvstore.server import turns
from kvstore.server.daemon import LONG_TURN_NS, Daemon
from kvstore.server.installed import installed
from kvstore.state.tree.sessions import Peer

LONG_NS = 2 * max(LONG_TURN_NS.values())


class Line:
    def answer(self, answer: wire.Answer) -> None: ...

    def cut(self) -> None: ...


class Ticked(Exception):
    """The daemon has looked at its turns."""


@pytest.fixture
def daemon(tmp_path, monkeypatch) -> Iterator[Daemon]:
    """One that does not listen; each of its ticks ends a window."""
    monkeypatch.setattr(served, "LAG_WINDOW_S", 0.0)
    monkeypatch.setattr(served, "TICK_S", 0.0)
    settings = (
        f"socket.path={tmp_path / 'kv.sock'}", "host.capacity_bytes=1048576",
        "host.extent_bytes=1048576", "host.prefault=false", "events.endpoint=",
    )  # fmt: skip
    with ExitStack() as undo:
        made = Daemon(load(ServerConfig, None, {}, settings), undo)
        monkeypatch.setattr(made._watch, "look", ticked)
        yield made


def ticked(_now_ns: int) -> None:
    raise Ticked


def told(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the daemon says of its turns in its next tick."""
    with pytest.raises(Ticked):
        asyncio.run(daemon._tick())
    return [one.message for one in caplog.records if "blocked" in one.message]


def a_message(daemon: Daemon, took_ns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(1, took_ns)
    monkeypatch.setattr(daemon.desk, "_clock", lambda: next(clock))
    daemon.desk.receive(daemon.desk.connect(Peer(1), Line()), wire.Lookup(1, 0, [0], bytes(96)))


def a_job(daemon: Daemon, took_ns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(0.0, took_ns / 1e9 / 2)
    monkeypatch.setattr(turns, "perf_counter", lambda: next(clock))

    async def run() -> None:
        operators = turns.Turns(daemon.desk)
        operators.start((None for _ in range(2)), print, "clear")
        operators.close()

    asyncio.run(run())


CASES = [(a_message, "Lookup of 3 keys"), (a_job, "an operator's request: clear")]


@pytest.mark.parametrize(("does", "name"), CASES)
def test_a_long_turn_is_named_in_the_log(daemon, caplog, monkeypatch, does, name):
    does(daemon, LONG_NS, monkeypatch)

    assert told(daemon, caplog) == [f"the loop was blocked for {LONG_NS // 10**6} ms by {name}"]


def test_an_announcement_of_what_a_start_found_is_no_operators_request(daemon, caplog, monkeypatch):
    now_ns = [1]

    def announce(_table: object) -> None:
        now_ns[0] += LONG_NS

    monkeypatch.setattr(daemon.desk, "_clock", lambda: now_ns[0])
    monkeypatch.setattr(daemon, "_announcement", SimpleNamespace(done=False, step=announce))

    assert not told(daemon, caplog)
    (line,) = told(daemon, caplog)
    assert line.endswith(" ms by an announcement of pages on disk")


def test_a_short_turn_is_not_worth_a_line(daemon, caplog, monkeypatch):
    a_message(daemon, LONG_TURN_NS[installed().core] - 1, monkeypatch)

    assert not told(daemon, caplog)
