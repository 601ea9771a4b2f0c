"""Goal: what is on disk can be reached, is told only once it is safe, and costs memory no page."""

import pytest

from kvstore.node.movements import Prefetch
from kvstore.protocol.counts import NO_RECORDS
from kvstore.protocol.errors import CapacityError, PageCorrupt
from kvstore.state.choice.policies import POLICIES
from kvstore.state.disk.jobs import (
    DiskRead,
    DiskSeal,
    DiskSync,
    DiskWrite,
    Verdict,
)
from kvstore.state.disk.log import Segment
from kvstore.state.disk.order import Order
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.node import PrefixNode, Retention
from tests.state.disk.disk_world import IO_ERROR, DiskWorld, flood
from tests.state.world import FULL, FULL_2, PAGE, STATE, WINDOW, chain, key


def test_a_page_counts_as_on_disk_only_once_the_page_before_it_does():
    world = DiskWorld()
    world.store(world.me, world.mine, "abc")

    world.end_job(world.write_of("abc"))
    world.end_job(world.write_of("ab"))
    assert world.on_disk("abc") == [False, False, False]

    world.end_job(world.write_of("a"))
    assert world.on_disk("abc") == [True, True, True]


def test_what_follows_a_page_that_could_not_be_written_is_not_on_disk_either():
    world = DiskWorld()
    world.store(world.me, world.mine, "abc")

    world.end_job(world.write_of("abc"))
    world.end_job(world.write_of("a"))
    world.end_job(world.write_of("ab"), IO_ERROR)

    assert world.on_disk("abc") == [True, False, False]
    assert world.lookup(world.mine, "abc") == (3, 0), "all are still in memory"


def test_a_page_whose_head_is_written_anew_counts_when_that_has_ended():
    """The head was on disk when the page's write began, and is not when it ends."""
    world = DiskWorld(write="back")
    world.store(world.me, world.mine, "ab")
    world.persist("a")
    world.end_all()
    first = world.persist("ab")
    world.disk.limits.forget(world.node("a"), 0)
    second = world.persist("a")

    world.end_job(world.write_of("ab"))
    assert world.on_disk("ab") == [False, False]
    world.end_all()

    assert world.on_disk("ab") == [True, True]
    assert (first.ended, second.ended) == (True, True)
    assert world.slots.stats().pinned_bytes == 0


def test_a_slot_is_pinned_while_it_is_written():
    world = DiskWorld(extents=1)
    world.store(world.me, world.mine, "abcd")

    assert world.store(world.me, world.mine, "x") == [PageStatus.NO_ROOM]
    assert world.disk.busy
    world.end_all()
    assert world.store(world.me, world.mine, "x") == [PageStatus.GRANTED]


def test_a_page_on_disk_is_still_a_hit_when_its_memory_is_taken():
    world = DiskWorld(write="back")
    world.store(world.me, world.mine, "abc")
    flood(world)

    assert world.on_disk("abc") == [True, True, True]
    assert world.in_memory("abc") == [False, False, False]
    assert world.lookup(world.mine, "abc") == (3, 0)
    packed = b"".join(chain("abc"))
    assert world.table.residents.on_disk(world.mine, [0], packed, 3) == 3
    assert world.store(world.me, world.mine, "abc") == [PageStatus.EXISTS] * 3


def test_a_fetch_brings_pages_back_and_keeps_them_until_it_ends():
    world = DiskWorld(write="back")
    world.store(world.me, world.mine, "abc")
    flood(world)
    run = world.table.residents.ready_run(world.mine, 0, b"".join(chain("abc")))

    fetch = world.fetch(run, 0)
    assert len(world.jobs(DiskRead)) == fetch.outstanding == 3
    assert world.me.session.used_bytes == 3 * PAGE
    world.end_all()
    assert world.table.fetches.ended == [fetch]
    assert world.in_memory("abc") == [True, True, True]
    flood(world)
    assert world.in_memory("abc") == [True, True, True], "pinned until the fetch ends"

    world.table.end_fetch(world.me, fetch)
    assert world.me.session.used_bytes == 0
    flood(world)
    assert not any(world.in_memory("abc"))


