"""The records of a cluster in etcd; the only place of a membership that imports its client.

``/kvstore/CLUSTER/settings`` and ``/kvstore/CLUSTER/nodes/NAME`` are JSON; the latter are attached
to the lease of their node.

Of too many records, a node reads its own, and those that were there first; of a record that is too
long, only the beginning.

The calls are those that ``aetcd`` has generated. Its client is not used: it has no TLS, and keeps
one connection and one token for good.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from math import ceil
from typing import Any, Final, TypeVar

import grpc
from aetcd import rpc

from kvstore.cluster.access import EndpointTurns, StoreServers, read_login, read_pem
from kvstore.cluster.records import RECORD_BYTES_MAX, RECORDS_MAX
from kvstore.cluster.store import CALL_S, LEASE_S
from kvstore.protocol.errors import (
    InvalidArgument,
    KVStoreError,
    PeerUnreachable,
    TransferTimeout,
    printable,
)

_OPTIONS: Final = [
    ("grpc.enable_http_proxy", 0),  # no variable of the environment leads elsewhere
    ("grpc.use_local_subchannel_pool", 1),  # a new channel waits for no pause of an older one
    ("grpc.max_receive_message_length", RECORDS_MAX * (RECORD_BYTES_MAX + 1024)),
]
_LOGIN_TEXTS: Final = ("authentication", "user name is empty", "permission denied")
"""Parts of etcd's answers when it rejects a login; status codes do not distinguish that from
mistakes."""
_NOT_ASKED: Final = "its answer is not what was asked for"

_T = TypeVar("_T")


class EtcdStore:
    """See :class:`~kvstore.cluster.store.RecordStore`; for etcd 3.4 or newer.

    Args:
        servers: of one etcd.
        cluster: name of the cluster.
        lease_s: seconds after the last renewal in which a record is gone.

    Attributes:
        lease_s: seconds after the last renewal in which a record is gone; whole ones, 2 at least.
    """

    def __init__(self, servers: StoreServers, cluster: str, lease_s: float = LEASE_S) -> None:
        self.lease_s = float(ceil(lease_s))
        self._servers = servers
        self._turns = EndpointTurns(servers)
        self._settings = f"/kvstore/{cluster}/settings".encode()
        self._nodes = f"/kvstore/{cluster}/nodes/".encode()
        self._end = self._nodes[:-1] + bytes([self._nodes[-1] + 1])
        self._channel: Any = None
        self._metadata: tuple[tuple[str, str], ...] = ()
        #: The lease of this process, over all connections; 0 = none.
        self._lease = 0
        #: Name of the record that this process has claimed.
        self._own = ""

    async def open(self) -> None:
        """See :meth:`kvstore.cluster.store.RecordStore.open`."""
        await self.close()
        where, pem = str(self._turns.next()), read_pem(self._servers)
        if pem is None:
            self._channel = rpc.insecure_channel(where, options=_OPTIONS)
        else:
            authority, certificate, key = pem
            credentials = grpc.ssl_channel_credentials(authority, key, certificate)
            self._channel = rpc.secure_channel(where, credentials, options=_OPTIONS)
        await self._login()

    async def close(self) -> None:
        """See :meth:`kvstore.cluster.store.RecordStore.close`."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def settings(self, offered: bytes) -> bytes:
        """See :meth:`kvstore.cluster.store.RecordStore.settings`."""
        there = await self._swap(self._settings, offered, None, lease=0)
        return offered if there is None else there

    async def claim(self, name: str, value: bytes, expected: bytes | None) -> bytes | None:
        """See :meth:`kvstore.cluster.store.RecordStore.claim`."""
        return await self._bounded(self._leased(name, value, expected))

    async def _leased(self, name: str, value: bytes, expected: bytes | None) -> bytes | None:
        """Put a record under the lease; get a lease if there is none."""
        if not await self.renew():
            asked = rpc.LeaseGrantRequest(TTL=int(self.lease_s))
            granted = await self._call(lambda: rpc.LeaseStub(self._open()).LeaseGrant, asked)
            self._lease = granted.ID
        there = await self._swap(self._nodes + name.encode(), value, expected, self._lease)
        if there is None:
            self._own = name
        return there

    async def renew(self) -> bool:
        """See :meth:`kvstore.cluster.store.RecordStore.renew`."""
        if not self._lease:
            return False

        async def renew(request: Any, **given: Any) -> Any:
            stream = rpc.LeaseStub(self._open()).LeaseKeepAlive(iter([request]), **given)
            try:
                return await stream.read()
            finally:
                stream.cancel()

        answer = await self._call(lambda: renew, rpc.LeaseKeepAliveRequest(ID=self._lease))
        if not getattr(answer, "TTL", 0):  # also when the stream ends without an answer
            self._lease = 0
        return bool(self._lease)

    async def check(self) -> None:
        """See :meth:`kvstore.cluster.store.RecordStore.check`."""
        request = rpc.RangeRequest(key=self._settings, count_only=True)
        await self._call(lambda: rpc.KVStub(self._open()).Range, request)

    async def withdraw(self, name: str, value: bytes) -> None:
        """See :meth:`kvstore.cluster.store.RecordStore.withdraw`."""
        key = self._nodes + name.encode()
        request = rpc.TxnRequest(
            compare=[_is(key, value)],
            success=[rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))],
        )
        await self._call(lambda: rpc.KVStub(self._open()).Txn, request)

    async def watch(self) -> AsyncGenerator[Mapping[str, bytes], None]:
        """See :meth:`kvstore.cluster.store.RecordStore.watch`."""
        records, are_more, listed = await self._list()
        stream = rpc.WatchStub(self._open()).Watch(metadata=self._metadata)
        create = rpc.WatchCreateRequest(
            key=self._nodes, range_end=self._end, start_revision=listed + 1
        )
        listed = -1
        try:
            await self._bounded(stream.write(rpc.WatchRequest(create_request=create)))
            self._continues(await self._bounded(stream.read()))
            yield dict(records)
            while True:
                try:
                    answer = self._continues(await stream.read())
                except Exception as error:
                    raise _translated(error) from error
                for change in answer.events:
                    name = self._name(change.kv.key)
                    if change.kv.mod_revision <= listed:
                        continue  # it came between the list and the watch
                    if change.type == rpc.Event.DELETE:
                        records.pop(name, None)
                    elif name in records or name == self._own or len(records) < RECORDS_MAX:
                        records[name] = _begun(change.kv.value)
                    else:
                        are_more = True
                if are_more and len(records) < RECORDS_MAX:
                    records, are_more, listed = await self._list()
                if answer.events:
                    yield dict(records)
        finally:
            stream.cancel()

    async def _list(self) -> tuple[dict[str, bytes], bool, int]:
        """The records that are read.

        Returns:
            the records, whether there are more, and the revision of the store.
        """
        asked = rpc.RangeRequest(
            key=self._nodes, range_end=self._end, limit=RECORDS_MAX,
            sort_target=rpc.RangeRequest.CREATE, sort_order=rpc.RangeRequest.ASCEND,
        )  # fmt: skip
        found = await self._call(lambda: rpc.KVStub(self._open()).Range, asked)
        kvs, revision = found.kvs[:RECORDS_MAX], found.header.revision
        records = {self._name(one.key): _begun(one.value) for one in kvs}
        are_more = found.more or len(found.kvs) > RECORDS_MAX
        if are_more and self._own and self._own not in records:
            asked = rpc.RangeRequest(key=self._nodes + self._own.encode())
            found = await self._call(lambda: rpc.KVStub(self._open()).Range, asked)
            if found.kvs:
                records.popitem()
                records[self._own] = _begun(found.kvs[0].value)
        return records, are_more, revision

    async def _login(self) -> None:
        """Get a token, if there is a login."""
        self._metadata = ()
        login = read_login(self._servers)
        if login is None:
            return
        request = rpc.AuthenticateRequest(name=login.user, password=login.password)
        call = rpc.AuthStub(self._open()).Authenticate(request, timeout=CALL_S)
        self._metadata = (("token", _decoded(await self._bounded(call)).token),)

    async def _swap(
        self, key: bytes, value: bytes, expected: bytes | None, lease: int
    ) -> bytes | None:
        """Put a value if the expected one is there; see :meth:`claim`."""
        request = rpc.TxnRequest(
            compare=[_is(key, expected)],
            success=[
                rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value, lease=lease))
            ],
            failure=[rpc.RequestOp(request_range=rpc.RangeRequest(key=key))],
        )  # fmt: skip
        answer = await self._call(lambda: rpc.KVStub(self._open()).Txn, request)
        if answer.succeeded:
            return None
        if not answer.responses:
            raise PeerUnreachable(f"etcd: {_NOT_ASKED}")
        found = answer.responses[0].response_range.kvs
        return bytes(found[0].value) if found else b""

    async def _call(self, method: Callable[[], Callable[..., Awaitable[Any]]], request: Any) -> Any:
        """Call a method of the open channel; log in again if the token has become invalid."""

        async def attempts() -> Any:
            try:
                return await method()(request, timeout=CALL_S, metadata=self._metadata)
            except rpc.AioRpcError as error:
                if error.code() is not rpc.StatusCode.UNAUTHENTICATED:
                    raise
            await self._login()
            return await method()(request, timeout=CALL_S, metadata=self._metadata)

        return _decoded(await self._bounded(attempts()))

    async def _bounded(self, call: Awaitable[_T]) -> _T:
        """Wait for a call, or for several that belong together."""
        try:
            async with asyncio.timeout(CALL_S):
                return await call
        except TimeoutError as error:
            raise TransferTimeout(_late()) from error
        except Exception as error:
            raise _translated(error) from error

    def _open(self) -> Any:
        if self._channel is None:
            raise PeerUnreachable("etcd is not connected")
        return self._channel

    def _continues(self, answer: Any) -> Any:
        """An answer of a watch, unless it is the last one."""
        ended = getattr(answer, "canceled", True)  # the end of the stream is no answer
        if ended:
            raise PeerUnreachable("etcd has ended the watch")
        return answer

    def _name(self, key: bytes) -> str:
        return _begun(key[len(self._nodes) :]).decode(errors="replace")


