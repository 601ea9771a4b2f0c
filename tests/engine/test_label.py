"""The name of an engine: the one in the options, else one that its adapter derives."""

import pytest

from kvstore.engine.label import EngineSources, engine_label
from kvstore.engine.options import Options, read_section
from kvstore.protocol.errors import ConfigError


def test_a_chosen_name_is_preferred_and_a_rank_is_part_of_the_name() -> None:
    sources = EngineSources("tcp://*:5557", "", "tcp://*:5558")
    label = engine_label("p1", "*:8000", "start", 1, sources, 16)

    assert label is not None
    assert (label.name, label.chosen, label.block_tokens) == ("p1/dp1", True, 16)
    assert (label.events, label.events_replay) == ("tcp://*:5557", "tcp://*:5558")
    derived = engine_label("", "*:8000", "start", None, sources, 16)
    assert derived is not None
    assert (derived.name, derived.chosen, derived.instance) == ("*:8000", False, label.instance)
    other = engine_label("", "*:8000", "another start", None, sources, 16)
    assert other is not None
    assert other.instance != label.instance
    assert engine_label("", "", "start", 1, sources, 16) is None


@pytest.mark.parametrize("name", ["a b", "a/b", "a:1", "a" * 65, "a\n"])
def test_a_name_that_the_conductor_would_refuse_is_refused_by_the_adapter(name) -> None:
    assert read_section({"engine": "p-1.a"}, Options, "where").engine == "p-1.a"
    with pytest.raises(ConfigError, match="where: engine: "):
        read_section({"engine": name}, Options, "where")