def test_two_fetches_share_one_load():
    world = DiskWorld(write="back")
    world.store(world.me, world.mine, "ab")
    flood(world)
    run = world.table.residents.ready_run(world.mine, 0, b"".join(chain("ab")))

    first, second = world.fetch(run, 0), world.fetch(run, 0)
    assert len(world.jobs(DiskRead)) == 2
    world.end_all()

    assert world.table.fetches.ended == [first, second]


@pytest.mark.parametrize(
    ("error", "cause"), [(PageCorrupt("flipped"), "corrupt"), (IO_ERROR, "unreadable")]
)
def test_a_page_that_cannot_be_read_leaves_with_all_that_it_leads_to(error, cause):
    world = DiskWorld(write="back")
    world.store(world.me, world.mine, "abc")
    flood(world)
    world.removed()
    run = world.table.residents.ready_run(world.mine, 0, b"".join(chain("abc")))
    fetch = world.fetch(run, 0)

    reads = {job.page.key: job for job in world.jobs(DiskRead)}
    world.end_job(reads[key("a")])
    world.end_job(reads[key("ab")], error)
    world.end_job(reads[key("abc")])

    assert world.removed(cause) == [key("abc"), key("ab")], "leaves first"
    assert world.lookup(world.mine, "abc") == (1, 0)
    assert world.table.fetches.ended == [fetch]
    world.table.end_fetch(world.me, fetch)
    assert world.slots.stats().limbo_bytes == world.slots.stats().writing_bytes == 0


@pytest.mark.parametrize("error", [None, PageCorrupt("flipped")])
def test_a_load_of_a_page_that_left_and_was_stored_again_changes_nothing(error):
    world = DiskWorld(write="back")
    world.mine = world.space(world.me, [FULL, FULL_2])
    for shard in (0, 1):
        world.store(world.me, world.mine, "a", shard=shard)
    flood(world)
    node = world.node("a")
    fetch = world.fetch([node], 0)
    (read,) = world.jobs(DiskRead)
    world.table.residents.drop(node, 0, "reclaimed")
    assert world.store(world.me, world.mine, "a") == [PageStatus.GRANTED]
    world.disk.make_durable([node], 0)
    world.end_job(world.write_of("a"))
    kept = node.slots[0]

    world.end_job(read, error)

    assert world.node("a") is node, "its other shard keeps it"
    assert node.slots[0] == kept
    assert world.lookup(world.mine, "a") == (1, 0)
    assert world.table.fetches.ended == [fetch]


def test_a_reclaim_whose_sync_fails_rests_before_it_syncs_again():
    """As when the tier is closed: it would be asked for without end."""
    world = DiskWorld()
    world.store(world.me, world.mine, "a")
    durable = world.persist("a")
    world.end_job(world.write_of("a"))
    for kind in (DiskSync, DiskSeal, DiskSync):  # the put's, then what the failed segment needs
        world.disk.advance(0)
        (job,) = world.jobs(kind)
        world.end_job(job, IO_ERROR, () if durable.ended and kind is DiskSync else (1,))
    assert durable.error is IO_ERROR

    for now_ns in (0, 1, 999):
        world.disk.advance(now_ns)
        assert world.jobs(DiskSync) == []

    world.disk.advance(1000)
    world.end_all()
    assert world.disk.log.stats().segments == 0, "now it worked"


def test_pages_that_must_not_go_to_disk_do_not():
    world = DiskWorld()
    world.store(world.me, world.mine, "a", keep=Retention(expires_ns=1 << 50))
    world.store(world.me, world.mine, "b", keep=Retention(read_once=True))
    world.store(world.me, world.mine, "c", keep=Retention(memory_only=True))

    assert not world.jobs(DiskWrite)


def test_a_page_kept_off_the_disk_stays_off_it_when_another_rank_stores_its_own_part():
    world = DiskWorld()
    world.space(world.me, [FULL, FULL_2])
    world.store(world.me, world.mine, "ab", shard=0, keep=Retention(memory_only=True))
    world.store(world.me, world.mine, "ab", shard=1)

    assert {job.page.shard for job in world.jobs(DiskWrite)} == {FULL_2}


def test_selective_writes_wait_for_the_first_use():
    world = DiskWorld(write="selective")
    world.store(world.me, world.mine, "ab")
    assert not world.jobs(DiskWrite)

    number, _ = world.acquire(world.me, world.mine, "ab")
    assert [job.page.key for job in world.jobs(DiskWrite)] == chain("ab")
    world.table.release(world.me, number)


