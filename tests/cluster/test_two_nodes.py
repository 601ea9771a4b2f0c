"""Goal: pages of one node arrive on another as they are; nothing is held for a lost reader."""

import asyncio
import ssl
import threading
from contextlib import AsyncExitStack
from typing import Any

import pytest

from kvstore.cluster import session as pace
from kvstore.mover.memory import memory_at
from kvstore.node.describe import describe
from kvstore.protocol import wire
from kvstore.protocol.errors import PageCorrupt, PeerUnreachable, TransferTimeout
from kvstore.protocol.page import DIGEST_BYTES
from kvstore.server import loans
from kvstore.state.remote.jobs import Locate
from kvstore.transport.base import TransferSettled
from tests.cluster.whole_node import (
    IDENTITY,
    KEYS,
    PAGE_BYTES,
    SHARD,
    WholeNode,
    context,
    linked,
    reading,
    serving,
    two_nodes,
)
from tests.loops import WAIT_S as LOOP_WAIT_S
from tests.loops import eventually, in_loop


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
@in_loop
async def test_pages_of_one_node_arrive_on_the_other_with_their_digests(encrypted):
    server = context(ssl.PROTOCOL_TLS_SERVER) if encrypted else None
    client = context(ssl.PROTOCOL_TLS_CLIENT) if encrypted else None
    async with AsyncExitStack() as undo:
        a, b = await two_nodes(undo)
        pages = a.store()
        service = await undo.enter_async_context(serving(a, server))
        await undo.enter_async_context(reading(b, {"a": service.endpoint}, client))
        await eventually(b.up)
        await eventually(lambda: b.standing == {"a": a.local.boot})
        slots = b.room(KEYS)

        first = b.fetch(slots[:2], keys=KEYS[:2])
        rest = b.fetch(slots[2:], keys=KEYS[2:])
        await eventually(lambda: len(b.ends) == 2)

        assert [(one.job, one.error, one.settled) for one in b.ends] == [
            (first, None, True), (rest, None, True),
        ]  # fmt: skip
        assert [len(one.digests) for one in b.ends] == [2 * DIGEST_BYTES, 4 * DIGEST_BYTES]
        assert b.content(slots) == pages
        await eventually(lambda: not a.pinned_bytes(), "the leases are released")
        assert not a.transport.tickets
        assert a.loans.stats() == {"open": 0, "lent_pages": 6}
        assert b.peers.transfers == 0


@in_loop
async def test_a_node_without_the_pages_lends_none_and_holds_nothing():
    async with AsyncExitStack() as undo:
        a, b = await linked(undo)
        a.store(KEYS[:3])

        number = b.fetch(b.room(KEYS))
        await eventually(lambda: b.end(number))

        assert len(b.ends[0].digests) == 3 * DIGEST_BYTES
        other = b.fetch(b.room(KEYS, "t"), tenant="t")
        await eventually(lambda: b.end(other))
        assert b.ends[1] == (other, b"", None, True, ())
        await eventually(lambda: not a.pinned_bytes())


@in_loop
async def test_tenants_are_read_through_one_connection():
    async with AsyncExitStack() as undo:
        a, b = await linked(undo)
        pages = {tenant: a.store(tenant=tenant) for tenant in ("red", "green")}

        for tenant, stored in pages.items():
            slots = b.room(KEYS, tenant)
            number = b.fetch(slots, tenant=tenant)
            await eventually(lambda number=number: b.end(number))
            assert b.content(slots) == stored


@in_loop
async def test_a_page_that_came_wrong_is_checked_by_its_owner_and_kept():
    async with AsyncExitStack() as undo:
        a, b = await linked(undo)
        a.store()
        b.transport.damaged = {2, 4}

        b.fetch(b.room(KEYS))
        await eventually(lambda: a.loans.counts["reports_false"] == 2)

        (end,) = b.ends
        assert len(end.digests) == 2 * DIGEST_BYTES, "what follows a hole is of no use"
        assert isinstance(end.error, PageCorrupt)
        await eventually(lambda: not a.pinned_bytes(), "released after the check")
        assert a.node.pages.counts["corrupt_pages"] == 0
        assert describe(a.node).host.ready_bytes == 6 * PAGE_BYTES


