"""Publishes the node's actions as KV events."""

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from socket import socket as Socket  # noqa: N812
from typing import Final

import numpy as np

from kvstore.config import EventsConfig, SocketConfig
from kvstore.events.publisher import (
    Event,
    EventPublisher,
    FollowerAccess,
    RemovedEvent,
    StoredEvent,
)
from kvstore.events.questions import OpenQuestion
from kvstore.events.zmtp import TOKEN_BYTES_MAX
from kvstore.process.smallfile import read_token
from kvstore.protocol.counts import NO_EVENTS, EventCounts
from kvstore.protocol.errors import ConfigError, InvalidArgument, reason
from kvstore.protocol.page import PrefixKey
from kvstore.state.tree.actions import (
    Abandoned,
    Action,
    Removed,
    Stored,
    TierRemoved,
    TierStored,
)

MEDIA: Final = {"host": "CPU", "ssd": "STORAGE"}
"""Tier → its name in events (vLLM's names)."""
BESIDE: Final = "ipc"
"""The endpoint for a Unix socket next to the node's."""
_OTHER: Final = {"host": "ssd", "ssd": "host"}


_TOKEN_CHARACTERS: Final = range(16, TOKEN_BYTES_MAX + 1)


class Publication:
    """Converts the node's actions to events; does nothing if events are off.

    Attributes:
        topic: first frame of every batch.
        needs_token: whether followers over TCP must send a token.
    """

    def __init__(
        self,
        config: EventsConfig,
        socket: SocketConfig,
        node: str,
        boot: bytes,
        *,
        to_peers: bool = False,
    ) -> None:
        """Bind the sockets.

        Args:
            config: endpoints and options.
            socket: the node's socket; Unix sockets for events are next to it, with the same
                permissions.
            node: its name.
            boot: its boot id.
            to_peers: other nodes follow it, even if nobody else may (:meth:`serve`).

        Raises:
            ConfigError: an endpoint cannot be bound, or a token is missing or invalid; names its
                key.
        """
        self.boot = boot.hex()
        self._publisher: EventPublisher | None = None
        self._tokens = config.tokens
        self.topic = f"kvstore@{node}@{boot.hex()}"
        self.needs_token = False
        if not config.endpoint and not to_peers:
            return
        # Events cover all tenants, so a group with separate tenants must not read them.
        mode = 0o660 if socket.group_access and not socket.tenants else 0o600
        live = config.endpoint
        replay = config.replay_endpoint if live else ""
        token = _follow_token(config)
        self.needs_token = bool(token)
        try:
            self._publisher = EventPublisher(
                _resolved(live, socket, "events") if live else None,
                _resolved(replay, socket, "replay") if replay else None,
                topic=self.topic.encode(),
                access=FollowerAccess(token, mode),
                queue_max=config.queue_max,
                replay_max=config.replay_max,
            )
        except InvalidArgument as error:
            if getattr(config, error.field, "") == BESIDE:
                raise ConfigError(f"socket.path={socket.path}: events.{error}") from error
            raise ConfigError(f"events.{error}") from error

    @property
    def endpoint(self) -> str:
        """The endpoint of events; empty if they are off."""
        return (self._publisher.bound_endpoint or "") if self._publisher else ""

    @property
    def replay_endpoint(self) -> str:
        """The endpoint of replays; empty if they are off."""
        return (self._publisher.bound_replay_endpoint or "") if self._publisher else ""

    @property
    def tells_tokens(self) -> bool:
        """Whether token ids are published."""
        return self._tokens and self._publisher is not None

    def publish(self, actions: Sequence[Action]) -> None:
        """Queue one batch; never blocks."""
        if self._publisher is not None:
            self._publisher.publish(events_of(actions, tokens=self._tokens))

    @property
    def sequence_next(self) -> int:
        """Number of the next batch; 0 if events are off."""
        return self._publisher.sequence_next if self._publisher else 0

    def serve(self, raw: Socket, *, replay: bool) -> None:
        """See :meth:`EventPublisher.serve`; closes the connection if events are off."""
        if self._publisher is None:
            raw.close()
        else:
            self._publisher.serve(raw, replay=replay)

    def answer_with(self, answer: Callable[[OpenQuestion], None] | None) -> None:
        """See :meth:`EventPublisher.answer_with`."""
        if self._publisher is not None:
            self._publisher.answer_with(answer)

    def stats(self) -> EventCounts:
        """Counters of the publisher; all 0 if events are off."""
        return self._publisher.stats() if self._publisher else NO_EVENTS

    def close(self) -> None:
        """Send queued batches and stop."""
        if self._publisher is not None:
            self._publisher.close()


def _resolved(endpoint: str, socket: SocketConfig, name: str) -> str:
    """The endpoint, with ``ipc`` resolved to a Unix socket next to the node's."""
    return f"ipc://{Path(socket.path).absolute()}.{name}" if endpoint == BESIDE else endpoint


