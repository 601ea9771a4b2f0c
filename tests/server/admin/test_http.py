"""Goal: what comes over HTTP costs a bounded part of a process that is not the node's."""

import asyncio
import os
import re
import resource
import socket
import sys
import threading
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace

import h11
import pytest

from kvstore.server import client
from kvstore.server.admin import app, connections
from kvstore.server.admin.access import Access
from kvstore.server.admin.app import App
from kvstore.server.admin.connections import Connections, HttpConnection, HttpPeer
from kvstore.server.refusal import Refusal
from tests.client.conftest import READY, Daemon, arguments
from tests.server.conftest import PAGE_BYTES, TIMEOUT_S, Api, Stored

_pins = count(10**6)
TCP = HttpPeer("10.0.0.7:1", unix=False)


# The pages that people look at


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
def test_probes_may_ask_with_head(daemon, path):
    whole = client.send(daemon.http, "GET", path, timeout_s=TIMEOUT_S)
    assert client.send(daemon.http, "HEAD", path, timeout_s=TIMEOUT_S) == (200, b"")
    assert whole[0] == 200
    assert whole[1]


def test_the_root_leads_to_a_page_that_needs_nothing_from_elsewhere(daemon):
    host, _, port = daemon.http.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), TIMEOUT_S) as asking:
        asking.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        told = b"".join(iter(lambda: asking.recv(1 << 16), b"")).decode()
    assert re.match(r"HTTP/1.1 307 ", told)
    assert re.search(r"(?mi)^location: /docs\r$", told)

    status, page = client.send(daemon.http, "GET", "/docs", timeout_s=TIMEOUT_S)
    assert (status, b"/openapi.json" in page) == (200, True)
    assert not re.findall(rb"(?:src|href|url|import|fetch)\W{1,3}(?:https?:)?//", page)


def test_what_is_no_number_where_one_belongs_is_not_found(api):
    assert api.refused("GET", "/v1/jobs/x")[:2] == (404, "not_found")
    assert api.refused("GET", f"/v1/jobs/{'9' * 5000}")[:2] == (404, "not_found")
    assert api.refused("DELETE", f"/v1/pins/{1 << 70}")[:2] == (422, "invalid_argument")
    assert api.refused("GET", "/v1/stats/")[:2] == (404, "not_found")


# Bodies that nobody wants


def test_a_stranger_that_sends_a_long_prompt_is_told_at_once_and_by_name(daemon):
    body = b'{"tokens": [' + b"1," * (5 << 20) + b"1]}"

    status, told = client.send(daemon.http, "POST", "/v1/explain", body=body, timeout_s=TIMEOUT_S)

    assert (status, b"unauthorized" in told) == (401, True)


