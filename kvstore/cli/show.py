"""Prints answers of a node as tables."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from io import TextIOWrapper
from typing import Any, Final

from msgspec import Struct, structs, to_builtins
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from kvstore.protocol.counts import (
    HostSizes,
    Latency,
    NodeStats,
    SessionCounts,
    SpaceCounts,
    SsdCounts,
    TierList,
)
from kvstore.protocol.explanation import Explanation
from kvstore.protocol.sizes import exact, rounded
from kvstore.server.answers import (
    Configuration,
    EngineRow,
    JobList,
    JobRow,
    PageDetail,
    PageList,
    PageRow,
    PinList,
    PromptPart,
    SessionList,
    SessionRow,
    SpaceList,
    SpaceRow,
)

_PIPED_COLUMNS: Final = 240
"""In a pipe keys must not be cut."""
LABEL_DIGITS: Final = 12
"""Digits of a space's label that are shown."""
_UNKNOWN: Final = "unknown"
"""Of what an older node does not tell."""
_REVISION_CHARACTERS: Final = 12
_KEY_DIGITS: Final = 16
"""Digits of a key that are shown in a tree."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise, so that the command ends in the same way as for JSON."""
        raise BrokenPipeError


def console() -> Console:
    """The console for answers."""
    if isinstance(sys.stdout, TextIOWrapper):  # it may not have all characters of names
        sys.stdout.reconfigure(errors="backslashreplace")
    width = None if sys.stdout.isatty() else _PIPED_COLUMNS
    return _Console(
        width=width, markup=False, emoji=False
    )  # names are chosen by engines: no markup


def stats(answer: NodeStats, console: Console) -> None:
    """Version, hit rate, sizes, spaces and sessions of a node."""
    counts = answer.counts
    table = Table(title=f"node {answer.node}", show_header=False)
    for name, value in (
        ("version", answer.version or _UNKNOWN),
        ("up for", duration(answer.uptime_s) if answer.uptime_s else _UNKNOWN),
        ("hit rate", f"{hit_rate(counts)} since the start"),
        ("pages", f"{answer.pages:,}"),
        *_count_rows(counts),
        ("policy", answer.policy or _UNKNOWN),
        ("core", answer.core or _UNKNOWN),
        ("mover", answer.mover),
        *_lookup_rows(answer),
        *_memory_rows(answer.host),
        *_ssd_rows(answer.ssd),
    ):
        table.add_row(name, cell(value))
    console.print(table)
    spaces(answer, console)
    sessions(answer, console)


def hit_rate(counts: dict[str, int]) -> str:
    """The fraction of looked-up pages that were hits."""
    asked = counts.get("lookup_pages", 0)
    if not asked:
        return "no lookups"
    return f"{counts.get('hit_pages', 0) / asked:.1%} of {asked:,} pages"


def _count_rows(counts: dict[str, int]) -> list[tuple[str, str]]:
    """Pages stored, loaded, dropped and requests refused since the start, if any."""

    def by_cause(prefix: str) -> str:
        named = sorted(name for name in counts if name.startswith(prefix) and counts[name])
        return ", ".join(f"{name.removeprefix(prefix)} {counts[name]:,}" for name in named)

    rows = []
    if pages := counts.get("stored_pages", 0):
        size = rounded(counts["stored_bytes"])
        rows.append(("stored", f"{pages:,} pages, {size} since the start"))
    if loaded := counts.get("loaded_bytes", 0):
        rows.append(("loaded", f"{rounded(loaded)} since the start"))
    if left := by_cause("removed_"):
        rows.append(("pages dropped", left))
    if refused := by_cause("refused_"):
        rows.append(("refused", refused))
    return rows


def _lookup_rows(answer: NodeStats) -> list[tuple[str, str]]:
    """Tiers of hits, and latencies; an older node has none."""
    rows: list[tuple[str, str]] = []
    tiers = {
        "memory": sum(one.host_pages for one in answer.lookups),
        "SSDs": sum(one.ssd_pages for one in answer.lookups),
        "miss": sum(one.missed_pages for one in answer.lookups),
    }
    if asked := sum(tiers.values()):
        shares = (f"{words} {pages / asked:.1%}" for words, pages in tiers.items())
        rows.append(("found in", ", ".join(shares)))
    for name, latency in answer.latencies.items():
        if latency.count:
            half, most = (_quantile(answer, latency, share) for share in (0.5, 0.99))
            samples = f"{latency.count:,} sample{'' if latency.count == 1 else 's'}"
            times = f"p50 {half}, p99 {most}, {samples}"
            rows.append((name.replace("_", " "), times))
    return rows


