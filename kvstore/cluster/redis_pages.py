"""The entries of pages in Redis: one string a page. docs/internals/directory.md describes them.

Scripts change many entries in one call, so that two nodes do not lose each other's changes. They
access keys that are not among their arguments, so one server must have all keys: Redis Cluster is
not supported.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
from redis.asyncio import Redis
from redis.commands.core import AsyncScript

from kvstore.cluster.entries import NAME_BYTES, FoundEntries, NumberHolder
from kvstore.cluster.page_store import AnnouncedNumber, ChangedPages, DirectoryFault
from kvstore.cluster.redis_client import PRIMARY_ONLY, RedisTrouble, disconnect, trouble_of
from kvstore.protocol.errors import InvalidArgument, printable

ENTRY_MS: Final = 3_600_000
"""Lifetime of an entry after it was announced."""
NUMBER_MS: Final = 30_000
"""Lifetime of a number after it was renewed."""
_MARGIN_MS: Final = 60_000
CALL_S: Final = 2.0
_T = TypeVar("_T")
_NOT_ASKED: Final = "its answer is not what was asked for"
_FOUND_NAMES: Final = 4_096
"""Entries of one call; other clients of the server wait meanwhile: a millisecond."""

_NOW: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
_FIELDS: Final = """
local function fields(key, ...) -- none of what is no hash
  local one = redis.pcall('HMGET', key, ...)
  if not one.err then return one end
  if not string.find(one.err, 'WRONGTYPE', 1, true) then redis.call('HMGET', key, ...) end
  return {}, true
end
"""

_CLAIM: Final = (
    _NOW
    + _FIELDS
    + """
local numbers, holder = KEYS[1], KEYS[2]
local node, boot, token, lease, keep = unpack(ARGV)
local taken = {}
for _, number in ipairs(redis.call('ZRANGE', numbers, 0, -1)) do
  local key, counts = holder .. number, string.find(number, '^[1-9]%d*$')
  local one, damaged = fields(key, 'node', 'boot', 'token')
  if counts and one[3] == token then return tonumber(number) end
  if counts and damaged then -- no longer, but entries may have it
    redis.call('DEL', key)
    redis.call('HSET', key, 'node', '', 'until', 0)
    redis.call('PEXPIRE', key, keep)
    taken[tonumber(number)] = true
  elseif not counts or not one[1] then
    redis.call('ZREM', numbers, number)
  else
    taken[tonumber(number)] = true
    if one[1] == node and one[2] ~= boot then
      redis.call('HSET', holder .. number, 'until', 0)
    end
  end
end
local number = 1
while taken[number] do number = number + 1 end
redis.call('DEL', holder .. number)
redis.call('HSET', holder .. number,
  'node', node, 'boot', boot, 'token', token, 'batch', 0, 'until', now + lease)
redis.call('PEXPIRE', holder .. number, keep)
redis.call('ZADD', numbers, now, number)
return number
"""
)

_RENEW: Final = (
    _NOW
    + _FIELDS
    + """
