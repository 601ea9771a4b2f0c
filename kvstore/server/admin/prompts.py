"""Explains the hits of a prompt's tokens.

Hashes them here, and sends the node a thousand keys at a time.

For each part of the keys, the node returns the spaces with the most pages; then it explains the
first missing page.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.explanation import Explanation
from kvstore.protocol.page import KEY_BYTES, page_keys
from kvstore.server import answers, operations

SIZES_MAX: Final = 8
"""Maximum page sizes for which one prompt is hashed."""
_STRETCH_BYTES: Final = operations.RUN_KEYS_MAX * KEY_BYTES

Asks = Callable[[operations.Operation, Any], Awaitable[Any]]
"""Runs an operation on the node: the operation and the type of its answer."""


class _Part:
    """The longest stored prefix of a prompt, in pages of one size."""

    def __init__(self, page_tokens: int, keys: bytes, space: str, pages: int) -> None:
        self.page_tokens = page_tokens
        self.keys = keys
        self.space = space
        self.pages = pages

    @property
    def tokens(self) -> int:
        return self.pages * self.page_tokens

    def key(self, at: int) -> str:
        return self.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES].hex()


async def explain(
    ask: Asks, tokens: list[int], space: str | None, shard: int | None
) -> Explanation:
    """Explain how many leading pages of a prompt are hits, and why the next page is not.

    Args:
        ask: runs an operation on the node.
        tokens: tokens from the beginning of the prompt.
        space: label of the space; None = the one with the longest prefix.
        shard: number of the shard in ``space``; None = any.

    Raises:
        InvalidArgument: the tokens are invalid, or fewer than a page.
        Refusal: the node refused.
    """
    there = await ask(operations.ListPageSizes(space=space), answers.PageSizes)
    if not there.sizes:
        raise InvalidArgument("tokens", "no space is open: nothing was stored yet")
    if space is None and len(there.sizes) > SIZES_MAX:
        raise InvalidArgument(
            "space", f"the node has pages of {len(there.sizes)} sizes: name a space"
        )
    least = there.page_tokens or min(there.sizes)
    if len(tokens) < least:
        raise InvalidArgument("tokens", f"{len(tokens)} are fewer than a page, which has {least}")
    if there.page_tokens is not None:
        part = await _longest(ask, tokens, there.page_tokens, there.space, shard)
    else:
        sizes = [size for size in there.sizes if size <= len(tokens)]
        parts = [await _longest(ask, tokens, size, None, None) for size in sizes]
        part = max(parts, key=lambda one: one.tokens)
    asked_pages = len(part.keys) // KEY_BYTES
    key = part.key(min(part.pages, asked_pages - 1))
    chosen = there.space or part.space or None
    question = operations.ExplainKey(key=key, space=chosen, shard=shard)
    found: Explanation = await ask(question, Explanation)
    if there.space is not None and found.verdict in ("never_stored", "unknown"):
        others = [size for size in there.sizes if size != part.page_tokens][: SIZES_MAX - 1]
        found = await _in_other_pages(ask, tokens, part, there.space, others) or found
    text = f"{part.pages} of {asked_pages} pages are a hit"
    if part.pages < asked_pages:
        text += f"; page {part.pages}: {found.text}"
    return replace(found, text=text, hit_pages=part.pages, asked_pages=asked_pages)


async def _in_other_pages(
    ask: Asks, tokens: list[int], part: _Part, space: str, sizes: list[int]
) -> Explanation | None:
    """Explain if a space with another page size has a longer prefix."""
    for size in sizes:
        if size > len(tokens):
            continue
        other = await _longest(ask, tokens, size, None, None)
        if other.tokens > part.tokens:
            key = other.key(other.pages - 1)
            question = operations.Compare(space=space, other=other.space, key=key)
            found: Explanation = await ask(question, Explanation)
            return found
    return None


async def _longest(
    ask: Asks, tokens: list[int], page_tokens: int, space: str | None, shard: int | None
) -> _Part:
    """The space with the longest prefix in pages of one size."""
    keys = (await asyncio.to_thread(page_keys, tokens, page_tokens)).packed
    among = [space] if space is not None else None
    label, pages = space or "", 0
    for start in range(0, len(keys), _STRETCH_BYTES):
        stretch = keys[start : start + _STRETCH_BYTES]
        question = operations.FindRuns(
            page_tokens=page_tokens, keys=stretch, among=among, shard=shard
        )
        runs = (await ask(question, answers.Runs)).runs
        if not runs:
            break
        label, among = runs[0].space, [run.space for run in runs]
        pages += runs[0].pages
        if runs[0].pages * KEY_BYTES < len(stretch):
            break
    return _Part(page_tokens, keys, label, pages)
