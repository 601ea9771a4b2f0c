"""The records of a cluster in Redis; the only place of a membership that imports its client.

``kvstore:{CLUSTER}:settings`` and ``kvstore:{CLUSTER}:node:NAME`` are strings of JSON; the latter
expire (PX). ``kvstore:{CLUSTER}:nodes`` is a sorted set of names by the time, in ms, at which they
expire, so that keys need not be searched. All changes are scripts, so each is atomic.

Of too many records, a node reads its own, then those that it has read before, then the others, the
next one to expire first; of a record that is too long, only the beginning.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final, TypeVar

import msgspec
from redis.asyncio import Redis

from kvstore.cluster.access import StoreServers
from kvstore.cluster.greeting import NODE_NAME
from kvstore.cluster.records import RECORD_BYTES_MAX, RECORDS_MAX
from kvstore.cluster.redis_client import PRIMARY_ONLY, disconnect, redis_clients, trouble_of
from kvstore.cluster.store import CALL_S, LEASE_S
from kvstore.protocol.errors import InvalidArgument, PeerUnreachable, TransferTimeout, printable

_T = TypeVar("_T")
_NOT_ASKED: Final = "its answer is not what was asked for"

POLL_S: Final = 0.5
"""Maximum delay until changes are seen."""

_NOW: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
_SETTINGS: Final = """
redis.call('SET', KEYS[1], ARGV[1], 'NX')
return redis.call('GET', KEYS[1])
"""
_CLAIM: Final = (
    _NOW
    + """
local there = redis.call('GET', KEYS[1]) or ''
if there ~= ARGV[2] then return there end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
redis.call('ZADD', KEYS[2], now + ARGV[3], ARGV[4])
return false
"""
)
_RENEW: Final = (
    _NOW
    + """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[2], now + ARGV[2], ARGV[3])
return 1
"""
)
_WITHDRAW: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[2])
return 1
"""
_CHECK: Final = PRIMARY_ONLY + "return 1"
_LIST: Final = (
    PRIMARY_ONLY
    + _NOW
    + """
local found, seen, most = {}, {}, tonumber(ARGV[1])
local function add(name)
  if seen[name] or #found >= 2 * most then return nil end
  seen[name] = true
  local value = redis.pcall('GET', KEYS[2] .. name)
  if type(value) == 'table' then
    if not string.find(value.err, 'WRONGTYPE', 1, true) then return value end
    value = ''
  end
  if value then
    found[#found + 1] = string.sub(name, 1, ARGV[2])
    found[#found + 1] = string.sub(value, 1, ARGV[2])
  end
  return nil
end
for at = 3, #ARGV do
  local failed = add(ARGV[at])
  if failed then return failed end
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], now, '+inf', 'LIMIT', 0, most)) do
  local failed = add(name)
  if failed then return failed end
end
return found
"""
)


