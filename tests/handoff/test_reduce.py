"""Goal: ranks that are processes agree on each request's state in one call a step."""

import re
import sys
import threading
from multiprocessing.connection import Connection, Listener

from kvstore.handoff.states import FailureCode, State
from tests.handoff.decode_rank import LATE_STEP, PARTS, PROMPT_BLOCKS, ROOMS
from tests.handoff.pair import SECRET
from tests.handoff.ranked import ranked, whole_of


class Reducer:
    """Takes the states of two ranks in each step, and gives both the lowest."""

    def __init__(self) -> None:
        self._listener = Listener(("127.0.0.1", 0), authkey=SECRET)
        self.port = self._listener.address[1]
        self.steps = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._thread.join(20)
        self._listener.close()
        assert not self._thread.is_alive()

    def _run(self) -> None:
        ranks: list[Connection] = [self._listener.accept() for _ in PARTS]
        try:
            while True:
                told = [one.recv() for one in ranks]
                lowest = [min(states) for states in zip(*(each for _, each in told), strict=True)]
                for one in ranks:
                    one.send(lowest)
                self.steps += 1
        except EOFError:
            for one in ranks:
                one.close()


def test_the_ranks_of_decode_in_processes_of_their_own_end_each_request_in_the_same_step(
    spawn, wait_until
):
    reducer = Reducer()
    with ranked(PARTS, ()) as engines:
        children = [
            spawn(
                [sys.executable, "-m", "tests.handoff.decode_rank", str(rank),
                 engines.registry.url, str(reducer.port)],
            )
            for rank in range(2)
        ]  # fmt: skip
        tokens = PROMPT_BLOCKS * 8
        senders = {room: [one.sender(room, tokens) for one in engines.prefill] for room in ROOMS}
        for room in (1, 2):
            blocks = list(range(room * 8, room * 8 + PROMPT_BLOCKS))
            engines.push(senders[room], whole_of(room, PROMPT_BLOCKS), blocks)
        for child in children:
            child.wait_ready(r"held (.*)", 40)
        reducer.close()

        said = [dict(_rooms(child.report())) for child in children]
        assert said[0] == said[1], "both ranks end it in the same step, in the same way"
        states = {room: said[0][room][0] for room in ROOMS}
        assert states == {1: "SUCCESS", 2: "SUCCESS", 3: "FAILED"}
        assert [said[0][room][2] for room in (1, 2)] == ["True", "True"]
        assert int(said[0][2][1]) >= LATE_STEP, "the lowest is that of the rank that is late"
        assert int(said[0][3][1]) == LATE_STEP, "a failure is known in the step in which it is"
        assert all("held [False, False, False]" in child.report() for child in children)
        wait_until(lambda: {one.state for one in senders[3]} == {State.FAILED})
        assert {one.failure.code for one in senders[3]} == {FailureCode.ABORTED}
        wait_until(lambda: {one.state for one in senders[1]} == {State.SUCCESS})


def _rooms(report: str) -> list[tuple[int, tuple[str, ...]]]:
    found = re.findall(r"room (\d) (\w+) (\d+) (\w+)", report)
    return [(int(room), tuple(rest)) for room, *rest in found]
