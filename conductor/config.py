"""The Conductor's configuration: one frozen tree in sections, loaded by :mod:`kvstore.config`.

A TOML file, the environment (``KVSTORE_CONDUCTOR__QUEUE__WAITING_MAX``) and ``--set
queue.waiting_max=9``; a later source overrides an earlier one.
"""

import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta

from conductor.costs.book import machine_of
from conductor.protocols import own_protocols
from conductor.routing.admission import AdmissionMode
from conductor.routing.engines import HandoffOffer, Role
from conductor.routing.policy import POLICIES
from kvstore.config import Loaded, Positive, load
from kvstore.config.section import Section
from kvstore.config.stores import StoreConfig
from kvstore.process.listeners import parse_endpoint
from kvstore.protocol.errors import InvalidArgument

ENV_PREFIX: Final = "KVSTORE_CONDUCTOR__"

Name = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$(?!\n)", description="1 to 64 of A-Z a-z 0-9 . _ -")
]
Url = Annotated[str, Meta(max_length=512)]
Endpoint = Annotated[str, Meta(max_length=512)]
Tokens = Annotated[int, Meta(ge=1, le=65_536)]
Space = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)", description="64 hex digits")]
Model = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=512,
        pattern=r"^[^\x00-\x1f\x7f]*$(?!\n)",
        description="a name on one line",
    ),
]
Token = Annotated[str, Meta(pattern=r"^[!-~]{1,255}$(?!\n)")]
Running = Annotated[int, Meta(ge=1, le=100_000)]
Count = Annotated[int, Meta(ge=1)]
LENGTH_MAX: Final = 1 << 24
Length = Annotated[int, Meta(ge=1, le=LENGTH_MAX)]
_CLASSES_MAX: Final = 64