class RedisStore:
    """See :class:`~kvstore.cluster.store.RecordStore`; for Redis 6.2 or newer.

    Args:
        servers: of one Redis; a replica among them does not serve.
        cluster: name of the cluster.
        lease_s: seconds after the last renewal in which a record is gone.

    Attributes:
        lease_s: seconds after the last renewal in which a record is gone.
    """

    def __init__(self, servers: StoreServers, cluster: str, lease_s: float = LEASE_S) -> None:
        self.lease_s = lease_s
        self._client = redis_clients(servers, CALL_S)
        self._prefix = f"kvstore:{{{cluster}}}:"
        self._redis: Redis | None = None
        self._own: tuple[str, bytes] | None = None
        #: Names of the nodes whose records were read last.
        self._seen: list[str] = []

    async def open(self) -> None:
        """See :meth:`kvstore.cluster.store.RecordStore.open`."""
        await self.close()
        self._redis = self._client()
        await self._eval(_CHECK, 1, self._prefix)

    async def close(self) -> None:
        """See :meth:`kvstore.cluster.store.RecordStore.close`."""
        redis, self._redis = self._redis, None
        if redis is not None:
            await disconnect(redis)

    async def settings(self, offered: bytes) -> bytes:
        """See :meth:`kvstore.cluster.store.RecordStore.settings`."""
        return _read(await self._eval(_SETTINGS, 1, f"{self._prefix}settings", offered), bytes)

    async def claim(self, name: str, value: bytes, expected: bytes | None) -> bytes | None:
        """See :meth:`kvstore.cluster.store.RecordStore.claim`."""
        there = await self._eval(
            _CLAIM, 2, *self._keys(name), value, expected or b"", self._lease_ms(), name
        )
        if there is None:
            self._own = (name, value)
        return there if there is None else _read(there, bytes)

    async def renew(self) -> bool:
        """See :meth:`kvstore.cluster.store.RecordStore.renew`."""
        if self._own is None:
            return False
        name, value = self._own
        return bool(await self._eval(_RENEW, 2, *self._keys(name), value, self._lease_ms(), name))

    async def check(self) -> None:
        """See :meth:`kvstore.cluster.store.RecordStore.check`."""
        await self._eval(_CHECK, 1, self._prefix)

    async def withdraw(self, name: str, value: bytes) -> None:
        """See :meth:`kvstore.cluster.store.RecordStore.withdraw`."""
        await self._eval(_WITHDRAW, 2, *self._keys(name), value, name)

    async def watch(self) -> AsyncGenerator[Mapping[str, bytes], None]:
        """See :meth:`kvstore.cluster.store.RecordStore.watch`."""
        last: dict[str, bytes] | None = None
        names, prefix = f"{self._prefix}nodes", f"{self._prefix}node:"
        while True:
            reply = await self._eval(
                _LIST, 2, names, prefix, RECORDS_MAX, RECORD_BYTES_MAX + 1, *self._first()
            )
            found = _read(reply, list[bytes])
            if len(found) % 2:
                raise PeerUnreachable(f"Redis: {_NOT_ASKED}")
            records = {
                name.decode(errors="replace"): value
                for name, value in zip(found[::2], found[1::2], strict=False)
            }
            self._seen = [name for name in records if NODE_NAME.fullmatch(name)]
            if records != last:
                last = records
                yield records
            await asyncio.sleep(POLL_S)

    def _first(self) -> list[str]:
        """Names whose records are read before all others."""
        return [*([self._own[0]] if self._own is not None else []), *self._seen]

    def _keys(self, name: str) -> tuple[str, str]:
        return f"{self._prefix}node:{name}", f"{self._prefix}nodes"

    def _lease_ms(self) -> int:
        return round(1_000 * self.lease_s)

    async def _eval(self, script: str, keys: int, *arguments: str | bytes | int) -> Any:
        """Run a script.

        Raises:
            TransferTimeout: no answer in time.
            PeerUnreachable: the server is away, or cannot do it.
            InvalidArgument: it rejects the login.
        """
        if self._redis is None:
            raise PeerUnreachable("Redis is not connected")
        try:
            async with asyncio.timeout(CALL_S):
                return await self._redis.eval(script, keys, *arguments)
        except Exception as error:  # a strange answer makes the client raise anything
            cause = trouble_of(error)
            if cause == "login":
                # Redis names the user; its text is not repeated, whatever it may come to contain.
                raise InvalidArgument(
                    "login", "Redis refuses the login, or this user may not use the keys"
                    f" {self._prefix}* and scripts",
                ) from error  # fmt: skip
            if cause == "late":
                raise TransferTimeout(f"Redis did not answer within {CALL_S} s") from error
            said = printable(str(error) or type(error).__name__)
            raise PeerUnreachable(f"Redis: {said}") from error


def _read(answer: Any, kind: type[_T]) -> _T:
    """An answer, converted to the expected type.

    Raises:
        PeerUnreachable: it is something else: this is not Redis.
    """
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise PeerUnreachable(f"Redis: {_NOT_ASKED}: {error}") from error
