"""The Conductor's configuration: one frozen tree in sections, loaded by :mod:`kvstore.config`.

A TOML file < environment (``KVSTORE_CONDUCTOR__QUEUE__WAITING_MAX``) <
``--set queue.waiting_max=9``.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from conductor.engines import Role
from conductor.policy import POLICIES
from kvstore.config import Loaded, Positive, Section, load

ENV_PREFIX: Final = "KVSTORE_CONDUCTOR__"

Name = Annotated[
    str, Meta(pattern="^[A-Za-z0-9._-]{1,64}$", description="1 to 64 of A-Z a-z 0-9 . _ -")
]
Url = Annotated[
    str,
    Meta(
        pattern="^https?://[^/?#]+$",
        max_length=512,
        description="an address such as http://host:8000, without a path",
    ),
]
Endpoint = Annotated[
    str,
    Meta(
        pattern="^(tcp|ipc|inproc)://.+$",
        max_length=512,
        description="an endpoint such as tcp://host:5557 or ipc:///path",
    ),
]
Count = Annotated[int, Meta(ge=1)]


class HttpConfig(Section, frozen=True):
    """The OpenAI-compatible front.

    Attributes:
        host: address to listen on; there is no authentication, so keep it on loopback.
        port: 0 = any free port; the ready line says which.
        body_bytes_max: a longer request body is refused with 413.
        drain_s: what requests in flight get at SIGTERM before they are cut.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 7700
    body_bytes_max: Count = 8 << 20
    drain_s: Positive = 10.0


class PolicyConfig(Section, frozen=True):
    """How engines are chosen.

    Attributes:
        name: one of ``conductor.policy.POLICIES``.
    """

    name: str = "longest-prefix"

    def __post_init__(self) -> None:
        """Refuse a policy that does not exist."""
        if self.name not in POLICIES:
            known = ", ".join(sorted(POLICIES))
            raise ValueError(f"name: {self.name!r} is none of {known}")


class QueueConfig(Section, frozen=True):
    """Requests that wait for an engine.

    Attributes:
        waiting_max: further requests are refused with 429 and ``Retry-After``.
        wait_s: a request that waited this long is refused with 503 and ``Retry-After``.
        tries: engines (or pairs) that one request may be sent to, one after another.
    """

    waiting_max: Count = 1024
    wait_s: Positive = 30.0
    tries: Annotated[int, Meta(ge=1, le=16)] = 3


class DeadlineConfig(Section, frozen=True):
    """How long an engine may take; every wait has one of these.

    Attributes:
        connect_s: to accept a connection.
        tokenize_s: to answer ``/tokenize``; later, the request is routed without its tokens.
        prefill_s: to answer a prefill (the first half of a pair).
        first_byte_s: until the first byte of the answer that the client gets.
        idle_s: between two pieces of a stream; also for the client to take one.
        request_s: for everything, from arrival to the last byte.
    """

    connect_s: Positive = 2.0
    tokenize_s: Positive = 2.0
    prefill_s: Positive = 120.0
    first_byte_s: Positive = 120.0
    idle_s: Positive = 60.0
    request_s: Positive = 900.0


class HealthConfig(Section, frozen=True):
    """When an engine counts as suspect or dead.

    Attributes:
        probe_s: between two probes of an engine that is well.
        probe_timeout_s: deadline of one probe.
        dead_after: failures in a row, of requests and probes together, that make it dead.
        backoff_s_max: the longest pause between probes of a dead engine.
    """

    probe_s: Positive = 1.0
    probe_timeout_s: Positive = 1.0
    dead_after: Annotated[int, Meta(ge=1, le=100)] = 3
    backoff_s_max: Positive = 10.0


class IndexConfig(Section, frozen=True):
    """Who holds which pages.

    Attributes:
        entries_max: pages known at most (about 34 bytes each); further ones are dropped, counted.
        page_tokens: page size for engines that do not name their own.
        foreign_blocks_max: blocks of one engine with hashes of its own that are remembered.
    """

    entries_max: Annotated[int, Meta(ge=16, le=1 << 28)] = 1_000_000
    page_tokens: Annotated[int, Meta(ge=1, le=65_536)] = 64
    foreign_blocks_max: Count = 200_000


class EventsConfig(Section, frozen=True):
    """Subscriptions to KV events.

    Attributes:
        replay_s: longest silence during a replay of missed batches.
        verify_s: without a live message for so long, the last batch is asked for again: it shows
            a publisher that was restarted, and batches that were missed at the end.
        queue_max: batches that may wait in one subscription's socket.
    """

    replay_s: Positive = 5.0
    verify_s: Positive = 5.0
    queue_max: Count = 10_000


class DecisionsConfig(Section, frozen=True):
    """The decision log.

    Attributes:
        kept: decisions that can be asked for; the oldest go first.
    """

    kept: Count = 4096


class EngineEntry(Section, frozen=True):
    """An engine to know from the start, or the body of ``POST /v1/engines``.

    What is not given here is asked from the engine's ``GET /v1/engine``.

    Attributes:
        id: names the engine in decisions and metrics.
        role: ``prefill``, ``decode`` or ``mixed``.
        url: ``http://host:port``.
        model: model name that it serves.
        page_tokens: tokens in a page of its space.
        space: hex digest of its space.
        events: endpoint of its KV events.
        events_replay: endpoint where missed batches are asked for.
        node: id of the kvstore node on its machine.
        max_running: requests it may have in flight.
    """

    id: Name
    role: Role
    url: Url
    model: str | None = None
    page_tokens: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    space: Annotated[str, Meta(pattern="^[0-9a-f]{64}$", description="64 hex digits")] | None = None
    events: Endpoint | None = None
    events_replay: Endpoint | None = None
    node: Name | None = None
    max_running: Annotated[int, Meta(ge=1, le=100_000)] | None = None


class NodeEntry(Section, frozen=True):
    """A kvstore node whose events are followed; also the body of ``POST /v1/nodes``.

    Attributes:
        id: the name that engines give for their ``node``.
        events: endpoint of its KV events.
        events_replay: endpoint where missed batches are asked for.
    """

    id: Name
    events: Endpoint
    events_replay: Endpoint | None = None


class ConductorConfig(Section, frozen=True):
    """Everything that ``kvstore-conductor`` can be told."""

    http: HttpConfig = HttpConfig()
    policy: PolicyConfig = PolicyConfig()
    queue: QueueConfig = QueueConfig()
    deadline: DeadlineConfig = DeadlineConfig()
    health: HealthConfig = HealthConfig()
    index: IndexConfig = IndexConfig()
    events: EventsConfig = EventsConfig()
    decisions: DecisionsConfig = DecisionsConfig()
    engines: tuple[EngineEntry, ...] = ()
    nodes: tuple[NodeEntry, ...] = ()


def load_conductor(
    path: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    overrides: Iterable[str] = (),
) -> Loaded[ConductorConfig]:
    """Read the tree once, at start-up.

    Raises:
        ConfigError: a key is unknown, or a value does not fit; names the key and its source.
    """
    return load(ConductorConfig, path, environ, overrides, ENV_PREFIX)
