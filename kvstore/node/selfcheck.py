"""Checks of all invariants of one node, in short stretches, round after round. Pure.

See :mod:`kvstore.state.table.invariants` for what a stretch is.
"""

from collections.abc import Iterator

from kvstore.node.node import Node
from kvstore.state.table.invariants import checks


class SelfCheck:
    """The rounds of one node.

    Attributes:
        rounds: complete rounds.
        pages: nodes of the prefix trees that were checked.
    """

    def __init__(self, node: Node) -> None:
        self.rounds = self.pages = 0
        self._node = node
        self._round = self._checks()

    def step(self) -> bool:
        """Check one stretch; returns whether a round has ended.

        Raises:
            AssertionError: the state is broken; its note has the last events of the page concerned.
        """
        with self._node.pages.story.explaining():
            looked = next(self._round, None)
        self.pages += looked or 0
        if looked is None:
            self._round = self._checks()
            self.rounds += 1
        return looked is None

    def run(self) -> None:
        """Check everything now; a round that is under way continues later."""
        under_way, self._round = self._round, self._checks()
        while not self.step():
            pass
        self._round = under_way

    def _checks(self) -> Iterator[int]:
        node = self._node
        yield from checks(node.pages)
        node.waiting.check()
        for token, session in list(node.sessions.items()):
            assert session.token == token
            for _ in session.checks():
                yield 0
        if node.remote is not None:
            for _ in node.remote.checks():
                yield 0
