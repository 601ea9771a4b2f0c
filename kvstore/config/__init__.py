"""Configuration: one frozen tree, read once at start-up and passed down in sections.

A value comes from the built-in default, a TOML file, an environment variable
(``KVSTORE__HOST__CAPACITY_BYTES``) or ``--set host.capacity_bytes=8GiB``; a later source overrides
an earlier one. An unknown key or a value that is not allowed is refused; the message names the key
and the source. An environment variable that looks like a misspelt one of ours is refused too.
"""

import difflib
import logging
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Generic, Literal, TypeVar, get_args, get_origin

import msgspec

from kvstore.config.addresses import is_loopback, read_url
from kvstore.config.cluster import NODES_MAX, ClusterConfig
from kvstore.config.constraints import allowed
from kvstore.config.machine import Needs
from kvstore.config.section import NodeName, Section
from kvstore.config.stores import StoreConfig
from kvstore.protocol.errors import ConfigError, reason
from kvstore.protocol.sizes import exact, size_of

__all__ = [
    "AdminConfig", "DeviceSlabConfig", "EventsConfig", "HostConfig", "HttpConfig", "Loaded",
    "Positive", "SSDConfig", "ServerConfig", "SocketConfig", "addresses", "cluster", "load",
    "machine", "section", "show", "stores", "values",
]  # fmt: skip

log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

_FILE_BYTES_MAX: Final = 1 << 20
_NEAR: Final = 0.8
"""Similarity (:mod:`difflib`) from which on a name counts as a misspelling of another."""
_ELSEWHERE: Final = re.compile(r"KVSTORE_(URL|TOKEN(_FILE)?|CONDUCTOR_.*)")
"""Variables of the command ``kvstore`` and of the Conductor."""
_SERVICE_LINK: Final = re.compile(
    r".*_(SERVICE_(HOST|PORT(_.*)?)|PORT_\d+_(TCP|UDP|SCTP)(_.*)?)=.*|.*_PORT=(tcp|udp|sctp)://.*"
)
"""Variables that Kubernetes sets for a service, such as ``KVSTORE_PORT=tcp://10.0.0.1:80``."""

EXTENTS_MAX: Final = 1 << 20
"""The most descriptors that Linux allows for a process by default (fs.nr_open)."""
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class NodeConfig(Section, frozen=True):
    """The identity of this node.

    Attributes:
        name: name of the node in events, metrics and routing decisions.
    """

    name: NodeName = "local"


class SocketConfig(Section, frozen=True):
    """The Unix socket that engines on this machine connect to.

    Attributes:
        path: absolute path of the socket; its directory is created if it does not exist.
        group_access: mode 0660 instead of 0600; members of the socket's group may connect.
        connections_max: maximum number of connections; further ones are refused.
        tenants: which users may use which tenant's pages: entries ``TENANT=USER`` or
            ``TENANT=@GROUP``, by name or number. Empty = every user who may connect may use any
            tenant. With entries the socket is open to every user, and users without an entry are
            refused; root and the node's own user may use any tenant.
    """

    path: str = "/run/kvstore/kvstore.sock"
    group_access: bool = False
    connections_max: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 1024
    tenants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a relative path: clients connect to ``unix:///absolute/path`` only."""
        if not self.path.startswith("/"):
            raise ValueError(
                f"socket.path={self.path} is relative: give an absolute path, because engines"
                " connect to unix:///absolute/path"
            )


class HostConfig(Section, frozen=True):
    """L2: host memory that engines map.

    Attributes:
        capacity_bytes: size of the host-memory tier; rounded down to whole extents.
        extent_bytes: unit in which memory is shared, mapped by clients and assigned to models; also
            the maximum size of a page.
        session_quota_bytes: the most bytes that one engine may have pinned, reserved or left in
            LIMBO at a time; 0 = half of the capacity.
        lease_s_max: maximum duration of a lease, in seconds.
        policy: the eviction policy: ``kvstore``, ``lru``, ``lfu``, ``tinylfu`` or ``s3-fifo``.
        prefault: touch all memory in the background at the start (a first touch is 5-40 times as
            slow as a copy).
    """

    capacity_bytes: Annotated[int, msgspec.Meta(ge=1 << 16)] = 4 << 30
    extent_bytes: Annotated[int, msgspec.Meta(ge=1 << 16, le=1 << 32, multiple_of=4096)] = 256 << 20
    session_quota_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    lease_s_max: Positive = 300.0
    policy: Literal["kvstore", "lru", "lfu", "tinylfu", "s3-fifo"] = "lru"
    prefault: bool = True

    def __post_init__(self) -> None:
        """Refuse a capacity of no extent, or of more extents than a process can have open."""
        if self.capacity_bytes < self.extent_bytes:
            raise ValueError(
                f"host.capacity_bytes={exact(self.capacity_bytes)} is smaller than"
                f" host.extent_bytes={exact(self.extent_bytes)}; raise it, or lower"
                " host.extent_bytes"
            )
        if self.capacity_bytes // self.extent_bytes > EXTENTS_MAX:
            raise ValueError(
                f"host.capacity_bytes={exact(self.capacity_bytes)} is more than {EXTENTS_MAX} times"
                f" host.extent_bytes={exact(self.extent_bytes)}: each takes a file descriptor"
            )


