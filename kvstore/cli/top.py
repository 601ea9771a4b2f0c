"""``kvstore top``: live rates and sizes of a node."""

import json
import sys
import threading
from time import monotonic
from typing import Final

from msgspec import Struct, to_builtins
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvstore.cli.remote import Remote
from kvstore.cli.show import cell, console
from kvstore.protocol.counts import NodeStats, SsdCounts
from kvstore.protocol.errors import PeerUnreachable
from kvstore.protocol.sizes import rounded

_PAUSE: Final = threading.Event()
"""Never set; waiting for it is a pause."""
_INTERVAL_MIN_S: Final = 0.1


def run(node: Remote, *, once: bool, as_json: bool, seconds: float) -> int:
    """Print one frame, or frames until interrupted.

    Args:
        node: the node to ask.
        once: print one frame and end.
        as_json: print that frame as JSON.
        seconds: time between frames.
    """
    seconds = max(_INTERVAL_MIN_S, seconds)
    before, since = node.get("/v1/stats", NodeStats).value, monotonic()
    if once or as_json:
        _PAUSE.wait(min(seconds, 1.0))
        rates = frame(before, node.get("/v1/stats", NodeStats).value, monotonic() - since)
        if as_json:
            sys.stdout.write(json.dumps(to_builtins(rates), indent=2) + "\n")
        else:
            console().print(_drawn(rates))
        return 0
    screen = console()
    if not screen.is_terminal:  # a file or a pipe: print one frame after the other
        while True:
            _PAUSE.wait(seconds)
            after, now = node.get("/v1/stats", NodeStats).value, monotonic()
            screen.print(_drawn(frame(before, after, now - since)))
            before, since = after, now
    with Live(console=screen, auto_refresh=False, screen=True) as live:
        while True:
            _PAUSE.wait(seconds)
            try:
                after, now = node.get("/v1/stats", NodeStats).value, monotonic()
            except PeerUnreachable as error:  # it may come back: keep watching
                live.update(Text(f"{error}"), refresh=True)
                continue
            live.update(_drawn(frame(before, after, now - since)), refresh=True)
            before, since = after, now


class SsdRates(Struct, frozen=True):
    """The SSD tier in one frame."""

    used_bytes: int
    capacity_bytes: int
    written_gb_per_s: float
    read_gb_per_s: float
    write_amplification: float
    degraded: bool


class SessionUse(Struct, frozen=True):
    """Slot bytes that a session holds."""

    name: str
    used_bytes: int
    quota_bytes: int


class Frame(Struct, frozen=True, kw_only=True):
    """Rates between two statistics, and sizes in the later one; ``hit_rate`` None = no lookups."""

    node: str
    hit_rate: float | None
    lookup_pages_per_s: float
    in_gb_per_s: float
    out_gb_per_s: float
    evictions_per_s: float
    corrupt: int
    pages: int
    host_used_bytes: int
    host_capacity_bytes: int
    host_pinned_bytes: int
    host_limbo_bytes: int
    ssd: SsdRates | None
    loop_lag_ms: float
    sessions: list[SessionUse]


def frame(before: NodeStats, after: NodeStats, seconds: float) -> Frame:
    """Rates between two statistics of one node.

    Args:
        before: the earlier one; if it is of another boot, all counts start at 0.
        after: the later one.
        seconds: time between them.
    """
    same, seconds = before.boot == after.boot, max(seconds, 1e-9)
    old = before.counts if same else {}

    def rate(name: str) -> float:
        return (after.counts.get(name, 0) - old.get(name, 0)) / seconds

    asked, host = rate("lookup_pages"), after.host
    return Frame(
        node=after.node, hit_rate=rate("hit_pages") / asked if asked else None,
        lookup_pages_per_s=asked, in_gb_per_s=rate("stored_bytes") / 1e9,
        out_gb_per_s=rate("loaded_bytes") / 1e9, evictions_per_s=rate("removed_evicted"),
        corrupt=after.counts.get("removed_corrupt", 0), pages=after.pages,
        host_used_bytes=host.capacity_bytes - host.free_bytes,
        host_capacity_bytes=host.capacity_bytes, host_pinned_bytes=host.pinned_bytes,
        host_limbo_bytes=host.limbo_bytes,
        ssd=_ssd_rates(before.ssd if same else None, after.ssd, seconds),
        loop_lag_ms=after.loop_lag_s * 1e3,
        sessions=[SessionUse(one.name, one.used_bytes, one.quota_bytes) for one in after.sessions],
    )  # fmt: skip


def _ssd_rates(
    before: SsdCounts | None, after: SsdCounts | None, seconds: float
) -> SsdRates | None:
    if after is None:
        return None
    written, read = after.written_bytes, after.read_bytes
    if before is not None:
        written, read = written - before.written_bytes, read - before.read_bytes
    return SsdRates(
        used_bytes=after.used_bytes, capacity_bytes=after.capacity_bytes,
        written_gb_per_s=written / seconds / 1e9, read_gb_per_s=read / seconds / 1e9,
        write_amplification=after.write_amplification, degraded=after.degraded,
    )  # fmt: skip


def _drawn(rates: Frame) -> Group:
    table = Table(title=f"node {rates.node}", show_header=False)
    hit = rates.hit_rate
    used, capacity = rates.host_used_bytes, rates.host_capacity_bytes
    for name, value in (
        ("hit rate", "no lookups" if hit is None else f"{hit:.1%}"),
        ("lookups", f"{rates.lookup_pages_per_s:,.0f} pages/s"),
        ("in", f"{rates.in_gb_per_s:.3f} GB/s"),
        ("out", f"{rates.out_gb_per_s:.3f} GB/s"),
        ("evictions", f"{rates.evictions_per_s:,.0f} pages/s"),
        ("corrupt pages", str(rates.corrupt)),
        ("pages", f"{rates.pages:,}"),
        ("host tier", f"{rounded(used)} of {rounded(capacity)} ({used / max(capacity, 1):.0%})"),
        (
            "pinned, limbo",
            f"{rounded(rates.host_pinned_bytes)}, {rounded(rates.host_limbo_bytes)}",
        ),
        *_ssd_rows(rates.ssd),
        ("loop lag", f"{rates.loop_lag_ms:.2f} ms"),
    ):
        table.add_row(name, value)
    sessions = Table("session", "holds", "quota", title="sessions")
    for one in rates.sessions:
        sessions.add_row(cell(one.name), rounded(one.used_bytes), rounded(one.quota_bytes))
    return Group(table, sessions)


def _ssd_rows(ssd: SsdRates | None) -> list[tuple[str, str]]:
    if ssd is None:
        return []
    used, capacity = ssd.used_bytes, ssd.capacity_bytes
    full = f"{rounded(used)} of {rounded(capacity)} ({used / max(capacity, 1):.0%})"
    return [
        ("SSD tier", full + ("; DEGRADED, see kvstore tiers" if ssd.degraded else "")),
        ("SSD writes", f"{ssd.written_gb_per_s:.3f} GB/s, each byte"
                       f" {ssd.write_amplification:.2f} times"),
        ("SSD reads", f"{ssd.read_gb_per_s:.3f} GB/s"),
    ]  # fmt: skip
