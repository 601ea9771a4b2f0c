"""Commands to an index, and its reports. Pure."""

import msgspec

from kvstore.index.credentials import PeerCredentials


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The source of one worker's events.

    Attributes:
        worker: name of the worker in the index.
        domain: the sharing domain of an engine's blocks: its model or space. Events of nodes name
            their space themselves.
        block_tokens: tokens in a block of an engine; 0 = as in its first event.
        endpoint: endpoint of the publisher, ``ipc://`` or ``tcp://``, or of the peer service of a
            node, ``peer://host:port``, which then is the one for replays as well.
        bind: ``endpoint`` is ours: the publisher connects to it.
        replay_endpoint: endpoint for missed batches; None = no replay.
        token: token for a publisher over TCP; empty = none.
        peer: credentials for a peer service; None for other endpoints.
        is_node: a node: it serves snapshots and audits at its replay endpoint.
    """

    worker: str
    domain: str
    endpoint: str
    block_tokens: int = 0
    bind: bool = False
    replay_endpoint: str | None = None
    token: str = ""
    peer: PeerCredentials | None = None
    is_node: bool = False

    @property
    def credentials(self) -> str | PeerCredentials:
        """The credentials for its endpoints."""
        return self.peer or self.token


class SourceBounds(msgspec.Struct, frozen=True):
    """Limits of one source.

    Attributes:
        replay_s: maximum silence during a replay.
        verify_s: after this time without a live message, the last batch is requested again.
        foreign_blocks: maximum blocks of one engine with its own hashes that are remembered.
    """

    replay_s: float
    verify_s: float
    foreign_blocks: int


class IndexSettings(msgspec.Struct, frozen=True):
    """Settings of one index.

    Attributes:
        entries_max: maximum pages and blocks, all workers together.
        bounds: limits of each source.
    """

    entries_max: int
    bounds: SourceBounds


class StartIndex(msgspec.Struct, frozen=True, tag="begin"):
    """The first message to an index process."""

    settings: IndexSettings


class Follow(msgspec.Struct, frozen=True, tag="follow"):
    """Follow a source, in place of the worker's previous one."""

    source: Source


class Unfollow(msgspec.Struct, frozen=True, tag="unfollow"):
    """Forget a worker."""

    worker: str


class Expect(msgspec.Struct, frozen=True, tag="expect"):
    """A worker will probably have these pages.

    Attributes:
        worker: its name.
        chains: uint64 chain values, little-endian, heads first.
        from_ns: from when on they count, on the monotonic clock.
        until_ns: until when.
    """

    worker: str
    chains: bytes
    from_ns: int
    until_ns: int


class Unexpect(msgspec.Struct, frozen=True, tag="unexpect"):
    """An expectation was wrong: it ends now.

    Attributes:
        expected: as it was sent.
    """

    expected: Expect


class Aside(msgspec.Struct, frozen=True, tag="aside"):
    """A message that is not about the index, in either direction: it is passed on unread."""

    body: bytes


Command = StartIndex | Follow | Unfollow | Expect | Unexpect | Aside


class FollowedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One followed worker.

    Attributes:
        worker: its name.
        connected: a connection to its publisher is up.
        current: all earlier batches are applied, so its pages count.
        why: why its pages do not count; empty if they do.
        kind: kind of an engine's chain values, ``keys`` or ``tokens``; empty until an event has
            shown it.
        block_tokens: tokens in a block of an engine; 0 until an event has shown it.
        groups: KV groups of an engine: how many blocks at the end of a prefix each needs; 0 = all.
        pages: pages by medium; of several shards, the maximum.
        batches: batches applied.
        lag_s: time from publication to application, of the newest batch.
        restarts: restarts of the publisher that were seen.
        gaps: gaps in the sequence; ``gaps_lost`` are those that a replay could not fill.
        skipped: events that were not applied.
        unmapped: blocks that could not be mapped to tokens.
        waiting: blocks whose parent is not known yet.
        snapshots: snapshots read.
        audited: pages of the last audit of a node; 0 = none yet.
        missing: audited pages that the node had and the index had not.
        stale: audited pages that its events told of, and on which node and index differed.
        resyncs: times that everything was read again, because of a gap or an audit.
        faults: faults of its publisher, by cause.
    """

    worker: str
    connected: bool = False
    current: bool = False
    why: str = ""
    kind: str = ""
    block_tokens: int = 0
    groups: dict[int, int] = {}
    pages: dict[str, int] = {}
    batches: int = 0
    lag_s: float = 0.0
    restarts: int = 0
    gaps: int = 0
    gaps_lost: int = 0
    skipped: int = 0
    unmapped: int = 0
    waiting: int = 0
    snapshots: int = 0
    audited: int = 0
    missing: int = 0
    stale: int = 0
    resyncs: int = 0
    faults: dict[str, int] = {}


class IndexReport(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """State of an index, from time to time.

    Attributes:
        entries: pages and blocks in the table.
        entries_max: their maximum.
        sets: distinct sets of holders.
        dropped: stores and expected pages that were left out because something was full.
        expected: expected pages.
        resident_bytes: resident memory of the index process.
        workers: every followed worker.
    """

    entries: int = 0
    entries_max: int = 0
    sets: int = 0
    dropped: int = 0
    expected: int = 0
    resident_bytes: int = 0
    workers: list[FollowedWorker] = []


Report = IndexReport | Aside