local holder, lease, keep = KEYS[1], ARGV[1], ARGV[2]
local lost = {}
for at = 3, #ARGV, 3 do
  local key = holder .. ARGV[at]
  local one = fields(key, 'token', 'until', 'batch')
  if one[1] == ARGV[at + 1] and (tonumber(one[2] or '') or 0) > now
      and (tonumber(one[3] or '') or -1) >= tonumber(ARGV[at + 2]) then
    redis.call('HSET', key, 'until', now + lease)
    redis.call('PEXPIRE', key, keep)
  else
    lost[#lost + 1] = tonumber(ARGV[at])
  end
end
return lost
"""
)

_WITHDRAW: Final = (
    _FIELDS
    + """
local key = KEYS[1] .. ARGV[1]
if fields(key, 'token')[1] == ARGV[2] then redis.call('HSET', key, 'until', 0) end
return 1
"""
)

_LIVE: Final = (
    _FIELDS
    + """
local function texts_of(names)
  local keys = {}
  for start = 1, #names, size do
    keys[#keys + 1] = 'k' .. string.sub(names, start, start + size - 1)
  end
  local texts = #keys > 0 and redis.call('MGET', unpack(keys)) or {}
  for at, text in ipairs(texts) do
    if text and #text > 4096 then texts[at] = false end -- no entry of ours
  end
  return keys, texts
end
local live = {}
local function is_live(number)
  if live[number] == nil then
    live[number] = (tonumber(fields(holder .. number, 'until')[1] or '') or 0) > now
  end
  return live[number]
end
"""
)

_CHANGE: Final = (
    _NOW
    + """
local holder, number, token, batch, ttl, size =
  KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
"""
    + _LIVE
    + """
local own = fields(holder .. number, 'token', 'until', 'batch')
if own[1] ~= token or (tonumber(own[2] or '') or 0) <= now then return 0 end
if tonumber(own[3] or '') == batch then return 1 end
if tonumber(own[3] or '') ~= batch - 1 then return 0 end
local function others(text, member)
  local kept = {}
  for one in string.gmatch(text, '[^,]+') do
    if one ~= member and is_live((string.gsub(one, '^-', ''))) then kept[#kept + 1] = one end
  end
  return kept
end
for at = 6, #ARGV, 3 do
  local is_stored, member, names = ARGV[at] == '+', ARGV[at + 1] .. number, ARGV[at + 2]
  local keys, texts = texts_of(names)
  for at, key in ipairs(keys) do
    local text = texts[at]
    if is_stored then
      if text and text ~= member then
        local kept = others(text, member)
        kept[#kept + 1] = member
        redis.call('SET', key, table.concat(kept, ','), 'PX', ttl)
      else
        redis.call('SET', key, member, 'PX', ttl)
      end
    elseif text then
      local kept = others(text, member)
      if #kept == 0 then
        redis.call('DEL', key)
      else
        redis.call('SET', key, table.concat(kept, ','), 'KEEPTTL')
      end
    end
  end
end
redis.call('HSET', holder .. number, 'batch', batch)
return 1
"""
)

_FIND: Final = (
    PRIMARY_ONLY
    + _NOW
    + """
local holder, size = KEYS[1], tonumber(ARGV[1])
"""
    + _LIVE
    + """
local seen, known, holders, shards = {}, {}, {}, {}
for shard = 2, #ARGV do
  local names, runs, last = ARGV[shard], {}, nil
  local _, texts = texts_of(names)
  for at = 1, #texts do
    local text = texts[at] or ''
    if text == last then
      runs[#runs - 1] = runs[#runs - 1] + 1
    else
      runs[#runs + 1], runs[#runs + 2], last = 1, text, text
      if not seen[text] then
        seen[text] = true
        for number in string.gmatch(text, '%d+') do
          if not known[number] then
            known[number] = true
            if is_live(number) then
              local one = fields(holder .. number, 'node', 'boot')
              if one[1] and one[2] and #one[1] + #one[2] <= 4096 then
                holders[#holders + 1] = {number, one[1], one[2]}
              end
            end
          end
        end
      end
    end
  end
  shards[#shards + 1] = runs
end
return {holders, shards}
"""
)


class _Found(msgspec.Struct, array_like=True):
    """The answer to a search.

    Attributes:
        holders: number, name of the node, and its boot id in hex.
        shards: for each, alternating, a number of pages and their text.
    """

    holders: list[tuple[bytes, bytes, bytes]]
    shards: list[list[int | bytes]]


class RedisPages:
    """A :class:`kvstore.cluster.page_store.PageStore` in Redis.

    Args:
        connect: a client of one server, not decoding and without retries; called again after a
            failure, to try another one, except when its memory is full.
        cluster: name of the cluster.
        entry_ms: lifetime of an entry.
        number_ms: lifetime of a number that is not renewed.
        call_s: time limit of each script.
    """

    def __init__(
        self, connect: Callable[[], Redis], cluster: str, entry_ms: int = ENTRY_MS,
        number_ms: int = NUMBER_MS, call_s: float = CALL_S,
    ) -> None:  # fmt: skip
        self._connect = connect
        self._numbers = f"kvstore:{{{cluster}}}:numbers"
        self._holder = f"kvstore:{{{cluster}}}:holder:"
        self._entry_ms = entry_ms
        self._lease_ms = number_ms
        self._keep_ms = entry_ms + number_ms + _MARGIN_MS
        self._call_s = call_s
        self._client: Redis | None = None
        self._scripts: dict[str, AsyncScript] = {}

    async def close(self) -> None:
        """Disconnect; the next call connects again."""
        client, self._client = self._client, None
        self._scripts.clear()
        if client is not None:
            await disconnect(client)

    async def claim(self, node: str, boot: bytes, token: str) -> int:
        """See :meth:`kvstore.cluster.page_store.PageStore.claim`."""
        arguments = [node, boot.hex(), token, self._lease_ms, self._keep_ms]
        number = _read(await self._call(_CLAIM, [self._numbers, self._holder], arguments), int)
        if number < 1:  # 0 is no number yet: it would be asked for again at once
            raise DirectoryFault("refused", f"Redis: {_NOT_ASKED}")
        return number

    async def change(
        self, number: int, token: str, batch: int, changes: Sequence[ChangedPages]
    ) -> bool:
        """See :meth:`kvstore.cluster.page_store.PageStore.change`."""
        arguments: list[Any] = [number, token, batch, self._entry_ms, NAME_BYTES]
        for one in changes:
            arguments += ["+" if one.stored else "-", one.sign, one.names]
        return bool(_read(await self._call(_CHANGE, [self._holder], arguments), int))

    async def renew(self, numbers: Mapping[int, AnnouncedNumber]) -> list[int]:
        """See :meth:`kvstore.cluster.page_store.PageStore.renew`."""
        arguments: list[Any] = [self._lease_ms, self._keep_ms]
        for number, (token, batch) in numbers.items():
            arguments += [number, token, batch]
        return _read(await self._call(_RENEW, [self._holder], arguments), list[int])

    async def withdraw(self, number: int, token: str) -> None:
        """See :meth:`kvstore.cluster.page_store.PageStore.withdraw`."""
        await self._call(_WITHDRAW, [self._holder], [number, token])

    async def find(self, shards: Sequence[bytes]) -> FoundEntries:
        """See :meth:`kvstore.cluster.page_store.PageStore.find`."""
        step = max(1, _FOUND_NAMES // max(1, len(shards))) * NAME_BYTES
        runs: list[list[tuple[int, str]]] = [[] for _ in shards]
        holders: dict[int, NumberHolder] = {}
        for start in range(0, max(map(len, shards), default=0), step):
            parts = [names[start : start + step] for names in shards]
            arguments: list[Any] = [NAME_BYTES, *parts]
            reply = _read(await self._call(_FIND, [self._holder], arguments), _Found)
            for number, node, boot in reply.holders:
                with contextlib.suppress(ValueError):  # it is no text: a number of nobody
                    holders[int(number)] = NumberHolder(node.decode(), bytes.fromhex(boot.decode()))
            if len(reply.shards) != len(parts):
                raise DirectoryFault("refused", f"Redis: {_NOT_ASKED}")
            for shard, names, counts in zip(runs, parts, reply.shards, strict=True):
                shard += _runs(counts, len(names) // NAME_BYTES)
        return FoundEntries(runs, holders)

    async def _call(self, text: str, keys: list[str], arguments: list[Any]) -> Any:
        """Run a script, with its deadline.

        Raises:
            DirectoryFault: it failed.
        """
        client: Redis | None = None
        try:
            client, script = self._script(text)
            async with asyncio.timeout(self._call_s):
                return await script(keys, arguments)
        except InvalidArgument as error:
            raise DirectoryFault("login", str(error)) from error
        except Exception as error:  # a strange answer makes the client raise anything
            cause = trouble_of(error)
            if client is not None and cause != "full":
                # Another server, or another password, may do: both are read for each client.
                await self._drop(client)
            raise DirectoryFault(cause, self._said(cause, error)) from error

    def _script(self, text: str) -> tuple[Redis, AsyncScript]:
        if self._client is None:
            self._client = self._connect()
        script = self._scripts.get(text)
        if script is None:
            script = self._scripts[text] = self._client.register_script(text)
        return self._client, script

    def _said(self, cause: RedisTrouble, error: Exception) -> str:
        match cause:
            case "login":  # Redis names the user
                return "Redis refuses the login, or this user may not use the keys and scripts"
            case "late":
                return f"Redis did not answer within {self._call_s} s"
            case "full":
                return "Redis takes no more: see its maxmemory"
            case _:
                return f"Redis: {printable(str(error) or type(error).__name__)}"

    async def _drop(self, client: Redis) -> None:
        """Disconnect a client that failed, unless another call has done that already."""
        if self._client is client:
            await self.close()


def _read(answer: Any, kind: type[_T]) -> _T:
    """An answer, converted to the expected type.

    Raises:
        DirectoryFault: it is something else: this is not Redis, or a record is damaged.
    """
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise DirectoryFault("refused", f"Redis: {_NOT_ASKED}: {error}") from error


def _runs(reply: Sequence[int | bytes], pages: int) -> list[tuple[int, str]]:
    """How many consecutive pages have which text.

    Raises:
        DirectoryFault: these are not runs of this many pages.
    """
    runs = [
        (count, text.decode("ascii", "replace"))
        for count, text in zip(reply[::2], reply[1::2], strict=False)
        if isinstance(count, int) and isinstance(text, bytes) and count > 0
    ]
    if len(reply) != 2 * len(runs) or sum(count for count, _ in runs) != pages:
        raise DirectoryFault("refused", f"Redis: {_NOT_ASKED}")
    return runs
