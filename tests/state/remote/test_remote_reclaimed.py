"""Goal: pages from peers are dropped with a head that was only on disk, whenever that is lost."""

from kvstore.state.choice.admission import Admission
from kvstore.state.disk.jobs import DiskRules, DiskWrite, LeftDisk, SyncPolicy, WritePolicy
from kvstore.state.disk.log import SegmentLog
from kvstore.state.disk.pages import DiskPages
from tests.state.remote.remote_world import RemoteWorld, leased
from tests.state.world import FULL, chain


def test_pages_whose_head_is_reclaimed_when_they_are_written_to_disk_are_fetched_again_with_it():
    world = RemoteWorld(shards=[FULL])
    residents = world.table.residents
    rules = DiskRules(WritePolicy.THROUGH, SyncPolicy.NONE, 0, 1 << 30)
    log = SegmentLog(8, 1 << 20)
    disk = DiskPages(residents, log, Admission("all", 0, log.capacity_bytes), rules)
    residents.disk = disk
    engine = world.engine()
    world.store(engine, "a")
    (write,) = [job for job in disk.jobs if isinstance(job, DiskWrite)]
    disk.jobs.clear()
    world.table.tiers.completed(write.job, None)
    (key,) = chain("a")
    head = world.space.nodes[key]
    assert residents.release_memory(head), "it is only on disk"
    world.locate(engine, "abc", ("p", 3))
    assert world.acquire(engine, "abc", 1) is None
    job = world.read(peer="p")
    assert len(job.slots) == 2

    # as when the segment of the head is reclaimed because the pages need room on disk
    disk.effects.append(LeftDisk(world.space, 0, head.keys, "reclaimed"))
    world.end(job)

    assert not world.ready("abc")
    assert world.table.counts["removed_reclaimed"] == 3
    again = world.read(peer="p")
    assert again.keys == b"".join(chain("abc"))
    world.end(again)
    assert leased(world.answer(engine)) == 2
    for write in [job for job in disk.jobs if isinstance(job, DiskWrite)]:
        world.table.tiers.completed(write.job, None)
    world.release(engine)
    world.check()
    world.check_nothing_held()
