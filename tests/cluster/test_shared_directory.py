"""Goal: a directory that nodes share says at last what live nodes have, whatever happens to it."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from kvstore.cluster.entries import HOLDERS_MAX, FoundEntries, NumberHolder, usable_prefixes
from kvstore.cluster.page_store import AnnouncedNumber, PageStore
from kvstore.testing.directory import DirectoryContract
from kvstore.testing.memory_pages import NUMBER_MS, MemoryPages
from tests.loops import eventually, in_loop


class CountedPages(MemoryPages):
    renewals = 0

    async def renew(self, numbers: Mapping[int, AnnouncedNumber]) -> list[int]:
        self.renewals += 1
        return await super().renew(numbers)


class OpenedMemory:
    def __init__(self) -> None:
        self.pages = CountedPages()

    def store(self) -> PageStore:
        return self.pages

    async def empty(self) -> None:
        self.pages.empty()

    async def save(self) -> None:
        self.pages.save()

    async def set_back(self) -> None:
        self.pages.set_back()

    async def stop(self) -> None:
        self.pages.away = True

    async def go_on(self) -> None:
        self.pages.away = False

    async def expire(self) -> None:
        for _ in range(4):  # others renew theirs meanwhile
            self.pages.now_ms += NUMBER_MS // 2
            renewed = self.pages.renewals + 2
            await eventually(lambda at=renewed: self.pages.renewals > at)


@asynccontextmanager
async def opened_memory() -> AsyncIterator[OpenedMemory]:
    yield OpenedMemory()


@pytest.fixture(autouse=True)
def renewed_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.cluster.announcing.RENEW_NS", 1_000_000)


@pytest.mark.parametrize("check", DirectoryContract.CHECKS)
def test_the_directory_in_memory_keeps_the_contract(check: str) -> None:
    in_loop(getattr(DirectoryContract(opened_memory), check))()


def test_an_entry_that_lies_or_cannot_be_read_names_nobody_else() -> None:
    holder = NumberHolder("b", b"boot")
    runs = [[(2, "7"), (1, "7,nonsense,-,,--7,-9999999999999"), (1, "8"), (3, "")]]

    assert usable_prefixes(FoundEntries(runs, {7: holder}), [0]) == [(holder, 3)]
    assert usable_prefixes(FoundEntries(runs, {}), [0]) == []


def test_nodes_that_do_not_count_and_too_many_that_do_cost_no_work() -> None:
    holders = {number: NumberHolder(f"n{number:03}", b"b") for number in range(1, 301)}
    everybody = ",".join(map(str, holders))
    runs = [[(1, everybody), (3, "299,300"), (1, "300")]]
    found = FoundEntries(runs, holders)

    usable = usable_prefixes(found, [0])
    assert len(usable) == HOLDERS_MAX
    assert usable[:2] == [(holders[300], 5), (holders[299], 4)]
    among = {"n005": b"", "n006": b"b", "n300": b"another boot"}
    assert usable_prefixes(found, [0], among) == [(holders[5], 1), (holders[6], 1)]
