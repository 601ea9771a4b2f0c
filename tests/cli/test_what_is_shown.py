"""Goal: an answer of ``kvstore`` leaves out nothing that its reader would have to guess."""

import json

import pytest
from rich.console import Console

from kvstore.cli import main, show
from kvstore.cli.decoding import completed
from kvstore.server.answers import JobList, PageList
from tests.server.conftest import PAGE_BYTES, Stored

KEYS = [f"{number:064x}" for number in range(1, 4)]


@pytest.fixture
def kvstore(daemon, capsys):
    """``kvstore(*words) -> (status, what was printed)``."""

    def run(*words: object) -> tuple[int, str]:
        status = main([*map(str, words), "--url", daemon.admin])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


def printed(shown, value) -> str:
    console = Console(width=240, markup=False)
    with console.capture() as told:
        shown(value, console)
    return told.get()


def row(at: int, *tiers: str, children: int = 0) -> dict[str, object]:
    shard = {"state": "ready", "tiers": list(tiers), "bytes": 1, "digest": None}
    return {
        "key": KEYS[at], "parent": KEYS[at - 1] if at else None, "tier": tiers[0], "hits": 0,
        "children": children, "shards": {"0": shard},
    }  # fmt: skip


@pytest.mark.parametrize("shown", [show.pages, show.tree])
def test_a_listing_names_every_tier_that_a_page_is_in(shown):
    pages = completed({"pages": [row(0, "host", "ssd"), row(1, "ssd")]}, PageList)

    told = printed(shown, pages)

    (both,) = [line for line in told.splitlines() if KEYS[0] in line]
    (one,) = [line for line in told.splitlines() if KEYS[1] in line]
    assert "host, ssd" in both
    assert "host" not in one


def test_a_tree_that_ends_at_its_depth_says_so():
    def told(*rows: dict[str, object], **more: object) -> str:
        return printed(show.tree, completed({"pages": list(rows), **more}, PageList))

    deeper = "deeper pages exist: raise --depth"
    assert deeper in told(row(0, "host", children=1), row(1, "host", children=2))
    assert deeper not in told(row(0, "host", children=1), row(1, "host"))
    cut = told(row(0, "host", children=1), next=KEYS[0])
    assert deeper not in cut
    assert "there is more: raise --limit" in cut


def test_the_tree_of_a_chain_longer_than_its_depth_says_that_it_goes_on(kvstore, stored: Stored):
    stored.put(4)

    assert "raise --depth" in kvstore("tree", stored.label, "--depth", 3)[1]
    assert "raise --depth" not in kvstore("tree", stored.label, "--depth", 4)[1]


def test_spaces_without_limits_are_shown_with_what_they_use(kvstore, stored: Stored):
    stored.put(2)

    status, every = kvstore("quota")
    assert status == 0
    (mine,) = [line for line in every.splitlines() if stored.label[:12] in line]
    assert mine.count("none") == 2
    status, told = kvstore("quota", stored.space.identity.model, "--json")
    assert (status, json.loads(told)["quotas"]) == (
        0,
        [{"space": stored.label, "tier": "host", "quota_bytes": 0, "reserved_bytes": 0,
          "used_bytes": 2 * PAGE_BYTES}],
    )  # fmt: skip
    assert kvstore("quota", stored.label, "--quota-bytes", 64 * PAGE_BYTES)[0] == 0
    (mine,) = json.loads(kvstore("quota", stored.label, "--json")[1])["quotas"]
    assert mine["quota_bytes"] == 64 * PAGE_BYTES
    assert kvstore("quota", stored.label, "--quota-bytes", 0)[0] == 0


def test_pages_that_pins_keep_are_told_as_such(kvstore, stored: Stored):
    last = stored.put(3)[2].hex()
    pin = json.loads(kvstore("pin", stored.label, last, "--json")[1])["pin"]

    assert "dropped 0, kept 3 (3 pinned), durable true" in kvstore("evict", stored.label)[1]

    assert kvstore("unpin", pin)[0] == 0
    assert "dropped 3, kept 0, durable true" in kvstore("evict", stored.label)[1]


def test_a_job_of_an_older_node_does_not_say_how_many_are_pinned():
    job = {"job": 1, "kind": "evict", "state": "done", "result": {"dropped": 0, "kept": 2}}

    assert "dropped 0, kept 2 " in printed(show.jobs, completed({"jobs": [job]}, JobList))
