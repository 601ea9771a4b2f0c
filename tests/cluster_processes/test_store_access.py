"""Goal: a real store lets in whom it knows, and what is in the files is never said to anybody."""

import asyncio
import logging
import traceback
from pathlib import Path

import pytest

from bench.store_servers import REDIS_RIGHTS
from kvstore.cluster.access import StoreServers
from kvstore.cluster.entries import NAME_BYTES
from kvstore.cluster.page_store import AnnouncedNumber, ChangedPages
from kvstore.cluster.records import write_record
from kvstore.cluster.redis_client import redis_clients
from kvstore.cluster.redis_pages import CALL_S, RedisPages
from kvstore.protocol.errors import KVStoreError
from kvstore.testing.leased import A, B, Scene
from tests.cluster_processes.store_scenes import (
    CERTIFICATES,
    KINDS,
    TLS,
    HarmedServer,
    start_server,
)
from tests.conftest import ROOT
from tests.loops import in_loop

pytestmark = pytest.mark.cluster
PAGE = ROOT / "docs" / "cluster.md"
USER, PASSWORD = "nodes-of-blue", "7c2c1f:with:colons"
WRONG = "another-1d3e55"


def login(folder: Path, text: str) -> str:
    path = folder / f"login-{len(list(folder.iterdir()))}"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_login_opens_the_store_and_a_wrong_one_is_told_without_its_words(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    said: list[str] = []

    async def case() -> None:
        with start_server(kind, tmp_path / kind, login=(USER, PASSWORD)) as server:
            right = login(tmp_path, f"{USER}:{PASSWORD}\n")
            harmed = HarmedServer(server, StoreServers((server.endpoint,), right))
            scene = Scene(harmed)
            try:
                (a,) = await scene.join(A)
                assert await scene.records() == {"a": write_record(A)}
                said.extend(map(repr, (a.store, vars(a.store._store), harmed.access)))
                for text in (f"{USER}:{WRONG}", f"{WRONG}:{PASSWORD}", ""):
                    path = login(tmp_path, text) if text else ""
                    harmed.access = StoreServers((server.endpoint,), path)
                    refused = await scene.begin(B)
                    said.append(await refused.stands("away", "login"))
                    said.append(repr(refused.membership.standing))
                    await refused.die()
                harmed.access = StoreServers((server.endpoint,), right)
                await a.sees(A)
            finally:
                await scene.end()

    asyncio.run(case())
    said.append(caplog.text)
    for secret in (PASSWORD, WRONG, USER):
        assert not [text for text in said if secret in text], "it says what is in the file"


@in_loop
async def test_the_rights_in_redis_that_the_page_names_are_enough_for_a_directory(
    tmp_path: Path,
) -> None:
    line = f"user kvstore on >PASSWORD {REDIS_RIGHTS}"
    assert line.split() in [one.split() for one in PAGE.read_text().replace("\\\n", "").split("\n")]
    with start_server("redis", tmp_path / "redis", login=(USER, PASSWORD)) as server:
        path = login(tmp_path, f"{USER}:{PASSWORD}")
        store = RedisPages(redis_clients(StoreServers((server.endpoint,), path), CALL_S), "blue")
        try:
            one = await store.claim("a", b"1" * 16, "token-a")
            other = await store.claim("b", b"2" * 16, "token-b")
            name = bytes(range(NAME_BYTES))
            for batch, stored in ((1, True), (2, False)):
                change = [ChangedPages(stored, "", name)]
                assert await store.change(one, "token-a", batch, change)
                if stored:
                    assert await store.change(other, "token-b", 1, change)
                    assert len((await store.find([name])).holders) == 2
            assert len((await store.find([name])).holders) == 1
            assert await store.renew({one: AnnouncedNumber("token-a", 2)}) == []
            await store.withdraw(one, "token-a")
        finally:
            await store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_login_is_read_again_without_a_restart(kind: str, tmp_path: Path) -> None:
    async def case() -> None:
        with start_server(kind, tmp_path / kind, login=(USER, PASSWORD)) as server:
            path = login(tmp_path, f"{USER}:{WRONG}")
            scene = Scene(HarmedServer(server, StoreServers((server.endpoint,), path)))
            try:
                a = await scene.begin(A)
                await a.stands("away", "login")
                await asyncio.to_thread(Path(path).write_text, f"{USER}:{PASSWORD}\n")
                await a.stands("joined")
            finally:
                await scene.end()

    asyncio.run(case())


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_with_tls_is_joined_by_who_trusts_and_shows_the_right_certificates(
    kind: str, tmp_path: Path
) -> None:
    authority, certificate, key = str(TLS.authority), str(TLS.certificate), str(TLS.key)
    stranger, its_key = str(CERTIFICATES / "stranger.pem"), str(CERTIFICATES / "stranger.key")

    async def case() -> None:
        with start_server(kind, tmp_path / kind, TLS) as server:
            where = (server.endpoint,)
            harmed = HarmedServer(server, StoreServers(where, "", authority, certificate, key))
            scene = Scene(harmed)
            try:
                (a,) = await scene.join(A)
                for access in (
                    StoreServers(where),  # plain
                    StoreServers(where, "", str(CERTIFICATES / "other.pem"), certificate, key),
                    StoreServers(where, "", authority),  # shows nothing
                    StoreServers(where, "", authority, stranger, its_key),
                ):
                    harmed.access = access
                    refused = await scene.begin(B)
                    assert await refused.stands("away")
                    await refused.die()
                harmed.access = StoreServers(where, "", authority, certificate, key)
                assert await scene.records() == {"a": write_record(A)}
                await a.sees(A)
            finally:
                await scene.end()

    asyncio.run(case())


@pytest.mark.parametrize("kind", KINDS)
@in_loop
async def test_of_several_endpoints_the_next_one_is_tried(kind: str, tmp_path: Path) -> None:
    with start_server(kind, tmp_path / kind) as server:
        servers = StoreServers(("127.0.0.1:1", server.endpoint, "127.0.0.1:2"))
        scene = Scene(HarmedServer(server, servers))
        try:
            a = await scene.begin(A)
            await a.stands("joined")
        finally:
            await scene.end()


@pytest.mark.parametrize("kind", KINDS)
@in_loop
async def test_records_are_where_an_operator_looks_for_them(kind: str, tmp_path: Path) -> None:
    with start_server(kind, tmp_path / kind) as server:
        harmed = HarmedServer(server, StoreServers((server.endpoint,)))
        scene = Scene(harmed)
        try:
            await scene.join(A)
            found = await asyncio.to_thread(server.get, harmed.key("a"))
            assert found == write_record(A)
            assert A.boot.hex().encode() in found
            common = harmed.key("x").replace("nodes/x", "settings").replace("node:x", "settings")
            settings = await asyncio.to_thread(server.get, common)
            assert settings == b'{"scheme":"sha256/xxh3_128 1","protocol":"1"}'
        finally:
            await scene.end()


@pytest.mark.parametrize("kind", KINDS)
@in_loop
async def test_a_store_with_a_wrong_login_never_shows_it_in_a_trace(
    kind: str, tmp_path: Path
) -> None:
    with start_server(kind, tmp_path / kind, login=(USER, PASSWORD)) as server:
        access = StoreServers((server.endpoint,), login(tmp_path, f"{USER}:{WRONG}"))
        store = HarmedServer(server, access).connect()
        try:
            with pytest.raises(KVStoreError) as caught:
                await store.open()
        finally:
            await store.close()
    trace = "".join(traceback.format_exception(caught.value))
    assert WRONG not in trace
    assert USER not in trace
