"""Goal: whoever connects to the peer service and is no node of the cluster changes nothing."""

import asyncio
import ssl
from typing import Any

import msgspec
import pytest

from kvstore.protocol import wire
from kvstore.protocol.errors import ConfigError
from kvstore.protocol.page import ALL_KEYS
from kvstore.server import handshakes, served
from tests.cluster.raw_peer import FOLLOW, HELLO, scene
from tests.cluster.whole_node import (
    IDENTITY,
    KEYS,
    PAGE_BYTES,
    SHARD,
    ByHand,
    context,
)
from tests.loops import WAIT_S, eventually, in_loop


def changed(message: Any, **fields: Any) -> Any:
    return type(message)(
        *(fields.get(at, getattr(message, at)) for at in message.__struct_fields__)
    )


DIFFERENT = {
    "cluster": ("cluster", {"cluster": "red"}),
    "scheme": ("scheme", {"scheme": "sha256/xxh3_128 2"}),
    "unknown name": ("node", {"node": "z"}),
    "our own name": ("node", {"node": "a"}),
}
OTHER_PROTOCOL = {"major": ("protocol", {"major": 2}), "minor": ("protocol", {"minor": 4})}


@pytest.mark.parametrize(
    ("message", "field", "fields"),
    [
        *(pytest.param(HELLO, *one, id=name) for name, one in (DIFFERENT | OTHER_PROTOCOL).items()),
        *(
            pytest.param(FOLLOW, *one, id=f"events: {name}")
            for name, one in DIFFERENT.items()
            if name != "our own name"
        ),  # the node's index process follows its own events
    ],
)
@in_loop
async def test_a_node_that_differs_is_refused_by_the_name_of_the_field(message, field, fields):
    async with scene() as made:
        before = made.state()
        raw = await made.connect()
        raw.send(changed(message, **fields))
        answer = await raw.answer()

        assert isinstance(answer, wire.Failure)
        assert (answer.code, answer.field) == ("invalid_argument", field)
        assert await raw.answer() is None
        assert made.state() == before
        assert made.service.stats().refused == {field: 1}
        assert made.service.stats().sessions == []


@pytest.mark.parametrize("name", ["", "\x1b[2J", "a\nb", "n" * 65, "n" * 9_999])
@pytest.mark.parametrize("message", [HELLO, FOLLOW], ids=["session", "events"])
@in_loop
async def test_a_name_that_no_node_can_have_is_refused_though_the_cluster_has_no_list(
    message, name
):
    async with scene() as made:
        made.service._knows = lambda _: True
        raw = await made.connect()
        raw.send(changed(message, node=name))
        answer = await raw.answer()

        assert isinstance(answer, wire.Failure)
        assert (answer.code, answer.field) == ("invalid_argument", "node")
        assert made.service.stats().sessions == []
        assert made.service.stats().followers == 0


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 8,
        b"\x05\0\0\0\xff\xff\xff\xff\xff",
        (1 << 20).to_bytes(4, "little") + b"x" * 100,
        (wire.FRAME_BYTES_MAX + 1).to_bytes(4, "little"),
        wire.encode(wire.Hello(1, 1, wire.PROTOCOL_MINOR, "engine")),
        wire.encode(wire.FetchExtents(b"", [0])),
        wire.encode(wire.Ping(1)),
    ],
    ids=["http", "no message", "a long first frame", "too long", "hello", "extents", "ping"],
)
@in_loop
async def test_garbage_gets_a_failure_and_the_end(sent):
    async with scene() as made:
        before = made.state()
        raw = await made.connect()
        raw.send(sent)

        answer = await raw.answer()
        assert isinstance(answer, wire.Failure)
        assert answer.code == "protocol"
        assert await raw.answer() is None
        assert made.state() == before


@in_loop
async def test_garbage_to_tls_changes_nothing_and_others_are_served():
    async with scene(tls=context(ssl.PROTOCOL_TLS_SERVER)) as made:
        raw = await made.connect()
        raw.send(b"\x05\0\0\0\xff\xff\xff\xff\xff" * 20)
        await raw.text()
        await eventually(lambda: sum(made.service.stats().refused.values()) == 1)

        good = await made.connect(context(ssl.PROTOCOL_TLS_CLIENT))
        await good.greet()
        assert made.service.stats().sessions == ["b"]


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
@in_loop
async def test_a_connection_without_a_first_message_is_closed_in_time(monkeypatch, encrypted):
    monkeypatch.setattr(handshakes, "HANDSHAKE_TIMEOUT_S", 0.2)
    tls = context(ssl.PROTOCOL_TLS_SERVER) if encrypted else None
    async with scene(tls=tls) as made:
        raw = await made.connect()
        raw.send(b"\x16\x03" if encrypted else wire.encode(HELLO)[:7])

        said = await raw.text()

        assert encrypted or b"no message in time" in said
        assert made.service.stats().refused == {"protocol": 1}


