"""What may be asked of a node by its admin process, and what it answers to that.

An operation is a request's query or body, an answer its JSON (:mod:`kvstore.server.answers`), and
``/openapi.json`` is made from both. Between the processes they travel as msgpack
(:mod:`kvstore.server.channel`); the node checks an operation again when it arrives.
"""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

KEYS_MAX: Final = 10_000
STRETCH_MAX: Final = 1000
RUN_KEYS_MAX: Final = 1024
TOKENS_MAX: Final = 2_000_000
CHAIN_MAX: Final = 1024

Tier = Literal["host", "ssd"]
Name = Annotated[str, Meta(max_length=256)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 62)]
Number = Annotated[int, Meta(ge=0, le=1 << 53)]
Age = Annotated[float, Meta(ge=0, le=1e12)]
Limit = Annotated[int, Meta(ge=1, le=STRETCH_MAX)]
ShardNumber = Annotated[int, Meta(ge=0, lt=1024)]
Keys = Annotated[list[Name], Meta(min_length=1, max_length=KEYS_MAX)]


class Operation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all: what it does not know is refused."""


# What shows


class PingNode(Operation, frozen=True):
    """The node's loop answers."""


class ShowReadiness(Operation, frozen=True):
    """The node answers and has memory to store pages in."""


class ShowStats(Operation, frozen=True):
    """Everything that can be counted; of spaces and sessions the first 100."""


class ListSpaces(Operation, frozen=True):
    """The spaces: what they are of, their shards, pages, bytes and limits."""

    cursor: Number = 0
    limit: Limit = 100


class ListPages(Operation, frozen=True):
    """Pages of a space (with ``prefix``: at and below a key), a stretch at a time.

    ``next`` is the cursor of the next stretch; a stretch may be short, or empty, before the end. A
    page that is there all the while is shown exactly once.
    """

    space: Name
    prefix: Name | None = None
    tier: Tier | None = None
    age_min_s: Age | None = None
    age_max_s: Age | None = None
    hits_min: Number | None = None
    hits_max: Number | None = None
    cursor: Annotated[str, Meta(pattern=r"^([0-9]{1,18}|[0-9a-f]{64})$")] = "0"
    limit: Limit = 100


class ShowPage(Operation, frozen=True):
    """One page: where, since when, how often hit, digests, parent, children."""

    space: Name
    key: Name


class ShowTokens(Operation, frozen=True):
    """What was asked of engines: the token ids of a page, and of pages before it.

    ``pages``: of how many pages, the page itself included; fewer when they are long. It changes
    nothing and leaves a line in the log.
    """

    space: Name
    key: Name
    pages: Annotated[int, Meta(ge=1, le=CHAIN_MAX)] = 1


class ListTree(Operation, frozen=True):
    """What lies at and below a key (or the whole space), every page before what follows it."""

    space: Name
    key: Name | None = None
    cursor: Name | None = None
    depth: Annotated[int, Meta(ge=1, le=1_000_000)] = 8
    limit: Limit = 100


class ListSessions(Operation, frozen=True):
    """The engines, their processes and what these hold."""

    cursor: Number = 0
    limit: Limit = STRETCH_MAX


class ListTiers(Operation, frozen=True):
    """The tiers: sizes and state."""


class ShowPolicy(Operation, frozen=True):
    """The eviction policy at work, all that are known, and those of the SSD tier."""


class ListPins(Operation, frozen=True):
    """What operators pinned, and the budget."""


class ListQuotas(Operation, frozen=True):
    """The spaces that have limits, once for each tier."""


class ListJobs(Operation, frozen=True):
    """The jobs that run and the last ones that ended, the newest first."""


class ShowJob(Operation, frozen=True):
    """One job, with its progress."""

    job: Number


# What explains: the admin process asks these to answer one question


class ListPageSizes(Operation, frozen=True):
    """How many tokens a page has: in a space, and in all spaces."""

    space: Name | None = None


class FindRuns(Operation, frozen=True):
    """Which spaces hold most of the leading pages of a chain.

    ``keys``: 32 bytes each. ``among``: labels of the spaces to look in; None = in all that have
    pages of ``page_tokens`` tokens.
    """

    page_tokens: Annotated[int, Meta(ge=1, le=65_536)]
    keys: Annotated[bytes, Meta(min_length=32, max_length=32 * RUN_KEYS_MAX)]
    among: Annotated[list[Name], Meta(max_length=64)] | None = None
    shard: ShardNumber | None = None


class ExplainKey(Operation, frozen=True):
    """Why a key is a hit or not."""

    key: Name
    space: Name | None = None
    shard: ShardNumber | None = None


class Compare(Operation, frozen=True):
    """What keeps a page that another space has from being one of a space."""

    space: Name
    other: Name
    key: Name


# What changes


class Change(Operation, frozen=True):
    """Base of all that change something: each leaves a line in the log."""


class PinPages(Change, frozen=True):
    """Pin the pages of a key and of all keys before it: they stay in a tier.

    It ends after ``ttl_s`` seconds; 0 = when it is unpinned.
    """

    space: Name
    key: Name
    ttl_s: float = 3600.0
    tier: Tier = "host"


class Unpin(Change, frozen=True):
    """End a pin."""

    pin: Number


class Evict(Change, frozen=True):
    """Take a key with all that follows it, or a whole space, out of the index."""

    space: Name
    key: Name | None = None


class Clear(Change, frozen=True):
    """Empty a space, or with ``all`` every space; what is pinned or being written stays."""

    space: Name | None = None
    all: bool = False


class Verify(Change, frozen=True):
    """Read pages again and compare them with their digests; what fails is quarantined.

    A page (space and key), a space, or with neither all pages; in one tier, or in all.
    """

    space: Name | None = None
    key: Name | None = None
    tier: Tier | None = None
    deadline_s: Annotated[float, Meta(gt=0, le=7 * 86_400)] = 3600.0


class PrefetchPages(Change, frozen=True):
    """Bring pages from the SSD into host memory, by a deadline."""

    space: Name
    keys: Keys
    deadline_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0


class MovePages(Change, frozen=True):
    """Move pages of one chain to another tier; to the SSDs: memory lets go from the tails on.

    The job's ``result`` says how many of the keys are ``there`` in the end, how many were ``kept``
    where they are (in use, followed by pages in memory, or without room), and how many are
    ``missing``.
    """

    space: Name
    keys: Keys
    to: Tier = "ssd"
    deadline_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0


class SetLimits(Change, frozen=True):
    """Limit what a space may have, and what the others must leave it, in a tier; 0 = none.

    A job puts the space's pages into queues of their own and brings it within its quota.
    """

    space: Name
    quota_bytes: Bytes = 0
    reserved_bytes: Bytes = 0
    tier: Tier = "host"


class SetPolicy(Change, frozen=True):
    """Change the eviction policy; when that fails the one before it stays."""

    name: Name


class CancelJob(Change, frozen=True):
    """Ask a job to end; what it has done stays done."""

    job: Number
