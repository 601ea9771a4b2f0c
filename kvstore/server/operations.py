"""Operations that the admin process can request from its node.

An operation is the query or body of an HTTP request; its answer is the JSON
(:mod:`kvstore.server.answers`). ``/openapi.json`` is generated from both. They are sent between the
processes as msgpack (:mod:`kvstore.server.channel`), and the node checks each operation again.
"""

from typing import Annotated, Final

from msgspec import Meta, Struct

from kvstore.protocol.wire import CONVERSATION_CHARS_MAX
from kvstore.state.tree.places import Tier

KEYS_MAX: Final = 10_000
STRETCH_MAX: Final = 1000
RUN_KEYS_MAX: Final = 1024
TOKENS_MAX: Final = 2_000_000
CHAIN_MAX: Final = 1024

Name = Annotated[str, Meta(max_length=256)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 62)]
Number = Annotated[int, Meta(ge=0, le=1 << 53)]
Age = Annotated[float, Meta(ge=0, le=1e12)]
Limit = Annotated[int, Meta(ge=1, le=STRETCH_MAX)]
ShardNumber = Annotated[int, Meta(ge=0, lt=1024)]
Keys = Annotated[list[Name], Meta(min_length=1, max_length=KEYS_MAX)]


class Operation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all operations; unknown fields are refused."""


# Operations that show state


class PingNode(Operation, frozen=True):
    """Check that the node's event loop answers."""


class ShowReadiness(Operation, frozen=True):
    """Check that the node answers and has memory to store pages in."""


class ShowStats(Operation, frozen=True):
    """All counters of the node; the first 100 spaces and sessions."""


class ListSpaces(Operation, frozen=True):
    """List the spaces: identity, shards, pages, bytes and limits."""

    cursor: Number = 0
    limit: Limit = 100


class ListPages(Operation, frozen=True):
    """List the pages of a space (with ``prefix``: a page and its descendants), in parts.

    ``next`` is the cursor of the next part. A part may be short, or empty, before the end. A page
    that is stored during the whole listing is listed exactly once.
    """

    space: Name
    prefix: Name | None = None
    tier: Tier | None = None
    age_min_s: Age | None = None
    age_max_s: Age | None = None
    hits_min: Number | None = None
    hits_max: Number | None = None
    cursor: Annotated[str, Meta(pattern=r"^([0-9]{1,18}|[0-9a-f]{64})$(?!\n)")] = "0"
    limit: Limit = 100


class ShowPage(Operation, frozen=True):
    """Show one page: tiers, age, hits, digests, parent, children."""

    space: Name
    key: Name


class ShowTokens(Operation, frozen=True):
    """Show the token ids of a page and of pages before it: the text of a prompt.

    ``pages``: number of pages including the page itself; fewer are returned if they are long.
    The request is logged although it changes nothing.
    """

    space: Name
    key: Name
    pages: Annotated[int, Meta(ge=1, le=CHAIN_MAX)] = 1


class ListTree(Operation, frozen=True):
    """List a page and its descendants (or a whole space), parents first."""

    space: Name
    key: Name | None = None
    cursor: Name | None = None
    depth: Annotated[int, Meta(ge=1, le=1_000_000)] = 8
    limit: Limit = 100


class ListSessions(Operation, frozen=True):
    """List the engines, their processes and the resources they hold."""

    cursor: Number = 0
    limit: Limit = STRETCH_MAX


class ShowEvents(Operation, frozen=True):
    """Show where the node publishes its KV events, and whether followers need a token."""


class ListNodes(Operation, frozen=True):
    """List the other nodes of the cluster: sessions, what they have, what was read from them."""


class ListTiers(Operation, frozen=True):
    """List the tiers with sizes and state."""


class ShowPolicy(Operation, frozen=True):
    """Show the eviction policy, all known ones, and the policies of the SSD tier."""


class ListPins(Operation, frozen=True):
    """List the pins of operators, and the budget."""


class ListConversations(Operation, frozen=True):
    """List the conversations whose pages are kept, and the budget."""


class ListQuotas(Operation, frozen=True):
    """List the limits that are set, by space and tier; ``/v1/spaces`` lists all spaces."""


class ListJobs(Operation, frozen=True):
    """List running jobs and the last ended ones, newest first."""


class ShowJob(Operation, frozen=True):
    """Show one job with its progress."""

    job: Number


# Operations that explain: the admin process combines them for one answer


class ListPageSizes(Operation, frozen=True):
    """Get the tokens per page of a space, and of all spaces."""

    space: Name | None = None


class FindRuns(Operation, frozen=True):
    """Find the spaces that have the most leading pages of a chain.

    ``keys``: 32 bytes each. ``among``: labels of the spaces to search; None = all spaces with
    ``page_tokens`` tokens per page.
    """

    page_tokens: Annotated[int, Meta(ge=1, le=65_536)]
    keys: Annotated[bytes, Meta(min_length=32, max_length=32 * RUN_KEYS_MAX)]
    among: Annotated[list[Name], Meta(max_length=64)] | None = None
    shard: ShardNumber | None = None


