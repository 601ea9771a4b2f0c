"""Goal: a directory that nodes share says at last what live nodes have, whatever happens to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvstore.cluster.page_store import PageStore
from kvstore.testing.directory import NUMBER_MS, DirectoryContract, MemoryPages
from tests.cluster.redis_server import needs_redis, opened_redis
from tests.loops import in_loop


class OpenedMemory:
    def __init__(self) -> None:
        self.pages = MemoryPages()

    def store(self) -> PageStore:
        return self.pages

    async def empty(self) -> None:
        self.pages.empty()

    async def stop(self) -> None:
        self.pages.away = True

    async def go_on(self) -> None:
        self.pages.away = False

    async def expire(self) -> None:
        for _ in range(40):  # others renew theirs meanwhile
            self.pages.now_ms += NUMBER_MS // 20
            await asyncio.sleep(0.005)


@asynccontextmanager
async def opened_memory() -> AsyncIterator[OpenedMemory]:
    yield OpenedMemory()


@pytest.fixture(autouse=True)
def renewed_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.cluster.announcing.RENEW_NS", 1_000_000)


@pytest.mark.parametrize("check", DirectoryContract.CHECKS)
def test_the_directory_in_memory_keeps_the_contract(check: str) -> None:
    in_loop(getattr(DirectoryContract(opened_memory), check))()


@needs_redis()
@pytest.mark.parametrize("check", DirectoryContract.CHECKS)
def test_redis_keeps_the_contract(
    check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.cluster.announcing.RENEW_NS", 100_000_000)
    in_loop(getattr(DirectoryContract(lambda: opened_redis(tmp_path)), check))()


@needs_redis()
def test_a_redis_that_was_killed_and_started_again_empty_keeps_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.cluster.announcing.RENEW_NS", 100_000_000)
    contract = DirectoryContract(lambda: opened_redis(tmp_path, kill=True))
    in_loop(contract.while_it_is_away_calls_fail_in_time_and_changes_are_made_good)()
