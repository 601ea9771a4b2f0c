"""Answers of a node as tables."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from io import TextIOWrapper
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

_PIPED_COLUMNS: Final = 240
"""Where nobody reads, keys must not be cut."""
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command, which ends the same way for JSON."""
        raise BrokenPipeError


def console() -> Console:
    """Where answers go."""
    if isinstance(sys.stdout, TextIOWrapper):  # names may have what the terminal's set has not
        sys.stdout.reconfigure(errors="backslashreplace")
    width = None if sys.stdout.isatty() else _PIPED_COLUMNS
    return _Console(
        width=width, markup=False, emoji=False
    )  # engines choose names: they are no code


def stats(answer: Any, console: Console) -> None:
    """Capacity, spaces and sessions."""
    memory = Table(title=f"node {answer['node']} ({answer['mover']})", show_header=False)
    for name, value in answer["host"].items():
        memory.add_row(name.removesuffix("_bytes"), size(value))
    console.print(memory)
    if ssd := answer["ssd"]:
        table = Table(title="SSD tier" + (", DEGRADED" if ssd["degraded"] else ""),
                      show_header=False)  # fmt: skip
        for name in ("capacity", "used", "live", "dead"):
            table.add_row(name, size(ssd[f"{name}_bytes"]))
        console.print(table)
    names = ("space", "model", "kv_dtype", "page_tokens", "tenant", "scope", "pages")
    rows = ([_short(one["space"]), *(one[name] for name in names[1:])] for one in answer["spaces"])
    _table(console, "spaces", [name.replace("_", " ") for name in names], rows)
    sessions(answer, console)


def spaces(answer: Any, console: Console) -> None:
    """Spaces and their limits."""
    rows = (
        [
            one["space"][:16], one["model"], one["revision"], one["kv_dtype"], one["page_tokens"],
            one["tenant"], one["scope"], len(one["shards"]), one["pages"], size(one["host_bytes"]),
            _limit(one["quota_bytes"]), _limit(one["reserved_bytes"]), size(one["ssd_bytes"]),
            _limit(one["ssd_quota_bytes"]), _limit(one["ssd_reserved_bytes"]),
        ]
        for one in answer["spaces"]
    )  # fmt: skip
    columns = ("space", "model", "revision", "dtype", "page tokens", "tenant", "scope", "shards",
               "pages", "in memory", "quota", "reserved", "on SSD", "SSD quota",
               "SSD reserved")  # fmt: skip
    _table(console, "spaces", columns, rows)


def sessions(answer: Any, console: Console) -> None:
    """Engines."""
    rows = (
        [
            one["name"], one["tenant"],
            one["processes"] if isinstance(one["processes"], int) else len(one["processes"]),
            size(one["used_bytes"]), size(one["quota_bytes"]),
        ]
        for one in answer["sessions"]
    )  # fmt: skip
    _table(console, "sessions", ("engine", "tenant", "processes", "holds", "quota"), rows)


def pages(answer: Any, console: Console) -> None:
    """Pages of a listing."""
    rows = (
        [
            one["key"], one["tier"], len(one["shards"]), one["hits"], seconds(one["stored_s_ago"]),
            seconds(one["used_s_ago"]), one["children"],
        ]
        for one in answer["pages"]
    )  # fmt: skip
    columns = ("key", "tier", "shards", "hits", "stored ago", "used ago", "children")
    _table(console, f"{len(answer['pages'])} pages", columns, rows)
    if answer["next"] is not None:
        console.print("there is more: raise --limit")


def page(answer: Any, console: Console) -> None:
    """One page."""
    anything({k: v for k, v in answer.items() if k != "shards"}, console)
    rows = (
        [number, one["state"], ", ".join(one["tiers"]), one["bytes"], one["digest"] or ""]
        for number, one in answer["shards"].items()
    )
    _table(console, "shards", ("shard", "state", "tiers", "bytes", "digest"), rows)


def tree(answer: Any, console: Console) -> None:
    """A part of the prefix tree."""
    root = Tree("pages")
    branches: dict[str, Tree] = {}
    for one in answer["pages"]:
        above = branches.get(one["parent"] or "", root)
        label = f"{one['key']}  {one['tier']}  {one['hits']} hits"
        branches[one["key"]] = above.add(label)
    console.print(root)
    if answer["next"] is not None:
        console.print("there is more: raise --limit, or name a key to begin at")


