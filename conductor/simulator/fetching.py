"""Fetches of prompts by an engine's node, and the requests that wait for them. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

from conductor.simulator.caching import Sources
from conductor.simulator.fleet import SimulatedEngine
from conductor.simulator.links import Link, Links
from conductor.simulator.scenario import Flight
from conductor.simulator.trace import BLOCK_TOKENS


class Fetches(NamedTuple):
    """Transfers of the KV of one prompt.

    Attributes:
        transfers: the links of each, and its bytes.
        end: blocks that the engine has when they have ended.
    """

    transfers: list[tuple[tuple[Link, ...], float]]
    end: int


def worth_fetching(
    sources: Sources, facts: SimulatedEngine, links: Links, *, peers: bool
) -> Fetches:
    """What is fetched sooner than computed, with the links as they are now.

    Args:
        sources: from where the KV can come.
        facts: the engine that computes the rest.
        links: of all engines.
        peers: whether its node may fetch from others.
    """
    engine, block_bytes = facts.info.id, facts.kv_bytes * BLOCK_TOKENS
    ways: list[tuple[tuple[Link, ...], int]] = [
        ((("host", engine),), sources.host), ((("disk", engine),), sources.disk),
    ]  # fmt: skip
    if sources.peer is not None and peers:
        ways.append(((("out", sources.peer), ("in", engine)), sources.more))
    wanted: list[tuple[tuple[Link, ...], float]] = []
    at = sources.start
    for way, blocks in ways:
        if not blocks:
            continue
        seconds = links.seconds(way, blocks * block_bytes)
        saved = facts.times.prefill_seconds(blocks * BLOCK_TOKENS, at * BLOCK_TOKENS)
        if seconds >= saved:
            break  # what lies behind would be of no use
        wanted.append((way, blocks * block_bytes))
        at += blocks
    return Fetches(wanted, at)


def leader_of(flights: Iterable[Flight], flight: Flight, start: int) -> Flight | None:
    """Who fetches to the same engine what a request counts on; None = nobody.

    Args:
        flights: all requests that engines have.
        flight: a request that fetches nothing itself.
        start: blocks that its engine has, or has soon.
    """
    blocks = flight.record.request.blocks
    for one in flights:
        at = one.fetched.start
        fetching = one.prefill == flight.prefill and one.transfers and not one.computed
        if fetching and at < start and one.record.request.blocks[at] == blocks[at]:
            return one
    return None
