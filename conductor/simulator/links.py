"""Links whose bytes in flight share the bandwidth. Pure.

A transfer goes over several links at once (the sender's, the receiver's), and is as fast as its
share of the slowest: each link gives all its transfers the same.
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

Link = Hashable
"""Names a link: a node's NIC in one direction, its memory, its disk."""


@dataclass(slots=True)
class _Transfer:
    links: tuple[Link, ...]
    left: float
    rate: float = 0.0


class Links:
    """The transfers that are under way, on all links.

    Args:
        bandwidths: bytes a second of each link, more than 0.
    """

    def __init__(self, bandwidths: Mapping[Link, float]) -> None:
        assert all(one > 0 for one in bandwidths.values())
        self._bandwidths = bandwidths
        self._transfers: dict[int, _Transfer] = {}
        self._shared: Counter[Link] = Counter()
        self._now = 0.0
        self._next = 0

    def __len__(self) -> int:
        return len(self._transfers)

    @property
    def ends_at(self) -> float | None:
        """When the next transfer ends, if none starts before; None = there is none."""
        return min(
            (self._now + one.left / one.rate for one in self._transfers.values()), default=None
        )

    def seconds(self, links: tuple[Link, ...], count_bytes: float) -> float:
        """How long a transfer would take that starts now, if nothing else changed."""
        return count_bytes / min(self._bandwidths[one] / (self._shared[one] + 1) for one in links)

    def start(self, links: tuple[Link, ...], count_bytes: float, now: float) -> int:
        """Start a transfer of at least one byte; returns its number."""
        assert count_bytes > 0
        self._pass(now)
        self._next += 1
        self._transfers[self._next] = _Transfer(links, count_bytes)
        self._shared.update(links)
        self._share()
        return self._next

    def stop(self, number: int, now: float) -> None:
        """End a transfer early."""
        self._pass(now)
        self._shared.subtract(self._transfers.pop(number).links)
        self._share()

    def ended(self, now: float) -> list[int]:
        """Remove the transfers that have ended by now; returns their numbers, sorted."""
        self._pass(now)
        # What is left of a byte after so many floating-point steps does not count.
        done = [n for n, one in self._transfers.items() if one.left < max(1.0, one.rate * 1e-9)]
        for number in done:
            self._shared.subtract(self._transfers.pop(number).links)
        if done:
            self._share()
        return done

    def _pass(self, now: float) -> None:
        seconds = now - self._now
        assert seconds >= 0
        for one in self._transfers.values():
            one.left = max(0.0, one.left - one.rate * seconds)
        self._now = now

    def _share(self) -> None:
        for one in self._transfers.values():
            one.rate = min(self._bandwidths[link] / self._shared[link] for link in one.links)

    def check(self) -> None:
        """Assert that no link carries more than it can."""
        used: Counter[Link] = Counter()
        for one in self._transfers.values():
            for link in one.links:
                used[link] += one.rate  # type: ignore[assignment]
        assert all(rate <= self._bandwidths[link] * (1 + 1e-6) for link, rate in used.items())
