"""What is known of the nodes of a cluster, and how a node is written down outside of it. Pure.

In a store a node is one JSON object, with the boot id in hex. Fields that are not known here are
ignored, so that a newer node can say more. Whoever can write to the store can write anything: what
does not describe a node is left out.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec

from kvstore import wire
from kvstore.config.addresses import is_wildcard, read_address
from kvstore.errors import InvalidArgument
from kvstore.index.reading import UnreadableError, read

SCHEME: Final = "sha256/xxh3_128 1"
"""How keys and digests of pages are computed: see :mod:`kvstore.page`. Nodes that compute them in
different ways would take the pages of each other for damaged ones."""
PROTOCOL: Final = f"{wire.PROTOCOL_MAJOR}.{wire.PROTOCOL_MINOR}"
RECORD_BYTES_MAX: Final = 4 << 10
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_BOOT_BYTES: Final = 16

NodeState = Literal["up", "draining"]
StandingState = Literal["joining", "joined", "away", "refused"]


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a cluster.

    Attributes:
        name: its name; no two live nodes have the same one.
        boot: its boot id, 16 bytes; empty = unknown until it is connected to.
        endpoint: ``host:port`` of its peer service, as other nodes reach it.
        transports: by which its pages can be read: name → endpoint.
        protocol: version of the protocol between nodes, ``MAJOR.MINOR``.
        scheme: how it computes keys and digests of pages.
        state: ``draining`` = it is about to end, and wants no further pages.
    """

    name: str
    boot: bytes = b""
    endpoint: str
    transports: dict[str, str] = {}
    protocol: str = PROTOCOL
    scheme: str = SCHEME
    state: NodeState = "up"


class MemberStanding(msgspec.Struct, frozen=True):
    """Whether a node is one of its cluster, by the membership.

    Attributes:
        state: ``joining`` = it has not been yet, ``joined``, ``away`` = the store of the membership
            does not answer, ``refused`` = it must not be.
        field: what refuses it: ``name``, ``scheme`` or ``protocol``; else empty.
        why: description, possibly text of the store; empty if it has joined.
    """

    state: StandingState = "joining"
    field: str = ""
    why: str = ""


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A record in a store."""

    name: str
    boot: str
    endpoint: str
    transports: Annotated[dict[str, str], msgspec.Meta(max_length=16)] = {}
    protocol: str = PROTOCOL
    scheme: str = SCHEME
    state: NodeState = "up"


_DECODER: Final = msgspec.json.Decoder(_Stored)


def encode_record(record: NodeRecord) -> bytes:
    """The value of a record in a store: UTF-8 JSON, the same bytes for the same record."""
    stored = msgspec.to_builtins(record) | {"boot": record.boot.hex()}
    return msgspec.json.encode(stored, order="sorted")


def decode_record(name: str, value: bytes) -> NodeRecord:
    """Read a record of a store.

    Args:
        name: under which it is there.
        value: what is there; nobody has checked it.

    Raises:
        InvalidArgument: it does not describe a node of that name; ``field`` is ``record``.
    """
    if len(value) > RECORD_BYTES_MAX:
        raise InvalidArgument("record", f"it has {len(value)} bytes, {RECORD_BYTES_MAX} at most")
    try:
        stored = read(_DECODER.decode, value)
        boot = bytes.fromhex(stored.boot)
        host, port = read_address(stored.endpoint)
    except (UnreadableError, ValueError) as error:
        raise InvalidArgument("record", str(error)) from error
    if stored.name != name or not _NAME.fullmatch(name):
        raise InvalidArgument("record", f"it names {stored.name!r}")
    if len(boot) != _BOOT_BYTES:
        raise InvalidArgument("record", f"a boot id has {_BOOT_BYTES} bytes")
    if not port or is_wildcard(host):
        raise InvalidArgument("record", f"nobody can connect to {stored.endpoint!r}")
    return NodeRecord(
        name=name, boot=boot, endpoint=stored.endpoint, transports=stored.transports,
        protocol=stored.protocol, scheme=stored.scheme, state=stored.state,
    )  # fmt: skip


def decode_records(values: Mapping[str, bytes]) -> tuple[dict[str, NodeRecord], dict[str, str]]:
    """Read all records of a store.

    Args:
        values: name → what is there.

    Returns:
        The nodes by name, and why each of the others was left out.
    """
    nodes: dict[str, NodeRecord] = {}
    unreadable: dict[str, str] = {}
    for name, value in values.items():
        try:
            nodes[name] = decode_record(name, value)
        except InvalidArgument as error:
            unreadable[name] = str(error)
    return nodes, unreadable
