"""Tracks which blocks hold valid draft-layer KV. Pure.

An EAGLE head, or a layer for multi-token prediction, computes its KV at a token from that token,
everything before it, and the token after it. So the last token of a block ties the block to one
next token, which neither the engine's hash of the block nor a key of its tokens covers. Keys of
such an engine are shifted by a token (:class:`kvstore.engine.chain.ShiftedChain`). Blocks are not:
the engine shares one between requests that continue differently, and some steps write no draft KV,
or wrong KV. So a page is stored only from blocks that are known to be right for its next token.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.engine.identity import Group
from kvstore.engine.messages import Load
from kvstore.engine.requests import ScheduledRequest
from kvstore.engine.states import RequestState

_WRONG: Final = -1
_FILLING: Final = -2
"""All tokens so far are right; the token after the block is not known yet."""


class _Seen(NamedTuple):
    """How many leading blocks of a request are known to this class, and how many are settled."""

    blocks: int
    settled: int


class DraftBlocks:
    """For each block, the next token for which its draft-layer KV is valid.

    It must be called for every step and load of the engine. All other blocks count as wrong.
    """

    def __init__(self, group: Group, page_tokens: int) -> None:
        self._group = group.index
        self._block_tokens = group.block_tokens
        self._page_blocks = page_tokens // group.block_tokens
        self._next: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._seen: dict[str, _Seen] = {}
        self._loads: dict[int, list[tuple[int, int]]] = {}

    def resize(self, blocks: int) -> None:
        """Set the number of the engine's blocks; all of them are wrong."""
        self._next = np.full(blocks, _WRONG, dtype=np.int64)

    def forget_all(self) -> None:
        """The engine's weights changed: no block is valid any more."""
        self._next.fill(_WRONG)
        self._seen.clear()
        self._loads.clear()

    def finished(self, request_id: str) -> None:
        """A request has ended; its blocks do not change."""
        self._seen.pop(request_id, None)

    def computes(
        self, progress: ScheduledRequest, state: RequestState | None, *, drafted: bool
    ) -> None:
        """A step computes a request.

        Args:
            progress: the part that it computes.
            state: the request; None = unknown, its blocks never count as right.
            drafted: the draft layer runs in this step. At the end of a partial prompt it uses a
                wrong next token.
        """
        table = progress.blocks[self._group]
        each = self._block_tokens
        before = self._seen.get(progress.request_id)
        if progress.starts:
            whole, rest = divmod(progress.begin, each)
            self._mark(table[whole : whole + bool(rest)], _WRONG)  # begun by somebody else
            seen = settled = whole + bool(rest)
        elif before is None:
            self._mark(table, _WRONG)
            seen = settled = len(table)
        else:
            seen, settled = before
        self._mark(table[seen:], _FILLING)
        self._seen[progress.request_id] = _Seen(max(seen, len(table)), settled)
        if state is None:
            return
        tokens = state.request.all_token_ids
        known = len(tokens)
        if not drafted:
            # With steps in flight ``begin`` may count drafts that are not accepted in the end.
            first = min(progress.begin, known - 1) // each
            self._mark(table[first : -(-progress.written // each)], _WRONG)
        elif progress.tokens < known:
            last = (progress.tokens - 1) // each
            self._mark(table[last : last + 1], _WRONG)
        end = min(progress.tokens, known - 1) // each
        for place in range(settled, min(end, len(table))):
            if self._next[table[place]] == _FILLING:
                self._next[table[place]] = tokens[(place + 1) * each]
        self._seen[progress.request_id] = _Seen(max(seen, len(table)), max(settled, end))

    def right_pages(
        self, progress: ScheduledRequest, state: RequestState, first: int, end: int
    ) -> tuple[int, int]:
        """The first run of pages from ``first`` to ``end`` whose blocks are all right.

        Args:
            progress: progress of the request, for its blocks.
            state: the request.
            first: index of a page.
            end: index after the last one.

        Returns:
            Index of its first page, and index after its last; ``(end, end)`` if there is none.
        """
        table, tokens = progress.blocks[self._group], state.request.all_token_ids
        each = self._page_blocks
        begin = end
        for page in range(first, end):
            places = range(page * each, (page + 1) * each)
            right = places.stop <= len(table) and all(
                self._next[table[place]] == tokens[(place + 1) * self._block_tokens]
                for place in places
            )
            if right and begin == end:
                begin = page
            elif not right and begin < end:
                return begin, page
        return begin, end

    def begins_load(self, load: Load, first: int, state: RequestState) -> None:
        """A load will write its blocks; its first page has this index in the request."""
        ((_, skipped, table),) = load.blocks
        begin = (first + skipped) * self._page_blocks + 1
        tokens = state.request.all_token_ids
        self._mark(table, _WRONG)
        self._loads[load.job] = [
            (block, tokens[(begin + at) * self._block_tokens]) for at, block in enumerate(table)
        ]

    def ended_load(self, job: int, pages: int) -> None:
        """A load has ended; its first ``pages`` pages are in their blocks."""
        for block, following in self._loads.pop(job, ())[: pages * self._page_blocks]:
            if block:
                self._next[block] = following

    def _mark(self, blocks: Sequence[int], what: int) -> None:
        self._next[list(blocks)] = what
        self._next[:1] = _WRONG  # the null block
