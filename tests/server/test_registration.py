"""Goal: exactly the memory of the named tenants is registered, for as long as it is theirs."""

import pytest

from kvstore.server.transports import EXTENTS_A_TURN, Registration
from kvstore.state.tree.slots import SlotTable
from kvstore.tier.host import HostMemory

EXTENT_BYTES = 1 << 16


class Registered:
    """A transport that only remembers."""

    name, endpoint = "remembers", ""

    def __init__(self, memory):
        self.memory = memory
        self.addresses_ = []

    def register(self, address, length, descriptor):
        assert length == EXTENT_BYTES
        assert descriptor >= 0
        assert address not in self.addresses_
        self.addresses_.append(address)

    def unregister(self, address):
        assert address in self.memory._mapped.values(), "it has gone already"
        self.addresses_.remove(address)


class Scene:
    def __init__(self, count, tenants):
        self.slots = SlotTable(EXTENT_BYTES, count)
        self.memory = HostMemory("n", b"b" * 16, EXTENT_BYTES, prefault=False)
        self.memory.create(range(count))
        self.transport = Registered(self.memory)
        self.registration = Registration(self.memory, self.slots, [self.transport], tenants)

    def registered(self):
        self.registration.step()
        return len(self.transport.addresses_)


@pytest.fixture
def made():
    scenes = []

    def make(count=4, tenants=("a",)):
        scenes.append(Scene(count, tenants))
        return scenes[-1]

    yield make
    for one in scenes:
        one.memory.close()


def test_only_extents_of_named_tenants_are_registered(made):
    scene = made()
    assert scene.registered() == 0
    scene.slots.allocate(1, "a", 4096)
    scene.slots.allocate(1, "b", 4096)
    assert scene.registered() == 1
    assert scene.transport.addresses_ == [scene.memory.address(scene.slots.extents[0].number)]
    assert scene.registered() == 1


def test_without_names_nothing_is_registered(made):
    scene = made(tenants=())
    scene.slots.allocate(1, "a", 4096)
    assert scene.registered() == 0


def test_memory_that_goes_is_unregistered_before_it_does(made):
    scene = made(count=1)
    taken = scene.slots.allocate(1, "a", 4096)
    assert scene.registered() == 1
    scene.slots.abort(taken)
    scene.slots._open["b", 4096] = []  # there is another class
    assert scene.slots.allocate(1, "b", 4096), "the extent belongs to another tenant now"

    scene.memory.replace(scene.slots.replaced)

    assert scene.transport.addresses_ == []
    assert scene.registered() == 0


def test_much_memory_is_registered_a_little_at_a_time(made):
    scene = made(count=EXTENTS_A_TURN + 3)
    scene.slots.allocate((EXTENTS_A_TURN + 3) * EXTENT_BYTES // 4096, "a", 4096)
    assert scene.registered() == EXTENTS_A_TURN
    assert scene.registered() == EXTENTS_A_TURN + 3


def test_an_extent_that_cannot_be_registered_now_is_registered_later(made, monkeypatch):
    scene = made()
    scene.slots.allocate(1, "a", 4096)

    def refuse(*_arguments):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as full:
        full.setattr(scene.transport, "register", refuse)
        assert scene.registered() == 0
        assert scene.registration.faults.counts == {"memory": 1}

    assert scene.registered() == 1
