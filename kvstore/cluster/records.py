"""Records of the nodes of a cluster, and their format in a store. Pure."""

from typing import Final, Literal

import msgspec

from kvstore.cluster.greeting import BOOT_BYTES, NODE_NAME
from kvstore.config.addresses import is_wildcard, read_address
from kvstore.index.reading import UnreadableError, read
from kvstore.protocol import wire

SCHEME: Final = "sha256/xxh3_128 1"
"""How keys and digests of pages are computed: see :mod:`kvstore.protocol.page`. Nodes that compute
them differently would take each other's pages for corrupt ones."""
PROTOCOL: Final = f"{wire.PROTOCOL_MAJOR}.{wire.PROTOCOL_MINOR}"
RECORD_BYTES_MAX: Final = 16 << 10
"""Maximum size of a readable record."""
RECORDS_MAX = 1_024
"""Maximum records of a store that are read."""
TRANSPORTS_MAX: Final = 16

NodeState = Literal["up", "draining"]
StandingState = Literal["joining", "joined", "away", "refused"]


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a cluster.

    Attributes:
        name: its name; no two live nodes have the same one.
        boot: its boot id, 16 bytes; empty = unknown until it is connected to.
        endpoint: ``host:port`` of its peer service.
        transports: name of each transport through which it can be read, and its endpoint; empty =
            exchanged in its sessions only.
        protocol: ``major.minor`` of the protocol that it speaks.
        scheme: how it computes keys and digests of pages.
        state: ``up``, or ``draining`` = it is about to leave.
        admin: URL of its admin API as other machines reach it, to be checked by readers; empty =
            they do not reach it, or it is a node of an earlier version.
    """

    name: str
    boot: bytes = b""
    endpoint: str
    transports: dict[str, str] = {}
    protocol: str = PROTOCOL
    scheme: str = SCHEME
    state: NodeState = "up"
    admin: str = ""


class JoinStanding(msgspec.Struct, frozen=True):
    """Whether this node is one of its cluster, as the store of the membership has it.

    Attributes:
        state: ``joining``; ``joined``; ``away`` = the store does not serve, and its last answer
            stays valid; ``refused`` = the node is not admitted.
        field: reason of a refusal: ``scheme``, ``protocol``, ``settings``, ``name``; in the state
            ``away`` the file that the store rejects: ``login``, ``authority`` and so on.
        why: description, possibly text of others.
        unreadable: number of records that cannot be read now; they are left out.
    """

    state: StandingState = "joining"
    field: str = ""
    why: str = ""
    unreadable: int = 0


class ClusterSettings(msgspec.Struct, frozen=True):
    """The settings that all nodes of a cluster share; written by the first one.

    Attributes:
        scheme: how keys and digests of pages are computed.
        protocol: major version of the protocol between nodes.
    """

    scheme: str
    protocol: str


class _WrittenRecord(msgspec.Struct):
    """The JSON of a record; operators read it, so the boot id is in hex."""

    name: str
    boot: str
    endpoint: str
    protocol: str
    scheme: str
    transports: dict[str, str] = {}
    state: NodeState = "up"
    admin: str = ""


_SETTINGS: Final = msgspec.json.Decoder(ClusterSettings)
_DECODER: Final = msgspec.json.Decoder(_WrittenRecord)


def write_record(record: NodeRecord) -> bytes:
    """The JSON of a record, always the same for the same record."""
    return msgspec.json.encode(
        _WrittenRecord(
            record.name, record.boot.hex(), record.endpoint, record.protocol, record.scheme,
            record.transports, record.state, record.admin,
        ), order="sorted",
    )  # fmt: skip


def read_record(name: str, value: bytes) -> NodeRecord:
    """The record of a node; unknown fields are ignored.

    Args:
        name: under which it is in the store.
        value: JSON, which anyone with access to the store can write.

    Raises:
        ValueError: it is not the record of a node of this name.
    """
    if len(value) > RECORD_BYTES_MAX:
        raise ValueError(f"the record has {len(value)} bytes")
    try:
        written = read(_DECODER.decode, value)
    except UnreadableError as error:
        raise ValueError(str(error)) from error
    boot = bytes.fromhex(written.boot)
    if written.name != name or not NODE_NAME.fullmatch(name) or len(boot) != BOOT_BYTES:
        raise ValueError("the record has another name, or no boot id")
    host, port = read_address(written.endpoint)
    if not port or is_wildcard(host):
        raise ValueError(f"nobody can connect to {written.endpoint!r}")
    if len(written.transports) > TRANSPORTS_MAX:
        raise ValueError(f"the record has {len(written.transports)} transports")
    return NodeRecord(
        name=name, boot=boot, endpoint=written.endpoint, transports=written.transports,
        protocol=written.protocol, scheme=written.scheme, state=written.state,
        admin=written.admin,
    )  # fmt: skip


def settings_of(record: NodeRecord) -> ClusterSettings:
    """The settings that a node requires of its cluster."""
    return ClusterSettings(record.scheme, record.protocol.partition(".")[0])


def differing_field(own: ClusterSettings, there: bytes) -> tuple[str, str] | None:
    """The setting that keeps a node out of a cluster.

    Args:
        own: the settings that the node requires.
        there: JSON of the settings in the store; unknown fields are ignored.

    Returns:
        the field that differs, and a description; None = nothing differs.
    """
    try:
        settings = read(_SETTINGS.decode, there)
    except UnreadableError:
        return "settings", "the settings record of the cluster cannot be read"
    for field in ("scheme", "protocol"):
        one, other = getattr(own, field), getattr(settings, field)
        if one != other:
            return field, f"the cluster has {other!r}, this node {one!r}"
    return None
