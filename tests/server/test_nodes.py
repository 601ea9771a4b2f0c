"""Goal: one list says of each other node whether it is there, what it has and what it gave."""

from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kvstore.cli.decoding import completed
from kvstore.cli.nodes import nodes as printed
from kvstore.protocol.counts import NodeList, NodeStats
from kvstore.server.nodes import node_list
from kvstore.server.peer_series import PEERS_MAX, node_series

FAULT = {"cause": "refused", "why": "cluster: 'red'", "field": "cluster", "s_ago": 2.5}
DOWN = {"up": False, "endpoint": "10.0.0.3:7400", "fault": FAULT, "faults": {"refused": 3},
        "draining": False, "boot": "", "transport": "", "fetches": 0}  # fmt: skip
UP = {"up": True, "endpoint": "10.0.0.2:7400", "fault": None, "faults": {}, "boot": "0b" * 16,
      "draining": True, "transport": "tcp", "fetches": 1}  # fmt: skip
READ = {"bytes_per_s": 5 << 20, "jobs": 1, "unsettled_jobs": 2, "fetched_pages": 7,
        "fetched_bytes": 7 << 20, "missing_pages": 3, "retried_pages": 1,
        "failed_jobs": 2}  # fmt: skip
KNOWN = {"current": True, "why": "", "pages": {"CPU": 40, "STORAGE": 2}, "lag_s": 0.25,
         "faults": {}}  # fmt: skip


MEMBER = {"kind": "etcd", "state": "refused", "field": "name", "why": "10.0.0.9:7400 has it",
          "changes": {"joined": 2, "refused": 1}, "unreadable_records": 3}  # fmt: skip


SHARED = {"current": True, "announced": 70, "waiting": 3, "announcements": 2, "asked": 9,
          "faults": {"lost": 1, "ask_away": 4}, "why": "", "outstanding": 5,
          "unanswered": {"overload": 6}, "trouble": ""}  # fmt: skip


