"""Goal: a session sees the spaces of its own tenant, and none that contradicts its layout."""

import msgspec
import pytest

from kvstore.errors import InvalidArgument, LayoutMismatch
from kvstore.page import CanonicalLayout
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


def test_a_page_larger_than_an_extent_is_refused():
    world = World(slots_each=1)
    engine = world.process()

    with pytest.raises(InvalidArgument, match="page_bytes"):
        world.table.spaces.open(engine.session, identity(), [WINDOW])
