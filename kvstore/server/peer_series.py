"""The series of other nodes and of reads from them, for Prometheus."""

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kvstore.config.cluster import NODES_MAX
from kvstore.protocol.counts import (
    CopyCounts,
    MembershipState,
    NodeIndex,
    NodeList,
    NodeRow,
    RemoteCounts,
    SharedDirectoryCounts,
)

PEERS_MAX: Final = NODES_MAX - 1
"""Other nodes that have series of their own."""

_GAUGES: Final[dict[str, tuple[str, Callable[[NodeRow], float]]]] = {
    "up": (
        "1 = this node has a session with the peer; it can read its pages.",
        lambda peer: peer.state == "up",
    ),
    "refused": (
        "1 = the peer or this node refuses the session because their settings differ.",
        lambda peer: peer.state == "refused",
    ),
    "index_current": (
        "1 = the index knows which pages the peer has; 0 = the peer counts as having none.",
        lambda peer: peer.current,
    ),
    "index_lag_seconds": (
        "Seconds from the publication of the peer's newest events until this node applied them.",
        lambda peer: peer.lag_s or 0.0,
    ),
    "running_reads": ("Reads from the peer in progress.", lambda peer: peer.reads),
    "unsettled": (
        "Reads from the peer that have ended but whose bytes may still arrive.",
        lambda peer: peer.unsettled_reads,
    ),
    "bytes_per_second": (
        "Last measured rate of reads from the peer; 0 = nothing was read yet.",
        lambda peer: peer.bytes_per_s,
    ),
}
_COUNTERS: Final[dict[str, tuple[str, Callable[[NodeRow], int]]]] = {
    "failed_reads": (
        "Reads from the peer that did not deliver all pages.", lambda peer: peer.failed_reads,
    ),
    "read_bytes": (
        "Bytes of pages that were read from the peer and verified.",
        lambda peer: peer.fetched_bytes,
    ),
}  # fmt: skip


def peer_series(remote: RemoteCounts) -> Iterator[Metric]:
    """Reads from all peers together."""
    size = GaugeMetricFamily(
        "kvstore_peer_bytes",
        "Slot bytes of reads from peers: in flight, and the limit.",
        labels=["use"],
    )
    size.add_metric(["in_flight"], remote.in_flight_bytes)
    size.add_metric(["in_flight_max"], remote.in_flight_bytes_max)
    yield size
    yield GaugeMetricFamily(
        "kvstore_peer_reads", "Reads from peers in progress.", value=remote.jobs
    )
    yield GaugeMetricFamily(
        "kvstore_peer_unsettled_reads",
        "Reads from peers that have ended but whose bytes may still arrive.",
        value=remote.unsettled_jobs,
    )


def copy_series(copies: CopyCounts) -> Iterator[Metric]:
    """Copies of this node's pages at other nodes."""
    yield GaugeMetricFamily(
        "kvstore_copies_running", "Requests asking other nodes to copy pages, in progress.",
        value=copies.running,
    )  # fmt: skip
    yield CounterMetricFamily(
        "kvstore_copied_pages",
        "Pages of one shard that other nodes have after they were asked to fetch them.",
        value=copies.copied_pages,
    )
    yield CounterMetricFamily(
        "kvstore_copies_failed",
        "Requests to fetch pages after which the other node did not have all of them.",
        value=copies.failed,
    )