class HttpConfig(Section, frozen=True):
    """The OpenAI-compatible server.

    Attributes:
        host: address to listen on; an address other than loopback needs tokens.
        port: TCP port; 0 = any free port, which the ready line shows.
        body_bytes_max: maximum size of a request body; larger ones are refused with 413.
        drain_s: seconds for requests in flight after SIGTERM, before they are cancelled.
        client_token: bearer token that allows inference requests; empty = taken from the file.
        client_token_file: file with that token; empty = none.
        read_token: bearer token that also allows reading engines, nodes and decisions; empty =
            taken from the file.
        read_token_file: file with that token; empty = none.
        operate_token: bearer token that also allows registering and removing engines and nodes;
            empty = taken from the file. Without either, on loopback, one is generated at the start
            and written to a file that programs of the same user can find.
        operate_token_file: file with that token; empty = none.
        open_requests: on other addresses than loopback, accept inference requests without a token,
            because a proxy in front of the Conductor checks them.
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
        """Refuse an address other than loopback without tokens."""
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
                " http.open_requests=true if a proxy in front of the Conductor checks them"
            )


class PolicyConfig(Section, frozen=True):
    """How engines are chosen.

    Attributes:
        name: one of ``conductor.routing.policy.POLICIES``.
        lends: whether mixed engines compute prompts only, or decode only, while that serves more.
            All mixed engines must be able to hand KV over then.
    """

    name: str = "longest-prefix"
    lends: bool = False

    def __post_init__(self) -> None:
        """Refuse a policy that does not exist."""
        if self.name not in POLICIES:
            known = ", ".join(sorted(POLICIES))
            raise ValueError(f"name: {self.name!r} is not one of {known}")


class AdmissionConfig(Section, frozen=True):
    """Which requests are refused because they would be served too late, and who comes first.

    Attributes:
        mode: ``none`` = nobody is refused; ``load`` = by the present load; ``prediction`` = if the
            first token is expected too late, or the engines that decode are expected to be full
            when the prompt is computed. Refused requests get 429 and ``Retry-After``.
        fair_shares: whether requests of tenants (the field ``user``) that got more than their share
            wait behind the requests of others.
    """

    mode: AdmissionMode = AdmissionMode.NONE
    fair_shares: bool = True


class ServiceClassEntry(Section, frozen=True):
    """A class of requests; the first one is that of requests that name none.

    Attributes:
        name: what the header ``X-Service-Class`` or the field ``service_tier`` says.
        ttft_s: maximum seconds to the first token.
        tbt_s: maximum seconds between two tokens.
        priority: lower is more urgent: such requests are considered first.
    """

    name: Name
    ttft_s: Positive = 30.0
    tbt_s: Positive = 0.1
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0


class QueueConfig(Section, frozen=True):
    """Requests that wait for an engine.

    Attributes:
        waiting_max: maximum waiting requests; further ones are refused with 429 and
            ``Retry-After``.
        wait_s: maximum wait; then a request is refused with 503 and ``Retry-After``.
        tries: maximum engines (or pairs) to which one request is sent, one after another.
    """

    waiting_max: Count = 1024
    wait_s: Positive = 30.0
    tries: Annotated[int, Meta(ge=1, le=16)] = 3


class DeadlineConfig(Section, frozen=True):
    """Deadlines for engines, in seconds.

    Attributes:
        connect_s: for connecting.
        tokenize_s: for an answer to ``/tokenize``; after it the request is routed without tokens.
        prefill_s: for an answer to a prefill (the first half of a pair).
        first_byte_s: until the first byte of the answer to the client.
        push_s: for a prefill engine to end its push after the answer of the decode engine has
            ended; until then its place is taken.
        idle_s: between two events of a stream; also for the client to read one.
        request_s: for the whole request, from arrival to the last byte.
    """

    connect_s: Positive = 2.0
    tokenize_s: Positive = 2.0
    prefill_s: Positive = 120.0
    first_byte_s: Positive = 120.0
    push_s: Positive = 15.0
    idle_s: Positive = 60.0
    request_s: Positive = 900.0


class HandoffConfig(Section, frozen=True):
    """Handoffs by push.

    Attributes:
        registry_hosts: hosts that the URL of an engine's registry may name besides the host of the
            engine's ``url``, because decode engines reach it under another name or address than the
            Conductor. Decode engines connect to any port there that a prefill engine names.
    """

    registry_hosts: tuple[Annotated[str, Meta(min_length=1, max_length=253)], ...] = ()


class HealthConfig(Section, frozen=True):
    """Health checks of engines.

    Attributes:
        probe_s: seconds between two probes of a healthy engine.
        probe_timeout_s: deadline of one probe.
        dead_after: failures in a row, of requests and probes together, after which an engine is
            dead.
        backoff_s_max: maximum pause between probes of a dead engine, and between two attempts to
            read a node that does not answer.
        node_s: seconds between two readings of a node's sessions and event endpoints.
    """

    probe_s: Positive = 1.0
    probe_timeout_s: Positive = 1.0
    dead_after: Annotated[int, Meta(ge=1, le=100)] = 3
    backoff_s_max: Positive = 10.0
    node_s: Positive = 2.0


class CostsConfig(Section, frozen=True):
    """What is known of the engines' speed.

    Attributes:
        file: where it is kept over restarts; its folder must exist. Empty = each start begins with
            estimates from ``shape`` and ``hardware`` of the engines. Two Conductors need two files.
    """

    file: Annotated[str, Meta(max_length=1024)] = ""


class BringConfig(Section, frozen=True):
    """KV that nodes are asked to bring before an engine asks for it.

    Off by default: it changes nodes, for which the Conductor needs their operate tokens, and what
    it gains depends on disks and links. A node's own engines and operators come first: at most
    ``jobs_max`` of its jobs are ours.

    Attributes:
        prefetches: whether pages of requests that wait are loaded from the disk of the node that
            will most likely serve them, or copied there from another node.
        replicates: whether prefixes that many requests have are copied to more nodes.
        bytes_max: maximum bytes of prefetches under way.
        jobs_max: maximum jobs at one node.
        deadline_s: maximum seconds of one job.
        after_s: seconds that a request has waited at least.
        hot_rate: requests a second with a prefix from which on two nodes are to have it; three from
            twice as many on, and so forth. A copy is forgotten below half of the rate that asked
            for it.
        copies_max: maximum nodes that are to have a prefix.
    """

    prefetches: bool = False
    replicates: bool = False
    bytes_max: Count = 4 << 30
    jobs_max: Annotated[int, Meta(ge=1, le=64)] = 4
    deadline_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    after_s: Annotated[float, Meta(ge=0, le=60)] = 0.05
    hot_rate: Positive = 1.0
    copies_max: Annotated[int, Meta(ge=2, le=16)] = 2


class IndexConfig(Section, frozen=True):
    """The prefix index.

    Attributes:
        entries_max: maximum pages and blocks (about 16 bytes each); further ones are left out and
            counted.
        page_tokens: page size for engines that do not report their own.
        foreign_blocks_max: maximum blocks of one engine with hashes of its own (about 25 bytes
            each).
    """

    entries_max: Annotated[int, Meta(ge=16, le=1 << 28)] = 10_000_000
    page_tokens: Annotated[int, Meta(ge=1, le=65_536)] = 64
    foreign_blocks_max: Count = 4_000_000


class EventsConfig(Section, frozen=True):
    """Subscriptions to KV events.

    Attributes:
        replay_s: maximum silence during a replay of missed batches.
        verify_s: after this time without a live message, the last batch is requested again, to
            detect restarts and lost batches.
    """

    replay_s: Positive = 5.0
    verify_s: Positive = 5.0


class DecisionsConfig(Section, frozen=True):
    """The decision log.

    Attributes:
        kept: maximum decisions kept; the oldest are removed first.
        trace_file: file to which each answered request is written without its content, as a trace
            for simulations; empty = none.
        trace_bytes_max: size from which on a new file is begun.
        trace_files_max: maximum files, the oldest are removed first.
        journal_file: file to which all inputs and decisions of the dispatcher are written, so that
            ``kvstore-conductor simulate --replay`` can repeat them; empty = none. Who looks for the
            reason of decisions sets it. It has no content, but names of sessions and tenants.
        journal_bytes_max: size at which it ends; a new one is begun at the next start.
    """

    kept: Count = 4096
    trace_file: str = ""
    trace_bytes_max: Count = 256 << 20
    trace_files_max: Annotated[int, Meta(ge=1, le=1000)] = 4
    journal_file: str = ""
    journal_bytes_max: Count = 256 << 20


class FollowedCluster(Section, frozen=True):
    """A cluster whose nodes are followed as they come and go.

    Attributes:
        name: the nodes' ``cluster.name``; needed with a membership other than ``local``.
        membership: the nodes' ``cluster.membership``: ``etcd`` = they are found in the etcd of
            section ``etcd``, ``redis`` = in the Redis of section ``redis``; ``local`` = only nodes
            of ``nodes``, and those that are registered, are followed.
        read_token_file: file with the ``http.read_token`` of all nodes, without which they tell
            nothing over TCP. It is sent to each URL that a record of a node names.
        events_token_file: file with the ``events.follow_token`` of all nodes; empty = none.
        operate_token_file: file with the ``http.operate_token`` of all nodes, for ``bring``; empty
            = the nodes of the cluster are not asked to bring anything. It is sent to the URL that a
            record names, with each such request: who sets it trusts whoever writes to the store.
    """

    name: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9._-]{0,64}$(?!\n)", description="a name, or empty")
    ] = ""
    membership: Literal["local", "etcd", "redis"] = "local"
    read_token_file: str = ""
    events_token_file: str = ""
    operate_token_file: str = ""

    def __post_init__(self) -> None:
        """Refuse a membership of no cluster."""
        if self.membership != "local" and not self.name:
            raise ValueError(f"cluster.membership={self.membership} needs cluster.name")


_URL: Final = re.compile(
    r"https?://(?:[A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?"
)


def check_url(url: str) -> None:
    """Refuse a URL that is not ``http(s)://host:port``.

    Raises:
        ValueError: the message does not repeat anything that could be a password.
    """
    if "@" in url:
        raise ValueError("url: must not have a user name or password")
    found = _URL.fullmatch(url)
    if found is None or not 1 <= int(found["port"] or 80) <= 65_535:
        raise ValueError("url: must be http://host:port or https://host:port")


def check_endpoint(field: str, endpoint: str | None) -> None:
    """Refuse an invalid endpoint for events.

    Raises:
        ValueError: the message names the field.
    """
    if endpoint is not None:
        try:
            parse_endpoint(field, endpoint)
        except InvalidArgument as error:
            raise ValueError(str(error)) from error


def check_node_url(url: str) -> None:
    """Refuse the address of a node that is neither HTTP nor a Unix socket.

    Raises:
        ValueError: the message does not repeat anything that could be a password.
    """
    if url.startswith("unix:///"):
        if not url.isprintable():
            raise ValueError("url: must have printable characters only")
        return
    try:
        check_url(url)
    except ValueError as error:
        raise ValueError(f"{error}, or unix:///path of the node's admin socket") from error


class EngineEntry(Section, frozen=True):
    """A configured engine, or the body of ``POST /v1/engines``.

    Missing fields are read from the engine's ``GET /v1/engine``. For an engine without that route,
    the model is read from ``GET /v1/models``, and the other fields from the sessions of its adapter
    at the registered nodes.

    Attributes:
        id: name of the engine in decisions and metrics.
        role: ``prefill``, ``decode`` or ``mixed``.
        url: ``http://host:port``.
        model: name of the model it serves.
        page_tokens: tokens per page of its space.
        space: hex digest of its space.
        events: endpoint of its KV events.
        events_bind: endpoint to which it connects, so that the Conductor listens there.
        events_replay: endpoint for missed batches.
        node: id of the kvstore node on its machine.
        max_running: maximum requests in flight at it.
        max_model_len: maximum tokens of a prompt and its answer.
        protocol: how it hands KV over in a pair, one of ``conductor.protocols.own_protocols()``;
            default: as it says, else ``reference`` if it has ``GET /v1/engine``, else ``vllm``.
        handoff: what it offers over its protocol: ``{"push": {"registry": "http://host:port"}}`` of
            a prefill engine, ``{"push": {}}`` of a decode engine; ``{}`` = nothing.
        shape: shape of its model, one of ``conductor.costs.shapes.SHAPES``.
        hardware: accelerators of the engine, as ``8xh800``, of
            ``conductor.costs.hardware.ACCELERATORS``; without a number, as many as a usual machine
            has.
    """

    id: Name
    role: Role
    url: Url
    model: Model | None = None
    page_tokens: Tokens | None = None
    space: Space | None = None
    events: Endpoint | None = None
    events_bind: Endpoint | None = None
    events_replay: Endpoint | None = None
    node: Name | None = None
    max_running: Running | None = None
    max_model_len: Length | None = None
    protocol: str | None = None
    shape: str | None = None
    hardware: str | None = None
    handoff: HandoffOffer | None = None

    def __post_init__(self) -> None:
        """Refuse an invalid URL or endpoint, or an unknown protocol."""
        if self.protocol is not None and self.protocol not in own_protocols():
            known = ", ".join(own_protocols())
            raise ValueError(f"protocol: {self.protocol[:64]!r} is not one of {known}")
        machine_of(self.shape or "", self.hardware or "")
        check_url(self.url)
        check_endpoint("events", self.events)
        check_endpoint("events_bind", self.events_bind)
        check_endpoint("events_replay", self.events_replay)


class ModelEntry(Section, frozen=True):
    """A model of which more is known than its engines say.

    Attributes:
        name: its name at the engines.
        tokenizer: path of its ``tokenizer.json``, or of a folder with that file and perhaps a chat
            template, on this machine: prompts are tokenised here, not by engines. Whose prompts are
            many or long sets it, or whose engines have no ``/tokenize``.
    """

    name: Model
    tokenizer: Annotated[str, Meta(min_length=1, max_length=4096)]


class NodeEntry(Section, frozen=True):
    """A kvstore node whose events are followed; also the body of ``POST /v1/nodes``.

    Give ``url``, or ``id`` and ``events``. What is missing is read from the node's admin API.

    Attributes:
        id: the ``node`` that engines report; default: the node's name.
        url: its admin API: ``http://host:port``, or ``unix:///path`` of its admin socket.
        read_token: the node's ``http.read_token``; a Unix socket needs none.
        operate_token: the node's ``http.operate_token``, for ``bring``; a Unix socket needs none.
        events: endpoint of its KV events.
        events_replay: endpoint for missed batches.
        events_token: the node's ``events.follow_token``, if it publishes over TCP.
    """

    id: Name | None = None
    url: Url | None = None
    read_token: Token | None = None
    operate_token: Token | None = None
    events: Endpoint | None = None
    events_replay: Endpoint | None = None
    events_token: Token | None = None

    def __post_init__(self) -> None:
        """Refuse an incomplete entry, an invalid URL or an invalid endpoint."""
        if self.url is not None:
            check_node_url(self.url)
        elif self.events is None:
            raise ValueError("url: needed, unless events is given")
        elif self.id is None:
            raise ValueError("id: needed, unless url is given")
        check_endpoint("events", self.events)
        check_endpoint("events_replay", self.events_replay)


class ConductorConfig(Section, frozen=True):
    """All settings of ``kvstore-conductor``."""

    http: HttpConfig = HttpConfig()
    policy: PolicyConfig = PolicyConfig()
    admission: AdmissionConfig = AdmissionConfig()
    queue: QueueConfig = QueueConfig()
    deadline: DeadlineConfig = DeadlineConfig()
    handoff: HandoffConfig = HandoffConfig()
    health: HealthConfig = HealthConfig()
    costs: CostsConfig = CostsConfig()
    bring: BringConfig = BringConfig()
    index: IndexConfig = IndexConfig()
    events: EventsConfig = EventsConfig()
    decisions: DecisionsConfig = DecisionsConfig()
    cluster: FollowedCluster = FollowedCluster()
    etcd: StoreConfig = StoreConfig()
    redis: StoreConfig = StoreConfig()
    classes: tuple[ServiceClassEntry, ...] = ()
    models: tuple[ModelEntry, ...] = ()
    engines: tuple[EngineEntry, ...] = ()
    nodes: tuple[NodeEntry, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a store that is used but is nowhere, and two classes or models of one name."""
        if len(self.classes) > _CLASSES_MAX:
            raise ValueError(f"classes: at most {_CLASSES_MAX} are possible")
        for section in ("classes", "models"):
            names = [one.name for one in getattr(self, section)]
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"{section}: {name} is there twice")
        for section in ("etcd", "redis"):
            store: StoreConfig = getattr(self, section)
            if why := store.refusal(section):
                raise ValueError(why)
            if self.cluster.membership == section and not store.endpoints:
                raise ValueError(
                    f"cluster.membership={section} needs {section}.endpoints, the addresses of its"
                    " servers"
                )


def load_conductor(
    path: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    overrides: Iterable[str] = (),
) -> Loaded[ConductorConfig]:
    """Read the configuration, once at the start.

    Raises:
        ConfigError: a key is unknown, or a value is not allowed; the message names the key and its
            source.
    """
    return load(ConductorConfig, path, environ, overrides, ENV_PREFIX)