class SSDConfig(Section, frozen=True):
    """L3: an append-only log of pages on SSDs.

    Attributes:
        directories: absolute paths of the log's directories, ideally one per disk; empty = no SSD
            tier.
        capacity_bytes: maximum size of each directory; rounded down to whole segments.
        segment_bytes: size of a segment file; disk space is reclaimed in this unit.
        write: when an ordinary page is written: ``back`` when it is evicted from memory,
            ``through`` as soon as it is stored, ``selective`` when it is used again.
        sync: when written pages survive a power cut: ``always`` at once, ``interval`` after the
            next sync, ``none`` at no defined time (durable puts are refused).
        sync_interval_s: seconds between two syncs with ``interval``.
        admission: which ordinary pages are written: ``all``, ``none``, ``evidence`` (pages that
            were used again; works best with the eviction policy ``kvstore``, which counts turns),
            or ``learned`` (pages of a kind that was used again).
        bytes_per_day_max: endurance budget: maximum bytes of ordinary pages written per day; 0 = no
            limit, with ``learned`` a quarter of the bytes evicted from memory.
    """

    directories: tuple[str, ...] = ()
    capacity_bytes: Annotated[int, msgspec.Meta(ge=1 << 20)] = 64 << 30
    segment_bytes: Annotated[int, msgspec.Meta(ge=1 << 18, le=1 << 34, multiple_of=4096)] = (
        256 << 20
    )
    write: Literal["back", "through", "selective"] = "back"
    sync: Literal["none", "interval", "always"] = "interval"
    sync_interval_s: Positive = 1.0
    admission: Literal["all", "evidence", "learned", "none"] = "all"
    bytes_per_day_max: Annotated[int, msgspec.Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        """Refuse a capacity of fewer than four segments, and relative or duplicate directories."""
        if self.capacity_bytes < 4 * self.segment_bytes:
            raise ValueError(
                f"ssd.capacity_bytes={exact(self.capacity_bytes)} is less than four segments of"
                f" ssd.segment_bytes={exact(self.segment_bytes)}: raise it or make segments smaller"
            )
        for path in self.directories:
            if not path.startswith("/"):
                raise ValueError(
                    f"ssd.directories={','.join(self.directories)}: {path} is relative: give an"
                    " absolute path"
                )
        if len({os.path.normpath(path) for path in self.directories}) < len(self.directories):
            raise ValueError(f"ssd.directories={','.join(self.directories)} names one twice")


class DeviceSlabConfig(Section, frozen=True):
    """L1: a cache of pages on the device of an engine, which belongs to one client.

    Attributes:
        capacity_bytes: size of the slab, at least 4096; allocated at once.
        device: ``cpu`` or ``cuda:N``.
    """

    capacity_bytes: Annotated[int, msgspec.Meta(ge=4096)]
    device: str = "cpu"


class HttpConfig(Section, frozen=True):
    """Health, metrics and the admin API over HTTP.

    Attributes:
        host: address to listen on; an address other than loopback needs a configured token.
        port: TCP port; 0 = any free port, which the ready line shows.
        socket_path: the Unix socket on which the node's user needs no token; empty =
            ``socket.path`` plus ``.admin``. Use another directory if containers of engines mount
            the directory of ``socket.path``.
        read_token: bearer token that allows reading; empty = taken from the file.
        read_token_file: file with that token; empty = none.
        operate_token: bearer token that also allows changes; empty = taken from the file.
        operate_token_file: file with that token; empty = none. If no token is configured at all,
            the node generates one at each start, in a file next to ``socket_path``.
        advertise: URL of the admin API as other machines reach it, for the node's record in etcd or
            Redis, where a Conductor finds it; empty = ``host`` and ``port``. If ``host`` stands for
            all addresses, the host of ``cluster.advertise`` or ``cluster.listen`` is used; if it is
            loopback, the API is told only in a cluster on loopback.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 7780
    socket_path: str = ""
    read_token: str = ""
    read_token_file: str = ""
    operate_token: str = ""
    operate_token_file: str = ""
    advertise: str = ""

    def __post_init__(self) -> None:
        """Refuse an address other than loopback without a token, and a URL that is none."""
        if self.advertise:
            try:
                read_url(self.advertise)
            except ValueError as error:
                raise ValueError(f"http.advertise: {error}") from None
        tokens = (
            self.read_token, self.read_token_file, self.operate_token, self.operate_token_file
        )  # fmt: skip
        if not self.is_loopback and not any(tokens):
            raise ValueError(
                f"http.host={self.host} is not loopback, so http.read_token or http.operate_token"
                " (or a _file of it) is needed"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)


class AdminConfig(Section, frozen=True):
    """Limits of pins and of kept conversations, and the memory for ``explain``.

    Attributes:
        pin_budget_bytes: budget for all operator pins in memory; 0 = a quarter of the host tier.
        pin_ssd_budget_bytes: the same for pins on the SSDs; 0 = a quarter of the SSD tier.
        conversations_budget_bytes: budget for the pages of all conversations that engines keep, in
            memory; 0 = a quarter of the host tier. Without an SSD tier only.
        conversations_ssd_budget_bytes: the same on the SSDs; 0 = a quarter of the SSD tier.
        conversations_s_max: maximum seconds for which a conversation is kept after its last
            request. Raise it to keep conversations over a weekend, lower it if tenants of a shared
            node ask for years.
        ghosts_max: number of dropped pages that ``explain`` can still report.
    """

    pin_budget_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    pin_ssd_budget_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    conversations_budget_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    conversations_ssd_budget_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    conversations_s_max: Annotated[int, msgspec.Meta(ge=1, le=10 * 366 * 86_400)] = 86_400
    ghosts_max: Annotated[int, msgspec.Meta(ge=0, le=100_000_000)] = 100_000


class EventsConfig(Section, frozen=True):
    """KV events, in the frames of ZeroMQ.

    Attributes:
        endpoint: where to publish: ``ipc`` = a Unix socket next to the node's, for its user and,
            with ``socket.group_access`` and no ``socket.tenants``, its group; ``ipc:///path``, with
            the same access; ``tcp://address:port``, which needs a token (port ``*`` = any free
            one); empty = no events.
        replay_endpoint: where followers request missed events, in the same forms; empty = no
            replay.
        tokens: also publish the token ids of pages, for followers that cannot use prefix keys.
            Every follower can then read the prompts of all tenants.
        follow_token: token that followers over TCP must send; empty = taken from the file.
        follow_token_file: file with that token; empty = none.
        queue_max: event batches that may wait for the publisher; further ones are dropped.
        replay_max: event batches kept for replay.
    """

    endpoint: str = "ipc"
    replay_endpoint: str = "ipc"
    tokens: bool = False
    follow_token: str = ""
    follow_token_file: str = ""
    queue_max: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    replay_max: Annotated[int, msgspec.Meta(ge=1)] = 10_000

    def __post_init__(self) -> None:
        """Refuse a TCP endpoint without a token."""
        for name in ("endpoint", "replay_endpoint"):
            where = getattr(self, name)
            if where.startswith("tcp:") and not (self.follow_token or self.follow_token_file):
                raise ValueError(
                    f"events.{name}={where}: over TCP, events.follow_token (or"
                    " events.follow_token_file) is needed; 'ipc' is a Unix socket for this machine"
                )


class DebugConfig(Section, frozen=True):
    """Settings to debug the node.

    Attributes:
        check_every_step: check the whole state after every message, not only in pieces while the
            node is idle; takes time that grows with the number of pages.
    """

    check_every_step: bool = False


class ServerConfig(Section, frozen=True):
    """All settings of ``kvstore-server``."""

    node: NodeConfig = NodeConfig()
    socket: SocketConfig = SocketConfig()
    host: HostConfig = HostConfig()
    ssd: SSDConfig = SSDConfig()
    http: HttpConfig = HttpConfig()
    events: EventsConfig = EventsConfig()
    cluster: ClusterConfig = ClusterConfig()
    etcd: StoreConfig = StoreConfig()
    redis: StoreConfig = StoreConfig()
    admin: AdminConfig = AdminConfig()
    debug: DebugConfig = DebugConfig()

    def __post_init__(self) -> None:
        """Refuse more nodes than can be followed, and a store that is used but not configured."""
        for section in ("etcd", "redis"):
            store: StoreConfig = getattr(self, section)
            if why := store.refusal(section):
                raise ValueError(why)
            user = self.cluster.stores.get(section)
            if user and not store.endpoints:
                raise ValueError(f"{user} needs {section}.endpoints, the addresses of its servers")
        others = list(self.cluster.others(self.node.name))
        if len(others) >= NODES_MAX:
            raise ValueError(
                f"cluster.nodes={','.join(self.cluster.nodes)}: a cluster has {NODES_MAX} nodes at"
                f" most, this one ({self.node.name}) included; the first one too many is"
                f" {others[NODES_MAX - 1]}"
            )

    @property
    def needs(self) -> Needs:
        """The resources that a node with this configuration needs."""
        host = self.host
        capacity = host.capacity_bytes // host.extent_bytes * host.extent_bytes
        mapped = capacity if self.ssd.directories else host.extent_bytes
        return Needs(capacity, host.extent_bytes, mapped)


class Loaded(msgspec.Struct, Generic[T], frozen=True):
    """A configuration, and the source of each value that is not a default (dotted key → source)."""

    config: T
    sources: dict[str, str]


def load(
    kind: type[T],
    path: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    overrides: Iterable[str] = (),
    env_prefix: str = "KVSTORE__",
) -> Loaded[T]:
    """Read the configuration, once at the start.

    Args:
        kind: the tree's root type.
        path: a TOML file, or None.
        environ: the environment; only keys that start with ``env_prefix`` are used.
        overrides: strings ``section.key=value``.
        env_prefix: prefix of this program's environment variables.

    Raises:
        ConfigError: a key is unknown, or a value is not allowed; the message names the key and its
            source.
    """
    _refuse_near_misses(kind, environ, env_prefix)
    tree: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, key, value in _entries(path, environ, overrides, env_prefix):
        if get_origin(_known(kind, key, source)) is tuple and isinstance(value, str):
            value = _listed(value, key, source)
        _put(tree, key, value, source)
        sources[".".join(key)] = source
    try:
        return Loaded(msgspec.convert(tree, kind, strict=False), sources)
    except msgspec.ValidationError as error:
        raise ConfigError(_refusal(kind, tree, sources, error)) from error


def _refusal(
    kind: type[Any], tree: dict[str, Any], sources: dict[str, str], error: msgspec.ValidationError
) -> str:
    """The message for a wrong value: its source, its key, and the allowed values."""
    what, _, path = str(error).partition(" - at `$.")
    path = path.rstrip("`")
    key = path.partition("[")[0]
    at: Any = kind
    value: Any = tree
    for step in re.findall(r"\w+", path):
        if step.isdecimal():
            at, value = get_args(at)[0], value[int(step)]
        else:
            types = {field.name: field.type for field in _fields(at)}
            at, value = types[step], value[step]
    name = path.rpartition(".")[2]
    if words := allowed(at, size=_is_size(name)):
        what = f"{_masked(name, value)!r} is not allowed: it must be {words}"
    # A section refuses inconsistent values, and names them.
    said = {s: None for k, s in sources.items() if k == key or f"{k}=" in what} or {
        s: None for k, s in sources.items() if k.startswith(f"{key}.")
    }
    return ": ".join(filter(None, (", ".join(said) or "configuration", path, what)))


def show(loaded: Loaded[T]) -> str:
    """The effective settings as TOML, with the source of each value that is not a default."""
    lines: list[str] = []
    for section, values in msgspec.to_builtins(loaded.config).items():
        if not isinstance(values, dict):
            lines.insert(0, _line(section, values, loaded.sources.get(section)))
            continue
        lines.append(f"\n[{section}]")
        for name, value in values.items():
            lines.append(_line(name, value, loaded.sources.get(f"{section}.{name}")))
    return "\n".join(lines).strip() + "\n"


def values(loaded: Loaded[T]) -> list[dict[str, Any]]:
    """Every value with its dotted key and its source; secrets are masked."""
    return [
        {
            "key": f"{section}.{name}",
            "value": _masked(name, value),
            "source": loaded.sources.get(f"{section}.{name}", "default"),
        }
        for section, fields in msgspec.to_builtins(loaded.config).items()
        for name, value in fields.items()
    ]


def _masked(name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_masked(name, one) for one in value]
    if isinstance(value, dict):
        return {key: _masked(key, one) for key, one in value.items()}
    return "***" if name.endswith("_token") and value else value


def _line(name: str, value: object, source: str | None) -> str:
    text = msgspec.json.encode(_masked(name, value)).decode()
    return f"{name} = {text}" + (f"  # {source}" if source else "")


def _entries(
    path: Path | None, environ: Mapping[str, str], overrides: Iterable[str], env_prefix: str
) -> Iterable[tuple[str, list[str], Any]]:
    if path is not None:
        try:
            with path.open("rb") as file:  # a device never ends
                raw = file.read(_FILE_BYTES_MAX + 1)
            if len(raw) > _FILE_BYTES_MAX:
                raise ConfigError(f"{path}: it has more than {_FILE_BYTES_MAX:,} bytes")
            content = tomllib.loads(raw.decode())
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{path}: {reason(error)}") from error
        yield from ((str(path), key, value) for key, value in _leaves(content, []))
    for name, text in sorted(environ.items()):
        if name.startswith(env_prefix):
            yield name, name.removeprefix(env_prefix).lower().split("__"), text
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals:
            raise ConfigError(f"--set {item}: expected key=value")
        yield f"--set {key}", key.strip().split("."), text


def _leaves(tree: dict[str, Any], above: list[str]) -> Iterable[tuple[list[str], Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and len(above) == 0:
            yield from _leaves(value, [*above, name])
        else:
            yield [*above, name], value


def _known(kind: type[Any], key: list[str], source: str) -> Any:
    """The type of a key's value.

    Raises:
        ConfigError: the key does not exist.
    """
    at: Any = kind
    for depth, name in enumerate(key):
        fields = {field.name: field.type for field in _fields(at)}
        if name not in fields:
            dotted = ".".join(key[: depth + 1])
            near = difflib.get_close_matches(name, list(fields), n=1)
            hint = f"; did you mean {'.'.join([*key[:depth], near[0]])}?" if near else ""
            raise ConfigError(f"{source}: unknown key {dotted}{hint}")
        at = fields[name]
    if _fields(at):
        raise ConfigError(f"{source}: {'.'.join(key)} is a section, not a value")
    return at


def _fields(kind: Any) -> tuple[msgspec.structs.FieldInfo, ...]:
    base = get_args(kind)[0] if hasattr(kind, "__metadata__") else kind
    is_struct = isinstance(base, type) and issubclass(base, msgspec.Struct)
    return msgspec.structs.fields(base) if is_struct else ()


def _put(tree: dict[str, Any], key: list[str], value: Any, source: str) -> None:
    if _has_nul(value):
        raise ConfigError(f"{source}: {'.'.join(key)}: it has a NUL character, which no name has")
    *parents, leaf = key
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[leaf] = _bytes(value, source, key) if _is_size(leaf) else value


def _has_nul(value: Any) -> bool:
    """Whether a value contains a text that no file, address or name can have."""
    if isinstance(value, (list, tuple)):
        return any(map(_has_nul, value))
    if isinstance(value, dict):
        return any(map(_has_nul, value.values()))
    return isinstance(value, str) and "\0" in value


def _listed(value: str, key: list[str], source: str) -> Any:
    """Parse a list written as ``a,b`` or as in TOML: ``["a", "b"]``."""
    if not value.lstrip().startswith("["):
        return [part.strip() for part in value.split(",") if part.strip()]
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{source}: {'.'.join(key)}: {value!r} is not a list: {error}") from error


def _bytes(value: Any, source: str, key: list[str]) -> Any:
    """Convert a size with a unit, such as ``8GiB``, to bytes."""
    try:
        return size_of(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"{source}: {'.'.join(key)}: {error}") from error


def _is_size(name: str) -> bool:
    return "bytes" in name.split("_")


def _refuse_near_misses(kind: type[Any], environ: Mapping[str, str], env_prefix: str) -> None:
    """Refuse a misspelt variable of this program.

    For other variables with our prefix, such as those that Kubernetes sets for a service named
    kvstore, log a warning.

    Raises:
        ConfigError: names the variable and the right one.
    """
    stem = env_prefix.rstrip("_") + "_"
    known = {
        f"{section.name}_{field.name}".upper(): f"{env_prefix}{section.name}__{field.name}".upper()
        for section in _fields(kind)
        for field in _fields(section.type)
    }
    ignored: list[str] = []
    for name, text in sorted(environ.items()):
        plain = re.sub("_+", "_", name.upper())
        elsewhere = stem == "KVSTORE_" and _ELSEWHERE.fullmatch(plain)
        if name.startswith(env_prefix) or not plain.startswith(stem) or elsewhere:
            continue
        near = difflib.get_close_matches(plain.removeprefix(stem), known, 1, _NEAR)
        if near and not _SERVICE_LINK.fullmatch(f"{plain}={text}"):
            raise ConfigError(f"{name}: this variable is not used; did you mean {known[near[0]]}?")
        ignored.append(name)
    if ignored:
        log.warning("these environment variables are not settings: %s", ", ".join(ignored))
