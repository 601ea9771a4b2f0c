"""Goal: the command reads answers of older and newer nodes, and of nothing else."""

import pytest
from msgspec import to_builtins

from kvstore.cli.decoding import Reply, completed
from kvstore.protocol.counts import NodeList, NodeStats, TierList
from kvstore.protocol.errors import PeerUnreachable, ProtocolError
from kvstore.protocol.explanation import Explanation
from kvstore.server.answers import JobRow, QuotaList, SpaceList

JOB = {"job": 3, "kind": "verify", "subject": {}, "state": "running", "done": 1, "total": 2,
       "result": {}, "error": None, "seconds": 0.5}  # fmt: skip


def test_an_answer_is_a_value_and_stays_as_it_came():
    reply = Reply({**JOB, "unheard_of": 1}, JobRow)

    assert (reply.value.job, reply.value.state) == (3, "running")
    assert reply.raw["unheard_of"] == 1, "of a newer node: for --json"


def test_what_an_older_node_does_not_say_is_empty():
    older = {name: value for name, value in JOB.items() if name not in ("seconds", "error")}

    assert Reply(older, JobRow).value == Reply({**JOB, "seconds": 0.0}, JobRow).value


@pytest.mark.parametrize("kind", [NodeStats, NodeList, TierList, SpaceList, QuotaList, Explanation])
def test_every_kind_of_answer_has_an_empty_one(kind):
    empty = completed({}, kind)

    assert completed(to_builtins(empty), kind) == empty


def test_missing_fields_are_filled_at_every_depth():
    told = {"tiers": [{"tier": "ssd", "directories": [{"path": "/a"}]}, {"tier": "host"}]}
    ssd, host = completed(told, TierList).tiers
    space = completed({"spaces": [{"shards": [{"group": "g"}]}]}, SpaceList).spaces[0]

    assert (ssd.directories[0].path, ssd.directories[0].used_bytes) == ("/a", 0)
    assert (ssd.wear.admitted, host.state, host.free_bytes) == (0, "", 0)
    assert (space.shards[0].group, space.shards[0].layers) == ("g", (0, 0))


@pytest.mark.parametrize("raw", [[], "text", None, {}, {"status": "up", "job": 1}])
def test_what_is_no_answer_of_a_node_is_said(raw):
    with pytest.raises(PeerUnreachable, match="not the HTTP API of a node"):
        _ = Reply(raw, JobRow).value


def test_a_state_that_this_version_does_not_know_is_said():
    with pytest.raises(ProtocolError, match=r"another version.*--json"):
        _ = Reply({**JOB, "state": "resting"}, JobRow).value
