"""The engines in columns: made again after each change that they show, and only then."""

from collections.abc import Callable

import pytest

from conductor.costs.book import CostBook
from conductor.routing.engines import EngineInfo, EngineRegistry
from conductor.routing.load import EngineLoads
from conductor.routing.occupancy import Occupancy
from conductor.routing.work import ComingPrompt
from tests.conductor.routing.test_dispatcher import info

Change = Callable[[Occupancy, EngineRegistry, EngineLoads], object]


def engine(max_running: int = 3) -> EngineInfo:
    return info("e", "mixed", max_running)


CHANGES: dict[str, Change] = {
    "a place is taken": lambda places, _, __: places.take("e"),
    "a place is free": lambda places, _, __: places.free("e", 0.0),
    "a place is promised": lambda places, _, __: places.promise("e"),
    "an engine is assigned": lambda places, _, __: places.chosen(["e"]),
    "an engine fails": lambda _, registry, __: next(iter(registry)).health.failed(0.0),
    "an engine registers": lambda _, registry, __: registry.register(info("f", "mixed"), 0.0),
    "it registers again": lambda _, registry, __: registry.register(engine(5), 0.0),
    "more is known of it": lambda _, registry, __: registry.update(engine(6)),
    "an engine goes": lambda _, registry, __: registry.remove("e"),
    "a prompt is given": lambda _, __, loads: loads.assigned(2, engine(), (9, 0), (0.0, 9.0), 0.0),
    "a prompt is computed": lambda _, __, loads: loads.computed(1, "e", 0.0, None),
    "KV comes": lambda _, __, loads: loads.comes(2, engine(), ComingPrompt(9, 9), "e", 0.0),
    "a handoff begins": lambda _, __, loads: loads.hands_over(1, engine(), 9, 0.0),
    "a request decodes": lambda _, __, loads: loads.decodes(2, engine(), 9, 0.0),
    "a request leaves": lambda _, __, loads: loads.left(1, "e", 0.0),
    "others use an engine": lambda _, __, loads: loads.tell_others("e", 3.0, 1.0, 1),
    "its costs are forgotten": lambda _, __, loads: loads.forget("e"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_view_is_made_again_after_a_change_only(what: str) -> None:
    registry, loads = EngineRegistry(), EngineLoads(CostBook())
    places = Occupancy(loads.others)
    registry.register(engine(), 0.0)
    places.take("e")
    loads.assigned(1, engine(), (1000, 0), (0.0, 5.0), 0.0)

    def view() -> object:
        return places.view(registry, loads, 1, 0.0)

    before = view()
    assert view() is before
    shown = repr(before)
    CHANGES[what](places, registry, loads)
    after = view()
    assert after is not before
    assert repr(after) != shown
    assert view() is after


def test_a_view_is_of_one_time() -> None:
    registry, loads = EngineRegistry(), EngineLoads(CostBook())
    places = Occupancy(loads.others)
    registry.register(engine(), 0.0)
    loads.assigned(1, engine(), (1000, 0), (0.0, 5.0), 0.0)
    costs = [places.view(registry, loads, 1, now).costs for now in (0.0, 2.0)]
    assert [float(one.backlog_s[0]) for one in costs if one is not None] == [5.0, 3.0]
