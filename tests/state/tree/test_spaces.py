"""Goal: a session sees the spaces of its own tenant, and none that contradicts its layout."""

import msgspec
import pytest

from kvstore.protocol.errors import CapacityError, InvalidArgument, LayoutMismatch
from kvstore.protocol.page import CanonicalLayout
from tests.state.disk.disk_world import DiskWorld
from tests.state.world import FULL, WINDOW, World, identity


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (msgspec.structs.replace(WINDOW, window_pages=3), "window_pages"),
        (msgspec.structs.replace(FULL, layout=CanonicalLayout(64)), "head_dim"),
    ],
)
def test_a_shard_that_contradicts_the_space_is_refused_by_the_field_that_differs(spec, field):
    world = World()
    engine = world.process()
    world.space(engine, [FULL, WINDOW])

    with pytest.raises(LayoutMismatch) as refused:
        world.space(engine, [spec])
    assert refused.value.field == field


def test_a_session_has_one_tenant_and_sees_no_space_of_another():
    world = World()
    red, blue = world.process("red"), world.process("blue", pid=2)
    space = world.space(red, tenant="red")
    world.space(blue, tenant="blue")

    with pytest.raises(InvalidArgument, match="tenant"):
        world.space(blue, tenant="red")
    with pytest.raises(InvalidArgument, match="space"):
        world.table.spaces.get(space.number, blue.session)
    with pytest.raises(InvalidArgument, match="space"):
        world.table.spaces.get(99, red.session)


@pytest.mark.parametrize("tenant", ["", "red"])
def test_a_session_sees_no_space_before_it_has_opened_it(tenant):
    world = World()
    space = world.space(world.process("first"), tenant=tenant)
    second = world.process("second", pid=2)

    with pytest.raises(InvalidArgument, match="space"):
        world.table.spaces.get(space.number, second.session)
    world.space(second, tenant=tenant)

    assert world.table.spaces.get(space.number, second.session) is space


def test_a_session_of_the_tenant_without_a_name_stays_with_it():
    world = World()
    engine = world.process()
    world.space(engine, tenant="")

    with pytest.raises(InvalidArgument, match="tenant"):
        world.space(engine, tenant="red")


def test_a_page_larger_than_an_extent_is_refused():
    world = World(slots_each=1)
    engine = world.process()

    with pytest.raises(InvalidArgument, match="page_bytes"):
        world.table.spaces.open(engine.session, identity(), [WINDOW])


def test_shards_of_one_message_that_contradict_each_other_are_refused():
    world = World()
    engine = world.process()
    other = msgspec.structs.replace(WINDOW, window_pages=3, heads=(1, 2))

    with pytest.raises(LayoutMismatch, match="window_pages"):
        world.space(engine, [WINDOW, other])
    assert list(world.table.spaces) == []


# There are only so many


def open_some(world: World, name: str, models: range) -> None:
    """Let a session open a space for each model."""
    process = world.process(name)
    for model in models:
        world.table.open_space(process.session, identity(model=f"m{model}"), [FULL])


def leave(world: World, name: str) -> None:
    """Let a session end."""
    session = world.sessions.pop(name)
    for process in list(session.processes.values()):
        world.end(process)
    world.table.spaces.left(session)


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> World:
    """A node that has room for eight spaces, of which one session may open five."""
    monkeypatch.setattr("kvstore.state.tree.sessions.SPACES_MAX", 8)
    monkeypatch.setattr("kvstore.state.tree.sessions.SESSION_SPACES_MAX", 5)
    monkeypatch.setattr("kvstore.state.tree.sessions.SESSION_SPACES_ALWAYS", 2)
    return World()


def test_a_session_opens_so_many_spaces_and_no_more(crowded: World):
    open_some(crowded, "a", range(5))

    with pytest.raises(CapacityError, match="session"):
        open_some(crowded, "a", range(5, 6))
    open_some(crowded, "a", range(4))


def test_a_session_opens_a_few_spaces_however_many_the_others_have(crowded: World):
    open_some(crowded, "a", range(5))
    open_some(crowded, "b", range(5, 8))

    open_some(crowded, "c", range(8, 10))
    with pytest.raises(CapacityError, match="in use"):
        open_some(crowded, "c", range(10, 11))


def open_shards(world: World, name: str, model: str, shards: range) -> None:
    """Let a session open so many shards of a space."""
    specs = [msgspec.structs.replace(FULL, heads=(at, at + 1)) for at in shards]
    world.table.open_space(world.process(name).session, identity(model=model), specs)


def test_shards_are_so_many_in_however_many_spaces(crowded: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.state.tree.sessions.ALL_SHARDS_MAX", 8)
    open_shards(crowded, "a", "m0", range(3))
    open_shards(crowded, "a", "m1", range(3))

    with pytest.raises(CapacityError, match="6 shards"):
        open_shards(crowded, "a", "m2", range(3))
    with pytest.raises(CapacityError, match="6 shards"):
        open_shards(crowded, "a", "m1", range(6))
    assert [len(space.shards) for space in crowded.table.spaces] == [3, 3]
    open_shards(crowded, "a", "m1", range(1, 5))
    open_shards(crowded, "a", "m0", range(3))

    open_shards(crowded, "b", "m2", range(8))
    with pytest.raises(CapacityError, match="16 shards"):
        open_shards(crowded, "c", "m3", range(1))
    crowded.table.spaces.check()

    leave(crowded, "a")
    open_shards(crowded, "c", "m3", range(1))
    assert [space.identity.model for space in crowded.table.spaces] == ["m2", "m3"]
    crowded.table.spaces.check()


def test_spaces_that_nobody_has_open_and_that_hold_nothing_give_up_their_places(crowded: World):
    open_some(crowded, "a", range(4))
    kept = crowded.process("a")
    space = next(iter(crowded.table.spaces))
    crowded.store(kept, space, "page")
    limited = list(crowded.table.spaces)[1]
    crowded.table.quotas.set(limited, 1 << 20, 0, 1 << 30)
    open_some(crowded, "b", range(4, 8))
    leave(crowded, "a")

    open_some(crowded, "c", range(8, 10))

    models = [one.identity.model for one in crowded.table.spaces]
    assert models == ["m0", "m1", "m4", "m5", "m6", "m7", "m8", "m9"]
    assert crowded.lookup(space, "page") == (4, 0)
    numbers = [one.number for one in crowded.table.spaces]
    assert numbers[-2:] == [8, 9], "no number is given twice"
    assert crowded.table.counts["closed_spaces"] == 2


def test_a_space_whose_removal_is_not_on_disk_yet_keeps_its_place():
    """Stored anew under another number its pages could be written before the tombstone."""
    world = DiskWorld()
    world.store(world.me, world.mine, "a")
    world.end_all()
    world.table.residents.drop(world.node("a"), 0, "operator")
    assert not world.mine.nodes
    assert world.table.residents.needs_space(world.mine)

    world.disk.go_on()
    world.end_all()

    assert not world.table.residents.needs_space(world.mine)
