"""Transfers of a simulation, and the callbacks at their ends. Pure."""

from collections.abc import Callable

from conductor.simulator.links import Link, Links


class Transfers:
    """All transfers over the links.

    Args:
        links: used by nobody else.
        at: lets a function be called at a time, with a number.
        clock: the time.

    Attributes:
        links: what they go over.
    """

    def __init__(
        self,
        links: Links,
        at: Callable[[float, Callable[[int], None], int], None],
        clock: Callable[[], float],
    ) -> None:
        self.links = links
        self._at = at
        self._clock = clock
        self._then: dict[int, Callable[[], None]] = {}
        self._turn = 0  # makes older events void

    def start(self, links: tuple[Link, ...], size: float, then: Callable[[], None]) -> int:
        """Start one of at least a byte; returns its number. ``then`` is called at its end."""
        number = self.links.start(links, size, self._clock())
        self._then[number] = then
        self._plan()
        return number

    def stop(self, number: int) -> None:
        """End one early; nobody is called."""
        self.links.stop(number, self._clock())
        del self._then[number]
        self._plan()

    def _plan(self) -> None:
        self._turn += 1
        ends_at = self.links.ends_at
        if ends_at is not None:
            self._at(max(ends_at, self._clock()), self._moved, self._turn)

    def _moved(self, turn: int) -> None:
        if turn != self._turn:
            return
        for number in self.links.ended(self._clock()):
            self._then.pop(number)()
        self._plan()

    def check(self, moving: list[int]) -> None:
        """Assert that exactly these are under way."""
        self.links.check()
        assert sorted(moving) == sorted(self._then)
        assert len(moving) == len(self.links)
