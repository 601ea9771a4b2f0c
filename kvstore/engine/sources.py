"""The blocks of a request that pages are stored from and loaded to. Pure."""

from collections.abc import Sequence

from kvstore.engine.identity import Group, window_pages
from kvstore.engine.messages import Blocks
from kvstore.engine.requests import ScheduledRequest, Setup


def blocks_of(scheduled: Sequence[ScheduledRequest], group: Group) -> list[int]:
    """All blocks of the requests of a step in one group."""
    return [block for one in scheduled for block in one.blocks[group.index] if block]


def source_blocks(
    setup: Setup, place: int, progress: ScheduledRequest, first: int, end: int
) -> Blocks | None:
    """Source blocks of the pages from ``first`` to ``end`` in one group; None = there are none.

    Only the last run without null blocks; pages before a sliding window are not in any block. Of a
    group with states only the page at whose end the step has ended: blocks before the last one may
    have the states of fewer tokens than their pages.

    Args:
        setup: setup of the engine.
        place: index of the group in ``setup.groups``.
        progress: the request after the step.
        first: index of the first page in the request's chain.
        end: index after the last page; all pages before it are computed.
    """
    group = setup.groups[place]
    each = setup.page_tokens // group.block_tokens
    table = list(progress.blocks[group.index][first * each : end * each])
    if len(table) < (end - first) * each:
        return None
    if group.state:
        if progress.tokens != end * setup.page_tokens:
            return None
        table[:-each] = [0] * (len(table) - each)
    start = max((index + 1 for index, block in enumerate(table) if block == 0), default=0)
    start = -(-start // each) * each
    return Blocks(place, start // each, table[start:]) if start < len(table) else None


def target_blocks(
    setup: Setup, place: int, blocks: Sequence[Sequence[int]], computed: int, first: int, end: int
) -> Blocks:
    """Target blocks of the pages from ``first`` to ``end`` in one group.

    Blocks with computed tokens may be shared with other requests, so the data for them goes to the
    null block. The same applies to blocks before a sliding window, where the engine itself has the
    null block. Pages without any other block are not loaded.

    Args:
        setup: setup of the engine.
        place: index of the group in ``setup.groups``.
        blocks: the request's block table, by the engine's group index.
        computed: leading tokens of the request whose KV is there.
        first: index of the first page in the request's chain.
        end: index after the last one.
    """
    group = setup.groups[place]
    each = setup.page_tokens // group.block_tokens
    window = window_pages(group, setup.page_tokens)
    first_here = max(first, end - window) if window else first
    table = list(blocks[group.index][first_here * each : end * each])
    computed_blocks = computed // group.block_tokens - first_here * each
    for index in range(min(len(table), computed_blocks)):
        table[index] = 0
    return Blocks(place, first_here - first, table)