def test_a_page_dropped_while_it_is_written_does_not_come_back():
    world = DiskWorld()
    world.store(world.me, world.mine, "ab")
    write = world.write_of("a")

    world.table.residents.drop(world.node("a"), 0, "corrupt")
    world.end_job(world.write_of("ab"))
    world.end_job(write)

    assert not world.mine.nodes
    assert world.slots.stats().limbo_bytes == world.slots.stats().ready_bytes == 0


def test_after_a_failed_write_nothing_is_written_for_a_while_and_memory_is_still_freed():
    world = DiskWorld(write="back", extents=1)
    world.disk.advance(1)
    world.store(world.me, world.mine, "abcd")
    assert world.store(world.me, world.mine, "x") == [PageStatus.NO_ROOM]
    for job in world.jobs(DiskWrite):
        world.end_job(job, IO_ERROR)

    assert world.store(world.me, world.mine, "x") == [PageStatus.GRANTED]
    assert world.disk.degraded
    assert world.table.counts["removed_evicted"] == 1
    world.disk.advance(2000)
    assert not world.disk.degraded


def test_no_more_is_under_way_than_the_bound():
    world = DiskWorld(in_flight_max=2 * (PAGE + 4096))
    world.store(world.me, world.mine, "a")
    world.store(world.me, world.mine, "b")
    world.store(world.me, world.mine, "c")

    assert len(world.jobs(DiskWrite)) == 2
    world.end_job(world.write_of("a"))
    assert [job.page.key for job in world.jobs(DiskWrite)] == [key("b"), key("c")]


def test_what_waits_is_written_as_soon_as_one_record_of_a_run_has_ended():
    world = DiskWorld(in_flight_max=2 * (PAGE + 4096))
    world.store(world.me, world.mine, "ab")
    world.store(world.me, world.mine, "c")
    assert len(world.jobs(DiskWrite)) == 2

    world.end_job(world.write_of("a"))

    assert [job.page.key for job in world.jobs(DiskWrite)] == [key("ab"), key("c")]


def test_window_pages_go_to_disk_without_their_heads():
    world = DiskWorld(write="back")
    world.mine = world.space(world.me, [FULL, WINDOW])
    world.store(world.me, world.mine, "abc", shard=1)
    world.table.residents.drop(world.node("a"), 1, "corrupt")

    world.disk.make_durable([world.node("abc")], 1)

    assert [job.page.key for job in world.jobs(DiskWrite)] == [key("abc")]


def test_a_hit_of_which_only_the_last_page_was_ever_stored_is_found_in_its_tier():
    """A state needs its last page only: those before it need not be there, and have no node."""
    world = DiskWorld()
    world.mine = world.space(world.me, [FULL, STATE])
    world.store(world.me, world.mine, "abcde", start=4, shard=1)
    world.end_all()
    packed = b"".join(chain("abcde"))

    assert world.lookup(world.mine, "abcde", [1]) == (5, 0)
    assert world.table.residents.on_disk(world.mine, [1], packed, 5) == 0
    assert world.table.residents.release_memory(world.node("abcde"))
    assert world.table.residents.on_disk(world.mine, [1], packed, 5) == 1, (
        "nobody loads those before it"
    )


def test_before_an_orderly_end_everything_is_written_and_synced():
    world = DiskWorld(write="back", sync="interval")
    world.store(world.me, world.mine, "ab")
    world.disk.advance(1)

    world.disk.write_out(world.table.spaces)
    assert not world.disk.settled
    for job in world.jobs(DiskWrite):
        world.end_job(job)
    assert not world.disk.settled, "written is not synced"
    (sync,) = world.jobs(DiskSync)
    world.end_job(sync)

    assert world.disk.settled
    assert world.on_disk("ab") == [True, True]


def test_a_page_too_large_for_any_segment_waits_for_none():
    """Room is nearly always being made, and it will never be enough for this page."""
    world = DiskWorld(write="back", segment_bytes=(80 << 10) - PAGE)
    world.store(world.me, world.mine, "a")
    world.disk.log.full.append(Segment(7, 1 << 20, Order(0)))

    assert world.disk.before_eviction(world.node("a")) is Verdict.EVICT
    with pytest.raises(CapacityError):
        world.persist("a")


