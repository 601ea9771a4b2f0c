"""Goal: a node with full SSDs counts no page as a hit that a reclaim has just taken away."""

from collections.abc import Callable
from typing import Any, TypeVar

from bench.node_alone import Clock, Engine, LoneNode
from kvstore.protocol.page import KEY_BYTES, PrefixKey
from kvstore.state.table.invariants import check
from kvstore.state.tree.match import longest_match

T = TypeVar("T")

PAGES = 512
RUN = 32
TAIL = 200
"""More pages than leave in one turn."""


class Watched(LoneNode):
    """A node of which a prompt is looked up after each turn in which pages leave before others."""

    def __init__(self) -> None:
        super().__init__(PAGES, "lru", Clock(), self.watch, at_once=False, ssd_pages=2 * PAGES)
        self.prompt = self.keys(RUN + TAIL)
        #: What a lookup found, and how many leading pages were there.
        self.found: list[tuple[int, int]] = []

    def watch(self, _name: str, call: Callable[..., T], *arguments: Any) -> T:
        """Take a turn, and look."""
        answer = call(*arguments)
        for space in self.desk.node.pages.spaces:
            if space.holes:
                keys = self.prompt
                there = [
                    space.index.get(PrefixKey(keys[at : at + KEY_BYTES]))
                    for at in range(0, len(keys), KEY_BYTES)
                ]
                ready = [bool(node and node.ready & 1) for node in there]
                leading = [*ready, False].index(False)
                self.found.append((longest_match(space, [0], keys).pages, leading))
                check(self.desk.node.pages)
        return answer


def test_a_prompt_whose_first_pages_a_reclaim_takes_is_missed_from_the_first_of_them_on():
    lone = Watched()
    engine = Engine(lone, 1)
    head, last = lone.prompt[: RUN * KEY_BYTES], lone.prompt[RUN * KEY_BYTES - KEY_BYTES :]
    engine.put(head)
    [space] = lone.desk.node.pages.spaces
    while space.node_of(PrefixKey(last[:KEY_BYTES])).memory:
        engine.put(lone.keys(RUN))
    engine.put(last[KEY_BYTES:], last[:KEY_BYTES])
    _, addresses = engine.acquire(last[KEY_BYTES:])
    assert len(addresses) == TAIL, "the tail stays in memory"

    while not lone.found:
        engine.put(lone.keys(8))
        assert lone.reclaimed() < 4 * 64, "the SSDs were written four times"

    assert [found for found, _ in lone.found] == [leading for _, leading in lone.found]
    assert min(leading for _, leading in lone.found) < RUN