def _quantile(answer: NodeStats, latency: Latency, share: float) -> str:
    """The bucket bound of a quantile."""
    left = share * latency.count
    for bound, count in zip(answer.latency_bounds_s, latency.buckets, strict=False):
        left -= count
        if left <= 0:
            return f"≤ {bound * 1e3:g} ms"
    return f"> {answer.latency_bounds_s[-1] * 1e3:g} ms"


def _memory_rows(host: HostSizes) -> list[tuple[str, str]]:
    used = host.capacity_bytes - host.free_bytes
    rows = [("memory", f"{rounded(used)} of {rounded(host.capacity_bytes)} in use")]
    states = {
        name.removesuffix("_bytes"): value
        for name, value in structs.asdict(host).items()
        if name not in ("capacity_bytes", "free_bytes") and value
    }
    if states:
        rows.append(("", ", ".join(f"{name} {rounded(value)}" for name, value in states.items())))
    return rows


def _ssd_rows(ssd: SsdCounts | None) -> list[tuple[str, str]]:
    if ssd is None:
        return []
    used, capacity = rounded(ssd.used_bytes), rounded(ssd.capacity_bytes)
    state = "DEGRADED, see kvstore tiers" if ssd.degraded else "in use"
    kinds = f"live {rounded(ssd.live_bytes)}, dead {rounded(ssd.dead_bytes)}"
    return [("SSD tier", f"{used} of {capacity} {state}"), ("", kinds)]


def spaces(answer: NodeStats | SpaceList, console: Console) -> None:
    """Spaces, two lines each: identity, then sizes."""
    every: Sequence[SpaceCounts | SpaceRow] = answer.spaces
    console.print(f"{len(every)} space{'' if len(every) == 1 else 's'}",
                  style="italic", highlight=False)  # fmt: skip
    if every:
        console.print(f"{'space':<{LABEL_DIGITS}}  model\n{'pages':>9}  {'memory':>10}  "
                      f"{'SSD':>10}  a page", style="bold", highlight=False)  # fmt: skip
    for one in every:
        console.print(
            Text.assemble((one.space[:LABEL_DIGITS], "bold"), f"  {cell(identity(one))}"),
            soft_wrap=True,
        )
        shards = one.shards if isinstance(one, SpaceCounts) else len(one.shards)
        on_ssd = rounded(one.ssd_bytes) if one.ssd_bytes else "-"
        line = f"{one.pages:>9,}  {rounded(one.host_bytes):>10}  {on_ssd:>10}  "
        line += f"{one.page_tokens} tokens, {one.kv_dtype}"
        line += f", {shards} shards" if shards != 1 else ""
        if limits := _limits(one):
            fits = len(f"{line}; {limits}") <= console.width
            line += f"; {limits}" if fits else f"\n{'':>11}{limits}"
        console.print(line, highlight=False, soft_wrap=True)


def _limits(space: SpaceCounts | SpaceRow) -> str:
    """The limits of a space as text; statistics do not tell them."""
    if isinstance(space, SpaceCounts):
        return ""
    return "; ".join(
        f"{words} {rounded(size_bytes)}"
        for size_bytes, words in (
            (space.quota_bytes, "quota"), (space.reserved_bytes, "reserved"),
            (space.ssd_quota_bytes, "SSD quota"), (space.ssd_reserved_bytes, "SSD reserved"),
        )
        if size_bytes
    )  # fmt: skip


def identity(space: SpaceCounts | SpaceRow) -> str:
    """The identity of a space as text: its model, and other fields that are not default."""
    apart = [
        f"{name} {value}"
        for name, value, usual in (
            ("tenant", space.tenant, "default"),
            ("revision", space.revision[:_REVISION_CHARACTERS], ""), ("scope", space.scope, ""),
        )
        if value != usual
    ]  # fmt: skip
    return space.model + (f" ({', '.join(apart)})" if apart else "")


