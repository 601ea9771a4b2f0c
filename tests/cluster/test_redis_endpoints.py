"""Goal: a Redis that fails is left: for the next endpoint, and with the login of today."""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from kvstore.cluster import sharing
from kvstore.cluster.access import StoreServers
from kvstore.cluster.messages import (
    AskPages,
    DirectoryReport,
    DirectorySettings,
    HoldingsFound,
)
from kvstore.cluster.page_store import DirectoryFault
from kvstore.cluster.redis_client import redis_clients
from kvstore.cluster.redis_pages import RedisPages
from kvstore.cluster.redis_records import RedisStore
from kvstore.cluster.sharing import PageQuestions, SharedDirectory
from kvstore.index.credentials import PeerCredentials
from kvstore.protocol.errors import TransferError
from tests.cluster.fake_redis import fake_redis
from tests.cluster.nodes import CERTIFICATES
from tests.loops import eventually, in_loop

READONLY = b"-READONLY You can't write against a read only replica.\r\n"
OF_SCRIPT = b"-ERR Error running script (call to f_0): @user_script:9: @user_script: 9: -%b\r\n"
"""As Redis 6.2 tells that a command of a script failed."""
FULL = b"OOM command not allowed when used memory > 'maxmemory'."
NOTHING = b"*2\r\n*0\r\n*1\r\n*2\r\n:1\r\n$0\r\n\r\n"
"""The answer to a search for one page that nobody has."""
FIND = AskPages(1, "00", [("00", 0)], b"k" * 32, {})


@asynccontextmanager
async def pages(*endpoints: str, login: str = "", call_s: float = 2.0) -> AsyncIterator[RedisPages]:
    servers = StoreServers(endpoints, login)
    store = RedisPages(redis_clients(servers, call_s), "blue", call_s=call_s)
    try:
        async with asyncio.timeout(20):
            yield store
    finally:
        await store.close()


async def claimed(store: RedisPages) -> int | str:
    """The number, or the cause of the fault."""
    try:
        return await store.claim("a", b"b" * 16, "token")
    except DirectoryFault as fault:
        return fault.cause


@in_loop
async def test_a_mended_login_is_read_after_a_wrong_one(tmp_path: Path) -> None:
    login = tmp_path / "login"
    login.write_text("u:old")

    def answer(call: list[bytes]) -> bytes:
        if call[0] != b"AUTH":
            return b":7\r\n"
        return b"+OK\r\n" if call[-1] == b"new" else b"-WRONGPASS invalid password\r\n"

    async with fake_redis(answer) as one, pages(one.endpoint, login=str(login)) as store:
        assert await claimed(store) == "login"
        login.write_text("u:new")
        assert await claimed(store) == 7


@in_loop
async def test_a_password_that_changed_while_connected_is_read_again(tmp_path: Path) -> None:
    login, needed = tmp_path / "login", [b"old"]
    login.write_text("u:old")

    def answer(call: list[bytes]) -> bytes:
        if call[0] == b"AUTH":
            return b"+OK\r\n" if call[-1] == needed[0] else b"-WRONGPASS invalid password\r\n"
        return (
            b":7\r\n" if needed[0] == b"old" or login.read_text() != "u:old" else b"-NOAUTH x\r\n"
        )

    async with fake_redis(answer) as one, pages(one.endpoint, login=str(login)) as store:
        assert await claimed(store) == 7
        needed[0] = b"new"
        assert await claimed(store) == "login"
        login.write_text("u:new")
        assert await claimed(store) == 7


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (READONLY, "refused"),
        (OF_SCRIPT % READONLY[1:-2], "refused"),
        (b"-NOPERM User u has no permissions to run the 'zadd' command\r\n", "login"),
        (OF_SCRIPT % b"NOPERM this user", "login"),
        (b"-ERR The user executing the script can't access at least one of the keys\r\n", "login"),
    ],
)
@in_loop
async def test_the_next_endpoint_is_asked_after_one_that_cannot_do_it(
    said: bytes, cause: str
) -> None:
    async with (
        fake_redis(lambda _: said) as replica, fake_redis(lambda _: b":7\r\n") as primary,
        pages(replica.endpoint, primary.endpoint) as store,
    ):  # fmt: skip
        assert await claimed(store) == cause
        assert await claimed(store) == 7


@pytest.mark.parametrize("said", [b"-%b\r\n" % FULL, OF_SCRIPT % FULL])
@in_loop
async def test_one_that_is_full_is_kept_and_no_other_is_asked(said: bytes) -> None:
    async with (
        fake_redis(lambda _: said) as full, fake_redis(lambda _: b":7\r\n") as other,
        pages(full.endpoint, other.endpoint) as store,
    ):  # fmt: skip
        assert [await claimed(store) for _ in range(3)] == ["full"] * 3
        assert not other.calls