def test_a_page_waits_for_a_segment_that_becomes_free_rather_than_be_dropped():
    world = DiskWorld(write="back", extents=1, segments=4)
    statuses = [PageStatus.GRANTED]
    while statuses == [PageStatus.GRANTED] or world.jobs(DiskWrite):
        for job in world.jobs(DiskWrite):
            world.end_job(job)
        statuses = world.store(world.me, world.mine, chr(next(world.letters)))

    assert statuses == [PageStatus.NO_ROOM], "nothing is sealed, so nothing can be reclaimed"
    assert world.disk.busy, "but it will be"
    world.end_all()
    flood(world, pages=1)
    assert world.table.counts["removed_evicted"] == 0


def test_a_prompt_longer_than_memory_spills_to_disk_from_its_beginning():
    world = DiskWorld(write="back", extents=1)
    path = "abcdefghij"
    stored = 0
    while stored < len(path):
        statuses = world.store(world.me, world.mine, path[: stored + 1], start=stored)
        if statuses == [PageStatus.GRANTED]:
            stored += 1
        else:
            assert world.disk.busy, "it waits for its own beginning to be written"
            world.end_all()

    assert world.lookup(world.mine, path) == (10, 0)
    assert world.in_memory(path) == [False] * 6 + [True] * 4
    assert world.on_disk(path)[:6] == [True] * 6


def test_the_stats_say_what_was_admitted_and_what_a_day_will_cost():
    world = DiskWorld()
    world.store(world.me, world.mine, "abc")

    wear = world.disk.stats(NO_RECORDS).wear

    assert (wear.admitted, wear.refused, wear.budget_bytes) == (3, 0, 0)
    assert wear.forecast_bytes > wear.today_bytes >= 3 * PAGE, "of less than an hour"


def test_a_refused_prompt_is_looked_at_a_few_times_however_long_it_is(monkeypatch):
    world = DiskWorld(write="back", extents=16, admission="none")
    asked: list[int] = []
    admit = world.disk.admission.admit

    def counting(pages: list[tuple[PrefixNode, int]], *rest: int) -> int:
        asked.append(sum(node.count for node, _ in pages))
        return admit(pages, *rest)

    monkeypatch.setattr(world.disk.admission, "admit", counting)
    path = "".join(chr(0x3000 + at) for at in range(60))
    world.store(world.me, world.mine, path)
    flood(world, 64)

    prompt = [pages for pages in asked if pages > 1]
    assert prompt == [60, 30, 15, 8, 4, 2], "once more when half of it is gone"
    assert world.disk.admission.wear().refused >= 60, "every page counts as refused in its turn"


def test_a_page_whose_head_is_reclaimed_while_room_is_made_for_it_is_not_granted():
    world = DiskWorld(write="back", extents=1, segments=6, segment_bytes=20 * PAGE)
    for path in "axy":  # one page a segment
        world.store(world.me, world.mine, path)
        world.persist(path)
        world.end_all()
        assert world.table.residents.release_memory(world.node(path))
    for path in "pqrs":  # all memory, and writing one of them takes a segment too many
        world.store(world.me, world.mine, path)
    world.disk.advance(0)

    _, statuses, _ = world.begin(world.me, world.mine, "ab", start=1)

    assert statuses == [PageStatus.NO_PARENT]
    assert key("a") not in world.mine.nodes
    world.end_all()


def test_a_prefetch_that_is_given_up_pins_nothing():
    world = DiskWorld()
    world.store(world.me, world.mine, "a")
    world.end_all()
    assert world.table.residents.release_memory(world.node("a"))
    prefetch = Prefetch(world.table, world.mine, chain("a"), 1000)
    steps = prefetch.steps()
    while not len(world.disk.loads):
        next(steps)

    prefetch.cancel()
    world.end_all()

    assert world.in_memory("a") == [True]
    assert world.slots.stats().pinned_bytes == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_all_pages_of_a_window_are_written_through_with_every_policy(policy):
    world = DiskWorld()
    world.table.eviction.change_policy(policy)
    world.mine = world.space(world.me, [FULL, WINDOW])
    world.store(world.me, world.mine, "abcd", shard=1)

    assert [job.page.key for job in world.jobs(DiskWrite)] == chain("abcd")
    world.end_all()
    assert all(1 in world.node(path).disk for path in ("a", "ab", "abc", "abcd"))
