"""Follows KV events."""

import asyncio
from collections.abc import Callable

from conductor.config import EventsConfig, IndexConfig, NodeEntry
from conductor.engines import EngineInfo
from conductor.index import PrefixIndex


class EventFollowers:
    """Follows nobody yet."""

    def __init__(
        self,
        index: PrefixIndex,
        index_config: IndexConfig,
        events_config: EventsConfig,
        changed: Callable[[], None],
    ) -> None:
        self._index = index

    def follow_engine(self, info: EngineInfo) -> None:
        """Later."""

    def follow_node(self, node: NodeEntry) -> None:
        """Later."""

    def drop_engine(self, engine_id: str) -> None:
        """Later."""

    def drop_node(self, node_id: str) -> None:
        """Later."""

    def is_current(self, worker: str) -> bool:
        """Later."""
        return False

    def gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Later."""
        return {}

    async def run(self) -> None:
        """Later."""
        await asyncio.Event().wait()
