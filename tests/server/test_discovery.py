"""What a registrant reads from a node: where its events are, and who has opened which space."""

import json
import logging

import msgspec
import pytest

from kvstore.client.store import KVStore
from kvstore.engine.label import EngineSources, engine_label
from kvstore.protocol.errors import PeerUnreachable
from kvstore.protocol.page import EngineLabel
from tests.client.conftest import FLAT, READY, TIMEOUT_S, Daemon, arguments, identity
from tests.connecting import connect
from tests.server.conftest import Api

READ, FOLLOW = "read-token-of-the-node", "follow-token-of-the-node"
OTHER = msgspec.structs.replace(FLAT, layers=(1, 2))


def label(name: str, start: str = "a") -> EngineLabel:
    made = engine_label(name, "", start, None, EngineSources("tcp://*:5557"), 16)
    assert made is not None
    return made


def row_of(api: Api, name: str):
    [row] = [one for one in api.get("/v1/sessions")["sessions"] if one["name"] == name]
    return row


def test_the_session_of_an_engine_tells_its_name_and_what_it_has_opened(api, daemon):
    with daemon.connect(name="worker", engine=label("p1")) as store:
        mine = identity()
        store.space(mine, (FLAT,))
        store.space(mine, (OTHER,))
        hidden = identity(scope="selftest")
        store.space(hidden, (FLAT,))
        row = row_of(api, "worker")

    assert row["engine"] == {
        "name": "p1", "events": "tcp://*:5557", "events_bind": None, "events_replay": None,
        "block_tokens": 16,
    }  # fmt: skip
    assert row["spaces_total"] == 2
    first, second = row["spaces"]
    assert first == {
        "space": mine.digest.hex(), "model": mine.model, "page_tokens": mine.page_tokens,
        "scope": "", "shards": [FLAT.digest.hex(), OTHER.digest.hex()],
        "windows": {},
    }  # fmt: skip
    assert (second["space"], second["scope"]) == (hidden.digest.hex(), "selftest")
    assert second["shards"] == [FLAT.digest.hex()]


def test_a_session_without_an_engines_name_says_so(api, daemon):
    with daemon.connect(name="nobody") as store:
        store.space(identity(), (FLAT,))
        assert row_of(api, "nobody")["engine"] is None


def test_an_engine_whose_name_is_taken_misses_until_the_other_one_ends(daemon, caplog, wait_until):
    caplog.set_level(logging.WARNING, "kvstore.client.link")
    first = daemon.connect(name="first", engine=label("twin", "a"))
    taken = KVStore.connect(
        daemon.address, timeout_s=TIMEOUT_S, name="second", engine=label("twin", "b")
    )
    with first, taken as second:
        assert not second.connected
        assert "an engine named 'twin' is connected already" in caplog.text
        with pytest.raises(PeerUnreachable, match="a name of its own"):
            second.ping()
        first.close()
        wait_until(lambda: second.connected, what="the name is free")


def test_the_events_of_a_node_are_told_to_whoever_may_read(spawn, tmp_path):
    (tmp_path / "token").write_text(FOLLOW)
    node = spawn(
        arguments(
            tmp_path / "kv.sock", http__read_token=READ, node__name="n1",
            events__endpoint="tcp://127.0.0.1:*", events__replay_endpoint="tcp://127.0.0.1:*",
            events__follow_token_file=tmp_path / "token",
        ),
        ready=READY,
    )  # fmt: skip
    daemon = Daemon(node)
    status, answer = Api(daemon, READ).send("GET", "/v1/events")

    assert status == 200
    boot = answer.pop("boot")
    assert answer == {
        "node": "n1", "topic": f"kvstore@n1@{boot}", "endpoint": daemon.events,
        "replay_endpoint": daemon.replay, "follow_token": True, "tokens": False,
        "cluster": "",
    }  # fmt: skip
    assert FOLLOW not in json.dumps(answer)
    assert Api(daemon, "").send("GET", "/v1/events")[0] == 401
    with connect(daemon.address, name="e") as store:
        assert store.stats()["boot"] == boot


def test_a_node_beside_its_followers_needs_no_follow_token(api, daemon):
    answer = api.get("/v1/events")

    assert (answer["endpoint"], answer["follow_token"]) == (daemon.events, False)