@in_loop
async def test_a_call_that_fails_late_leaves_the_newer_client_alone() -> None:
    async with (
        fake_redis(lambda _: None) as silent, fake_redis(lambda _: b":7\r\n") as good,
        pages(silent.endpoint, good.endpoint, call_s=3.0) as store,
    ):  # fmt: skip
        first = asyncio.create_task(claimed(store))
        await eventually(lambda: silent.calls)
        older, store._client = store._client, None  # as after another call's failure
        store._scripts.clear()
        assert await claimed(store) == 7
        newer = store._client
        assert await first == "late"
        assert store._client is newer
        assert await claimed(store) == 7
        assert older is not None
        await older.aclose()


@asynccontextmanager
async def questions(store: RedisPages) -> AsyncIterator[tuple[PageQuestions, list[HoldingsFound]]]:
    told: list[HoldingsFound] = []
    asked = PageQuestions(store, "blue", told.append)
    running = asyncio.create_task(asked.run())
    try:
        yield asked, told
    finally:
        running.cancel()
        await asyncio.wait([running])


@in_loop
async def test_questions_leave_a_silent_server_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sharing, "_AGAIN_S", 3_600.0)
    for limit in ("ASK_S", "CALL_OF_ASK_S"):  # the good one has to keep them, too
        monkeypatch.setattr(sharing, limit, 4 * getattr(sharing, limit))
    async with (
        fake_redis(lambda _: None) as silent, fake_redis(lambda _: NOTHING) as good,
        pages(silent.endpoint, good.endpoint, call_s=sharing.CALL_OF_ASK_S) as store,
        questions(store) as (asked, told),
    ):  # fmt: skip
        for number in (1, 2):
            asked.ask(FIND)
            await eventually(lambda at=number: len(told) == at)
        assert (asked.faults, asked.asked) == ({"late": 1}, 1)
        assert good.calls[-1] in (b"EVAL", b"EVALSHA")


@in_loop
async def test_failing_questions_are_told_until_one_succeeds_though_nobody_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sharing, "_AGAIN_S", 0.01)
    said: list[bytes] = [READONLY]
    async with (
        fake_redis(lambda _: said[0]) as one, pages(one.endpoint) as store,
        questions(store) as (asked, told),
    ):  # fmt: skip
        for number in range(1, sharing.TROUBLE_FAULTS + 1):
            assert asked.trouble == ""
            asked.ask(FIND)
            await eventually(lambda at=number: len(told) == at)
        assert asked.trouble == "refused"
        said[0] = NOTHING
        await eventually(lambda: not asked.trouble)
        assert asked.asked == 0


@in_loop
async def test_the_directory_is_not_current_while_questions_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The announcer has another connection, which may serve."""
    servers = DirectorySettings(
        servers=StoreServers(("127.0.0.1:1",)), endpoint="127.0.0.1:2", boot=b"b" * 16
    )
    shared = SharedDirectory(servers, PeerCredentials("blue", "a", "s"), lambda _: None)
    monkeypatch.setattr(shared._announcer, "report", lambda: DirectoryReport(current=True))
    assert shared._report().current
    shared._questions.trouble = "late"
    assert (shared._report().current, shared._report().trouble) == (False, "ask_late")


@in_loop
async def test_a_question_that_has_waited_too_long_is_not_asked_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sharing, "CALL_OF_ASK_S", sharing.ASK_S + 1)
    async with (
        fake_redis(lambda _: NOTHING) as one, pages(one.endpoint) as store,
        questions(store) as (asked, told),
    ):  # fmt: skip
        asked.ask(FIND)
        await eventually(lambda: told)
        assert (asked.faults, asked.trouble, one.calls) == ({"overload": 1}, "", [])


@contextmanager
def stoppable(tls: ssl.SSLContext) -> Iterator[tuple[str, threading.Event]]:
    """A server with TLS that answers, and says nothing more at all once the event is set."""
    stopped, ended = threading.Event(), threading.Event()

    def serve(raw: socket.socket) -> None:
        with raw, tls.wrap_socket(raw, server_side=True) as connection:
            while connection.recv(1 << 16) and not stopped.is_set():
                connection.sendall(b":1\r\n")
            ended.wait(20)  # the end of TLS is not answered

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(3) as threads:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threads.submit(serve, listener.accept()[0])

        threads.submit(accept)
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}", stopped
        finally:
            ended.set()
            listener.shutdown(socket.SHUT_RDWR)


@in_loop
async def test_a_stopped_server_with_tls_does_not_keep_a_store_from_closing() -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(CERTIFICATES / "store.pem", CERTIFICATES / "store.key")
    authority = str(CERTIFICATES / "store-authority.pem")
    with stoppable(tls) as (endpoint, stopped):
        store = RedisStore(StoreServers((endpoint,), authority=authority), "blue")
        async with asyncio.timeout(20):
            await store.open()
            await asyncio.gather(store.check(), store.check())
            stopped.set()
            with pytest.raises(TransferError):
                await store.check()  # the other connection is idle
            async with asyncio.timeout(10):  # the server says nothing for 20 s
                await store.close()
