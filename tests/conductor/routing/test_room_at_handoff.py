"""Goal: KV goes to a decode engine that has room for it when it arrives, not only before."""

import math

import pytest

from conductor.routing.choices import Assign, Continue
from conductor.routing.engines import EngineRegistry
from conductor.routing.requests import Request
from tests.conductor.routing.test_seconds_dispatched import decided, dispatcher, info


@pytest.mark.parametrize(
    ("short", "decodes"),
    [((), "d0"), (("d0",), "d1"), (("d0", "d1"), "d0"), (("d1",), "d0")],
    ids=["both have room", "only the other", "neither", "only the intended one"],
)
def test_kv_that_arrives_goes_where_there_is_room_for_it_by_then(
    short: tuple[str, ...], decodes: str
) -> None:
    """``short``: the engines whose KV memory lacks one token for it when it arrives."""
    registry = EngineRegistry()
    for name, role in (("p", "prefill"), ("d0", "decode"), ("d1", "decode")):
        registry.register(info(name, role), 0.0)
    desk = dispatcher(registry, "earliest-first-token")
    desk.arrive(Request(number=1, model="m", arrived=0.0, tokens=8192))
    [assign] = decided(desk, 0.0)
    assert isinstance(assign, Assign)
    assert assign.decode == "d0"
    costs = desk.view(0.0).costs
    assert costs is not None
    for row, (name, needs) in enumerate((("d0", 0), ("d1", 8192)), 1):
        room = costs.inputs.kv_room[row] - needs - desk.admission.output(1)
        taken = math.floor(room) + (name in short)
        desk.loads.decodes(100 + row, info(name, "decode"), taken, 0.5)
    desk.prefilled(1, 1.0)
    [then] = desk.step(1.0)
    desk.check()

    assert isinstance(then, Continue)
    assert then.decode == decodes


def test_only_as_many_leave_an_engine_as_it_has_no_room_for() -> None:
    registry = EngineRegistry()
    for name, role in (("p", "prefill"), ("d0", "decode")):
        registry.register(info(name, role), 0.0)
    desk = dispatcher(registry, "cache-local")
    for number in (1, 2):
        desk.arrive(Request(number=number, model="m", arrived=0.0, tokens=8192))
    assert [one.decode for one in decided(desk, 0.0) if isinstance(one, Assign)] == ["d0", "d0"]
    registry.register(info("d1", "decode"), 0.5)
    costs = desk.view(0.5).costs
    assert costs is not None
    desk.loads.decodes(9, info("d0", "decode"), int(costs.inputs.kv_room[1]), 0.5)
    for number in (1, 2):
        desk.prefilled(number, 1.0)
    then = desk.step(1.0)
    desk.check()

    assert sorted(one.decode for one in then if isinstance(one, Continue)) == ["d0", "d1"]
