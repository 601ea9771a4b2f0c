"""Publishes changes of the local prefix cache as KV events.

Events have only prefix keys: routers need no more, and followers cannot read prompts.
"""

import os
from collections.abc import Sequence

from engine_adapters.reference.prefix_tree import TreeChange
from kvstore.events.publisher import Event, EventPublisher, RemovedEvent, StoredEvent
from kvstore.protocol.page import SpaceIdentity

MEDIUM = "GPU"
"""The pool represents an accelerator's memory, which other engines cannot read."""


class EngineEvents:
    """One publisher; its topic contains the engine's name and boot id."""

    def __init__(
        self, engine_id: str, space: SpaceIdentity, endpoint: str, replay_endpoint: str | None
    ) -> None:
        boot = os.urandom(8).hex()
        topic = f"kv-events@{engine_id}@{boot}".encode()
        self._space = space.digest.hex()
        self._page_tokens = space.page_tokens
        self._publisher = EventPublisher(endpoint, replay_endpoint, topic=topic)
        self.endpoint = self._publisher.bound_endpoint
        self.replay_endpoint = self._publisher.bound_replay_endpoint

    def publish(self, changes: Sequence[TreeChange]) -> None:
        """Queue one batch; never blocks."""
        self._publisher.publish([self._event(change) for change in changes])

    def close(self) -> None:
        """Close the publisher."""
        self._publisher.close()

    def _event(self, change: TreeChange) -> Event:
        keys = change.keys
        hashes = [bytes(key) for key in keys]
        if not change.stored:
            return RemovedEvent(block_hashes=hashes, medium=MEDIUM, space=self._space, shard=0)
        return StoredEvent(
            block_hashes=hashes,
            parent_block_hash=keys.parent or None,
            token_ids=[],
            block_size=self._page_tokens,
            medium=MEDIUM,
            space=self._space,
            shard=0,
        )
