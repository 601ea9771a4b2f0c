"""How fast each peer delivers pages, and which peers delivered nothing recently. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvstore.protocol.counts import PeerCounts

RATE_DEFAULT: Final = 100e6
"""Assumed bytes per second of a peer without measurements: a slow network."""
START_S: Final = 0.005
"""Duration of a fetch besides the transfer: a few round trips."""
SAMPLE_NS: Final = 50_000_000
"""Interval of rate samples of a peer that is never idle."""
AWAY_NS = 1_000_000_000
"""How long a peer that delivered nothing, and did not say that it has nothing, is not asked."""
PEERS_MAX: Final = 64
_OLD_SHARE: Final = 0.5
"""Weight of earlier measurements in each new rate."""


@dataclass(slots=True)
class PeerRate:
    """One peer.

    Attributes:
        bytes_per_s: while it delivered pages; 0 = no measurement yet.
        jobs: in progress.
        since_ns: start of the current sample.
        size_bytes: bytes received in the current sample.
        away_until_ns: it delivered nothing, and is not asked before.
        pages: pages delivered in total.
        bytes: bytes of the delivered pages.
        missing_pages: pages that were requested and not delivered.
        retried_pages: missing pages that were then requested from another peer.
        failed_jobs: jobs that delivered less than was requested.
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
    """All known peers; beyond :data:`PEERS_MAX` the first ones are forgotten."""

    def __init__(self) -> None:
        self._peers: dict[str, PeerRate] = {}

    def began(self, peer: str, now_ns: int) -> None:
        """A job of a peer starts."""
        known = self._peers.get(peer)
        if known is None:
            idle = next((name for name, one in self._peers.items() if not one.jobs), None)
            if len(self._peers) >= PEERS_MAX and idle is not None:
                del self._peers[idle]
            known = self._peers[peer] = PeerRate()
        if not known.jobs:
            known.since_ns, known.size_bytes = now_ns, 0
        known.jobs += 1

    def ended(
        self, peer: str, pages: int, missing: int, page_bytes: int, now_ns: int, *, answered: bool
    ) -> None:
        """A job of a peer has ended, with ``pages`` pages delivered and ``missing`` not.

        ``answered``: the peer has said which of them it has; whoever asked for others was wrong.
        """
        known = self._peers[peer]
        known.jobs -= 1
        assert known.jobs >= 0
        known.pages += pages
        known.bytes += pages * page_bytes
        known.missing_pages += missing
        known.size_bytes += pages * page_bytes
        known.failed_jobs += missing > 0
        if missing and not (pages or answered):
            known.away_until_ns = now_ns + AWAY_NS
        took_ns = now_ns - known.since_ns
        if known.size_bytes and took_ns > 0 and (not known.jobs or took_ns >= SAMPLE_NS):
            rate = known.size_bytes * 1e9 / took_ns
            old = known.bytes_per_s or rate
            known.bytes_per_s = _OLD_SHARE * old + (1 - _OLD_SHARE) * rate
            known.since_ns, known.size_bytes = now_ns, 0

    def retried(self, peer: str, pages: int) -> None:
        """Pages that a peer did not deliver are requested from another one."""
        known = self._peers.get(peer)
        if known is not None:
            known.retried_pages += pages

    def of(self, peer: str) -> float:
        """Expected bytes per second."""
        known = self._peers.get(peer)
        return known.bytes_per_s or RATE_DEFAULT if known is not None else RATE_DEFAULT

    def is_away(self, peer: str, now_ns: int) -> bool:
        """Whether a peer delivered nothing a moment ago."""
        known = self._peers.get(peer)
        return known is not None and now_ns < known.away_until_ns

    def stats(self, unsettled: Mapping[str, int]) -> dict[str, PeerCounts]:
        """The measurements of each peer; ``unsettled``: lost reads whose bytes may arrive."""
        return {
            name: PeerCounts(
                bytes_per_s=round(one.bytes_per_s), jobs=one.jobs,
                unsettled_jobs=unsettled.get(name, 0), fetched_pages=one.pages,
                fetched_bytes=one.bytes, missing_pages=one.missing_pages,
                retried_pages=one.retried_pages, failed_jobs=one.failed_jobs,
            )
            for name, one in self._peers.items()
        }  # fmt: skip