def stats(peers: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """The counters of a node that says so much of its cluster."""
    directory = {
        "peers": {"b": KNOWN}, "refused": ["z"], "entries": 42, "entries_max": 1000,
        "left_out": 5, "resident_bytes": 1 << 20, "restarts": 1,
    }  # fmt: skip
    service = {"sessions": ["b"], "refused": {"scheme": 4}}
    cluster = {"name": "blue", "endpoint": "10.0.0.1:7400", "peers": peers,
               "directory": directory, "service": service, "membership": MEMBER}  # fmt: skip
    return {"node": "a", "boot": "0a" * 16, "cluster": cluster,
            "remote": {"peers": {"b": READ}}} | changed  # fmt: skip


def listed(told: dict[str, Any]) -> NodeList:
    """The list of a node that says so much."""
    return node_list(completed(told, NodeStats))


def show(found: NodeList) -> str:
    out = StringIO()
    printed(found, Console(file=out, width=200))
    return out.getvalue()


def test_each_node_has_a_row_with_all_that_the_parts_count():
    found = listed(stats({"c": DOWN, "b": UP}))

    assert [one.name for one in found.nodes] == ["b", "c"]
    b, c = found.nodes
    assert (b.draining, c.draining) == (True, False)
    assert (b.state, b.transport, b.boot, b.reads_here) == ("up", "tcp", "0b" * 16, True)
    assert (b.indexed_pages, b.current, b.lag_s) == ({"CPU": 40, "STORAGE": 2}, True, 0.25)
    assert (b.reads, b.unsettled_reads, b.failed_reads, b.bytes_per_s) == (1, 2, 2, 5 << 20)
    assert (b.fetched_pages, b.fetched_bytes) == (7, 7 << 20)
    assert (b.missing_pages, b.retried_pages) == (3, 1)
    assert (c.state, c.reads_here, c.current, c.lag_s) == ("refused", False, False, None)
    assert c.fault is not None
    assert (c.fault.field, c.faults) == ("cluster", {"refused": 3})
    assert found.not_followed == ["z"]
    assert found.not_admitted == {"scheme": 4}


@pytest.mark.parametrize(
    ("peers", "joined"),
    [({}, "alone"), ({"b": UP}, "joined"), ({"b": UP, "c": DOWN}, "partly"),
     ({"c": DOWN}, "alone")],
)  # fmt: skip
def test_a_node_is_joined_as_far_as_it_has_sessions(peers, joined):
    assert listed(stats(peers)).joined == joined


def test_a_node_without_a_cluster_has_no_rows_and_says_so():
    found = listed(stats({}, cluster=None, remote=None))

    assert (found.joined, found.directory) == ("off", "off")
    assert "cluster.name is empty" in show(found)


def test_the_table_names_what_differs_and_what_is_left_out():
    told = show(listed(stats({"b": UP, "c": DOWN})))

    for words in (
        "some other nodes have no session with it", "42 of 1,000 pages, 5 left out",
        "b (10.0.0.2:7400)", "up, tcp, draining", "40 CPU, 2 STORAGE", "1, 2 unsettled",
        "7, 7.0 MiB, 3 missing, 1 retried", "5.0 MiB/s", "not followed, too many nodes: z",
        "membership in etcd: this node is refused and serves alone (name): 10.0.0.9:7400 has it;",
        "changes: joined 2, refused 1; 3 unreadable records left out",
        "not admitted: scheme 4", "c: refused (cluster) 2.5 s ago: cluster: 'red'",
    ):  # fmt: skip
        assert words in told, words


def test_pages_in_a_directory_that_nodes_share_count_and_its_counts_are_shown_and_exported():
    counted = stats({"b": UP})
    counted["cluster"]["directory"] |= {"peers": {}, "shared": SHARED}
    found = listed(counted)

    (b,) = found.nodes
    assert (b.current, b.index_why, b.lag_s, b.indexed_pages) == (True, "", None, {})
    told = show(found)
    assert "do not count" not in told
    assert "in Redis" in told
    assert "directory in Redis: all pages of this node are announced; 3 wait, 70 were" in told
    assert "unanswered: overload 6; faults: ask_away 4, lost 1" in told
    series = {
        (sample.name.removeprefix("kvstore_cluster_directory_"), *sample.labels.values()):
        sample.value
        for family in node_series(found)
        for sample in family.samples
        if "cluster_directory" in sample.name
    }  # fmt: skip
    assert series == {
        ("current",): 1, ("waiting_pages",): 3, ("outstanding",): 5, ("announced_pages_total",): 70,
        ("announcements_total",): 2, ("answers_total",): 9,
        ("faults_total", "away"): 0, ("faults_total", "ask_away"): 4, ("faults_total", "lost"): 1,
        ("unanswered_total", "timeout"): 0, ("unanswered_total", "overload"): 6,
    }  # fmt: skip


def gauge(found: NodeList) -> float:
    """The series that an alert asks for."""
    [value] = [
        sample.value
        for family in node_series(found)
        for sample in family.samples
        if sample.name == "kvstore_cluster_directory_current"
    ]
    return value


def test_a_directory_in_a_redis_that_does_not_answer_is_degraded_and_says_why():
    counted = stats({"b": UP})
    directory = counted["cluster"]["directory"]
    directory |= {"peers": {}, "refused": [], "shared": SHARED}
    found = listed(counted)
    assert (found.directory, gauge(found)) == ("current", 1)

    directory["shared"] = SHARED | {"current": False, "trouble": "away"}
    found = listed(counted)
    assert (found.directory, gauge(found)) == ("degraded", 0)
    failed = (
        "directory in Redis: its last call failed (away), nodes may not find each other's pages;"
    )
    assert failed in show(found)


@pytest.mark.parametrize(
    ("peers", "known", "refused", "state"),
    [({"b": UP}, {"b": KNOWN}, [], "current"), ({}, {}, [], "current"),
     ({"b": UP}, {}, [], "degraded"), ({"b": UP}, {"b": KNOWN}, ["z"], "degraded"),
     ({"b": UP, "c": UP}, {"b": KNOWN, "c": KNOWN | {"current": False}}, [], "degraded"),
     ({"b": UP, "c": DOWN}, {"b": KNOWN}, [], "current")],
)  # fmt: skip
def test_a_directory_of_peers_is_degraded_when_pages_of_a_node_in_reach_are_not_known(
    peers, known, refused, state
):
    counted = stats(peers)
    counted["cluster"]["directory"] |= {"peers": known, "refused": refused}
    found = listed(counted)
    assert (found.directory, gauge(found)) == (state, float(state == "current"))


def test_no_more_nodes_have_series_than_a_cluster_may_have():
    found = listed(stats({f"n{at}": UP for at in range(100)}))

    peers = {
        sample.labels["peer"]
        for family in node_series(found)
        for sample in family.samples
        if "peer" in sample.labels
    }
    assert len(peers) == PEERS_MAX == 15


def test_the_series_say_in_which_state_the_node_is_by_its_membership():
    found = {
        (sample.name, sample.labels.get("state", "")): sample.value
        for family in node_series(listed(stats({"b": UP})))
        for sample in family.samples
        if "membership" in sample.name
    }
    assert found == {
        **{("kvstore_cluster_membership_state", one): float(one == "refused")
           for one in ("joining", "joined", "away", "refused")},
        **{("kvstore_cluster_membership_changes_total", one): count
           for one, count in (("joining", 0), ("joined", 2), ("away", 0), ("refused", 1))},
        ("kvstore_cluster_membership_unreadable_records", ""): 3,
    }  # fmt: skip


def test_a_membership_that_is_a_list_and_an_older_node_have_no_line():
    counted = stats({"b": UP})
    counted["cluster"]["membership"] = MEMBER | {"kind": "local", "state": "joined"}
    found = listed(counted)

    for one in (found, msgspec.structs.replace(found, membership=None)):
        assert "membership in" not in show(one)


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"joined": 1, "away": 1}, "what it said last counts"),
     ({"away": 1}, "this node has not joined since its start, and knows no other nodes"),
     ({"refused": 1, "away": 1}, "has not joined since its start")],
)  # fmt: skip
def test_what_counts_while_the_store_is_away_depends_on_whether_the_node_ever_joined(changes, told):
    counted = stats({"b": UP})
    counted["cluster"]["membership"] = MEMBER | {"state": "away", "field": "", "changes": changes}
    found = listed(counted)
    assert told in show(found)
    assert ("last counts" in show(found)) == ("joined" in changes)
