"""A layer-wise load is invalid if the engine has not waited for all of its layers."""

import pytest

from tests.engine.test_worker import Machine


@pytest.mark.parametrize("waited", [[], [0], [1, 2, 3], [0, 1, 3]])
def test_a_load_with_a_layer_for_which_the_engine_did_not_wait_is_invalid(waited, caplog):
    """It may have computed on the layer before it came, in a graph that calls nobody."""
    machine = Machine(layers=4)
    for number in (1, 2):
        machine.load(number, ends_after_s=0.1 if waited else 1000.0, layerwise=True)
        for layer in waited:
            machine.side.wait_layer(0, layer)
        began = machine.now
        outcome = machine.side.poll()

        assert outcome.invalid_blocks == {1, 2, 3, 4}
        assert outcome.report.ended[number].pages == 0
        assert machine.now == began, "and the step does not wait for what nobody uses"
    assert machine.side.counts.take()["unwaited_loads"] == 2
    (said,) = caplog.messages
    assert "load: async" in said


def test_a_load_that_waits_outside_of_steps_needs_nobody_to_wait_for_its_layers():
    machine = Machine(layers=4)
    machine.load(1, ends_after_s=0.0)

    assert machine.side.poll().report.ended[1].pages == 2
    assert "unwaited_loads" not in machine.side.counts.take()


def test_layers_count_as_waited_for_by_the_load_of_their_own_step_only():
    machine = Machine(layers=1)
    machine.load(1, ends_after_s=0.1, layerwise=True)
    machine.side.wait_layer(0, 0)
    assert machine.side.poll().report.ended[1].pages == 2
    machine.load(2, ends_after_s=0.0, layerwise=True)

    assert machine.side.poll().report.ended[2].pages == 0


def test_a_load_that_failed_already_is_not_said_to_have_failed_of_that():
    machine = Machine(layers=2)
    machine.load(1, ends_after_s=1000.0, wait_s=0.1, layerwise=True).stuck = True
    machine.side.wait_layer(0, 0)
    machine.side.poll()
    machine.side.poll()

    assert "unwaited_loads" not in machine.side.counts.take()