@in_loop
async def test_a_page_that_is_wrong_at_its_owner_leaves_it():
    async with AsyncExitStack() as undo:
        a, b = await linked(undo)
        a.store()
        (extent, _, offset) = a.slots.address(_slot_of(a, 1))
        memory_at(a.memory.address(extent) + offset, 1)[0] ^= 1

        b.fetch(b.room(KEYS))
        await eventually(lambda: a.loans.counts["reports_true"] == 1)

        assert len(b.ends[0].digests) == DIGEST_BYTES
        await eventually(lambda: not a.pinned_bytes())
        b.fetch(b.room(KEYS[:2], "t"), keys=KEYS[:2])
        await eventually(lambda: len(b.ends) == 2)
        assert b.ends[1].error is None
        assert len(b.ends[1].digests) == DIGEST_BYTES, "the wrong page is no page any more"


@pytest.mark.parametrize("leaves", [False, True])
@in_loop
async def test_a_lease_is_released_after_the_check_of_its_page_or_when_its_reader_leaves(
    monkeypatch, leaves
):
    gate = threading.Event()
    monkeypatch.setattr(loans, "_is_wrong", lambda *_: not gate.wait(LOOP_WAIT_S))
    async with AsyncExitStack() as undo:
        undo.callback(gate.set)
        a, b = await two_nodes(undo)
        a.store()
        b.transport.damaged = {0}
        service = await undo.enter_async_context(serving(a))
        async with reading(b, {"a": service.endpoint}):
            await eventually(b.up)
            b.fetch(b.room(KEYS))
            await eventually(lambda: b.ends and not a.transport.tickets)
            assert a.pinned_bytes() == 6 * PAGE_BYTES
            assert a.loans.stats()["open"] == 1
            if not leaves:
                gate.set()
                await eventually(lambda: not a.pinned_bytes())
        await eventually(lambda: not a.pinned_bytes(), "its reader has left")
        gate.set()
        await eventually(lambda: a.loans.stats()["open"] == 0)


def _slot_of(node: WholeNode, position: int) -> Any:
    (space,) = node.node.pages.spaces
    return space.nodes[KEYS[position]].slot(0)


@in_loop
async def test_the_lease_of_a_reader_that_vanishes_is_gone_at_once():
    async with AsyncExitStack() as undo:
        a, b = await two_nodes(undo)
        a.store()
        b.transport.held = []
        service = await undo.enter_async_context(serving(a))
        async with reading(b, {"a": service.endpoint}):
            await eventually(b.up)
            number = b.fetch(b.room(KEYS))
            await eventually(lambda: b.transport.held)
            assert a.pinned_bytes() == 6 * PAGE_BYTES
            assert len(a.transport.tickets) == 1

        await eventually(lambda: not a.pinned_bytes())
        assert not a.transport.tickets
        assert describe(a.node).host.limbo_bytes == 0
        assert not a.node.processes
        assert b.end(number) is None


@in_loop
async def test_a_lease_ends_with_its_deadline_though_the_reader_stays():
    async with AsyncExitStack() as undo:
        a, b = await linked(undo)
        a.store()
        b.transport.held = []
        b.transport.lingers = True

        number = b.fetch(b.room(KEYS), wait_s=3.0)
        await eventually(lambda: b.end(number))

        assert b.ends == [(number, b"", b.ends[0].error, False, ())]
        assert isinstance(b.ends[0].error, TransferTimeout)
        await eventually(lambda: not a.pinned_bytes())
        assert not a.transport.tickets
        assert b.settled == [], "bytes may still land"
        b.transport.tell(TransferSettled(number))
        await eventually(lambda: b.settled == [number])
        assert b.peers.transfers == 0


