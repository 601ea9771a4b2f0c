"""What is computed on layer-wise loads is stored, and found again, only if all of them came."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.results import Hit
from kvstore.engine.layered import STEPS_MAX, LayeredSteps
from kvstore.engine.messages import Report, Store
from kvstore.engine.requests import Role, ScheduledRequest
from kvstore.protocol.page import PrefixKeys
from tests.engine.engine import PLAIN, Request, World


def request(tokens=range(300)):
    return Request("r", list(tokens))


def table(count=10, first=1):
    return list(range(first, first + count))


def layerwise_step(world, *more):
    """A request of which two pages are loaded in the step that computes the other two."""
    world.store.answer = Hit(2)
    asked = request()
    assert world.side.match(asked, PLAIN, 0) == (128, False)
    world.side.allocated(asked, [table()], 128)
    step = world.step(ScheduledRequest("r", 300, [table()]), *more, tokens=172)
    (load,) = step.loads
    assert load.layerwise
    return step


@pytest.mark.parametrize("finishes", [False, True])
def test_what_was_computed_on_layers_is_stored_when_all_ranks_have_had_them(finishes):
    world = World(load="layerwise", ranks=2)
    step = layerwise_step(world)
    assert not step.stores
    report = Report()
    for _ in range(2):
        report.end(step.loads[0].job, 2)
    world.side.reported(report)
    if finishes:
        world.side.finished("r")
    assert world.blocks.held == dict.fromkeys(table(4, 5), 1), "kept until then"
    assert world.side.busy, "so that there is another step"

    (store,) = world.step().stores

    assert store.blocks[0].blocks == [5, 6, 7, 8]
    assert not world.step().stores


def test_what_was_computed_on_layers_that_did_not_come_is_not_stored():
    world = World(load="layerwise", ranks=2)
    step = layerwise_step(world)
    report = Report()
    report.end(step.loads[0].job, 2)
    report.end(step.loads[0].job, 1)  # one rank lacks a page: all have computed without it
    world.side.reported(report)

    assert not world.step().stores
    assert not world.blocks.held
    (store,) = world.step(ScheduledRequest("r", 300, [table()])).stores
    assert store.blocks[0].blocks == [3, 4, 5, 6, 7, 8], "computed again, and stored then"


def test_what_was_computed_on_layers_that_some_rank_cannot_tell_of_is_not_stored():
    world = World(load="layerwise", ranks=2)
    step = layerwise_step(world)
    report = Report(late={step.loads[0].job})
    report.end(step.loads[0].job, 2)
    world.side.reported(report)

    assert not world.step().stores
    assert world.blocks.held == dict.fromkeys(table(4), 1), "only the load's"


@pytest.mark.parametrize("came", [2, 1])
def test_a_step_that_begins_before_the_layers_of_the_one_before_it_have_come_waits_for_them(came):
    """As with asynchronous scheduling, and with stages of a pipeline."""
    world = World(load="layerwise")
    world.store.answer = Hit(2)
    asked = request(tokens=range(330))
    assert world.side.match(asked, PLAIN, 0) == (128, False)
    world.side.allocated(asked, [table()], 128)
    first = world.step(ScheduledRequest("r", 256, [table()]))
    second = world.step(ScheduledRequest("r", 320, [table()]))
    world.side.reported(None)  # of a step before both
    assert not first.stores
    assert not second.stores
    assert not world.blocks.forgotten

    world.ended(first.loads[0].job, came)

    stored = [store.blocks[0].blocks for store in world.step().stores]
    if came == 2:
        assert stored == [[5, 6, 7, 8], [9, 10]]
        assert not world.blocks.forgotten
    else:
        assert not stored
        assert world.blocks.forgotten == set(table())
        assert not world.blocks.held
        (store,) = world.step(ScheduledRequest("r", 320, [table()])).stores
        assert store.blocks[0].blocks == table(8, 3), "computed again, and stored then"


def test_the_engine_finds_no_block_that_was_computed_on_layers_that_did_not_come():
    world = World(load="layerwise", role=Role(loads=True, stores=False))
    # Two that share blocks with the load, one that does not.
    shares, other = (
        ScheduledRequest("s", 200, [[1, 2, 20, 21]]),
        ScheduledRequest("o", 200, [table(6, 30)]),
    )
    step = layerwise_step(world, shares, other)
    world.ended(step.loads[0].job, 1)

    assert world.blocks.forgotten == {*table(), 20, 21}

    world.blocks.forgotten.clear()
    world.step(ScheduledRequest("r", 300, [table()]), tokens=172)
    world.side.reported(None)
    assert not world.blocks.forgotten


def test_steps_do_not_wait_for_ever_for_layers_of_which_nobody_tells():
    world = World(load="layerwise")
    layerwise_step(world)
    for _ in range(STEPS_MAX - 1):
        world.step()
        world.side.reported(None)
    assert not world.blocks.forgotten

    world.step(ScheduledRequest("r", 300, [table()]))
    world.side.reported(None)

    assert world.blocks.forgotten == set(table())
    assert world.blocks.held == dict.fromkeys(table(4), 1), "only the load's"
    assert world.step(ScheduledRequest("r", 300, [table()])).stores, "and steps store again"


@pytest.mark.parametrize("invalid", [(), {7}])
def test_what_was_computed_on_loads_of_another_connector_is_stored_if_they_came(invalid):
    """The blocks that it loaded, and those of its request, are unknown: all of the step count."""
    world = World()
    world.side.see(request(), PLAIN)
    first = world.side.build([ScheduledRequest("r", 128, [table()])], 128, others_load=True)
    second = world.side.build([ScheduledRequest("r", 256, [table()])], 128)
    world.side.reported(Report(), invalid)  # of a step before both
    assert first.others
    assert not first.stores
    assert not second.stores
    assert not second.others

    report = Report()
    report.end(first.others, 0)
    world.side.reported(report, invalid)

    stored = [store.blocks[0].blocks for store in world.step().stores]
    if not invalid:
        assert stored == [[1, 2, 3, 4], [5, 6, 7, 8]]
        assert not world.blocks.forgotten
    else:
        assert not stored
        assert not world.blocks.held
        assert world.blocks.forgotten == set(table())
        (store,) = world.step(ScheduledRequest("r", 256, [table()])).stores
        assert store.blocks[0].blocks == table(8), "computed again, and stored then"
    assert world.side.busy, "so that there is another step"


def others_step(world, invalid):
    """Another connector loads in a step; what is stored of a request after it."""
    step = world.side.build([ScheduledRequest("r", 128, [table()])], 128, others_load=True)
    report = Report()
    report.end(step.others, 0)
    world.side.reported(report, invalid)
    return world.step(ScheduledRequest("r", 256, [table()])).stores


def test_an_engine_that_goes_on_behind_what_others_did_not_load_stores_nothing_any_more(caplog):
    """Its own cache keeps what it computes of it, so later requests are computed on that, too."""
    world = World(recomputes=False)
    world.side.see(request(), PLAIN)
    assert not others_step(world, {7})

    assert world.blocks.forgotten == set(table())
    world.side.forget_all()
    world.side.see(request(), PLAIN)
    assert not others_step(world, {7})
    assert not world.step(ScheduledRequest("r", 300, [table()])).stores
    assert not world.blocks.held
    (said,) = caplog.messages
    assert "restart" in said


def test_a_load_of_ours_that_failed_in_part_is_none_of_others():
    world = World(recomputes=False)
    world.store.answer = Hit(4)
    load = world.load(Request("o", list(range(300))), table=table(10, 20)).loads[0]
    world.side.see(request(), PLAIN)
    step = world.side.build([ScheduledRequest("r", 128, [table()])], 128, others_load=True)
    report = Report()
    report.end(load.job, 1)
    report.end(step.others, 0)
    world.side.reported(report, set(load.blocks[0].blocks[2:]))

    assert [store.blocks[0].blocks for store in world.step().stores] == [[1, 2, 3, 4]]
    assert world.step(ScheduledRequest("r", 256, [table()])).stores


@given(st.lists(st.sampled_from(["no load", "comes", "fails"]), max_size=12), st.integers(0, 3))
def test_a_step_is_stored_once_unless_it_began_before_a_failed_load_was_reported(fates, ahead):
    """Every step stores something; an engine begins ``ahead`` steps before it knows of one."""
    steps, stored = LayeredSteps(), []
    for number in range(len(fates) + ahead):
        if number < len(fates):
            steps.begins({number: [number]} if fates[number] != "no load" else {})
            if steps.waits:
                steps.withhold(Store(number, PrefixKeys(b""), []))
            else:
                stored.append(number)
        if number >= ahead:
            steps.ended(number - ahead, whole=fates[number - ahead] == "comes")
        stored += [store.job for store in steps.judge().good]

    spoilt = {
        after for at, fate in enumerate(fates) if fate == "fails"
        for after in range(at, at + ahead + 1)
    }  # fmt: skip
    assert stored == [number for number in range(len(fates)) if number not in spoilt]
    assert not steps.waits