def tiers(answer: Any, console: Console) -> None:
    """Tiers."""
    for tier in answer["tiers"]:
        table = Table(title=f"tier {tier['tier']}", show_header=False)
        for name, text in _flat({k: v for k, v in tier.items() if k != "tier"}):
            table.add_row(name, text)
        console.print(table)


def config(answer: Any, console: Console) -> None:
    """Configured values."""
    rows = ([one["key"], one["value"], one["source"]] for one in answer["values"])
    _table(console, "configuration", ("key", "value", "source"), rows)


def pins(answer: Any, console: Console) -> None:
    """Operator pins."""
    rows = (
        [one["pin"], one["tier"], one["space"][:16], one["key"], one["pages"], size(one["bytes"]),
         seconds(one["ends_in_s"])]
        for one in answer["pins"]
    )  # fmt: skip
    title = f"pins: {size(answer['used_bytes'])} of {size(answer['budget_bytes'])}"
    title += f"; on SSD: {size(answer['ssd_used_bytes'])} of {size(answer['ssd_budget_bytes'])}"
    _table(console, title, ("pin", "tier", "space", "key", "pages", "bytes", "ends in"), rows)


def quotas(answer: Any, console: Console) -> None:
    """Limits of spaces."""
    if "quotas" not in answer:
        job(answer, console)
        return
    rows = (
        [one["space"], one["tier"], size(one["used_bytes"]), _limit(one["quota_bytes"]),
         _limit(one["reserved_bytes"])]
        for one in answer["quotas"]
    )  # fmt: skip
    _table(console, "limits", ("space", "tier", "used", "quota", "reserved"), rows)


def job(answer: Any, console: Console) -> None:
    """One job."""
    jobs({"jobs": [answer]}, console)


def jobs(answer: Any, console: Console) -> None:
    """Jobs."""
    rows = (
        [
            one["job"], one["kind"], one["state"], f"{one['done']} of {one['total']}",
            ", ".join(f"{name} {value}" for name, value in one["result"].items()),
            one["error"]["message"] if one["error"] else "",
        ]
        for one in answer["jobs"]
    )  # fmt: skip
    _table(console, "jobs", ("job", "kind", "state", "done", "result", "error"), rows)


def explanation(answer: Any, console: Console) -> None:
    """Why a page is a hit or not."""
    at: Any = answer
    while at is not None:
        console.print(Text.assemble((at["verdict"], "bold"), f": {at['text']}"))
        console.print(f"  page {at['key']}", highlight=False)
        if at["space"]:
            console.print(f"  space {at['space']}", highlight=False)
        for one in at["differs"]:
            console.print(f"  {one['field']}: asked {one['asked']!r}, stored {one['there']!r}")
        left = {name: value for name, value in (at["left"] or {}).items() if value != ""}
        for name, text in _flat(left):
            if text:
                console.print(f"  {name}: {text}", highlight=False)
        at = at["head"]


def anything(answer: Any, console: Console) -> None:
    """Names and values."""
    table = Table(show_header=False)
    for name, text in _flat(answer):
        table.add_row(name, text)
    console.print(table)


def size(value: float) -> str:
    """Bytes for people."""
    scale = max(0, min((int(value).bit_length() - 1) // 10, len(_UNITS) - 1))
    return f"{value / 1024**scale:,.1f} {_UNITS[scale]}" if scale else f"{value:,.0f} B"


def seconds(value: float | None) -> str:
    """A time span for people; empty when there is none."""
    return "" if value is None else f"{value:,.1f} s"


def _flat(values: dict[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    """Names and values for people, those of nested objects under dotted names."""
    for name, value in values.items():
        label = f"{within}{name}"
        parts = value if isinstance(value, list) else [value]
        if value and all(isinstance(part, dict) for part in parts):
            for at, part in enumerate(parts):
                yield from _flat(part, f"{label}.{at}." if isinstance(value, list) else f"{label}.")
        elif value is None:
            yield label, ""
        elif name.endswith("_bytes"):
            yield label, size(value)
        elif isinstance(value, float) and name.endswith(("_s", "_s_ago")):
            yield label, seconds(value)
        else:
            yield label, cell(value)


def cell(value: object) -> str:
    """A value for people; what would move a terminal's cursor is shown as its code."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in str(value))


def _limit(value: int) -> str:
    return size(value) if value else ""


def _short(label: str) -> str:
    return label[:16]


def _table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]
) -> None:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")  # a key that is cut is none
    for row in rows:
        table.add_row(*map(cell, row))
    console.print(table)