@pytest.mark.parametrize("rest", [b"zz\r\n", b"2\r\n{}\r\n\x00\r\n", b"2\r\n{}zz"])
def test_what_turns_out_to_be_no_http_is_refused_once_and_quietly(daemon, api, rest, wait_until):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(TIMEOUT_S)
        asking.connect(daemon.admin.removeprefix("unix://"))
        asking.sendall(
            b"POST /v1/evict HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        assert asking.recv(1 << 16).startswith(b"HTTP/1.1 100 "), "it waits for the body"
        asking.sendall(rest)
        told = b"".join(iter(lambda: asking.recv(1 << 16), b""))

    assert re.findall(rb"HTTP/1.1 (\d+)", told) == [b"400"]
    pin = next(_pins)
    api.send("DELETE", f"/v1/pins/{pin}")
    wait_until(lambda: f"pin={pin} " in daemon.process.stderr, what="a later line of the log")
    assert "Traceback" not in daemon.process.stderr


def test_a_stranger_whose_body_never_comes_is_told_soon(daemon):
    host, _, port = daemon.http.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), TIMEOUT_S) as asking:
        asking.sendall(b"POST /v1/clear HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
        assert asking.recv(1 << 16).startswith(b"HTTP/1.1 401")


def test_long_prompts_wait_for_each_other_and_are_refused_when_it_takes_too_long(monkeypatch):
    monkeypatch.setattr(app, "PROMPTS_MAX", 1)
    monkeypatch.setattr(app, "BUSY_S", 0.0)

    async def run() -> None:
        access = Access({}, group=False, tenants=False, token_file="")
        made = App(SimpleNamespace(), access, [], open_metrics=True)
        await made._acquire_prompt()
        with pytest.raises(Refusal, match="prompts are being explained") as refused:
            await made._acquire_prompt()
        assert (refused.value.status, refused.value.code) == (503, "busy")

    asyncio.run(run())


def test_many_long_prompts_keep_no_lookup_waiting(daemon, api):
    """The load of the defect; how long an engine waits meanwhile is in the fuzz test."""
    with daemon.connect() as store:
        mine = Stored(store)
        keys = mine.put(50)
        asked = [threading.Thread(target=api.post, args=("/v1/explain",),
                                  kwargs={"tokens": list(range(300_000))})
                 for _ in range(4)]  # fmt: skip
        for one in asked:
            one.start()
        while any(one.is_alive() for one in asked):
            assert mine.space.lookup(keys).pages == 50
        for one in asked:
            one.join()


# Connections


class Transport:
    """A connection's other side; tells whether it was cut off."""

    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


class Client:
    """A connection, as far as it is counted."""

    def __init__(self, peer: HttpPeer, *, idle: bool) -> None:
        self.peer, self.idle = peer, idle
        self.transport = Transport()
        self.since = 0.0


def opened(every: Connections, peer: HttpPeer = TCP, *, idle: bool = True) -> Client:
    made = Client(peer, idle=idle)
    every.opened(made)
    return made


@pytest.fixture
def few(monkeypatch) -> Connections:
    monkeypatch.setattr(connections, "TCP_MAX", 3)
    monkeypatch.setattr(connections, "UNIX_MAX", 1)
    return Connections()


def test_who_has_been_idle_for_longest_makes_room(few):
    first, busy, third = opened(few), opened(few, idle=False), opened(few)
    few.rested(first)

    fourth = opened(few)
    assert [one.transport.aborted for one in (first, busy, third, fourth)] == [
        False, False, True, False,
    ]  # fmt: skip
    fifth = opened(few)
    assert (first.transport.aborted, fifth.transport.aborted) == (True, False)
    assert len(few) == 3


def test_where_all_are_busy_the_new_one_is_cut_off(few):
    every = [opened(few, idle=False) for _ in range(3)]
    late = opened(few)

    assert [one.transport.aborted for one in (*every, late)] == [False, False, False, True]
    few.closed(every[0])
    assert not opened(few).transport.aborted


def test_strangers_over_tcp_take_no_place_of_the_unix_socket(few):
    for _ in range(9):
        opened(few, idle=False)
    mine = opened(few, HttpPeer("user 0, process 1", unix=True, uid=0))

    assert not mine.transport.aborted


def test_the_descriptors_of_a_process_bound_its_connections(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (128, 128))
    every = Connections()
    taken = [opened(every, idle=False) for _ in range(100)]

    assert sum(not one.transport.aborted for one in taken) == (128 - 64) // 2


def test_what_is_idle_or_busy_for_too_long_is_cut_off(few, monkeypatch):
    now = 100.0
    monkeypatch.setattr(connections, "monotonic", lambda: now)
    monkeypatch.setattr(connections, "SWEEP_S", 0.0)
    cases = {(True, 9.0): False, (True, 11.0): True, (False, 11.0): False, (False, 71.0): True}
    made = {}
    for (idle, age), late in cases.items():
        few = Connections()
        made[opened(few, idle=idle).transport] = late
        next(iter(few._open[False])).since = now - age

        async def sweep(every: Connections = few) -> None:
            sweeping = asyncio.create_task(every.sweep())
            for _ in range(3):
                await asyncio.sleep(0)
            sweeping.cancel()

        asyncio.run(sweep())
    assert [one.aborted for one in made] == list(made.values())


def test_a_connection_is_idle_until_its_request_and_after_its_answer():
    made = HttpConnection.__new__(HttpConnection)
    for cycle, idle in (
        (None, True), (SimpleNamespace(response_complete=False), False),
        (SimpleNamespace(response_complete=True), True),
    ):  # fmt: skip
        made.cycle = cycle
        assert made.idle == idle


def test_a_request_that_turns_out_to_be_no_http_gets_no_second_answer():
    made = HttpConnection.__new__(HttpConnection)
    made.conn = h11.Connection(h11.SERVER)
    made.conn.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    made.conn.next_event()
    written: list[bytes] = []
    made.transport = SimpleNamespace(write=written.append, close=lambda: written.append(b"closed"))
    made.cycle = SimpleNamespace(
        response_complete=False, disconnected=False, message_event=asyncio.Event()
    )

    made.send_400_response("wrong")
    assert (made.cycle.disconnected, made.cycle.message_event.is_set()) == (True, True)
    assert written[0].startswith(b"HTTP/1.1 400 ")
    made.send_400_response("wrong again")  # its state allows no further answer
    assert written[-1] == b"closed"
    assert len([one for one in written if one.startswith(b"HTTP")]) == 1


# Who may


@pytest.mark.parametrize(
    ("peer", "group", "authorization", "role", "held"),
    [
        (HttpPeer("p", unix=True, uid=os.geteuid()), False, "", "operate", "operate"),
        (HttpPeer("p", unix=True, uid=0), False, "", "operate", "operate"),
        (HttpPeer("p", unix=True, uid=77, groups={os.getegid()}), True, "", "operate", "operate"),
        (HttpPeer("p", unix=True, uid=77, groups={5, os.getegid()}), False, "", "operate", 401),
        (HttpPeer("p", unix=True, uid=77, groups={78}), True, "", "read", 401),
        (TCP, True, "", "read", 401), (None, True, "", "read", 401),
        (HttpPeer("p", unix=False, uid=0), True, "", "read", 401),
        (TCP, False, "Bearer rrr", "read", "read"), (TCP, False, "bearer  rrr ", "read", "read"),
        (TCP, False, "Bearer rrr", "operate", 403), (TCP, False, "Basic rrr", "read", 401),
        (TCP, False, "Bearer ooo", "read", "operate"), (TCP, False, "Bearer rr", "read", 401),
        (TCP, False, "Bearer", "read", 401), (TCP, False, "Bearer \xff", "read", 401),
    ],
)  # fmt: skip
def test_who_asks_decides_what_may_be_asked(peer, group, authorization, role, held):
    tokens = {"read": "rrr", "operate": "ooo"}
    access = Access(tokens, group=group, tenants=True, token_file="/run/token")
    if isinstance(held, int):
        with pytest.raises(Refusal) as refused:
            access.check(peer, authorization, role)
        assert refused.value.status == held
        assert held == 403 or "it is in /run/token" in str(refused.value)
    else:
        assert access.check(peer, authorization, role).role == held


@pytest.mark.parametrize(
    ("uid", "tenants", "authorization", "allowed"),
    [
        (0, True, "", True), (77, False, "", True), (77, True, "", False),
        (77, True, "Bearer rrr", False), (77, True, "Bearer ooo", True),
    ],
)  # fmt: skip
def test_in_a_group_of_several_tenants_nobody_reads_the_prompts_of_the_others(
    uid, tenants, authorization, allowed
):
    tokens = {"read": "rrr", "operate": "ooo"}
    access = Access(tokens, group=True, tenants=tenants, token_file="")
    peer = HttpPeer("p", unix=True, uid=uid, groups={os.getegid()})
    if allowed:
        assert access.check(peer, authorization, "operate", prompts=True).role == "operate"
    else:
        with pytest.raises(Refusal):
            access.check(peer, authorization, "operate", prompts=True)


# The log


@pytest.fixture
def own(spawn, tmp_path) -> Iterator[Daemon]:
    """A daemon whose log begins with the test."""
    settings = {"http__read_token": "r" * 20, "http__operate_token": "o" * 20}
    return Daemon(spawn(arguments(tmp_path / "own.sock", **settings), ready=READY))


def test_every_change_is_in_the_log_with_who_and_how_many(own, wait_until):
    operator, owner = Api(own, "o" * 20), Api(own)
    with own.connect() as store:
        mine = Stored(store)
        keys = mine.put(5)
        pin = owner.post("/v1/pins", space=mine.label, key=keys[1].hex())
        owner.send("DELETE", f"/v1/pins/{pin['pin']}")
        limits = {"quota_bytes": 4 * PAGE_BYTES}
        owner.ended(owner.send("PUT", f"/v1/quotas/{mine.label}", limits)[1])
        owner.ended(owner.post("/v1/verify", space=mine.label))
        operator.ended(operator.post("/v1/clear", space=mine.label))
        operator.send("DELETE", "/v1/pins/99")
        Api(own, "r" * 20).send("POST", "/v1/clear", {"all": True})
        owner.get("/v1/pins")

    def lines(*words: str) -> list[str]:
        return [
            line for line in own.process.stderr.splitlines() if all(word in line for word in words)
        ]

    me = f'role=operate address="user {os.geteuid()}, process {os.getpid()}"'
    wait_until(lambda: lines("refused"))
    assert len(lines("operation done operation=Pin", me, mine.label, "pages=2")) == 1
    assert len(lines("operation done operation=Unpin", me, "pages=2")) == 1
    assert len(lines("operation done operation=SetLimits", me, "job=1")) == 1
    assert len(lines("job ended job=1 kind=limit", me, "state=done pages=1")) == 1
    assert len(lines("operation done operation=Clear", "role=operate address=127.0.0.1:")) == 1
    checked = 'pages=4 result="checked=4 corrupt=0 unreadable=0 skipped=0"'
    assert len(lines("operation done operation=Verify", me)) == 1
    assert len(lines("job ended job=2 kind=verify", me, checked)) == 1
    assert len(lines("job ended job=3 kind=clear", "address=127.0.0.1:", "pages=4")) == 1
    assert len(lines("operation refused operation=Unpin", "code=not_found")) == 1
    assert len(lines("operation")) == 6, "what may not be asked changes nothing; looking neither"


# Mistakes of our own


BROKEN = """
import sys
from kvstore.server import daemon, kept

def broken(self, _asked):
    yield from ()
    self._table.slots.extents[0].pinned = 7
    assert False, "an invariant of the state"

kept.KeptViews.quotas = broken
sys.exit(daemon.main(sys.argv[1:]))
"""


def test_an_assertion_that_fails_in_a_turn_ends_the_node_loudly(spawn, tmp_path, wait_until):
    words = arguments(tmp_path / "own.sock")
    process = spawn([sys.executable, "-c", BROKEN, *words[3:]], ready=READY)
    broken = Daemon(process)
    api = Api(broken)
    assert api.refused("GET", "/v1/pages?space=x")[0] == 404, "input is not what ends it"

    status = client.send(broken.admin, "GET", "/v1/quotas", timeout_s=TIMEOUT_S)[0]

    assert status == 503
    wait_until(lambda: process.returncode is not None)
    assert process.returncode == 1
    assert "an invariant of the state" in process.stderr
    assert "its state cannot be trusted any more" in process.stderr
