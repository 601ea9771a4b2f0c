"""The Conductor's configuration: one frozen tree in sections, loaded by :mod:`kvstore.config`.

A TOML file < environment (``KVSTORE_CONDUCTOR__QUEUE__WAITING_MAX``) <
``--set queue.waiting_max=9``.
"""

import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from conductor.routing.engines import Role
from conductor.routing.policy import POLICIES
from kvstore.config import Loaded, Positive, Section, load
from kvstore.errors import InvalidArgument
from kvstore.process.listeners import parse_endpoint

ENV_PREFIX: Final = "KVSTORE_CONDUCTOR__"

Name = Annotated[
    str, Meta(pattern="^[A-Za-z0-9._-]{1,64}$", description="1 to 64 of A-Z a-z 0-9 . _ -")
]
Url = Annotated[str, Meta(max_length=512)]
Endpoint = Annotated[str, Meta(max_length=512)]
Tokens = Annotated[int, Meta(ge=1, le=65_536)]
Space = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", description="64 hex digits")]
Model = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=512,
        pattern=r"^[^\x00-\x1f\x7f]*$",
        description="a name on one line",
    ),
]
Running = Annotated[int, Meta(ge=1, le=100_000)]
Count = Annotated[int, Meta(ge=1)]


class HttpConfig(Section, frozen=True):
    """The OpenAI-compatible front.

    Attributes:
        host: address to listen on; anything but loopback needs tokens.
        port: 0 = any free port; the ready line says which.
        body_bytes_max: a longer request body is refused with 413.
        drain_s: what requests in flight get at SIGTERM before they are cut.
        client_token: who shows it may send requests; empty = see the file.
        client_token_file: a file that holds that token; empty = none.
        read_token: who shows it may also read engines, nodes and decisions; empty = see the file.
        read_token_file: a file that holds that token; empty = none.
        operate_token: who shows it may also register and remove engines and nodes; empty = see the
            file; without either, one is made at start and written where programs of the same user
            find it.
        operate_token_file: a file that holds that token; empty = none.
        open_requests: beyond loopback, take requests from everybody: something in front of the
            Conductor knows who they are.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 7700
    body_bytes_max: Count = 8 << 20
    drain_s: Positive = 10.0
    client_token: str = ""
    client_token_file: str = ""
    read_token: str = ""
    read_token_file: str = ""
    operate_token: str = ""
    operate_token_file: str = ""
    open_requests: bool = False

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name, whatever it begins with
            return False

    def __post_init__(self) -> None:
        """Refuse to listen for strangers without tokens."""
        if self.is_loopback:
            return
        where = f"http.host={self.host} is not loopback, so"
        if not (self.operate_token or self.operate_token_file):
            raise ValueError(f"{where} http.operate_token (or http.operate_token_file) is needed")
        may_ask = (
            self.client_token, self.client_token_file, self.read_token, self.read_token_file
        )  # fmt: skip
        if not any(may_ask) and not self.open_requests:
            raise ValueError(
                f"{where} http.client_token (or http.client_token_file) is needed for requests, or"
                " http.open_requests=true when something in front of the Conductor checks them"
            )


class PolicyConfig(Section, frozen=True):
    """How engines are chosen.

    Attributes:
        name: one of ``conductor.routing.policy.POLICIES``.
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
    """

    replay_s: Positive = 5.0
    verify_s: Positive = 5.0


class DecisionsConfig(Section, frozen=True):
    """The decision log.

    Attributes:
        kept: decisions that can be asked for; the oldest go first.
    """

    kept: Count = 4096


_URL: Final = re.compile(
    r"https?://(?:[A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?"
)


def check_url(url: str) -> None:
    """Refuse what is not ``http(s)://host:port``.

    Raises:
        ValueError: says what is wrong, without repeating what could be a password.
    """
    if "@" in url:
        raise ValueError("url: must not carry a user name or password")
    found = _URL.fullmatch(url)
    if found is None or not 1 <= int(found["port"] or 80) <= 65_535:
        raise ValueError("url: must be http://host:port or https://host:port")


def check_endpoint(field: str, endpoint: str | None) -> None:
    """Refuse what nobody can follow events at.

    Raises:
        ValueError: names the field.
    """
    if endpoint is not None:
        try:
            parse_endpoint(field, endpoint)
        except InvalidArgument as error:
            raise ValueError(str(error)) from error


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
    model: Model | None = None
    page_tokens: Tokens | None = None
    space: Space | None = None
    events: Endpoint | None = None
    events_replay: Endpoint | None = None
    node: Name | None = None
    max_running: Running | None = None

    def __post_init__(self) -> None:
        """Refuse a URL or endpoint that cannot be."""
        check_url(self.url)
        check_endpoint("events", self.events)
        check_endpoint("events_replay", self.events_replay)


class NodeEntry(Section, frozen=True):
    """A kvstore node whose events are followed; also the body of ``POST /v1/nodes``.

    Attributes:
        id: the name that engines give for their ``node``.
        events: endpoint of its KV events.
        events_replay: endpoint where missed batches are asked for.
        events_token: the node's ``events.follow_token``, where it has one.
    """

    id: Name
    events: Endpoint
    events_replay: Endpoint | None = None
    events_token: Annotated[str, Meta(pattern="^[!-~]{1,255}$")] | None = None

    def __post_init__(self) -> None:
        """Refuse an endpoint that cannot be."""
        check_endpoint("events", self.events)
        check_endpoint("events_replay", self.events_replay)


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
