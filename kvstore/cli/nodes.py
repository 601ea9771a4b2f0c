"""Shows the nodes of a cluster, as one of them sees the others."""

from collections.abc import Iterator
from typing import Final

from rich.console import Console

from kvstore.cli.show import seconds, table
from kvstore.protocol.counts import MembershipState, NodeList, NodeRow, SharedDirectoryCounts
from kvstore.protocol.sizes import rounded

_JOINED: Final = {
    "joined": "it has sessions with all other nodes",
    "partly": "some other nodes have no session with it",
    "alone": "no other node has a session with it; it serves its own pages",
}

_MEMBER: Final = {
    "joining": "this node has not joined yet",
    "joined": "this node has joined",
    "away": "away; what it said last counts",
    "refused": "this node is refused and serves alone",
}
_NEVER_JOINED: Final = "away; this node has not joined since its start, and knows no other nodes"


def nodes(answer: NodeList, console: Console) -> None:
    """This node, the index of others' pages, and a row for each other node."""
    if not answer.cluster:
        console.print(
            f"node {answer.node} is alone: cluster.name is empty", style="italic",
            highlight=False,
        )  # fmt: skip
        return
    console.print(
        f"node {answer.node} of cluster {answer.cluster} at {answer.endpoint}, boot"
        f" {answer.boot}: {_JOINED[answer.joined]}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if said := _membership(answer.membership):
        console.print(said, highlight=False, soft_wrap=True)
    if (index := answer.index) is not None:
        console.print(
            f"index: {index.entries:,} of {index.entries_max:,} pages,"
            f" {index.left_out:,} left out; {rounded(index.resident_bytes)} resident;"
            f" {index.restarts} restarts",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    if (shared := answer.shared) is not None:
        console.print(_shared(shared), highlight=False, soft_wrap=True)
    for what, left in (
        ("not followed, too many nodes", ", ".join(answer.not_followed)),
        ("not admitted", _counts(answer.not_admitted)),
    ):
        if left:
            console.print(f"{what}: {left}", highlight=False, soft_wrap=True)
    columns = ("node", "session", "its pages", "index", "reads", "pages read", "speed")
    rows = [_row(one) for one in answer.nodes]
    if rows:
        table(console, "other nodes", columns, rows)
    else:
        console.print("there is no other node", style="italic", highlight=False)
    for line in _troubles(answer.nodes):
        console.print(line, highlight=False, soft_wrap=True)


def _membership(member: MembershipState | None) -> str:
    """A line about the store of the membership; empty if it is a list."""
    if member is None or member.kind == "local":
        return ""
    field = f" ({member.field})" if member.field else ""
    why = f": {member.why}" if member.why else ""
    left_out = member.unreadable_records
    state = _MEMBER[member.state]
    if member.state == "away" and not member.changes.get("joined"):
        state = _NEVER_JOINED
    return (
        f"membership in {member.kind}: {state}{field}{why};"
        f" changes: {_counts(member.changes) or 'none'}"
        + (f"; {left_out} unreadable records left out" if left_out else "")
    )


def _shared(shared: SharedDirectoryCounts) -> str:
    """A line about the directory in Redis."""
    status = "all pages of this node are announced" if shared.current else "not announced yet"
    if trouble := shared.trouble:
        status = f"its last call failed ({trouble}), nodes may not find each other's pages"
    why = f"; its own events cannot be followed: {shared.why}" if shared.why else ""
    return (
        f"directory in Redis: {status}; {shared.waiting:,} wait, {shared.announced:,} were"
        f" announced; {shared.asked:,} questions answered"
        f"; unanswered: {_counts(shared.unanswered) or 'none'}"
        f"; faults: {_counts(shared.faults) or 'none'}{why}"
    )


def _row(node: NodeRow) -> list[object]:
    pages = ", ".join(f"{count:,} {medium}" for medium, count in sorted(node.indexed_pages.items()))
    index = "not current"
    if node.current and node.lag_s is None:
        pages, index = "in Redis", "none"
    elif node.current:
        index = f"current, lag {seconds(node.lag_s)}"
    session: str = node.state
    if session == "up":
        session += f", {node.transport or 'no transport'}"
    if node.draining:
        session += ", draining"
    reads = str(node.reads)
    if node.unsettled_reads:
        reads += f", {node.unsettled_reads} unsettled"
    read = f"{node.fetched_pages:,}, {rounded(node.fetched_bytes)}"
    for pages_left, words in ((node.missing_pages, "missing"), (node.retried_pages, "retried")):
        if pages_left:
            read += f", {pages_left:,} {words}"
    speed = f"{rounded(node.bytes_per_s)}/s" if node.bytes_per_s else ""
    return [f"{node.name} ({node.endpoint})", session, pages or "none", index, reads, read,
            speed]  # fmt: skip


def _troubles(nodes: list[NodeRow]) -> Iterator[str]:
    """The last fault of each session, and why pages of a node do not count."""
    for node in nodes:
        if (fault := node.fault) is not None:
            field = f" ({fault.field})" if fault.field else ""
            yield (
                f"{node.name}: {fault.cause}{field} {seconds(fault.s_ago)} ago:"
                f" {fault.why}; faults: {_counts(node.faults)}"
            )
        if not node.current:
            yield f"{node.name}: its pages do not count: {node.index_why}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
