"""The blocks of a request that pages are stored from. Pure."""

from kvstore.engine.messages import Blocks
from kvstore.engine.requests import ScheduledRequest, Setup


def source_blocks(
    setup: Setup, place: int, progress: ScheduledRequest, first: int, end: int
) -> Blocks | None:
    """Source blocks of the pages from ``first`` to ``end`` in one group; None = there are none.

    Only the last run without null blocks; pages before a sliding window are not in any block. Of a
    group with states only the page at whose end the step has ended: blocks before the last one may
    have the states of fewer tokens than their pages.

    Args:
        setup: of the engine.
        place: index of the group in ``setup.groups``.
        progress: the request after the step.
        first: index of the first page in the request's chain.
        end: index after the last one; all of them are computed.
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