def _follow_token(config: EventsConfig) -> bytes:
    """The token that followers over TCP must send; Unix sockets use permissions instead.

    Raises:
        ConfigError: it cannot be read, or is invalid.
    """
    if "tcp:" not in f"{config.endpoint} {config.replay_endpoint}":
        return b""
    text, key = config.follow_token, "events.follow_token"
    if not text:
        key = f"{key}_file={config.follow_token_file}"
        try:
            text = read_token(Path(config.follow_token_file))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{key}: {reason(error)}") from error
    if len(text) not in _TOKEN_CHARACTERS or not (text.isascii() and text.isprintable()):
        first, last = _TOKEN_CHARACTERS[0], _TOKEN_CHARACTERS[-1]
        raise ConfigError(f"{key}: {first} to {last} printable ASCII characters are needed")
    return text.encode()


def events_of(actions: Sequence[Action], *, tokens: bool = False) -> list[Event]:
    """Convert actions to events, in order; consecutive ones of the same kind are merged.

    Token ids are included only if ``tokens`` is true, because keys do not reveal the contents of
    pages. An event has the token ids of all its pages, or none.

    A page that left one medium and stays in another is published as removed from the first and
    stored again in the second, so that followers that ignore media are correct too.
    """
    events: list[Event] = []
    published = [action for action in actions if not isinstance(action, Abandoned)]
    for _, same in groupby(published, key=_kind):
        members = list(same)
        match members[0]:
            case Removed():
                gone = [one for one in members if isinstance(one, Removed)]
                for tier in gone[0].tiers:
                    keys = [key for one in gone for key in one.keys]
                    events.append(_removed(gone[0], keys, tier))
            case TierRemoved(tier=tier):
                moved = [one for one in members if isinstance(one, TierRemoved)]
                events.append(_removed(moved[0], [key for one in moved for key in one.keys], tier))
                events += _stored(moved[::-1], _OTHER[tier], tokens)  # removals begin with leaves
            case TierStored(tier=tier):
                came = [one for one in members if isinstance(one, TierStored)]
                events += _stored(came, tier, tokens)
            case _:
                events += [_event(one, tokens) for one in members if isinstance(one, Stored)]
    return events


def _kind(action: Action) -> tuple[object, ...]:
    """Equal for consecutive actions that may be merged into one event."""
    where = (type(action), action.space.number, action.shard) if hasattr(action, "shard") else ()
    match action:
        case Removed(tiers=tiers):
            return (*where, tiers)
        case TierStored(tier=tier) | TierRemoved(tier=tier):
            return (*where, tier)
        case _:
            return where


def _event(action: Stored, tokens: bool) -> StoredEvent:  # noqa: FBT001
    return StoredEvent(
        block_hashes=action.keys,
        parent_block_hash=action.parent or None,
        token_ids=_ids([action.tokens]) if tokens else [],
        block_size=action.space.identity.page_tokens,
        medium=MEDIA["host"],
        space=action.space.label,
        shard=action.shard,
        shard_digest=action.space.shards[action.shard].event_label,
        group=action.space.shards[action.shard].spec.group,
        window_pages=action.space.shards[action.shard].window_pages,
    )


def _stored(
    pages: Sequence[TierStored | TierRemoved],
    tier: str,
    tokens: bool,  # noqa: FBT001
) -> list[Event]:
    """One event for each run of consecutive pages."""
    runs: list[list[TierStored | TierRemoved]] = []
    for page in pages:
        if runs and page.parent == runs[-1][-1].keys[-1]:
            runs[-1].append(page)
        else:
            runs.append([page])
    return [
        StoredEvent(
            block_hashes=[key for page in run for key in page.keys],
            parent_block_hash=run[0].parent or None,
            token_ids=_ids([page.tokens for page in run]) if tokens else [],
            block_size=run[0].space.identity.page_tokens,
            medium=MEDIA[tier],
            space=run[0].space.label,
            shard=run[0].shard,
            shard_digest=run[0].space.shards[run[0].shard].event_label,
            group=run[0].space.shards[run[0].shard].spec.group,
            window_pages=run[0].space.shards[run[0].shard].window_pages,
        )
        for run in runs
    ]


def _ids(tokens: Sequence[bytes]) -> list[int]:
    """The token ids of consecutive pages; none unless those of all pages are known."""
    known = b"".join(tokens) if all(tokens) else b""
    found: list[int] = np.frombuffer(known, dtype="<u4").tolist()
    return found


def _removed(first: Removed | TierRemoved, keys: list[PrefixKey], tier: str) -> RemovedEvent:
    return RemovedEvent(
        block_hashes=keys,
        medium=MEDIA[tier],
        space=first.space.label,
        shard=first.shard,
        shard_digest=first.space.shards[first.shard].event_label,
        group=first.space.shards[first.shard].spec.group,
    )