def _engine(session: SessionCounts | SessionRow) -> str:
    """The engine's name of a session, in the statistics or in a listing; empty = none."""
    engine = session.engine
    return engine.name if isinstance(engine, EngineRow) else engine or ""


def sessions(answer: NodeStats | SessionList, console: Console) -> None:
    """Engines."""
    every: Sequence[SessionCounts | SessionRow] = answer.sessions
    if not every:
        console.print("no engine is connected", style="italic", highlight=False)
        return
    rows = (
        [
            _engine(one) or ("(node)" if one.peer else "-"), one.name, one.tenant,
            one.processes if isinstance(one, SessionCounts) else len(one.processes),
            rounded(one.used_bytes), rounded(one.quota_bytes),
        ]
        for one in every
    )  # fmt: skip
    table(console, "sessions", ("engine", "session", "tenant", "processes", "holds", "quota"), rows)


def pages(answer: PageList, console: Console) -> None:
    """Pages of a listing."""
    rows = (
        [
            one.key, _tiers(one), len(one.shards), one.hits, seconds(one.stored_s_ago),
            seconds(one.used_s_ago), one.children,
        ]
        for one in answer.pages
    )  # fmt: skip
    columns = ("key", "tiers", "shards", "hits", "stored ago", "used ago", "children")
    table(console, f"{len(answer.pages)} pages", columns, rows)
    if answer.next is not None:
        console.print("there is more: raise --limit")


def _tiers(page: PageRow) -> str:
    """Every tier that has a page of this key."""
    found = {tier for shard in page.shards.values() for tier in shard.tiers}
    return ", ".join(sorted(found)) or page.tier


def page(answer: PageDetail, console: Console) -> None:
    """One page."""
    _values({k: v for k, v in to_builtins(answer).items() if k != "shards"}, console)
    rows = (
        [number, one.state, ", ".join(one.tiers), rounded(one.bytes), one.digest or ""]
        for number, one in answer.shards.items()
    )
    table(console, "shards", ("shard", "state", "tiers", "bytes", "digest"), rows)


def tokens(answer: PromptPart, console: Console) -> None:
    """The token ids of some pages, ready for ``kvstore explain --tokens``."""
    for one in answer.prompt:
        ids = "not known" if one.tokens is None else ",".join(map(str, one.tokens))
        console.print(f"page {one.depth}  {one.key[:_KEY_DIGITS]}  {ids}", soft_wrap=True)


def tree(answer: PageList, console: Console) -> None:
    """A part of the prefix tree; keys are shortened if the terminal is narrow."""
    root = Tree("pages")
    branches: dict[str, Tree] = {}
    depths = {"": 0}
    labels = []
    for one in answer.pages:
        depth = depths[one.key] = depths.get(one.parent or "", 0) + 1
        labels.append((depth, one, f"  {_tiers(one)}  {one.hits} hits"))
    fits = all(4 * depth + len(one.key + said) <= console.width for depth, one, said in labels)
    for _, one, said in labels:
        key = one.key if fits else one.key[:_KEY_DIGITS]
        branches[one.key] = branches.get(one.parent or "", root).add(key + said)
    console.print(root)
    above = {one.parent for one in answer.pages}
    if answer.next is not None:
        console.print("there is more: raise --limit, or give a key to begin at")
    elif any(one.children and one.key not in above for one in answer.pages):
        console.print("deeper pages exist: raise --depth, or give a key to begin at")


def tiers(answer: TierList, console: Console) -> None:
    """Tiers."""
    for tier in to_builtins(answer.tiers):
        table = Table(title=f"tier {tier['tier']}", show_header=False)
        for name, text in _flat({k: v for k, v in tier.items() if k != "tier"}):
            table.add_row(name, text)
        console.print(table)


def config(answer: Configuration, console: Console) -> None:
    """Configured values."""
    rows = ([one.key, _configured(one.key, one.value), one.source] for one in answer.values)
    table(console, "configuration", ("key", "value", "source"), rows)


