"""A session carries its engine's name; two live engines of a node never have the same one."""

import msgspec
import pytest

from kvstore.node.describe import describe
from kvstore.protocol import wire
from kvstore.protocol.errors import EngineNameTaken, ProtocolError, error_from_code
from kvstore.protocol.page import EngineLabel
from kvstore.state.tree.sessions import Peer
from tests.node.test_protocol import IDENTITY, KEYS, SHARDS, Wire

ONE, TWO = b"1" * 16, b"2" * 16


def label(name: str = "e", instance: bytes = ONE, **fields: object) -> EngineLabel:
    return EngineLabel(name, instance, **fields)


def hello(
    node: Wire, connection: int, engine: EngineLabel | None, session: bytes = b""
) -> wire.Answer:
    node.node.connected(connection, Peer(connection, connection))
    answer = node.ask(
        connection, wire.Hello(0, 1, 4, f"process-{connection}", session, b"", 0, engine)
    )
    assert answer is not None
    return answer


def names(node: Wire) -> list[str | None]:
    sessions = node.node.sessions.values()
    return [one.engine.name if one.engine is not None else None for one in sessions]


@pytest.fixture
def node() -> Wire:
    return Wire()


def test_another_live_engine_of_the_same_name_is_refused_and_told_what_to_do(node) -> None:
    assert isinstance(hello(node, 1, label("e")), wire.Welcome)

    refused = hello(node, 2, label("e", TWO))

    assert isinstance(refused, wire.Failure)
    assert refused.code == "engine_name_taken"
    assert "'e'" in refused.message
    assert "processes [1]" in refused.message
    assert "a name of its own" in refused.message
    assert isinstance(error_from_code(refused.code, refused.message), EngineNameTaken)
    assert describe(node.node).counts["refused_engine_name_taken"] == 1
    assert names(node) == ["e"]
    assert isinstance(hello(node, 3, label("e/dp1", TWO)), wire.Welcome), "a rank has its own name"


def test_all_processes_of_an_engine_have_its_name(node) -> None:
    welcome = hello(node, 1, label())
    assert isinstance(welcome, wire.Welcome)

    assert isinstance(hello(node, 2, label()), wire.Welcome), "in a session of its own"
    assert isinstance(hello(node, 3, label(), welcome.session), wire.Welcome), "in the first one"
    assert names(node) == ["e", "e"]


def test_the_name_of_an_engine_that_has_ended_is_free_at_once(node) -> None:
    hello(node, 1, label())
    node.node.disconnected(1, node.now_ns, ended=True)

    assert isinstance(hello(node, 2, label("e", TWO)), wire.Welcome)


def test_the_name_is_free_though_the_node_still_holds_slots_for_the_process(node) -> None:
    hello(node, 1, label())
    node.ask(1, wire.OpenSpace(0, IDENTITY, SHARDS))
    node.begin(1, KEYS)
    node.node.disconnected(1, node.now_ns, ended=False)
    assert names(node) == ["e"], "its session stays until its copies have ended"

    assert isinstance(hello(node, 2, label("e", TWO)), wire.Welcome)


def test_an_engine_that_reconnects_is_no_duplicate_of_itself(node) -> None:
    welcome = hello(node, 1, label())
    assert isinstance(welcome, wire.Welcome)
    node.ask(1, wire.OpenSpace(0, IDENTITY, SHARDS))
    node.begin(1, KEYS)

    assert isinstance(hello(node, 2, label(), welcome.session), wire.Welcome)
    node.node.disconnected(1, node.now_ns, ended=False)
    assert isinstance(hello(node, 3, label(), welcome.session), wire.Welcome)
    assert names(node) == ["e"]


def test_a_name_that_was_only_derived_never_costs_an_engine_its_cache(node) -> None:
    hello(node, 1, label("*:8000", chosen=False))

    assert isinstance(hello(node, 2, label("*:8000", TWO, chosen=False)), wire.Welcome)
    assert names(node) == ["*:8000", None]
    assert describe(node.node).counts["unnamed_duplicates"] == 1


def test_a_session_remembers_which_shards_it_has_opened(node) -> None:
    hello(node, 1, label())
    hello(node, 2, label())
    node.ask(1, wire.OpenSpace(0, IDENTITY, SHARDS))
    node.ask(2, wire.OpenSpace(0, IDENTITY, SHARDS[1:]))

    first, second = node.node.sessions.values()

    assert (first.shards, second.shards) == ({0: 0b11}, {0: 0b10})
    node.node.disconnected(2, node.now_ns, ended=True)
    assert second.shards == {}


def test_a_client_of_an_earlier_protocol_has_no_name(node) -> None:
    assert isinstance(hello(node, 1, None), wire.Welcome)
    assert names(node) == [None]


class HelloOf13(msgspec.Struct, array_like=True, tag=1):
    """Hello as protocol 1.3 has it."""

    id: int
    major: int
    minor: int
    name: str
    session: bytes = b""
    origin: bytes = b""
    number: int = 0


def test_an_earlier_node_ignores_the_name_and_an_earlier_client_sends_none() -> None:
    new = wire.encode(wire.Hello(1, 1, 4, "e", ONE, b"o", 7, label()))[4:]
    old = HelloOf13(1, 1, 3, "e", ONE, b"o", 7)

    assert msgspec.msgpack.decode(new, type=HelloOf13) == HelloOf13(1, 1, 4, "e", ONE, b"o", 7)
    decoded = wire.decode_request(msgspec.msgpack.encode(old))
    assert decoded == wire.Hello(1, 1, 3, "e", ONE, b"o", 7, None)


@pytest.mark.parametrize(
    "engine",
    [
        label(""), label("a b"), label("a\n"), label("e/dpx"), label("e/other"), label("e" * 301),
        label("e", b"short"), label("e", block_tokens=-1), label("e", events="ipc:///a b"),
        label("e", events_bind="tcp://h\n"), label("e", events_replay="x" * 513),
    ],
)  # fmt: skip
def test_a_label_that_cannot_be_is_no_message(engine) -> None:
    frame = wire.encode(wire.Hello(1, 1, 4, "e", engine=engine))

    with pytest.raises(ProtocolError):
        wire.decode_request(frame[4:])
