"""A node looks at itself: all that must hold of it, a stretch at a time, round after round. Pure.

See :mod:`kvstore.state.table.invariants` for what a stretch is.
"""

from collections.abc import Iterator

from kvstore.node.node import Node


class SelfCheck:
    """The rounds of one node.

    Attributes:
        rounds: how often everything was looked at.
        pages: nodes of the prefix trees that were looked at.
    """

    def __init__(self, node: Node) -> None:
        self.rounds = self.pages = 0
        self._node = node
        self._round = self._checks()

    def step(self) -> bool:
        """Look at one stretch; whether a round has ended.

        Raises:
            AssertionError: the state is broken; it tells what happened to the page concerned.
        """
        try:
            self.pages += next(self._round)
        except StopIteration:
            self._round = self._checks()
            self.rounds += 1
            return True
        except Exception as error:
            self._node.pages.story.explain(error)
            raise
        return False

    def run(self) -> None:
        """Look at everything now; a round that is under way goes on later."""
        under_way, self._round = self._round, self._checks()
        while not self.step():
            pass
        self._round = under_way

    def _checks(self) -> Iterator[int]:
        node = self._node
        yield from node.pages.checks()
        node.waiting.check()
        for token, session in list(node.sessions.items()):
            assert session.token == token
            for _ in session.checks():
                yield 0
