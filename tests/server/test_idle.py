"""Goal: an idle daemon looks at its state in short pieces, and ends when it is broken."""

import sys
from contextlib import suppress
from http.client import HTTPException

import pytest

from kvstore.protocol import wire
from kvstore.server import client, idle
from kvstore.server.idle import PAUSE_S, PIECE_S, IdleChecks
from kvstore.state.tree import prefix_tree
from tests.client.conftest import READY, TIMEOUT_S, Daemon, arguments, content, new_keys, open_space
from tests.node.test_protocol import KEYS
from tests.node.test_selfcheck import desk_of, world  # noqa: F401


@pytest.fixture
def desk(world, monkeypatch):  # noqa: F811
    """A desk whose node needs several stretches for a round; a piece never runs out of time."""
    monkeypatch.setattr(prefix_tree, "STRETCH_WORK", 1)
    monkeypatch.setattr(idle, "perf_counter", lambda: 0.0)
    return desk_of(world, check_every_step=False)


def test_a_node_that_is_asked_for_something_looks_at_nothing(desk, world):  # noqa: F811
    checks = IdleChecks(desk)
    for now_s in range(5):
        desk.receive(1, wire.Lookup(1, 0, [0], KEYS.packed))
        checks.turn(now_s)
    assert desk.self_check.pages == 0

    checks.turn(6)

    assert desk.self_check.pages > 0


def test_a_node_on_which_a_request_waits_looks_at_nothing(desk, world):  # noqa: F811
    checks = IdleChecks(desk)
    world.ask(1, wire.BeginPut(0, 7, 0, 0, b"k" * 32, b""))
    desk.receive(1, wire.Lookup(2, 0, [0], b"k" * 32, 1000))
    assert world.node.waiting.count == 1
    for _ in range(5):
        checks.turn(1.0)
    assert desk.self_check.pages == 0

    desk.receive(1, wire.AbortPut(7))
    assert world.node.waiting.count == 0
    for _ in range(5):
        checks.turn(1.0)

    assert desk.self_check.pages > 0


def test_after_a_round_the_node_rests(desk):
    checks = IdleChecks(desk)
    for _ in range(100):
        checks.turn(1.0)
    assert desk.self_check.rounds == 1

    checks.turn(PAUSE_S)
    assert desk.self_check.pages == len(KEYS)
    for _ in range(100):
        checks.turn(1.0 + PAUSE_S)

    assert desk.self_check.rounds == 2


def test_a_piece_ends_with_the_stretch_that_ends_its_time(desk, monkeypatch):
    clock = iter(range(1_000_000))
    monkeypatch.setattr(idle, "perf_counter", lambda: next(clock) * PIECE_S / 3)
    steps = []
    monkeypatch.setattr(desk.self_check, "step", lambda: bool(steps.append(1)))
    checks = IdleChecks(desk)
    checks.turn(1.0)

    checks.turn(1.0)

    assert len(steps) == 2


BREAK = """
import sys
from kvstore.server import daemon, idle, kept

idle.PAUSE_S = 0.0

def broken(self, _asked):
    yield from ()
    [space] = self._table.spaces
    max(space.nodes.values(), key=lambda node: node.depth).children_in_memory = 1
    return {"quotas": []}

kept.KeptViews.quotas = broken
sys.exit(daemon.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("debug", ["false", "true"])
def test_a_broken_state_ends_an_idle_daemon_and_its_log_has_the_story(
    spawn, tmp_path, wait_until, debug
):
    pause = "idle.PAUSE_S = 0.0" if debug == "false" else "idle.PIECE_S = -1.0"
    words = arguments(tmp_path / "own.sock", debug__check_every_step=debug)
    program = BREAK.replace("idle.PAUSE_S = 0.0", pause)
    process = spawn([sys.executable, "-c", program, *words[3:]], ready=READY)
    daemon = Daemon(process)
    with daemon.connect() as store:
        space = open_space(store)
        keys = new_keys(space, 2)
        assert space.put(keys, content(2, space.page_bytes[0])).stored == 2
        wait_until(lambda: daemon.ask("/v1/stats")["self_check"]["rounds"] > 1)

        with suppress(OSError, HTTPException):  # it may end before it has answered
            client.send(daemon.admin, "GET", "/v1/quotas", timeout_s=TIMEOUT_S)

        wait_until(lambda: process.returncode is not None)
    assert process.returncode == 1
    assert "AssertionError" in process.stderr
    last = process.stderr[process.stderr.index("the last events of page") :]
    assert last.startswith(f"the last events of page {keys[1].hex()[:16]}, 2 of 2")
    assert "granted" in last
    assert "stored" in last
