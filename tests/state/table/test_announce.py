"""Goal: what a start found on disk is told of a few pages at a time, and only what is there."""

from kvstore.state.table.announce import Announcement
from kvstore.state.tree.actions import TierStored
from tests.state.disk.disk_world import DiskWorld
from tests.state.world import key


def test_every_page_on_disk_is_told_of_once_and_in_steps():
    world = DiskWorld(extents=300)
    letters = [chr(0x5000 + number) for number in range(1100)]
    for letter in letters:
        world.store(world.me, world.mine, letter)
    for job in world.jobs(object):
        del world.open[job.job]
        world.disk.completed(job.job, None)
    on_disk = {node.key for node in world.mine.nodes.values() if node.disk}
    assert len(on_disk) > 800
    announcement = Announcement(world.table)
    world.table.actions.clear()
    gone = list(world.mine.nodes.values())[-1]
    world.table.residents.drop(gone, 0, "corrupt")
    world.table.actions.clear()

    steps = 0
    while not announcement.done:
        announcement.step(world.table)
        steps += 1

    told = [one for one in world.table.actions if isinstance(one, TierStored)]
    assert steps > 1
    assert len(told) == len(world.table.actions)
    assert sorted(action.keys[0] for action in told) == sorted(on_disk - {gone.key})
    assert {action.tier for action in told} == {"ssd"}
    assert gone.key == key(letters[-1])