def _configured(key: str, value: object) -> str:
    """A value in the syntax of the configuration."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and "bytes" in key.rpartition(".")[2].split("_"):
        return exact(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def pins(answer: PinList, console: Console) -> None:
    """Operator pins."""
    rows = (
        [one.pin, one.tier, one.space[:LABEL_DIGITS], one.key, one.pages,
         rounded(one.bytes), seconds(one.ends_in_s)]
        for one in answer.pins
    )  # fmt: skip
    title = f"pins: {rounded(answer.used_bytes)} of {rounded(answer.budget_bytes)}"
    title += f"; on SSD: {rounded(answer.ssd_used_bytes)} of {rounded(answer.ssd_budget_bytes)}"
    table(console, title, ("pin", "tier", "space", "key", "pages", "bytes", "ends in"), rows)


def job(answer: JobRow, console: Console) -> None:
    """One job."""
    jobs(JobList(jobs=[answer]), console)


def _result(result: dict[str, Any]) -> str:
    """What a job reports, without what is empty, such as the reason why nothing was left out."""
    shown = {name: cell(value) for name, value in result.items() if value != ""}
    if "kept" in shown and (pinned := shown.pop("pinned", "")):
        shown["kept"] += f" ({pinned} pinned)"
    return ", ".join(f"{name} {text}" for name, text in shown.items())


def jobs(answer: JobList, console: Console) -> None:
    """Jobs."""
    rows = (
        [
            one.job, one.kind, one.state, f"{one.done} of {one.total}",
            _result(one.result),
            one.error.message if one.error is not None else "",
        ]
        for one in answer.jobs
    )  # fmt: skip
    table(console, "jobs", ("job", "kind", "state", "done", "result", "error"), rows)


def explanation(answer: Explanation, console: Console) -> None:
    """Why a page is a hit or not."""
    at: Explanation | None = answer
    while at is not None:
        console.print(Text.assemble((at.verdict, "bold"), f": {at.text}"))
        console.print(f"  page {at.key}", highlight=False)
        if at.space:
            console.print(f"  space {at.space}", highlight=False)
        for peer, shards in sorted(at.peers.items()):
            console.print(f"  node {cell(peer)} has it, shards {', '.join(map(str, shards))}",
                          highlight=False)  # fmt: skip
        for one in at.differs:
            console.print(f"  {one['field']}: asked {one['asked']!r}, stored {one['there']!r}")
        left = {name: value for name, value in dict(at.left or {}).items() if value != ""}
        for name, text in _flat(left):
            if text:
                console.print(f"  {name}: {text}", highlight=False)
        at = at.head


def anything(answer: Struct, console: Console) -> None:
    """A table of names and values."""
    _values(to_builtins(answer), console)


def _values(values: dict[str, Any], console: Console) -> None:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, text in _flat(values):
        table.add_row(name, text)
    console.print(table)


def seconds(value: float | None) -> str:
    """A time span as text; empty for None."""
    return "" if value is None else f"{value:,.1f} s"


def duration(value: float) -> str:
    """A duration as text, in its two largest units: ``3 d 4 h``."""
    left, parts = int(value), list[str]()
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
        elif parts:
            break
    return " ".join(parts[:2])


def _flat(values: dict[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    """Names and values as text; nested objects get dotted names."""
    for name, value in values.items():
        label = f"{within}{name}"
        parts = value if isinstance(value, list) else [value]
        if value and all(isinstance(part, dict) for part in parts):
            for at, part in enumerate(parts):
                yield from _flat(part, f"{label}.{at}." if isinstance(value, list) else f"{label}.")
        elif value is None or value in ([], {}):
            yield label, ""
        elif isinstance(value, list):
            yield label, ", ".join(map(cell, value))
        elif name == "bytes" or name.endswith("_bytes"):
            yield label, rounded(value)
        elif isinstance(value, float) and name.endswith(("_s", "_s_ago")):
            yield label, seconds(value)
        else:
            yield label, cell(value)


def cell(value: object) -> str:
    """A value as text; unprintable characters are escaped."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]
) -> None:
    """Print rows; a cell is never cut.

    Args:
        console: where.
        title: above the rows.
        columns: their names.
        rows: values of each row.
    """
    made = Table(title=title)
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*map(cell, row))
    console.print(made)