@in_loop
async def test_the_oldest_silent_connection_gives_its_place_to_a_new_one(monkeypatch):
    monkeypatch.setattr(handshakes, "SILENT_MAX", 2)
    async with scene() as made:
        silent = [await made.connect()]
        await eventually(lambda: made.service.stats().accepted_connections == 1)
        silent += [await made.connect(), await made.connect()]

        assert b"its place was needed" in await silent[0].text()
        await silent[2].greet()


@pytest.mark.parametrize(
    "request_",
    [
        wire.BeginPut(3, 1, 0, 0, KEYS.packed, b""),
        wire.CommitPut(3, 1, b"d" * 16),
        wire.AbortPut(1),
        wire.Persist(3, 0, 0, KEYS.packed, 10),
        wire.Settled(3),
        wire.ReportPrefill(0.1),
        wire.Stats(3),
        wire.FetchExtents(b"", [0]),
        wire.Hello(3, 1, wire.PROTOCOL_MINOR, "engine"),
        HELLO,
        FOLLOW,
    ],
    ids=lambda one: type(one).__name__,
)
@in_loop
async def test_a_request_that_a_node_may_not_make_ends_its_session(request_):
    async with scene() as made:
        made.node.store()
        raw = await made.connect()
        await raw.open()
        before = made.state()[1:]

        raw.send(request_)
        answer = await raw.answer()

        assert isinstance(answer, wire.Failure)
        assert (answer.code, answer.id) == ("protocol", getattr(request_, "id", 0))
        assert type(request_).__name__ in answer.message
        assert await raw.answer() is None
        assert made.state()[1:] == before
        await eventually(lambda: made.service.stats().sessions == [])


@in_loop
async def test_sessions_that_break_the_protocol_again_and_again_are_counted_and_logged_once(caplog):
    async with scene() as made:
        for _ in range(20):
            raw = await made.connect()
            await raw.greet()
            raw.send(b"\x01\0\0\0\xff")
            assert (await raw.answer()).code == "protocol"
            assert await raw.answer() is None

        assert made.node.node.pages.counts["refused_protocol"] == 20
    lines = [one.getMessage() for one in caplog.records if "node b" in one.getMessage()]
    assert len(lines) == 1
    assert "not a request of protocol" in lines[0]


@in_loop
async def test_requests_that_cannot_be_right_are_refused_and_the_session_goes_on():
    async with scene() as made:
        made.node.store()
        raw = await made.connect()
        await raw.greet()
        assert (await raw.ask(wire.Acquire(0, 1, 0, 0, KEYS.packed, 100))).field == "space"
        assert (await raw.ask(wire.Lookup(0, 0, [0], KEYS.packed))).field == "space"
        opened = await raw.ask(wire.OpenSpace(0, IDENTITY, [SHARD]))
        space = opened.space
        assert (await raw.ask(wire.Acquire(0, 1, space, 9, KEYS.packed, 100))).field == "shards"
        assert (await raw.ask(wire.Acquire(0, 1, space, 0, KEYS.packed, 0))).field == "lease_ms"
        assert (await raw.ask(wire.Acquire(0, 1, space, 0, ALL_KEYS, 100))).field == "keys"
        raw.send(wire.Release(77), wire.Corrupt(space, 0, KEYS[0], 0), wire.Corrupt(9, 9, b"", 0))

        lent = await raw.ask(wire.Acquire(0, 1, space, 0, KEYS.packed, 3_000))
        assert isinstance(lent, wire.Lent)
        assert len(lent.digests) == 6 * 16
        assert (await raw.ask(wire.Acquire(0, 1, space, 0, KEYS.packed, 100))).field == "lease"
        found = await raw.ask(wire.Lookup(0, space, [0], KEYS.packed))
        assert found.pages == 6
        assert isinstance(await raw.ask(wire.Ping(0)), wire.Pong)
        assert made.node.loans.counts["reports_ignored"] == 2
        (_, generation, _), *_ = wire.unpack_addresses(lent.addresses)
        raw.send(wire.Corrupt(space, 0, KEYS[0], generation, b"another boot"))
        assert isinstance(await raw.ask(wire.Ping(0)), wire.Pong)
        assert made.node.loans.counts["reports_ignored"] == 3
        raw.send(wire.Release(1))
        await eventually(lambda: not made.node.pinned_bytes())
        assert not made.node.transport.tickets