@in_loop
async def test_a_fetch_without_a_session_is_refused_at_once_and_the_session_comes_back():
    async with AsyncExitStack() as undo:
        a, b = await two_nodes(undo)
        pages = a.store()
        async with serving(a) as service:
            place = service.endpoint
            await undo.enter_async_context(reading(b, {"a": place}))
            await eventually(b.up)
        await eventually(lambda: not b.up())
        slots = b.room(KEYS)

        number = b.fetch(slots)
        nobody = b.fetch(slots, peer="z")
        await eventually(lambda: len(b.ends) == 2)
        assert {one.job for one in b.ends} == {number, nobody}
        assert all(isinstance(one.error, PeerUnreachable) and one.settled for one in b.ends)

        async with serving(a, listen=place):
            await eventually(b.up)
            again = b.fetch(slots)
            await eventually(lambda: b.end(again))
            assert b.content(slots) == pages
        assert b.faults()["closed"] >= 1


@pytest.mark.parametrize("comes", [True, False])
@in_loop
async def test_a_fetch_waits_for_the_memory_of_its_slots_until_its_deadline(monkeypatch, comes):
    async with AsyncExitStack() as undo:
        a, b = await linked(undo)
        pages = a.store()
        slots = b.room(KEYS)
        looked: list[int] = []
        monkeypatch.setattr(
            b.memory, "pending", lambda extent: not (comes and len(looked) > 20)
            and looked.append(extent) is None,
        )  # fmt: skip

        number = b.fetch(slots, wait_s=30.0 if comes else 1.5)
        await eventually(lambda: b.end(number))

        assert looked
        if comes:
            assert b.content(slots) == pages
        else:
            assert isinstance(b.ends[0].error, TransferTimeout)
            assert b.ends[0].digests == b""
        await eventually(lambda: not a.pinned_bytes() and not b.peers.transfers)


@in_loop
async def test_a_name_that_no_host_can_have_is_a_node_that_is_not_there():
    async with AsyncExitStack() as undo:
        _, b = await two_nodes(undo)
        await undo.enter_async_context(reading(b, {"a": "a..b:1"}))
        faults = lambda: b.peers.sessions()["a"].faults if b.peers.sessions() else {}  # noqa: E731
        await eventually(lambda: faults().get("unreachable", 0) > 1, "it is tried again")


@in_loop
async def test_what_the_directory_says_reaches_the_desk_in_a_later_turn():
    async with AsyncExitStack() as undo:
        _, b = await linked(undo)
        b.jobs.append(Locate(7, IDENTITY, (SHARD,), KEYS.packed))
        b.peers.flush()
        assert b.holdings == {}, "the desk is carrying out decisions"
        await eventually(lambda: b.holdings == {7: [("a", 3)]})


@in_loop
async def test_a_node_with_the_certificate_of_another_authority_is_not_served():
    async with AsyncExitStack() as undo:
        a, b = await two_nodes(undo)
        service = await undo.enter_async_context(serving(a, context(ssl.PROTOCOL_TLS_SERVER)))
        stranger = context(ssl.PROTOCOL_TLS_CLIENT, "stranger")
        await undo.enter_async_context(reading(b, {"a": service.endpoint}, stranger))

        await eventually(lambda: service.stats().refused.get("connection"))
        assert not b.up()
        assert service.stats().sessions == []


# ---- a node that is not as it should be


