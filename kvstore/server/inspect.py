"""Operations that show spaces, pages, the prefix tree, sessions, pins, limits and explanations.

Each is work in turns. Rows are produced a few at a time; pages that leave meanwhile are skipped.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from time import monotonic, monotonic_ns
from typing import Any, Final

from kvstore.node.node import Node
from kvstore.protocol.counts import MembershipState
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.explanation import Explanation
from kvstore.protocol.page import KEY_BYTES, PrefixKey
from kvstore.server import answers, operations
from kvstore.server.kept import KeptViews, limits_of
from kvstore.server.naming import key_of, not_stored, space_of
from kvstore.server.refusal import Refusal
from kvstore.server.sessions import session_rows
from kvstore.server.status import NodeStatus
from kvstore.server.turns import Work
from kvstore.state.ask.explain import Explainer, leading_runs, where
from kvstore.state.ask.traversal import subtree
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.prefix_tree import PrefixTree

STRETCH_ROWS: Final = 250
"""Maximum rows of one answer; producing them takes less than a millisecond."""
STRETCH_SHARDS: Final = 1000
"""Maximum shards of the spaces in one answer, but at least one space."""
_GROUPS_MAX: Final = 64
"""Maximum groups of pages of one time searched for one answer; the next answer continues."""
_SPACES_MAX: Final = 64
_SHARDS_MAX: Final = 64
_ANSWER_POLL_S: Final = 0.005
"""Spaces, and shards of each, for which other nodes are looked up for one explanation."""
_STEP_ROWS: Final = 16
_CHILDREN_MAX: Final = 100
_TOKENS_MAX: Final = 65_536
"""Maximum token ids of one answer, but at least one page."""
_READ_S: Final = 5.0
_POLL_S: Final = 0.002
_NS_PER_S: Final = 1_000_000_000


class Inspection:
    """The operations that change nothing.

    Args:
        node: the node; never changed.
        status: its status.

    Attributes:
        handlers: operation → its implementation.
    """

    def __init__(self, node: Node, status: NodeStatus) -> None:
        self._node = node
        self._table = node.pages
        self._status = status
        self.handlers: dict[type[operations.Operation], Callable[[Any], Work[Any]]] = {
            operations.ShowReadiness: self.readiness,
            operations.ShowStats: lambda _: _at_once(status.stats),
            operations.ShowEvents: lambda _: _at_once(status.event_source),
            operations.ListNodes: lambda _: _at_once(status.nodes),
            operations.ListTiers: lambda _: _at_once(status.tiers),
            operations.ShowPolicy: lambda _: _at_once(status.policy),
            operations.ListSpaces: self.spaces,
            operations.ListPages: self.pages,
            operations.ShowPage: self.page,
            operations.ShowTokens: self.tokens,
            operations.ListTree: self.tree,
            operations.ListSessions: self.sessions,
            **KeptViews(self._table).handlers,
            operations.ListPageSizes: self.page_sizes,
            operations.FindRuns: self.runs,
            operations.ExplainKey: self.explain,
            operations.Compare: self.compare,
        }

    def readiness(self, _asked: operations.ShowReadiness) -> Work[answers.Readiness]:
        """Check that there is memory to store pages in."""
        yield from ()
        slots, disk = self._table.slots, self._table.disk
        if why := self._status.unready():
            raise Refusal(503, "tier_unavailable", why)
        ssd = "off" if not disk.exists else "degraded" if disk.troubled else "ready"
        withheld = slots.withheld * slots.extent_bytes
        unwatched = sum(not one.peer.watched for one in self._node.processes.values())
        nodes, registered = self._status.nodes(), self._status.registered()
        return answers.Readiness(
            withheld_bytes=withheld, ssd=ssd, unwatched_processes=unwatched,
            cluster=nodes.joined, membership=_member(nodes.membership), directory=nodes.directory,
            registered_bytes=registered.get("registered_bytes", 0),
            registered_huge_bytes=registered.get("registered_huge_bytes", 0),
        )  # fmt: skip

    def spaces(self, asked: operations.ListSpaces) -> Work[answers.SpaceList]:
        """List spaces."""
        every = list(self._table.spaces)
        rows: list[answers.SpaceRow] = []
        shards = 0
        for space in every[asked.cursor : asked.cursor + min(asked.limit, STRETCH_ROWS)]:
            shards += len(space.shards)
            if rows and shards > STRETCH_SHARDS:
                break
            rows.append(self._space_row(space))
            if len(rows) % _STEP_ROWS == 0 or len(space.shards) > _STEP_ROWS:
                yield None
        end = asked.cursor + len(rows)
        more = end if end < len(every) else None
        return answers.SpaceList(spaces=rows, next=more, total=len(every))

    def pages(self, asked: operations.ListPages) -> Work[answers.PageList]:
        """List pages."""
        space = space_of(self._table.spaces, asked.space)
        limit = min(asked.limit, STRETCH_ROWS)
        if asked.prefix is not None:
            top = self._stored(space, asked.prefix, "prefix")
            after = key_of(asked.cursor, "cursor") if len(asked.cursor) == 64 else PrefixKey(b"")
            nodes, more = yield from subtree(space, top, after, 1 << 30, limit)
            rows = yield from _rows(nodes, asked)
            return answers.PageList(pages=rows, next=nodes[-1].key.hex() if more else None)
        if len(asked.cursor) == 64:
            raise InvalidArgument("cursor", "belongs to a listing with a prefix")
        found: list[answers.PageRow] = []
        at = int(asked.cursor)
        for count, number in enumerate(space.by_creation.numbers(at)):
            room = limit - len(found)
            rows = yield from _rows(space.shown(number, at), asked, room + 1)
            found += rows[:room]
            if len(rows) > room:
                at = rows[room].serial
                return answers.PageList(pages=found, next=str(at), total=len(space.nodes))
            at = space.by_creation.after(number)
            if count + 1 == _GROUPS_MAX:
                return answers.PageList(pages=found, next=str(at), total=len(space.nodes))
            yield None
        return answers.PageList(pages=found, next=None, total=len(space.nodes))

    def page(self, asked: operations.ShowPage) -> Work[answers.PageDetail]:
        """One key."""
        yield from ()
        space, key = space_of(self._table.spaces, asked.space), key_of(asked.key)
        node = space.nodes.get(key)
        if node is None:
            raise not_stored(asked.key, "key")
        row = _row(node, monotonic_ns())
        return answers.PageDetail(
            **{name: getattr(row, name) for name in row.__struct_fields__},
            space=space.label, pins=node.pins, read_once=bool(node.read_once),
            first_children=[child.hex() for child in islice(node.children, _CHILDREN_MAX)],
        )  # fmt: skip

    def tokens(self, asked: operations.ShowTokens) -> Work[answers.PromptPart]:
        """The tokens of a page and of some before it; read from their records if necessary."""
        space, key = space_of(self._table.spaces, asked.space), key_of(asked.key)
        node = space.nodes.get(self._stored(space, key.hex(), "key"))
        chain: list[PrefixNode] = []
        most = max(1, _TOKENS_MAX // space.identity.page_tokens)
        while node is not None and node is not space.root and len(chain) < min(asked.pages, most):
            chain.append(node)
            node = node.parent
        pages = [(one.key.hex(), one.depth, one) for one in reversed(chain)]
        found = {one: one.tokens for one in chain}
        if any(one.on_disk for one in chain):
            run = self._table.disk.read_tokens(
                (at, of) for at in chain if not found[at] for of in at.disk
            )
            until_s = monotonic() + _READ_S
            try:
                while not run.finished:
                    if monotonic() > until_s:
                        message = f"the SSD tier did not read them in {_READ_S:g} s; try again"
                        raise Refusal(503, "transfer_timeout", message)
                    yield _POLL_S
            finally:
                run.cancel()
            for one in chain:
                found[one] = run.tokens.get((space.number, one.key), found[one])
        yield None
        rows = [
            answers.PageTokens(key=name, depth=depth, tokens=_ids(found[one]))
            for name, depth, one in pages
        ]
        return answers.PromptPart(space=space.label, prompt=rows)

    def tree(self, asked: operations.ListTree) -> Work[answers.PageList]:
        """List a part of the prefix tree."""
        space = space_of(self._table.spaces, asked.space)
        top = self._stored(space, asked.key, "key") if asked.key is not None else PrefixKey(b"")
        after = key_of(asked.cursor, "cursor") if asked.cursor is not None else PrefixKey(b"")
        limit = min(asked.limit, STRETCH_ROWS)
        nodes, more = yield from subtree(space, top, after, asked.depth, limit)
        rows = yield from _rows(nodes, None)
        return answers.PageList(pages=rows, next=nodes[-1].key.hex() if more else None)

    def sessions(self, asked: operations.ListSessions) -> Work[answers.SessionList]:
        """List sessions."""
        every = list(self._node.sessions.values())
        end = asked.cursor + min(asked.limit, STRETCH_ROWS)
        rows = yield from session_rows(every[asked.cursor : end])
        end = asked.cursor + len(rows)
        more = end if end < len(every) else None
        return answers.SessionList(sessions=rows, next=more, total=len(every))

    def page_sizes(self, asked: operations.ListPageSizes) -> Work[answers.PageSizes]:
        """The page sizes of the spaces."""
        yield from ()
        space = space_of(self._table.spaces, asked.space) if asked.space is not None else None
        sizes = sorted({one.identity.page_tokens for one in self._table.spaces})
        return answers.PageSizes(
            space=space.label if space is not None else None,
            page_tokens=space.identity.page_tokens if space is not None else None,
            sizes=sizes,
        )

    def runs(self, asked: operations.FindRuns) -> Work[answers.Runs]:
        """The spaces with the longest part of a chain."""
        if len(asked.keys) % KEY_BYTES:
            raise InvalidArgument("keys", "not a whole number of keys")
        if asked.among is None:
            spaces = list(self._table.spaces)
        else:
            spaces = [space_of(self._table.spaces, label, "among") for label in asked.among]
        of_size = [one for one in spaces if one.identity.page_tokens == asked.page_tokens]
        yield None
        best = yield from leading_runs(of_size, asked.keys, asked.shard)
        return answers.Runs(
            runs=[answers.Run(space=space.label, pages=pages) for space, pages in best]
        )

    def explain(self, asked: operations.ExplainKey) -> Work[Explanation]:
        """Explain why a key is a hit or a miss."""
        space = space_of(self._table.spaces, asked.space) if asked.space is not None else None
        explainer, key = Explainer(self._table, monotonic_ns()), key_of(asked.key)
        found = yield from explainer.steps(key, space, asked.shard)
        if found.verdict in ("hit", "pending") or self._status.others is None:
            return found
        spaces = [space] if space is not None else list(self._table.spaces)[:_SPACES_MAX]
        for one in spaces:
            yield None
            peers = yield from self._holders(one, key, asked.shard)
            if peers:
                text = f"{found.text}; {_had_by(peers)}"
                return replace(found, text=text, space=one.label, peers=peers)
        return found

    def compare(self, asked: operations.Compare) -> Work[Explanation]:
        """Compare the spaces of two pages with the same key."""
        yield from ()
        space = space_of(self._table.spaces, asked.space)
        other = space_of(self._table.spaces, asked.other, "other")
        explainer = Explainer(self._table, monotonic_ns())
        return explainer.other(space, other, key_of(asked.key))

    # ---- internal ---------------------------------------------------------------------------

    def _holders(
        self, space: PrefixTree, key: PrefixKey, shard: int | None
    ) -> Work[dict[str, list[int]]]:
        """Which other nodes have a page, and for which shards of those that are asked for."""
        assert self._status.others is not None
        numbers = range(len(space.shards)) if shard is None else [shard]
        asked = [number for number in numbers if number < len(space.shards)][:_SHARDS_MAX]
        specs = [space.shards[number].spec for number in asked]
        answers: list[dict[str, list[int]]] = []
        self._status.others.holders(space.identity, specs, key, answers.append)
        while not answers:  # it has a deadline of its own
            yield _ANSWER_POLL_S
        return {peer: [asked[at] for at in held] for peer, held in answers[0].items()}

    def _stored(self, space: PrefixTree, text: str, field: str) -> PrefixKey:
        """The key in a request, if the space has it."""
        key = key_of(text, field)
        if key not in space.nodes:
            raise not_stored(key.hex(), field)
        return key

    def _space_row(self, space: PrefixTree) -> answers.SpaceRow:
        of, quotas = space.identity, limits_of(self._table)
        host = quotas["host"].get(space)
        ssd = quotas["ssd"].get(space) if "ssd" in quotas else None
        return answers.SpaceRow(
            space=space.label, model=of.model, kv_dtype=of.kv_dtype, page_tokens=of.page_tokens,
            tenant=of.tenant, revision=of.revision, scope=of.scope, pages=len(space.nodes),
            host_bytes=space.host_bytes, quota_bytes=host.quota_bytes,
            reserved_bytes=host.reserved_bytes, ssd_bytes=space.disk_bytes,
            ssd_quota_bytes=ssd.quota_bytes if ssd is not None else 0,
            ssd_reserved_bytes=ssd.reserved_bytes if ssd is not None else 0,
            shards=[
                answers.ShardRow(
                    layout=one.spec.layout, layers=one.spec.layers, heads=one.spec.heads,
                    group=one.spec.group, window_pages=one.spec.window_pages,
                    page_bytes=one.page_bytes,
                )
                for one in space.shards
            ],
        )  # fmt: skip


def _member(membership: MembershipState | None) -> answers.Member:
    """Whether the node is one of its cluster, for those who ask whether it is ready."""
    if membership is None:
        return "off"
    return "local" if membership.kind == "local" else membership.state


def _had_by(peers: dict[str, list[int]]) -> str:
    """Which nodes have a page, in words."""
    names = sorted(peers)
    return f"node {names[0]} has it" if len(names) == 1 else f"nodes {', '.join(names)} have it"


def _ids(tokens: bytes) -> list[int] | None:
    """Token ids from their bytes; None = unknown."""
    return list(memoryview(tokens).cast("I")) if tokens else None


def _at_once(shown: Callable[[], Any]) -> Work[Any]:
    """Work of one step."""
    yield from ()
    return shown()


def _rows(
    nodes: Iterable[PrefixNode], wanted: operations.ListPages | None, most: int = STRETCH_ROWS
) -> Work[list[answers.PageRow]]:
    """The rows of the first nodes that still exist and match."""
    rows: list[answers.PageRow] = []
    now_ns = monotonic_ns()
    for count, node in enumerate(nodes, start=1):
        if is_live(node) and (wanted is None or _is_wanted(node, wanted, now_ns)):
            rows.append(_row(node, now_ns))
            if len(rows) == most:
                break
        if count % _STEP_ROWS == 0:
            yield None
    return rows


def _is_wanted(node: PrefixNode, wanted: operations.ListPages, now_ns: int) -> bool:
    if wanted.hits_min is not None and node.hits < wanted.hits_min:
        return False
    if wanted.hits_max is not None and node.hits > wanted.hits_max:
        return False
    if wanted.tier == "host" and not any(node.ready >> shard & 1 for shard in node.slots):
        return False
    if wanted.tier == "ssd" and not any(node.ready >> shard & 1 for shard in node.disk):
        return False
    if wanted.age_min_s is None and wanted.age_max_s is None:
        return True
    age_s = (now_ns - node.stored_ns) / _NS_PER_S if node.stored_ns else None
    return (
        age_s is not None
        and (wanted.age_min_s is None or age_s >= wanted.age_min_s)
        and (wanted.age_max_s is None or age_s <= wanted.age_max_s)
    )


def _row(node: PrefixNode, now_ns: int) -> answers.PageRow:
    """One key."""
    parent = node.above.key if node.above is not None else b""
    shards = node.space.shards
    return answers.PageRow(
        key=node.key.hex(),
        parent=parent.hex() or None,
        depth=node.depth,
        serial=node.serial,
        tier="host" if node.slots else "ssd" if node.disk else "none",
        children=len(node.children),
        hits=node.hits,
        stored_s_ago=(now_ns - node.stored_ns) / _NS_PER_S if node.stored_ns else None,
        used_s_ago=(now_ns - node.used_ns) / _NS_PER_S if node.used_ns else None,
        expires_in_s=(min(node.expires.values()) - now_ns) / _NS_PER_S if node.expires else None,
        shards={
            number: answers.PageShard(
                state="writing" if tiers == ["writing"] else "ready",
                tiers=[] if tiers == ["writing"] else tiers,
                bytes=shards[int(number)].page_bytes,
                digest=node.digests.get(int(number), b"").hex() or None,
            )
            for number, tiers in where(node).items()
        },
    )