@in_loop
async def test_pages_of_a_shard_that_was_not_opened_are_refused_though_an_engine_has_it_open():
    async with scene() as made:
        engine = ByHand(made.node, "default")
        second = msgspec.structs.replace(SHARD, layers=(1, 2))
        opened = engine.ask(wire.OpenSpace(0, IDENTITY, [SHARD, second]))
        engine.ask(wire.BeginPut(0, 1, opened.space, opened.shards[1], KEYS.packed, b""))
        engine.ask(wire.CommitPut(0, 1, bytes(16 * len(KEYS))))
        raw = await made.connect()
        space = (await raw.open()).space

        shard = opened.shards[1]
        assert (await raw.ask(wire.Acquire(0, 1, space, shard, KEYS.packed, 100))).field == "shards"
        assert (await raw.ask(wire.Lookup(0, space, [0, shard], KEYS.packed))).field == "shards"

        await raw.ask(wire.OpenSpace(0, IDENTITY, [second]))
        lent = await raw.ask(wire.Acquire(0, 1, space, shard, KEYS.packed, 100))
        assert isinstance(lent, wire.Lent)
        raw.close()
        made.node.desk.disconnect(engine.number, ended=True)


@in_loop
async def test_a_lease_is_gone_at_its_deadline_and_its_ticket_with_it():
    async with scene() as made:
        made.node.store()
        raw = await made.connect()
        space = (await raw.open()).space
        lent = await raw.ask(wire.Acquire(0, 1, space, 0, KEYS.packed, 50))
        assert isinstance(lent, wire.Lent)

        await eventually(lambda: not made.node.pinned_bytes())

        assert not made.node.transport.tickets
        assert made.node.loans.counts["expired"] == 1


@in_loop
async def test_a_reader_that_closes_during_its_lease_leaves_nothing_behind():
    async with scene() as made:
        made.node.store()
        before = made.state()
        raw = await made.connect()
        space = (await raw.open()).space
        assert isinstance(
            await raw.ask(wire.Acquire(0, 1, space, 0, KEYS.packed, 3_000)), wire.Lent
        )
        assert made.node.pinned_bytes() == 6 * PAGE_BYTES

        raw.close()

        await eventually(lambda: made.state() == before)


@in_loop
async def test_only_so_many_requests_of_a_node_wait(monkeypatch):
    monkeypatch.setattr(served, "ASKED_MAX", 2)
    async with scene() as made:
        made.node.room(KEYS)  # being written: lookups wait for them
        raw = await made.connect()
        space = (await raw.open()).space
        lookup = wire.Lookup(1, space, [0], KEYS.packed, 60_000)

        raw.send(lookup, lookup, changed(lookup, id=2), changed(lookup, id=3))

        assert (await raw.answer()).field == "id"
        answer = await raw.answer()
        assert (answer.id, answer.code) == (3, "capacity")
        (writer,) = (one for one in made.node.node.processes.values() if one.puts)
        made.node.desk.disconnect(writer.connection, ended=True)
        assert {(await raw.answer()).id, (await raw.answer()).id} == {1, 2}


@in_loop
async def test_a_newer_connection_of_a_node_ends_the_older_one():
    async with scene() as made:
        made.node.store()
        old = await made.connect()
        space = (await old.open()).space
        await old.ask(wire.Acquire(0, 1, space, 0, KEYS.packed, 3_000))
        new = await made.connect()
        await new.greet()

        assert await old.answer() is None
        assert not made.node.pinned_bytes()
        assert made.service.stats().sessions == ["b"]
        assert isinstance(await new.ask(wire.Ping(0)), wire.Pong)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
@in_loop
async def test_a_follower_of_events_gets_the_stream_with_every_byte_after_its_first_message(
    encrypted,
):
    followed: list[wire.FollowEvents] = []

    async def follow(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: wire.FollowEvents
    ) -> None:
        followed.append(hello)
        writer.write((await reader.readexactly(6)).upper())
        await writer.drain()
        await reader.read()
        writer.close()

    tls = context(ssl.PROTOCOL_TLS_SERVER) if encrypted else None
    async with scene(tls=tls, follow=follow) as made:
        raw = await made.connect(context(ssl.PROTOCOL_TLS_CLIENT) if encrypted else None)
        raw.send(wire.encode(FOLLOW) + b"abc")
        await eventually(lambda: followed)
        raw.send(b"def")

        async with asyncio.timeout(WAIT_S):
            assert await raw._reader.readexactly(6) == b"ABCDEF"
        assert followed == [FOLLOW]
        assert made.service.stats().followers == 1
        raw.close()
        await eventually(lambda: made.service.stats().followers == 0)


@pytest.mark.parametrize("listen", ["", "nonsense", "127.0.0.1", "127.0.0.1:99999"])
@in_loop
async def test_an_address_that_is_none_is_refused_by_its_key(listen):
    with pytest.raises(ConfigError, match=r"cluster\.listen"):
        async with scene(listen=listen):
            pass
