"""``python -m bench conductor``: what it measures is what it says."""

import pytest
import uvloop

from bench.conductor_decision import decided
from bench.conductor_front import INDEX_GONE, Added, added_ttft, ingest, servers, streams
from bench.conductor_schedule import ENGINES, scheduled

# The first loop of a process makes a pipe that stays: no test leaves it behind.
uvloop.new_event_loop().close()


@pytest.mark.parametrize("policy", ["longest-prefix", "cache-global", "earliest-first-token"])
def test_a_round_of_the_schedule_gives_one_place_to_one_of_those_who_wait(policy: str) -> None:
    times = scheduled(policy, 3)
    assert len(times.wall) == len(times.cpu) == 3
    assert all(cpu > 0 for cpu in times.cpu)
    assert ENGINES == 64


def test_every_token_comes_through_the_relay_and_the_conductor() -> None:
    with servers() as at:
        added = added_ttft(at, 0.2, 1)
        assert len(added.direct) == len(added.relayed) == len(added.through) == 20
        gone = added_ttft(at, 0.2, 2, INDEX_GONE)
        assert len(gone.through) == 20, "all were answered without an index"
        with ingest(at) as writing:
            relayed = streams(at, 3, 1.0, 1, prompts_per_s=1.0)
            assert writing.ask("stop") > 0
        for one in (*relayed.conductor, *relayed.relay):
            assert 0 <= one.on_time <= 1
            assert one.cpu_us >= 0


def test_every_decision_chooses_a_pair_while_the_index_is_written_to() -> None:
    found = decided(20_000, 0.2, lambda _: None)
    assert found.held == 0
    for times in (found.known, found.known_cpu, found.of_tokens, found.of_tokens_cpu):
        assert times
        assert min(times) > 0
    parts = zip(found.entry_cpu, found.known_cpu, strict=True)
    assert all(0 < entry < whole for entry, whole in parts), "the entry is a part of a decision"
    assert found.blocks_per_s > 0


@pytest.mark.parametrize("percent", [50, 99])
def test_what_is_added_is_the_difference_of_percentiles(percent: float) -> None:
    added = Added([1.0] * 100, [3.0] * 100, [6.0] * 100, [0.5])
    assert added.at(percent) == (5.0, 2.0)
