"""Goal: what is one run on disk comes back as one, whoever wants it and whatever happens meanwhile.

That loads of runs and of single pages have the same results is compared in test_runs_on_disk.py.
"""

from kvstore.protocol.page import DIGEST_BYTES
from kvstore.state.disk.jobs import DiskRead
from kvstore.state.tree.actions import TierStored
from kvstore.state.tree.sessions import Fetch
from tests.state.disk.disk_world import IO_ERROR, DiskWorld, flood
from tests.state.disk.test_runs_on_disk import runs_of, whole
from tests.state.world import chain, key


def on_disk_only(path: str) -> DiskWorld:
    """A world whose pages of a path are one run on disk, and in no memory."""
    world = DiskWorld()
    world.store(world.me, world.mine, path)
    world.end_all()
    assert world.table.residents.release_memory(whole(world, path))
    assert whole(world, path).count == len(path)
    assert not whole(world, path).memory
    world.table.actions.clear()
    return world


def fetch(world: DiskWorld, path: str) -> Fetch:
    """Somebody wants a path's pages in memory."""
    asked = world.table.begin_fetch(world.me, len(path) * 4096)
    world.table.room.fetch(asked, world.mine, 0, b"".join(chain(path)))
    return asked


def test_a_run_is_loaded_with_one_event_and_stays_one_node():
    world = on_disk_only("abcdef")

    asked = fetch(world, "abcdef")
    reads = world.jobs(DiskRead)
    assert len(reads) == 6
    assert asked.outstanding == 1
    for job in reversed(reads):
        assert world.table.fetches.ended == []
        world.end_job(job)

    assert world.table.fetches.ended == [asked]
    (told,) = [one for one in world.table.actions if isinstance(one, TierStored)]
    assert told.keys == chain("abcdef")
    assert whole(world, "abcdef").count == 6
    assert whole(world, "abcdef").memory


def test_two_fetches_share_the_load_of_the_pages_that_both_want():
    world = on_disk_only("abcdef")

    first, second = fetch(world, "abcd"), fetch(world, "abcdef")
    assert len(world.jobs(DiskRead)) == 6
    assert second.outstanding == 2
    third = fetch(world, "ab")
    assert third.outstanding == 1
    world.end_all()

    assert world.table.fetches.ended == [first, third, second]
    for asked in (first, second, third):
        world.table.end_fetch(world.me, asked)
    flood(world)
    assert not whole(world, "abcdef").memory, "nothing is left pinned"


def test_a_load_brings_what_is_left_of_its_pages():
    world = on_disk_only("abcdef")
    asked = fetch(world, "abcdef")
    world.table.residents.drop(world.node("abcd"), 0, "operator")
    world.store(world.me, world.mine, "abcd")  # other bytes, and in memory
    kept = world.node("abcd").slots[0]

    for job in world.jobs(DiskRead):
        world.end_job(job)

    assert world.table.fetches.ended == [asked]
    assert world.in_memory("abcd") == [True] * 4
    assert world.node("abcd").slots[0] == kept
    world.table.end_fetch(world.me, asked)
    assert world.slots.stats().writing_bytes == world.slots.stats().pinned_bytes == 0


def test_pages_are_loaded_beside_one_that_is_still_loaded_for_those_before_it():
    world = on_disk_only("abcd")
    first = fetch(world, "abcd")
    stale = world.jobs(DiskRead)
    world.table.residents.drop(world.node("abc"), 0, "reclaimed")
    world.store(world.me, world.mine, "abcd")
    for path in ("abc", "abcd"):
        world.end_job(world.write_of(path))
    assert world.table.residents.release_memory(whole(world, "abcd"))
    second = fetch(world, "abcd")
    for job in stale:
        world.end_job(job)
    world.end_all()

    assert world.table.fetches.ended == [first, second]
    assert all(world.in_memory("abcd"))


def test_a_page_that_was_stored_again_with_other_bytes_does_not_get_the_old_ones():
    world = on_disk_only("abcd")
    asked = fetch(world, "abcd")
    reads = world.jobs(DiskRead)
    world.table.residents.drop(world.node("abc"), 0, "reclaimed")
    number = world.begin(world.me, world.mine, "abcd")[0]
    put = world.me.puts[number]
    world.table.commit_put(world.me, number, b"\7" * DIGEST_BYTES * len(put.slots))
    for path in ("abc", "abcd"):
        world.end_job(world.write_of(path))
    assert world.table.residents.release_memory(whole(world, "abcd"))

    for job in reads:
        world.end_job(job)

    assert world.table.fetches.ended == [asked]
    assert world.in_memory("abcd") == [True, True, False, False]
    assert world.lookup(world.mine, "abcd") == (4, 0)


def test_what_follows_a_page_that_cannot_be_read_leaves_and_what_precedes_it_comes():
    world = on_disk_only("abcdef")
    asked = fetch(world, "abcdef")

    for job in reversed(world.jobs(DiskRead)):
        world.end_job(job, IO_ERROR if job.page.key == key("abcd") else None)

    assert world.table.fetches.ended == [asked]
    assert world.in_memory("abc") == [True] * 3
    assert world.lookup(world.mine, "abcdef") == (3, 0)
    world.table.end_fetch(world.me, asked)
    assert world.slots.stats().writing_bytes == world.slots.stats().pinned_bytes == 0


def test_memory_of_the_page_before_those_that_are_loaded_may_give_them_room():
    world = DiskWorld(write="through", extents=1)
    world.store(world.me, world.mine, "abcd")
    world.end_all()
    assert world.table.residents.release_memory(world.node("abcd"))
    free = world.slots.stats().free_bytes // 4096
    world.acquire(world.me, world.mine, "ab")  # these stay
    for at in range(free):
        path = "xyz"[at]
        world.store(world.me, world.mine, path)
        world.acquire(world.me, world.mine, path)
    world.end_all()

    asked = world.table.begin_fetch(world.me, 4096)
    world.table.room.fetch(asked, world.mine, 0, key("abcd"))

    assert [job.page.key for job in world.jobs(DiskRead)] == [key("abcd")]
    world.end_all()
    assert world.table.fetches.ended == [asked]
    assert world.in_memory("abcd") == [True, True, False, True]


def test_a_run_that_is_split_because_it_is_used_is_lent_whole():
    """The policy ``selective`` writes it then, and it does not fit the rest of a segment."""
    world = DiskWorld(write="selective", segment_bytes=120 << 10)
    path = "abcdefghij"
    world.store(world.me, world.mine, "xyzuvw")
    world.acquire(world.me, world.mine, "xyzuvw")
    world.store(world.me, world.mine, path)

    packed = b"".join(chain(path))
    leased = world.table.acquire(world.me, 99, world.mine, 0, packed, 1 << 60)

    assert len(runs_of(world)) > 2, "it was split meanwhile"
    assert len(leased.lease.slots) == len(leased.digests) // 16 == leased.lasting == len(path)
