"""Blocks whose last loaded token will be recomputed by a later step. Pure.

An engine shares the blocks of a load as soon as it has ended. If all tokens of a request were
loaded, the request computes the last one anew in its first step. That may come after a step of
another request, which found the block in the engine's cache: nothing is stored from it before.
"""

from collections.abc import Iterable

from kvstore.engine.messages import Blocks, Load


class LastTokens:
    """The requests that will compute their last token anew."""

    def __init__(self) -> None:
        self._blocks: dict[str, set[int]] = {}

    def expect(self, request_id: str, load: Load) -> None:
        """A load of all tokens of a request begins."""
        self._blocks[request_id] = {part.blocks[-1] for part in load.blocks if part.blocks}

    def computed(self, request_ids: Iterable[str]) -> None:
        """These are computed in the step that is built, after which stores begin; or have ended."""
        for request_id in request_ids:
            self._blocks.pop(request_id, None)

    def touch(self, parts: Iterable[Blocks]) -> bool:
        """Whether one of the blocks will be written to."""
        return any(
            not one.isdisjoint(part.blocks) for part in parts for one in self._blocks.values()
        )
