"""Goal: ranks that are processes agree on each request's state in one call a step, over gloo.

The tests that kill or stop a rank reduce over pipes (``rank_process``): gloo ends the others, too.
"""

import re
import sys
from pathlib import Path

from kvstore.handoff.ranks import RankPart
from kvstore.handoff.states import FailureCode, State
from tests.handoff.ranked import HEADS, LAYERS, ranked, whole_of

ROOMS = (1, 2, 3)
PROMPT_BLOCKS = 4
LATE_STEP = 20
PARTS = tuple(RankPart((0, LAYERS), (half, half + HEADS // 2)) for half in (0, HEADS // 2))


def test_the_ranks_of_decode_in_processes_of_their_own_end_each_request_in_the_same_step(
    spawn, wait_until, tmp_path: Path
):
    with ranked(PARTS, ()) as engines:
        children = [
            spawn(
                [sys.executable, "-m", "tests.handoff.decode_rank", str(rank),
                 engines.registry.url, str(tmp_path / "store")],
                env={"GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(2)
        ]  # fmt: skip
        for child in children:  # torch takes seconds, for which prefill would not wait
            child.wait_ready(r"imported", 50)
        tokens = PROMPT_BLOCKS * 8
        senders = {room: [one.sender(room, tokens) for one in engines.prefill] for room in ROOMS}
        for room in (1, 2):
            blocks = list(range(room * 8, room * 8 + PROMPT_BLOCKS))
            engines.push(senders[room], whole_of(room, PROMPT_BLOCKS), blocks)
        for child in children:
            child.wait_ready(r"held (.*)", 40)

        said = [dict(_rooms(child.report())) for child in children]
        assert said[0] == said[1], "both ranks end it in the same step, in the same way"
        states = {room: said[0][room][0] for room in ROOMS}
        assert states == {1: "SUCCESS", 2: "SUCCESS", 3: "FAILED"}
        assert [said[0][room][2] for room in (1, 2)] == ["True", "True"]
        assert int(said[0][2][1]) >= LATE_STEP, "the lowest is that of the rank that is late"
        assert int(said[0][3][1]) == LATE_STEP, "a failure is known in the step in which it is"
        assert all("held [False, False, False]" in child.report() for child in children)
        steps = {
            re.search(r"steps (\d+) reduced (\d+)", child.report()).groups() for child in children
        }
        ((made, reduced),) = steps
        assert made == reduced, "one call a step, at all ranks"
        wait_until(lambda: {one.state for one in senders[3]} == {State.FAILED})
        assert {one.failure.code for one in senders[3]} == {FailureCode.ABORTED}
        wait_until(lambda: {one.state for one in senders[1]} == {State.SUCCESS})


def _rooms(report: str) -> list[tuple[int, tuple[str, ...]]]:
    found = re.findall(r"room (\d) (\w+) (\d+) (\w+)", report)
    return [(int(room), tuple(rest)) for room, *rest in found]
