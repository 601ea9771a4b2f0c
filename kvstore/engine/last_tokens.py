"""Blocks whose last loaded token will be recomputed by a later step. Pure.

An engine shares the blocks of a load as soon as it has ended. If all tokens of a request were
loaded, the request recomputes the last one in its first step. That step may come after a step of
another request, which found the block in the engine's cache: nothing is stored from it before.
"""

from collections.abc import Iterable

from kvstore.engine.messages import Blocks, Load


class LastTokens:
    """The requests that will recompute their last token."""

    def __init__(self) -> None:
        self._blocks: dict[str, set[int]] = {}

    def expect(self, request_id: str, load: Load) -> None:
        """A load of all tokens of a request starts."""
        self._blocks[request_id] = {part.blocks[-1] for part in load.blocks if part.blocks}

    def computed(self, request_ids: Iterable[str]) -> None:
        """These requests are computed in this step, before its stores start, or have ended."""
        for request_id in request_ids:
            self._blocks.pop(request_id, None)

    def touch(self, parts: Iterable[Blocks]) -> bool:
        """Whether one of the blocks will still be written."""
        return any(
            not one.isdisjoint(part.blocks) for part in parts for one in self._blocks.values()
        )
