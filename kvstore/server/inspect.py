"""Routes that show: spaces, pages, the prefix tree, sessions, tiers, configuration, ``explain``."""

from collections.abc import Iterable
from time import monotonic_ns
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, ConfigDict, Field

from kvstore.config import values
from kvstore.errors import InvalidArgument
from kvstore.page import PrefixKey, page_keys
from kvstore.server.api import Checked, Turns, key_of, not_stored
from kvstore.server.auth import Auth
from kvstore.state.explain import Explainer, Explanation, where
from kvstore.state.tree import Node, Space
from kvstore.state.walks import TURN_NODES, subtree

PAGES_MAX: Final = 1000
TOKENS_MAX: Final = 2_000_000
_SHELVES_MAX: Final = 64
"""Shelves that one request looks through; a filter that finds little goes on with the next one."""
_NS_PER_S: Final = 1_000_000_000

Seconds = Annotated[float | None, Query(allow_inf_nan=False)]
Limit = Annotated[int, Query(ge=1, le=PAGES_MAX)]


class Question(BaseModel):
    """What is asked of ``explain``: a key, or tokens from the prompt's beginning."""

    model_config = ConfigDict(extra="forbid")

    key: str | None = None
    tokens: Annotated[list[int], Field(max_length=TOKENS_MAX)] | None = None
    space: str | None = None
    shard: Annotated[int, Field(ge=0, lt=1024)] | None = None


class Filter(BaseModel):
    """Which pages of a space a listing shows; ages in seconds."""

    model_config = ConfigDict(extra="forbid")

    tier: Literal["host", "ssd"] | None = None
    age_min_s: Seconds = None
    age_max_s: Seconds = None
    hits_min: int | None = None
    hits_max: int | None = None

    def shows(self, row: dict[str, Any]) -> bool:
        """Whether the page of a row is wanted."""
        age, hits = row["stored_s_ago"], row["hits"]
        tiers = {tier for shard in row["shards"].values() for tier in shard["tiers"]}
        return (
            (self.tier is None or self.tier in tiers)
            and (self.age_min_s is None or (age is not None and age >= self.age_min_s))
            and (self.age_max_s is None or (age is not None and age <= self.age_max_s))
            and (self.hits_min is None or hits >= self.hits_min)
            and (self.hits_max is None or hits <= self.hits_max)
        )


