"""How fast each peer delivers pages, and which peers delivered nothing recently. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvstore.protocol.counts import PeerCounts

RATE_DEFAULT: Final = 100e6
"""Bytes per second of a peer that gave nothing yet: a slow network."""
START_S: Final = 0.005
"""What a fetch takes beside the bytes: a few messages to and fro."""
SAMPLE_NS: Final = 50_000_000
"""Of a peer that is never idle the rate is taken so often."""
AWAY_NS = 1_000_000_000
"""A peer that gave nothing is not asked for so long."""
PEERS_MAX: Final = 64
_OLD_SHARE: Final = 0.5
"""Weight of what was measured before, in each new rate."""


@dataclass(slots=True)
class PeerRate:
    """One peer.

    Attributes:
        bytes_per_s: while it gave pages; 0 = it gave none yet.
        jobs: under way.
        since_ns: the bytes came since then.
        size_bytes: what came since then.
        away_until_ns: it gave nothing, and is not asked before.
        pages: that came, altogether.
        bytes: of these pages.
        missing_pages: that were asked for and did not come.
        retried_pages: of these, pages that were then asked of another peer.
        failed_jobs: that brought less than was asked for.
    """

    bytes_per_s: float = 0.0
    jobs: int = 0
    since_ns: int = 0
    size_bytes: int = 0
    away_until_ns: int = 0
    pages: int = 0
    bytes: int = 0
    missing_pages: int = 0
    retried_pages: int = 0
    failed_jobs: int = 0


class PeerRates:
    """All peers of which something is known; beyond :data:`PEERS_MAX` the first are forgotten."""

    def __init__(self) -> None:
        self._peers: dict[str, PeerRate] = {}

    def began(self, peer: str, now_ns: int) -> None:
        """A job of a peer begins."""
        known = self._peers.get(peer)
        if known is None:
            idle = next((name for name, one in self._peers.items() if not one.jobs), None)
            if len(self._peers) >= PEERS_MAX and idle is not None:
                del self._peers[idle]
            known = self._peers[peer] = PeerRate()
        if not known.jobs:
            known.since_ns, known.size_bytes = now_ns, 0
        known.jobs += 1

    def ended(self, peer: str, pages: int, missing: int, page_bytes: int, now_ns: int) -> None:
        """A job of a peer has ended, with so many pages, and without so many."""
        known = self._peers[peer]
        known.jobs -= 1
        known.pages += pages
        known.bytes += pages * page_bytes
        known.missing_pages += missing
        known.size_bytes += pages * page_bytes
        known.failed_jobs += missing > 0
        if missing and not pages:
            known.away_until_ns = now_ns + AWAY_NS
        took_ns = now_ns - known.since_ns
        if known.size_bytes and took_ns > 0 and (not known.jobs or took_ns >= SAMPLE_NS):
            rate = known.size_bytes * 1e9 / took_ns
            old = known.bytes_per_s or rate
            known.bytes_per_s = _OLD_SHARE * old + (1 - _OLD_SHARE) * rate
            known.since_ns, known.size_bytes = now_ns, 0

    def retried(self, peer: str, pages: int) -> None:
        """Pages that a peer did not give are asked of another one."""
        known = self._peers.get(peer)
        if known is not None:
            known.retried_pages += pages

    def of(self, peer: str) -> float:
        """Bytes per second to expect."""
        known = self._peers.get(peer)
        return known.bytes_per_s or RATE_DEFAULT if known is not None else RATE_DEFAULT

    def is_away(self, peer: str, now_ns: int) -> bool:
        """Whether a peer gave nothing a moment ago."""
        known = self._peers.get(peer)
        return known is not None and now_ns < known.away_until_ns

    def stats(self, unsettled: Mapping[str, int]) -> dict[str, PeerCounts]:
        """A snapshot of each peer; ``unsettled``: its reads that may still bring bytes."""
        return {
            name: PeerCounts(
                bytes_per_s=round(one.bytes_per_s), jobs=one.jobs,
                unsettled_jobs=unsettled.get(name, 0), fetched_pages=one.pages,
                fetched_bytes=one.bytes, missing_pages=one.missing_pages,
                retried_pages=one.retried_pages, failed_jobs=one.failed_jobs,
            )
            for name, one in self._peers.items()
        }  # fmt: skip