async def by_hand(undo: AsyncExitStack, answers: Any) -> str:
    """A peer service by hand; returns where it listens."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = wire.FrameReader()
        try:
            while data := await reader.read(1 << 16):
                for body in frames.feed(data):
                    for answer in answers(wire.decode_request(body)):
                        writer.write(answer if type(answer) is bytes else wire.encode(answer))
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    undo.callback(server.close)
    host, port = server.sockets[0].getsockname()[:2]
    return f"{host}:{port}"


_PLACES = {f"t{number}": ("a:1", b"p" * 8) for number in range(1_000)}
_MANY = {f"t{number}": "a:1" for number in range(1_000)}


def welcome(request: wire.PeerHello, **changed: Any) -> wire.PeerWelcome:
    fields = {"node": "a", "boot": b"a" * 16, "transports": {"fake": "a:1"}, **changed}
    return wire.PeerWelcome(request.id, 1, wire.PROTOCOL_MINOR, **fields)


@in_loop
async def test_a_peer_that_never_answers_costs_a_fetch_its_deadline_and_then_its_session(
    monkeypatch,
):
    monkeypatch.setattr(pace, "PING_NS", 20 * pace.MS)
    monkeypatch.setattr(pace, "SILENT_NS", 400 * pace.MS)

    def answers(request: wire.Request) -> list[Any]:
        return [welcome(request)] if isinstance(request, wire.PeerHello) else []

    async with AsyncExitStack() as undo:
        _, b = await two_nodes(undo)
        place = await by_hand(undo, answers)
        await undo.enter_async_context(reading(b, {"a": place}))
        await eventually(b.up)

        number = b.fetch(b.room(KEYS), wait_s=0.1)
        await eventually(lambda: b.end(number))

        assert isinstance(b.ends[0].error, TransferTimeout | PeerUnreachable)
        assert b.ends[0].settled
        await eventually(lambda: b.faults().get("silent"))


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (lambda hello: b"\xff" * 64, "protocol"),
        (lambda hello: wire.Pong(hello.id), "protocol"),
        (lambda hello: welcome(hello, node="c"), "refused"),
        (lambda hello: wire.PeerWelcome(hello.id, 2, 0, "a", b"", {}), "refused"),
        (lambda hello: welcome(hello, boot=b""), "protocol"),
        (lambda hello: welcome(hello, boot=b"a" * (1 << 20)), "protocol"),
        (lambda hello: welcome(hello, transports=_MANY), "protocol"),
        (lambda hello: wire.Failure(hello.id, "x", "a" * (4 << 20)), "protocol"),
        (lambda hello: wire.Failure(hello.id, "invalid_argument", "no", "scheme"), "refused"),
    ],
    ids=[
        "garbage",
        "another answer",
        "another name",
        "another protocol",
        "no boot id",
        "a long boot id",
        "too many transports",
        "a long answer",
        "a refusal",
    ],
)
@in_loop
async def test_a_peer_that_greets_wrongly_gets_no_session(answer, cause):
    async with AsyncExitStack() as undo:
        _, b = await two_nodes(undo)
        place = await by_hand(undo, lambda request: [answer(request)])
        await undo.enter_async_context(reading(b, {"a": place}))

        await eventually(lambda: b.up("a") or (b.peers.sessions() and b.faults().get(cause)))

        assert not b.up()


@pytest.mark.parametrize(
    "lent",
    [
        wire.Lent(0, b"a" * 16, b"d" * 32, 0, 0, 1000, b"t" * 16),
        wire.Lent(0, b"a" * 16, b"d" * 15, 0, 0, 1000, b"t" * 16),
        wire.Lent(0, b"a" * 16, b"d" * 16, 0, 0, 1000, b"t"),
        wire.Lent(0, b"a" * 16 * 99, b"d" * 16 * 99, 0, 0, 1000, b"t" * 16),
        wire.Lent(0, b"a" * 16, b"d" * 16, 0, 0, 1000, b"t" * 16, b"", _PLACES),
        wire.Found(0, 1, 0),
    ],
    ids=[
        "fewer addresses",
        "part of a digest",
        "a short ticket",
        "too many",
        "many places",
        "no lease",
    ],
)
@in_loop
async def test_a_lease_that_does_not_fit_ends_the_session_and_the_fetch(lent):
    def answers(request: Any) -> list[Any]:
        match request:
            case wire.PeerHello():
                return [welcome(request)]
            case wire.OpenSpace():
                return [wire.SpaceOpened(request.id, 5, [3])]
            case wire.Acquire():
                lent.id = request.id
                return [lent]
        return []

    async with AsyncExitStack() as undo:
        _, b = await two_nodes(undo)
        place = await by_hand(undo, answers)
        await undo.enter_async_context(reading(b, {"a": place}))
        await eventually(b.up)
        number = b.fetch(b.room(KEYS))
        await eventually(lambda: b.end(number))

        assert isinstance(b.ends[0].error, PeerUnreachable)
        assert b.faults() == {"protocol": 1}
