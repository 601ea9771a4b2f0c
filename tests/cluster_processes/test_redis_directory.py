"""Goal: a directory in a real Redis keeps its contract, whatever happens to Redis."""

import asyncio
from pathlib import Path

import pytest

from kvstore.testing.directory import AnnouncingNode, DirectoryContract, located, pages_of
from tests.cluster_processes.redis_scenes import opened_redis
from tests.loops import eventually, in_loop

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def renewed_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.cluster.announcing.RENEW_NS", 100_000_000)


@pytest.mark.parametrize("check", DirectoryContract.CHECKS)
def test_redis_keeps_the_contract_of_directories(check: str, tmp_path: Path) -> None:
    in_loop(getattr(DirectoryContract(lambda: opened_redis(tmp_path)), check))()


def test_a_redis_that_was_killed_and_started_again_empty_keeps_the_contract(
    tmp_path: Path,
) -> None:
    contract = DirectoryContract(lambda: opened_redis(tmp_path, kill=True))
    in_loop(contract.while_it_is_away_calls_fail_in_time_and_changes_are_made_good)()


@in_loop
async def test_entries_in_redis_expire_unless_they_are_announced_again(tmp_path: Path) -> None:
    async with opened_redis(tmp_path, entry_ms=3_000) as at:
        node = AnnouncingNode("a", at.store())
        node.store(*pages_of(0, 16))
        running = asyncio.create_task(node.run())
        try:
            await eventually(lambda: at.server.info("db0") >= 18)
            # The record of its number is renewed, its pages are not.
            await eventually(lambda: at.server.info("db0") == 2)
            assert await located(at.store(), 0) == {}
        finally:
            running.cancel()
            await asyncio.wait([running])
