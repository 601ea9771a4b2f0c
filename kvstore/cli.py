"""``kvstore``: ask a node over HTTP what it holds. More verbs come with the admin API."""

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

_TIMEOUT_S = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a node's statistics; returns the process's exit status."""
    parser = argparse.ArgumentParser(prog="kvstore", description="Ask a node what it holds.")
    parser.add_argument("command", choices=["stats"], help="stats: capacity, pages, sessions")
    parser.add_argument("--url", default="http://127.0.0.1:7780", help="the node's HTTP address")
    parser.add_argument("--json", action="store_true", help="the answer as it came")
    options = parser.parse_args(arguments)
    try:
        with urllib.request.urlopen(f"{options.url}/v1/stats", timeout=_TIMEOUT_S) as answer:
            stats = json.load(answer)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        sys.stderr.write(f"kvstore: no node answers at {options.url} ({reason}); is it running?\n")
        return 1
    if options.json:
        sys.stdout.write(json.dumps(stats, indent=2) + "\n")
    else:
        _show(stats, Console())
    return 0


def _show(stats: dict[str, Any], console: Console) -> None:
    memory = Table(title=f"node {stats['node']} ({stats['mover']})", show_header=False)
    for name, size in stats["host"].items():
        memory.add_row(name.removesuffix("_bytes"), f"{size / 2**20:,.1f} MiB")
    console.print(memory)
    spaces = Table("model", "dtype", "page tokens", "tenant", "scope", "pages", title="spaces")
    for space in stats["spaces"]:
        names = ("model", "kv_dtype", "page_tokens", "tenant", "scope", "pages")
        spaces.add_row(*(str(space[name]) for name in names))
    console.print(spaces)
    sessions = Table("engine", "tenant", "processes", "holds", "quota", title="sessions")
    for session in stats["sessions"]:
        holds, quota = (
            f"{session[name] / 2**20:,.1f} MiB" for name in ("used_bytes", "quota_bytes")
        )
        sessions.add_row(
            session["name"], session["tenant"], str(session["processes"]), holds, quota
        )
    console.print(sessions)