class Inspection:
    """The routes that any token may use.

    Args:
        turns: takes turns on the state's loop.
        auth: who may read.
    """

    def __init__(self, turns: Turns, auth: Auth) -> None:
        """Make the routes."""
        self._turns = turns
        self.router = APIRouter(
            prefix="/v1", dependencies=[Depends(auth.require("read"))], tags=["inspect"],
            route_class=Checked,
        )  # fmt: skip
        for path, route in (
            ("/stats", self.stats), ("/spaces", self.spaces), ("/pages", self.pages),
            ("/pages/{space}/{key}", self.page), ("/tree", self.tree),
            ("/sessions", self.sessions), ("/tiers", self.tiers), ("/config", self.config),
            ("/policy", self.policy), ("/pins", self.pins), ("/quotas", self.quotas),
        ):  # fmt: skip
            self.router.add_api_route(path, route, methods=["GET"])
        self.router.add_api_route("/explain", self.explain, methods=["POST"])

    def stats(self) -> dict[str, Any]:
        """Everything that can be counted."""
        return self._turns.ask(self._turns.observed.stats)

    def spaces(self, cursor: Annotated[int, Query(ge=0)] = 0, limit: Limit = 100) -> dict[str, Any]:
        """The spaces: what they are of, their shards, pages, bytes and limits."""

        def rows() -> tuple[list[dict[str, Any]], int]:
            pages = self._turns.observed.node.pages
            every = list(pages.spaces)
            shown = []
            for space in every[cursor : cursor + limit]:
                limits = pages.quotas.get(space)
                ssd = pages.disk.limits.quotas.get(space) if pages.disk is not None else None
                shown.append(
                    {
                        "space": space.label,
                        "identity": space.identity,
                        "pages": len(space.nodes),
                        "host_bytes": space.host_bytes,
                        "quota_bytes": limits.quota_bytes,
                        "reserved_bytes": limits.reserved_bytes,
                        "ssd_bytes": space.disk_bytes,
                        "ssd_quota_bytes": ssd.quota_bytes if ssd is not None else 0,
                        "ssd_reserved_bytes": ssd.reserved_bytes if ssd is not None else 0,
                        "shards": list(space.shards),
                    }
                )
            return shown, len(every)

        found, total = self._turns.ask(rows)
        end = cursor + len(found)
        # What never changes is made plain here: for a thousand spaces that is longer than a turn.
        shown = [
            {
                "space": row.pop("space"),
                **msgspec.to_builtins(row.pop("identity")),
                **row,
                "shards": [
                    {**msgspec.to_builtins(one.spec), "page_bytes": one.page_bytes}
                    for one in row["shards"]
                ],
            }
            for row in found
        ]
        return {"spaces": shown, "next": end if end < total else None, "total": total}

    def pages(
        self, space: str, shown: Annotated[Filter, Depends()],
        cursor: Annotated[str, Query(pattern=r"^(\d{1,18}|[0-9a-f]{64})$")] = "0",
        limit: Limit = 100, prefix: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Pages of a space (with ``prefix``: at and below a key), a stretch at a time.

        ``next`` is the cursor of the next stretch; a stretch may be short, or empty, before the
        end. A page that is there all the while is shown exactly once.
        """
        of = self._turns.space(space)
        if prefix is not None:
            return self._below(of, self._stored(of, prefix, "prefix"), cursor, limit, shown)
        if len(cursor) == 64:
            raise InvalidArgument("cursor", "is one of a listing with a prefix")
        rows: list[dict[str, Any]] = []
        at = int(cursor)
        numbers = self._turns.ask(lambda: of.shelves.numbers(at))
        for count, number in enumerate(numbers):
            if count == _SHELVES_MAX:
                return {"pages": rows, "next": str(at), "total": len(of.nodes)}
            found = self._rows(of, number, at)
            for row in found:
                if len(rows) == limit:
                    return {"pages": rows, "next": str(row["serial"]), "total": len(of.nodes)}
                if shown.shows(row):
                    rows.append(row)
            at = of.shelves.after(number)
        return {"pages": rows, "next": None, "total": len(of.nodes)}

    def page(self, space: str, key: str) -> dict[str, Any]:
        """One page: where, since when, how often hit, digests, parent, children."""
        of, wanted = self._turns.space(space), key_of(key)

        def detail() -> dict[str, Any] | None:
            node = of.nodes.get(wanted)
            if node is None:
                return None
            children = [child.hex() for _, child in zip(range(100), node.children, strict=False)]
            return {
                **_row(node, monotonic_ns()),
                "depth": node.depth,
                "pins": node.pins,
                "read_once": bool(node.read_once),
                "first_children": children,
            }

        found = self._turns.ask(detail)
        if found is None:
            raise not_stored(key, "key")
        return {"space": of.label, **found}

    def tree(
        self, space: str, key: str | None = None, cursor: str | None = None,
        depth: Annotated[int, Query(ge=1, le=1_000_000)] = 8, limit: Limit = 100,
    ) -> dict[str, Any]:  # fmt: skip
        """What lies at and below a key (or the whole space), every page before what follows it."""
        of = self._turns.space(space)
        top = self._stored(of, key, "key") if key is not None else PrefixKey(b"")
        after = key_of(cursor, "cursor") if cursor is not None else PrefixKey(b"")
        rows, more = self._subtree(of, top, after, depth, limit)
        return {"pages": rows, "next": rows[-1]["key"] if more else None}

    def sessions(self) -> dict[str, Any]:
        """The engines, their processes and what these hold."""

        def rows() -> list[dict[str, Any]]:
            return [
                {
                    "name": session.name,
                    "tenant": session.domain,
                    "used_bytes": session.used_bytes,
                    "quota_bytes": session.quota_bytes,
                    "prefill_s_per_token": session.prefill_s_per_token,
                    "processes": [
                        {
                            "pid": process.peer.pid,
                            "watched": process.peer.watched,
                            "lost": process.lost,
                            "leases": len(process.leases),
                            "expired_leases": sum(one.expired for one in process.leases.values()),
                            "puts": len(process.puts),
                        }
                        for process in session.processes.values()
                    ],
                }
                for session in self._turns.observed.node.sessions.values()
            ]

        return {"sessions": self._turns.ask(rows)}

    def tiers(self) -> dict[str, Any]:
        """The tiers: sizes and state."""
        return {"tiers": self._turns.ask(self._turns.observed.tiers)}

    def config(self) -> dict[str, Any]:
        """Every configured value and where it came from; secrets are masked."""
        return {"values": values(self._turns.observed.loaded)}

    def policy(self) -> dict[str, Any]:
        """The eviction policy at work, all that are known, and those of the SSD tier."""
        return self._turns.ask(self._turns.observed.policy)

    def pins(self) -> dict[str, Any]:
        """What operators pinned, and the budget."""

        def rows() -> dict[str, Any]:
            pins, now = self._turns.observed.node.pages.pins, monotonic_ns()
            return {
                "pins": [
                    {
                        "pin": pin.number,
                        "space": pin.space.label,
                        "key": pin.key.hex(),
                        "tier": pin.tier,
                        "pages": len(pin.nodes),
                        "bytes": pin.size_bytes,
                        "ends_in_s": (pin.expires_ns - now) / _NS_PER_S if pin.expires_ns else None,
                    }
                    for pin in pins
                ],
                "used_bytes": pins.used_bytes,
                "budget_bytes": pins.budget_bytes,
                "ssd_used_bytes": pins.disk_used_bytes,
                "ssd_budget_bytes": pins.disk_budget_bytes,
            }

        return self._turns.ask(rows)

    def quotas(self) -> dict[str, Any]:
        """The spaces that have limits, once for each tier."""

        def rows() -> list[dict[str, Any]]:
            pages = self._turns.observed.node.pages
            tiers = {"host": pages.quotas}
            if pages.disk is not None:
                tiers["ssd"] = pages.disk.limits.quotas
            return [
                {
                    "space": one.space.label,
                    "tier": tier,
                    "quota_bytes": one.quota_bytes,
                    "reserved_bytes": one.reserved_bytes,
                    "used_bytes": quotas.used(one.space),
                }
                for tier, quotas in tiers.items()
                for one in quotas.all()
            ]

        return {"quotas": self._turns.ask(rows)}

    def explain(self, question: Question) -> dict[str, Any]:
        """Why a key, or a prompt's tokens, are a hit or not."""
        space = self._turns.space(question.space) if question.space is not None else None
        if (question.key is None) == (question.tokens is None):
            raise InvalidArgument("key", "give either a key or tokens")
        if space is None and question.shard is not None:
            raise InvalidArgument("shard", "a shard is one of a space; name the space too")
        pages = self._turns.observed.node.pages
        if question.key is not None:
            key = key_of(question.key)
            found = self._turns.ask(
                lambda: Explainer(pages, monotonic_ns()).key(key, space, question.shard)
            )
            return _told(found)
        every = self._turns.ask(lambda: list(pages.spaces))
        if not every:
            raise InvalidArgument("tokens", "no space is open here: nothing was stored yet")
        sizes = {one.identity.page_tokens for one in every}
        chains = {size: list(page_keys(question.tokens or [], size)) for size in sorted(sizes)}
        chains = {size: keys for size, keys in chains.items() if keys}
        least = space.identity.page_tokens if space is not None else min(sizes)
        if least not in chains:
            raise InvalidArgument("tokens", f"they fill no page of {least} tokens")
        return _told(
            self._turns.ask(
                lambda: Explainer(pages, monotonic_ns()).tokens(chains, space, question.shard)
            )
        )

    def _stored(self, space: Space, text: str, field: str) -> PrefixKey:
        """The key that a request names, if the space has it."""
        key = key_of(text, field)
        if not self._turns.ask(lambda: key in space.nodes):
            raise not_stored(key.hex(), field)
        return key

    def _below(
        self, space: Space, top: PrefixKey, cursor: str, limit: int, shown: Filter
    ) -> dict[str, Any]:
        after = key_of(cursor, "cursor") if len(cursor) == 64 else PrefixKey(b"")
        rows, more = self._subtree(space, top, after, 1 << 30, limit)
        wanted = [row for row in rows if shown.shows(row)]
        return {"pages": wanted, "next": rows[-1]["key"] if more else None}

    def _subtree(
        self, space: Space, top: PrefixKey, after: PrefixKey, depth: int, limit: int
    ) -> tuple[list[dict[str, Any]], bool]:
        def turn() -> tuple[list[dict[str, Any]], bool]:
            nodes, more = subtree(space, top, after, depth, min(limit, TURN_NODES))
            now_ns = monotonic_ns()
            return [{**_row(node, now_ns), "depth": node.depth} for node in nodes], more

        return self._turns.ask(turn)

    def _rows(self, space: Space, number: int, cursor: int) -> Iterable[dict[str, Any]]:
        def turn() -> list[dict[str, Any]]:
            now_ns = monotonic_ns()
            return [_row(node, now_ns) for node in space.shelves.nodes(number, cursor)]

        return self._turns.ask(turn)


def _row(node: Node, now_ns: int) -> dict[str, Any]:
    """One page as plain values; call it on the state's loop."""
    parent = node.parent.key if node.parent is not None else b""
    shards = node.space.shards
    tiers = where(node)
    return {
        "key": node.key.hex(),
        "parent": parent.hex() or None,
        "serial": node.serial,
        "tier": "host" if node.slots else "ssd" if node.disk else "none",
        "children": len(node.children),
        "hits": node.hits,
        "stored_s_ago": (now_ns - node.stored_ns) / _NS_PER_S if node.stored_ns else None,
        "used_s_ago": (now_ns - node.used_ns) / _NS_PER_S if node.used_ns else None,
        "expires_in_s": (min(node.expires.values()) - now_ns) / _NS_PER_S if node.expires else None,
        "shards": {
            number: {
                "state": "writing" if found == ["writing"] else "ready",
                "tiers": [] if found == ["writing"] else found,
                "bytes": shards[int(number)].page_bytes,
                "digest": node.digests.get(int(number), b"").hex() or None,
            }
            for number, found in tiers.items()
        },
    }


def _told(found: Explanation) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(found)
    return told