def _begun(value: bytes) -> bytes:
    """The beginning of a record, or of its name: enough to see that it is too long."""
    return value[: RECORD_BYTES_MAX + 1]


def _is(key: bytes, value: bytes | None) -> Any:
    """The condition that a key has a value; None = that it is absent."""
    if value is None:
        return rpc.Compare(
            key=key, target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, create_revision=0
        )
    return rpc.Compare(key=key, target=rpc.Compare.VALUE, result=rpc.Compare.EQUAL, value=value)


def _decoded(answer: Any) -> Any:
    """An answer; the client gives None for one that it cannot decode."""
    if answer is None:
        raise PeerUnreachable(f"etcd: {_NOT_ASKED}")
    return answer


def _late() -> str:
    return f"etcd did not answer within {CALL_S} s"


def _translated(error: Exception) -> KVStoreError:
    """What a call has raised, as this store's callers know it.

    The client raises others than those with a status: when its channel was closed meanwhile.
    """
    if isinstance(error, KVStoreError):
        return error
    if not isinstance(error, rpc.AioRpcError):
        return PeerUnreachable(f"etcd: {type(error).__name__}: {printable(str(error))}")
    code, text = error.code(), error.details() or ""
    if code is rpc.StatusCode.DEADLINE_EXCEEDED:
        return TransferTimeout(_late())
    if code is rpc.StatusCode.UNAUTHENTICATED or any(said in text for said in _LOGIN_TEXTS):
        return InvalidArgument(
            "login", "etcd refuses the login, or this user may not use the keys"
            " /kvstore/CLUSTER/",
        )  # fmt: skip
    return PeerUnreachable(f"etcd: {code.name}: {printable(text)}")