class ExplainKey(Operation, frozen=True):
    """Explain why a key is a hit or a miss."""

    key: Name
    space: Name | None = None
    shard: ShardNumber | None = None


class Compare(Operation, frozen=True):
    """Compare the identity of a space with that of another one that has a page."""

    space: Name
    other: Name
    key: Name


# Operations that change state


class Change(Operation, frozen=True):
    """Base of all operations that change something; each is logged."""


class PinPages(Change, frozen=True):
    """Pin a page and all pages before it, so that they stay in a tier.

    The pin ends after ``ttl_s`` seconds; 0 = it lasts until it is removed.
    """

    space: Name
    key: Name
    ttl_s: float = 3600.0
    tier: Tier = "host"


class KeepPages(Change, frozen=True):
    """Keep a page and all pages before it for a conversation.

    They are kept for ``ttl_s`` seconds from now on, on the SSDs if the node has any, else in
    memory. ``bytes_max``: maximum bytes of the conversation; 0 = no limit of its own.
    """

    space: Name
    key: Name
    conversation: Annotated[str, Meta(min_length=1, max_length=CONVERSATION_CHARS_MAX)]
    ttl_s: Annotated[float, Meta(gt=0, le=10 * 366 * 86_400)] = 3600.0
    bytes_max: Annotated[int, Meta(ge=0)] = 0


class EndConversation(Change, frozen=True):
    """Stop keeping the pages of a conversation."""

    space: Name
    conversation: Annotated[str, Meta(min_length=1, max_length=CONVERSATION_CHARS_MAX)]


class Unpin(Change, frozen=True):
    """Remove a pin."""

    pin: Number


class Evict(Change, frozen=True):
    """Evict a page and its descendants, or all pages of a space, from every tier."""

    space: Name
    key: Name | None = None


class Clear(Change, frozen=True):
    """Remove all pages of a space, or with ``all`` of every space.

    Pages that are pinned or being written are skipped.
    """

    space: Name | None = None
    all: bool = False


class Verify(Change, frozen=True):
    """Read stored pages and check their digests; quarantine those that fail.

    Verify a page (space and key), a space, or all pages if neither is given; in one tier or in all.
    """

    space: Name | None = None
    key: Name | None = None
    tier: Tier | None = None
    deadline_s: Annotated[float, Meta(gt=0, le=7 * 86_400)] = 3600.0


class PrefetchPages(Change, frozen=True):
    """Load pages from the SSDs into host memory, until a deadline."""

    space: Name
    keys: Keys
    deadline_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0


class MovePages(Change, frozen=True):
    """Move pages of one chain to another tier; to the SSDs, the tail of the chain first.

    The job's ``result`` counts the keys that are in the target tier at the end (``there``), those
    that were not moved (``kept``: in use, with descendants in memory, or no free space), and those
    that are not stored (``missing``).
    """

    space: Name
    keys: Keys
    to: Tier = "ssd"
    deadline_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0


class ReplicatePages(Change, frozen=True):
    """Copy a page and all pages before it, so that ``copies`` nodes of the cluster have them.

    The other nodes fetch them. ``node`` names the preferred one; None = the node chooses. The job's
    ``result``: ``copies``, this node included; ``pages`` and ``bytes`` that other nodes reported
    to have; whether it is ``complete``, and if not, ``why``.
    """

    space: Name
    key: Name
    copies: Annotated[int, Meta(ge=2, le=16)] = 2
    node: Name | None = None
    deadline_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0


class MoveToNode(Change, frozen=True):
    """Copy a page and all pages before it to another node, then drop them here.

    ``node``: None = the node chooses. Pages are dropped only after the other node has reported that
    it has all of them, from the last page backwards, up to a page that is pinned, in use, or has
    other descendants.
    """

    space: Name
    key: Name
    node: Name | None = None
    deadline_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0


class DrainNode(Change, frozen=True):
    """Copy all pages of this node to the other nodes, the most recently used ones first.

    The other nodes do not evict more recently used pages for them. ``bytes_per_s``: bandwidth
    limit; 0 = none. The pages also stay on this node. The job's ``result`` counts the ``pages``
    that other nodes reported to have, and the pages of chains that no other node is known to have
    completely (``kept``); it says whether it is ``complete``, and if not, ``why``.
    """

    deadline_s: Annotated[float, Meta(gt=0, le=86_400)] = 600.0
    bytes_per_s: Bytes = 0


class SetLimits(Change, frozen=True):
    """Replace the quota and the reservation of a space in a tier; 0, or left out = none.

    So ``{}`` removes both. A job evicts pages until the space is within its quota.
    """

    space: Name
    quota_bytes: Bytes = 0
    reserved_bytes: Bytes = 0
    tier: Tier = "host"


class SetPolicy(Change, frozen=True):
    """Change the eviction policy; if that fails, the old one stays."""

    name: Name


class CancelJob(Change, frozen=True):
    """Cancel a job; its changes are not undone."""

    job: Number
