"""An engine's sessions are found by its name at the nodes, and never guessed."""

import pytest

from conductor.routing.joining import (
    FoundSessions,
    Gap,
    NodeView,
    RankEvents,
    SeenEngine,
    SeenSession,
    SeenSpace,
    Sessions,
    address_of,
    reachable,
)

A, B, C = "aa" * 32, "bb" * 32, "cc" * 32


def session(name: str, *spaces: SeenSpace, **engine: object) -> SeenSession:
    return SeenSession(SeenEngine(name, **engine), spaces)


def view(node: str, *sessions: SeenSession, host: str = "10.0.0.1") -> NodeView:
    return NodeView(
        id=node, host=host, boot="b", events=None, events_replay=None, follow_token=False,
        sessions=sessions, unnamed=0,
    )  # fmt: skip


def space(name: str = A, page_tokens: int = 64, scope: str = "", shards: tuple[str, ...] = ()):
    return SeenSpace(name, page_tokens, scope, shards)


def node_of(found: FoundSessions | Gap) -> str:
    return found if isinstance(found, Gap) else found.node


@pytest.mark.parametrize(
    ("name", "url", "node"),
    [
        ("p1", "http://10.0.0.9:8000", "n1"),
        ("p1/dp3", "http://10.0.0.9:8000", "n1"),
        ("10.0.0.1:8000", "http://10.0.0.1:8000", "n1"),
        ("10.0.0.1:8000/dp0", "http://10.0.0.1:8000", "n1"),
        ("10.0.0.1:80", "http://10.0.0.1", "n1"),
        ("[::1]:8000", "http://[::1]:8000", "n1"),
        ("*:8000", "http://10.0.0.1:8000", "n1"),
        ("*:8000", "http://10.0.0.2:8000", Gap.UNKNOWN_NODE),
        ("*:8000", "http://10.0.0.1:8001", Gap.UNKNOWN_NODE),
        ("10.0.0.1:8000", "http://10.0.0.2:8000", Gap.UNKNOWN_NODE),
        ("p11", "http://10.0.0.1:8000", Gap.UNKNOWN_NODE),
    ],
)
def test_an_engine_is_found_by_its_id_or_by_the_address_of_its_server(name, url, node) -> None:
    sessions = Sessions([view("n0", session("other", space())), view("n1", session(name, space()))])

    assert node_of(sessions.find("p1", url, None)) == node


def test_a_node_on_this_machine_is_where_an_engine_on_loopback_is() -> None:
    sessions = Sessions([view("n", session("*:8000"), host="")])

    assert node_of(sessions.find("e", "http://127.0.0.1:8000", None)) == "n"
    assert node_of(sessions.find("e", "http://10.0.0.1:8000", None)) is Gap.UNKNOWN_NODE


def test_a_name_at_two_nodes_belongs_to_neither_unless_the_registration_says_which() -> None:
    sessions = Sessions([view("n1", session("e", space(A))), view("n2", session("e", space(B)))])

    assert sessions.find("e", "http://h:1", None) is Gap.AMBIGUOUS_NODE
    found = sessions.find("e", "http://h:1", "n2")
    assert isinstance(found, FoundSessions)
    assert (found.node, found.spaces) == ("n2", (B,))
    assert sessions.find("e", "http://h:1", "n3") is Gap.UNKNOWN_NODE


def test_the_id_is_preferred_to_the_address() -> None:
    sessions = Sessions([view("n1", session("10.0.0.1:80")), view("n2", session("e"))])

    assert node_of(sessions.find("e", "http://10.0.0.1", None)) == "n2"


def test_the_processes_and_ranks_of_an_engine_are_told_together() -> None:
    first = session(
        "e/dp0", space(A, 64, shards=(B,)), block_tokens=16, events="tcp://*:5557",
        events_replay="tcp://*:5560",
    )  # fmt: skip
    worker = session("e/dp0", space(A, 64, shards=(C, B)), space(C, 32, scope="selftest"))
    second = session("e/dp1", space(A, 64, shards=(B,)), events_bind="tcp://10.0.0.7:5558")
    found = Sessions([view("n", second, first, worker)]).find("e", "http://h:8000", None)

    assert isinstance(found, FoundSessions)
    assert (found.spaces, found.page_tokens, found.shards) == ((A,), 64, (B, C))
    assert found.block_tokens == 16
    assert found.ranks == (
        RankEvents(0, "tcp://h:5557", None, "tcp://h:5560"),
        RankEvents(1, None, "tcp://10.0.0.7:5558", None),
    )


def test_the_space_that_was_opened_last_is_the_one_that_counts() -> None:
    found = Sessions([view("n", session("e", space(A, 64), space(B, 32)))]).find(
        "e", "http://h", None
    )

    assert isinstance(found, FoundSessions)
    assert (found.spaces, found.page_tokens) == ((A, B), 32)


def test_a_session_that_has_opened_nothing_yet_is_found_all_the_same() -> None:
    found = Sessions([view("n", session("e"))]).find("e", "http://h", None)

    assert isinstance(found, FoundSessions)
    assert (found.node, found.spaces, found.page_tokens) == ("n", (), 0)


@pytest.mark.parametrize(
    ("endpoint", "host", "expected"),
    [
        ("tcp://*:5557", "10.0.0.1", "tcp://10.0.0.1:5557"),
        ("tcp://0.0.0.0:5557", "fe80::1", "tcp://[fe80::1]:5557"),
        ("tcp://[::]:5557", "", "tcp://127.0.0.1:5557"),
        ("tcp://10.0.0.2:5557", "10.0.0.1", "tcp://10.0.0.2:5557"),
        ("ipc:///run/a", "10.0.0.1", "ipc:///run/a"),
        ("", "h", None),
        (None, "h", None),
    ],
)
def test_an_endpoint_at_every_address_is_one_at_the_publishers_host(
    endpoint, host, expected
) -> None:
    assert reachable(endpoint, host) == expected


def test_an_address_always_has_a_port() -> None:
    assert address_of("https://h") == "h:443"
    assert address_of("http://[::1]:7") == "[::1]:7"
