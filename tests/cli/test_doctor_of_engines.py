"""``doctor`` says which engines a Conductor cannot count, and what to do about each."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import msgspec
import pytest

from kvstore.cli import main
from kvstore.cli.decoding import completed
from kvstore.cli.engines import conductor_checks, name_check
from kvstore.index.control import FollowedWorker, IndexReport
from kvstore.protocol.counts import NodeStats

NOTHING = object()
GAP = {"gap": "no_space", "means": "its space is unknown", "do": "set the option `engine`"}


class FakeConductor(HTTPServer):
    """Answers with what a test puts into ``answers``: path → JSON, None = 401, nothing = 404."""

    answers: dict[str, object]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    def do_GET(self) -> None:
        answer = self.server.answers.get(self.path, NOTHING)
        body = b"Not Found" if answer is NOTHING else json.dumps(answer).encode()
        self.send_response(404 if answer is NOTHING else 401 if answer is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def conductor() -> Iterator[FakeConductor]:
    server = FakeConductor(("127.0.0.1", 0), Handler)
    server.answers = {"/v1/engines": {"engines": []}, "/v1/nodes": {"nodes": []}}
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def node(name: str, why: str | None = None) -> dict[str, object]:
    return {"id": name, "why_not": why, "do": "set events.endpoint" if why else None}


def test_each_gap_of_an_engine_or_node_is_a_line_with_its_advice(conductor) -> None:
    conductor.answers = {
        "/v1/engines": {
            "engines": [
                {"id": "good", "url": "http://h:1"},
                {"id": "e", "url": "http://h:2", "gaps": [GAP, GAP]},
            ]
        },
        "/v1/nodes": {"nodes": [node("m"), node("n", "its events are off")]},
    }
    first, engine, of_node = conductor_checks(conductor.url, "")

    assert (first.status, "2 engines, 2 nodes" in first.found) == ("warn", True)
    assert (engine.name, engine.status) == ("engine e", "warn")
    assert engine.advice == "set the option `engine`", "once, though two gaps say so"
    assert (of_node.name, of_node.found, of_node.advice) == (
        "node n", "its events are off", "set events.endpoint",
    )  # fmt: skip


@pytest.mark.parametrize(("state", "lines"), [("current", 0), ("away", 1), ("connecting", 1)])
def test_a_membership_that_is_not_read_is_a_line(conductor, state: str, lines: int) -> None:
    membership = {"kind": "etcd", "cluster": "blue", "state": state, "field": "", "why": "closed"}
    conductor.answers["/v1/engines"] = {"engines": [{"id": "e", "url": "http://h:1", "gaps": []}]}
    conductor.answers["/v1/nodes"] = {"nodes": [], "membership": membership}
    _, *found = conductor_checks(conductor.url, "")
    assert [(one.name, one.status) for one in found] == [("membership", "warn")] * lines
    assert all(f"etcd is {state}: closed" in one.found for one in found)


def test_a_dead_engine_is_a_line_even_if_it_lacks_nothing(conductor) -> None:
    dead = {"id": "e", "gaps": [], "state": "dead", "failures": 7, "url": "http://h:1"}
    conductor.answers["/v1/engines"] = {"engines": [dead, {**dead, "id": "a", "state": "alive"}]}
    first, engine = conductor_checks(conductor.url, "")
    assert first.status == "warn"
    assert (engine.name, engine.status) == ("engine e", "warn")
    assert "7 failures" in engine.found
    assert "http://h:1" in engine.advice


@pytest.mark.parametrize(
    "answers",
    [{}, {"/v1/index": {"error": {"message": "Not Found"}}}, {"/v1/index": {"node": "n"}}],
)
def test_the_index_of_what_is_no_conductor_is_an_error_that_says_so(
    conductor, capsys, answers: dict[str, object]
) -> None:
    conductor.answers = answers
    assert main(["index", "--url", conductor.url]) == 2
    told = capsys.readouterr().err
    assert f"{conductor.url} has no index: give a Conductor's URL" in told


def test_a_conductor_that_lacks_nothing_is_well_and_an_empty_one_is_not(conductor) -> None:
    [empty] = conductor_checks(conductor.url, "")
    assert (empty.status, empty.advice) == ("warn", "register engines: POST /v1/engines")

    conductor.answers["/v1/engines"] = {"engines": [{"id": "e", "url": "http://h:1", "gaps": []}]}
    [well] = conductor_checks(conductor.url, "")
    assert well.status == "ok"


@pytest.mark.parametrize("answer", [None, [], {"other": 1}, {"engines": [{"id": 3}]}])
def test_what_is_no_conductor_or_refuses_fails_and_says_what_to_check(conductor, answer) -> None:
    conductor.answers = {"/v1/engines": answer}
    [found] = conductor_checks(conductor.url, "")

    assert found.status == "fail"
    assert "--conductor" in found.advice


def test_sessions_without_an_engines_name_are_warned_of() -> None:
    def stats(*sessions: dict[str, object]) -> NodeStats:
        return completed({"sessions": list(sessions)}, NodeStats)

    assert name_check(None) == name_check(stats()) == []
    named = {"name": "a", "engine": "p1"}
    assert name_check(stats(named))[0].status == "ok"
    [found] = name_check(stats(named, {"name": "vllm-1", "engine": None}, {"name": "old"}))
    assert (found.status, found.found) == ("warn", "2 of 3 sessions have none: old, vllm-1")
    assert "option `engine`" in found.advice


def test_a_session_of_another_node_is_no_engine_without_a_name() -> None:
    peer = {"name": "peer b", "engine": None, "peer": True}
    engine = {"name": "a", "engine": "p1", "peer": False}
    assert name_check(completed({"sessions": [peer]}, NodeStats)) == []
    [found] = name_check(completed({"sessions": [peer, engine]}, NodeStats))
    assert (found.status, found.found) == ("ok", "all of 1 sessions have one")


def test_the_command_asks_the_conductor_that_is_named(conductor, capsys, tmp_path) -> None:
    conductor.answers["/v1/engines"] = {
        "engines": [{"id": "e", "url": "http://h:1", "gaps": [GAP]}]
    }
    words = ["doctor", "--url", "http://127.0.0.1:1", "--directory", str(tmp_path), "--json"]
    main([*words, "--conductor", conductor.url])

    checks = {one["name"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["engine e"]["found"] == "its space is unknown"
    assert checks["conductor"]["status"] == "warn"
    with pytest.raises(SystemExit):
        main([*words, "--conductor", "here"])
    assert "'here' is not http://HOST:PORT" in capsys.readouterr().err


def test_index_says_who_counts_and_why_not(conductor, capsys) -> None:
    workers = [
        FollowedWorker(worker="engine/e", current=True, pages={"GPU": 3}, batches=1, unmapped=2),
        FollowedWorker(worker="node/n", why="not connected yet", audited=10, missing=1),
    ]
    report = IndexReport(entries=3, entries_max=100, workers=workers)
    state = {"up": True, "restarts": 0, "faults": {"ended": 0, "backlog": 1234}}
    conductor.answers["/v1/index"] = {**state, **msgspec.to_builtins(report)}
    assert main(["index", "--url", conductor.url]) == 0
    shown = capsys.readouterr().out
    assert "index up; 3 of 100 pages" in shown
    assert "0 restarts, 0 ended, 1,234 backlog" in " ".join(shown.split())
    for text in ("engine/e", "3 GPU", "2 blocks", "counts"):
        assert text in shown
    for text in ("node/n", "none", "1 of 10", "does not count: not connected yet"):
        assert text in shown


def test_an_index_that_follows_nobody_says_so(conductor, capsys) -> None:
    report = msgspec.to_builtins(IndexReport(entries_max=100))
    conductor.answers["/v1/index"] = {"up": False, "restarts": 1, **report}
    assert main(["index", "--url", conductor.url]) == 0
    shown = capsys.readouterr().out
    assert "index down: nothing is known now" in shown
    assert "no engine or node is followed" in shown