def node_series(cluster: NodeList) -> Iterator[Metric]:
    """Each peer, and the index of their pages."""
    peers = cluster.nodes[:PEERS_MAX]
    for name, (help_text, value) in _GAUGES.items():
        gauge = GaugeMetricFamily(f"kvstore_peer_{name}", help_text, labels=["peer"])
        for peer in peers:
            gauge.add_metric([peer.name], float(value(peer)))
        yield gauge
    for name, (help_text, count) in _COUNTERS.items():
        counter = CounterMetricFamily(f"kvstore_peer_{name}", help_text, labels=["peer"])
        for peer in peers:
            counter.add_metric([peer.name], count(peer))
        yield counter
    pages = CounterMetricFamily(
        "kvstore_peer_pages",
        "Pages of one shard requested from the peer: read; missing; or missing and retried at"
        " another peer.",
        labels=["peer", "outcome"],
    )
    faults = CounterMetricFamily(
        "kvstore_peer_faults",
        "Sessions with the peer that broke or failed to start, by cause.",
        labels=["peer", "cause"],
    )
    known = GaugeMetricFamily(
        "kvstore_peer_index_pages",
        "Pages of one shard that the peer has according to the index, by medium.",
        labels=["peer", "medium"],
    )
    for peer in peers:
        pages.add_metric([peer.name, "read"], peer.fetched_pages)
        pages.add_metric([peer.name, "missing"], peer.missing_pages)
        pages.add_metric([peer.name, "retried"], peer.retried_pages)
        for cause, faulted in sorted(({"unreachable": 0} | peer.faults).items()):
            faults.add_metric([peer.name, cause], faulted)
        for medium, held in sorted(({"CPU": 0} | peer.indexed_pages).items()):
            known.add_metric([peer.name, medium], held)
    yield from (pages, faults, known)
    refused = CounterMetricFamily(
        "kvstore_cluster_refused",
        "Connections from other nodes that this node refused, by cause.",
        labels=["cause"],
    )
    for cause, turned_away in sorted(({"cluster": 0} | cluster.not_admitted).items()):
        refused.add_metric([cause], turned_away)
    yield refused
    if cluster.membership is not None:
        yield from _membership(cluster.membership)
    yield GaugeMetricFamily(
        "kvstore_cluster_directory_current",
        "1 = nodes find each other's pages: the directory is current, as /readyz says.",
        value=float(cluster.directory == "current"),
    )
    if cluster.index is not None:
        yield from _index(cluster.index)
    if cluster.shared is not None:
        yield from _shared(cluster.shared)


def _membership(member: MembershipState) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "kvstore_cluster_membership_state",
        "1 for the current membership state of this node; with a fixed list always joined.",
        labels=["state"],
    )
    changes = CounterMetricFamily(
        "kvstore_cluster_membership_changes",
        "Changes of the membership to this state.",
        labels=["state"],
    )
    for name in ("joining", "joined", "away", "refused"):
        state.add_metric([name], float(member.state == name))
        changes.add_metric([name], member.changes.get(name, 0))
    yield from (state, changes)
    yield GaugeMetricFamily(
        "kvstore_cluster_membership_unreadable_records",
        "Records in etcd or Redis that do not describe a valid node and are ignored.",
        value=member.unreadable_records,
    )


def _shared(shared: SharedDirectoryCounts) -> Iterator[Metric]:
    """The directory in Redis."""
    for name, count, help_text in (
        ("waiting_pages", shared.waiting,
         "Pages and changes that this node has not announced yet."),
        ("outstanding", shared.outstanding, "Queries to the directory without an answer yet."),
    ):  # fmt: skip
        yield GaugeMetricFamily(f"kvstore_cluster_directory_{name}", help_text, value=float(count))
    for name, count, help_text in (
        ("announced_pages", shared.announced,
         "Pages announced in the directory, changes included."),
        ("announcements", shared.announcements,
         "Complete announcements of all pages of this node."),
        ("answers", shared.asked, "Queries that the directory answered."),
    ):  # fmt: skip
        yield CounterMetricFamily(f"kvstore_cluster_directory_{name}", help_text, value=count)
    for name, counts, first, help_text in (
        ("faults", shared.faults, "away", "Failed calls to the directory and lost announcements."),
        ("unanswered", shared.unanswered, "timeout", "Queries that were not answered in time."),
    ):
        counter = CounterMetricFamily(
            f"kvstore_cluster_directory_{name}", f"{help_text[:-1]}, by cause.", labels=["cause"]
        )
        for cause, count in sorted(({first: 0} | counts).items()):
            counter.add_metric([cause], count)
        yield counter


def _index(index: NodeIndex) -> Iterator[Metric]:
    for name, count, help_text in (
        ("entries", index.entries, "Entries of the index of peers' pages."),
        ("entries_max", index.entries_max,
         "Maximum entries of the index (cluster.index_pages_max)."),
        ("resident_bytes", index.resident_bytes, "Resident memory of the index process."),
    ):  # fmt: skip
        yield GaugeMetricFamily(f"kvstore_cluster_index_{name}", help_text, value=count)
    for name, count, help_text in (
        ("left_out_pages", index.left_out,
         "Pages of peers left out of the index because it was full."),
        ("restarts", index.restarts, "Restarts of the index process."),
    ):  # fmt: skip
        yield CounterMetricFamily(f"kvstore_cluster_index_{name}", help_text, value=count)
