"""Goal: loads that hang leave memory to others, and a fetch that has to wait for them goes on."""

import pytest

from kvstore.protocol.page import KEY_BYTES
from kvstore.state.disk.jobs import DiskRead
from kvstore.state.table.invariants import check
from kvstore.state.table.runs import leading_ready
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.sessions import Fetch
from tests.state.disk.disk_world import DiskWorld
from tests.state.world import PAGE, chain

EXTENTS, MOST = 8, 16
"""Of four pages each; half of them may be loaded at a time."""


def on_disk_only(*paths: str, in_flight_max: int = 1 << 30) -> DiskWorld:
    """A world whose prompts are on disk and in no memory."""
    world = DiskWorld(extents=EXTENTS, segments=64, in_flight_max=in_flight_max)
    for path in paths:
        assert set(world.store(world.me, world.mine, path)) == {PageStatus.GRANTED}
        world.end_all()
        run = leading_ready(world.mine, b"".join(chain(path)), 0)
        for node in reversed(run):
            assert world.table.residents.release_memory(node)
    world.table.actions.clear()
    return world


def fetch(world: DiskWorld, path: str) -> Fetch:
    """Somebody wants a path's pages in memory."""
    asked = world.table.begin_fetch(world.me, 0)
    world.table.room.fetch(asked, world.mine, 0, b"".join(chain(path)))
    check(world.table)
    return asked


def go_on(world: DiskWorld) -> None:
    """Take the turns that a node would take."""
    for _ in range(20):
        if not world.table.residents.unfinished:
            return
        world.table.tiers.go_on()
        world.table.room.load_more()
        check(world.table)
    pytest.fail("it goes on in vain")


def end(world: DiskWorld, count: int) -> None:
    """The oldest reads end, and what waited for them goes on."""
    for job in world.jobs(DiskRead)[:count]:
        world.end_job(job)
    go_on(world)


def reads(world: DiskWorld) -> int:
    return len(world.jobs(DiskRead))


LETTERS = "bcdefghijklmnopqrstuvwxyzBCDEFGHIJKLMNOPQRSTUVWXYZ"


def test_reads_that_hang_leave_half_of_memory_even_if_nobody_waits_for_them():
    world = on_disk_only(*LETTERS[:40])
    for path in LETTERS[:40]:
        asked = fetch(world, path)
        go_on(world)
        world.table.end_fetch(world.me, asked)
        go_on(world)
        assert not world.disk.loads.beginning, "given up, it does not pile up"
    assert reads(world) == MOST

    assert world.store(world.me, world.mine, "A" * MOST) == [PageStatus.GRANTED] * MOST


def test_a_prompt_longer_than_the_limit_is_loaded_in_parts_and_told_once():
    world = on_disk_only("a" * 28)
    asked = fetch(world, "a" * 28)
    assert reads(world) == MOST
    go_on(world)
    assert reads(world) == MOST, "the rest waits"

    end(world, MOST - 1)
    assert world.table.fetches.ended == []
    assert reads(world) == 1
    end(world, 1)
    assert reads(world) == 28 - MOST
    assert world.table.fetches.ended == []
    end(world, 28)

    assert world.table.fetches.ended == [asked]
    assert all(world.in_memory("a" * 28))
    assert not world.disk.loads.in_flight_bytes
    assert not world.disk.loads.beginning


def test_pages_larger_than_the_limit_are_loaded_one_at_a_time():
    world = on_disk_only("abc", in_flight_max=PAGE // 8)
    asked = fetch(world, "abc")

    for _ in range(3):
        assert reads(world) == 1
        assert world.table.fetches.ended == []
        end(world, 1)

    assert world.table.fetches.ended == [asked]
    assert all(world.in_memory("abc"))


def test_what_is_large_is_not_passed_by_what_is_small():
    world = on_disk_only("A" * 10, *LETTERS[:20])
    for path in LETTERS[:12]:
        fetch(world, path)
    large = fetch(world, "A" * 10)
    assert reads(world) == MOST, "as much of it as fits has begun"
    assert not world.table.residents.unfinished, "it waits for reads to end"

    last = [fetch(world, path) for path in LETTERS[12:14]]
    for left in (5, 4, 3, 2, 1, 0):
        for job in world.jobs(DiskRead)[:1]:
            world.end_job(job)
        assert world.table.residents.unfinished, "it has room for a page"
        assert reads(world) == MOST - 1
        if not left:
            last.append(fetch(world, LETTERS[14]))
            assert reads(world) == MOST - 1, "it comes before a new one"
        go_on(world)
        assert reads(world) == MOST
        assert sum(len(packed) for _, _, packed in large.wanted) == left * KEY_BYTES
        assert not [one for one in last if not one.wanted], "none of these has begun"

    end(world, 30)
    end(world, 30)
    assert set(world.table.fetches.ended) >= {large, *last}


def test_a_page_that_hangs_does_not_keep_a_long_stretch_and_all_behind_it():
    world = on_disk_only("A" * MOST, "b", "c", "d")
    fetch(world, "b")
    (hung,) = world.jobs(DiskRead)
    asked = [fetch(world, path) for path in ("A" * MOST, "c", "d")]

    assert reads(world) == MOST
    for _ in range(2):
        for job in world.jobs(DiskRead):
            if job is not hung:
                world.end_job(job)
        go_on(world)

    assert world.table.fetches.ended == asked
    assert world.jobs(DiskRead) == [hung]


def test_a_page_larger_than_the_limit_waits_for_the_one_that_is_read():
    world = on_disk_only("a", "bc", in_flight_max=PAGE // 8)
    first, second = fetch(world, "a"), fetch(world, "bc")
    assert reads(world) == 1
    assert not world.table.residents.unfinished

    for _ in range(3):
        end(world, 1)

    assert world.table.fetches.ended == [first, second]


def test_when_the_first_one_that_waits_is_given_up_the_others_go_on():
    world = on_disk_only("A" * 10, *LETTERS[:20])
    for path in LETTERS[:12]:
        fetch(world, path)
    large, small = fetch(world, "A" * 10), fetch(world, LETTERS[12])
    for job in world.jobs(DiskRead)[:1]:
        world.end_job(job)

    world.table.end_fetch(world.me, large)

    assert world.table.residents.unfinished
    go_on(world)
    assert not small.wanted
    assert reads(world) == MOST
    end(world, MOST)
    assert small in world.table.fetches.ended
    assert large not in world.table.fetches.ended


def test_while_one_waits_others_still_share_the_loads_of_pages_that_come():
    world = on_disk_only("A" * 10, *LETTERS[:20])
    for path in LETTERS[:12]:
        fetch(world, path)
    fetch(world, "A" * 10)
    assert world.disk.loads.beginning

    shares = fetch(world, LETTERS[0])

    assert not shares.wanted
    assert shares not in world.disk.loads.beginning
    end(world, 1)
    assert shares in world.table.fetches.ended
