"""What the node did, as KV events for whoever indexes pages."""

from collections.abc import Sequence

import msgspec
import numpy as np

from kvstore.config import EventsConfig
from kvstore.events import Event, EventPublisher, RemovedEvent, StoredEvent
from kvstore.page import PrefixKey
from kvstore.state.outcomes import Action, Removed, Stored

MEDIUM = "CPU"


class Publication:
    """Turns the node's actions into events; does nothing when events are configured off."""

    def __init__(self, config: EventsConfig, node: str, boot: bytes) -> None:
        """Bind the sockets."""
        self._publisher: EventPublisher | None = None
        if config.endpoint:
            self._publisher = EventPublisher(
                config.endpoint,
                config.replay_endpoint or None,
                topic=f"kvstore@{node}@{boot.hex()}".encode(),
                queue_max=config.queue_max,
                replay_max=config.replay_max,
            )

    @property
    def endpoint(self) -> str:
        """Where events are published; empty when they are not."""
        return self._publisher.bound_endpoint if self._publisher else ""

    @property
    def replay_endpoint(self) -> str:
        """Where missed events can be asked for again; empty when they cannot."""
        return (self._publisher.bound_replay_endpoint or "") if self._publisher else ""

    def publish(self, actions: Sequence[Action]) -> None:
        """Queue one batch; never waits."""
        if self._publisher is not None:
            self._publisher.publish(events_of(actions))

    def stats(self) -> dict[str, object]:
        """Counters of the publisher; empty when events are off."""
        return msgspec.structs.asdict(self._publisher.stats()) if self._publisher else {}

    def close(self) -> None:
        """Send what is queued and stop."""
        if self._publisher is not None:
            self._publisher.close()


def events_of(actions: Sequence[Action]) -> list[Event]:
    """The events that tell what ``actions`` did; removals that follow each other become one."""
    events: list[Event] = []
    gone: list[PrefixKey] = []
    last: Removed | None = None
    for action in [*actions, None]:
        if last is not None and not (
            isinstance(action, Removed) and (action.space, action.shard) == (last.space, last.shard)
        ):
            events.append(
                RemovedEvent(
                    block_hashes=gone, medium=MEDIUM, space=last.space.label, shard=last.shard
                )
            )
            gone, last = [], None
        match action:
            case Removed():
                gone, last = gone + action.keys, action
            case Stored():
                events.append(
                    StoredEvent(
                        block_hashes=action.keys,
                        parent_block_hash=action.parent or None,
                        token_ids=np.frombuffer(action.tokens, dtype="<u4").tolist(),
                        block_size=action.space.identity.page_tokens,
                        medium=MEDIUM,
                        space=action.space.label,
                        shard=action.shard,
                    )
                )
            case _:
                pass
    return events
