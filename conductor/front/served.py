"""Asks an engine what it is, and which model and LoRA adapters it serves.

Its properties are read from ``GET /v1/engine``; without this route (vLLM), its model and its LoRA
adapters from ``GET /v1/models``. That answer lists the model, and each adapter with a ``parent``
and, as its ``root``, the path that the engine has loaded it from. The keys of an adapter's pages
are seeded with its name, this path and a fingerprint of the files there. The Conductor looks at the
same path: on the engine's machine, or in a file system that both see, it finds the same. Elsewhere
its seeds match no page.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

import msgspec

from conductor.config import (
    LENGTH_MAX,
    Endpoint,
    EngineEntry,
    Length,
    Model,
    Name,
    Running,
    Space,
    Tokens,
)
from conductor.costs.book import machine_of
from conductor.front.openai import BadRequestError
from conductor.front.upstream import EngineError, Upstream
from conductor.protocols import own_protocols
from conductor.routing.engines import HandoffOffer, LoraAdapter
from kvstore.engine.requests import weights_fingerprint
from kvstore.index.reading import UnreadableError, read

ADAPTERS_MAX: Final = 1024
"""Maximum LoRA adapters of one engine; further ones are not served here."""
_WEIGHTS_KEPT_S: Final = 60.0
"""For how long a fingerprint is taken as it was."""
_WEIGHTS_KEPT_MAX: Final = 4096
_WEIGHTS_S: Final = 1.0
"""For how long a registration waits for a file system."""
_LATE_S: Final = 30.0
"""After which the next adapter is read, while a thread still waits for a file system."""
_THREADS_MAX: Final = 8
"""Threads that wait for file systems; nothing more is read meanwhile."""

_PATH_MAX: Final = 4096
_NOT_FOUND: Final = 404
_NAME_MODEL: Final = "if it cannot be asked, register it with `model`"

_log = logging.getLogger(__name__)


class DescribedEngine(msgspec.Struct):
    """The answer of ``GET /v1/engine``; all fields are optional."""

    role: str | None = None
    model: Model | None = None
    page_tokens: Tokens | None = None
    space: Space | None = None
    events: Endpoint | None = None
    events_bind: Endpoint | None = None
    events_replay: Endpoint | None = None
    node: Name | None = None
    max_running: Running | None = None
    max_model_len: Length | None = None
    shape: str | None = None
    hardware: str | None = None
    protocol: str | None = None
    handoff: HandoffOffer | None = None


class _Model(msgspec.Struct):
    id: Model
    parent: str | None = None
    root: object = None
    max_model_len: object = None


class _Models(msgspec.Struct):
    data: list[_Model]


_DESCRIBED: Final = msgspec.json.Decoder(DescribedEngine)
_Weights = dict[str, str | None]
"""path → fingerprint of the files there; None = they cannot be read."""
_Job = asyncio.Future[str | None]
_MODELS: Final = msgspec.json.Decoder(_Models)


class SaidEngine(NamedTuple):
    """What an engine says of itself.

    Attributes:
        said: its properties.
        adapters: its LoRA adapters; None = they could not be read.
        lists: whether they are read from ``GET /v1/models``.
    """

    said: DescribedEngine
    adapters: dict[str, LoraAdapter] | None
    lists: bool


class ServedModels(NamedTuple):
    """What an engine serves; None = it does not tell."""

    model: str | None
    adapters: dict[str, LoraAdapter]
    max_model_len: int | None = None


class ServedReader:
    """Asks engines what they serve.

    Args:
        upstream: client for engines.
        timeout_s: deadline of one answer.
        fingerprint: reads the files of an adapter; called in a thread.
    """

    def __init__(
        self,
        upstream: Upstream,
        timeout_s: float,
        fingerprint: Callable[[str], str] = weights_fingerprint,
    ) -> None:
        self._upstream = upstream
        self._timeout_s = timeout_s
        self._fingerprint = fingerprint
        self._known: dict[str, tuple[float, str | None]] = {}  # path → until when, what
        self._jobs: dict[str, tuple[float, _Job]] = {}  # path → when it is late, its fingerprint
        self._unread: dict[str, None] = {}  # paths to read, those of the jobs too

    async def describe(self, entry: EngineEntry) -> SaidEngine:
        """Ask an engine that registers.

        Raises:
            EngineError: it does not answer, and the entry names no model.
        """
        try:
            raw = await self._upstream.get(entry.id, f"{entry.url}/v1/engine", self._timeout_s)
            return SaidEngine(read(_DESCRIBED.decode, raw), {}, lists=False)
        except (EngineError, UnreadableError) as error:
            if not isinstance(error, EngineError) or error.status != _NOT_FOUND:
                if entry.model is None:
                    raise _unnamed(entry, error) from error
                return SaidEngine(DescribedEngine(), None, lists=True)
        try:
            served = await self.read(entry.id, entry.url)
        except (EngineError, UnreadableError) as error:
            if entry.model is None:
                raise _unnamed(entry, error) from error
            return SaidEngine(DescribedEngine(), None, lists=True)
        said = DescribedEngine(model=served.model, max_model_len=served.max_model_len)
        return SaidEngine(said, served.adapters, lists=True)

    async def read(self, engine: str, url: str) -> ServedModels:
        """Ask one engine.

        Args:
            engine: its id.
            url: its URL.

        Raises:
            EngineError: it does not answer correctly in time.
            UnreadableError: its answer is no list of models.
        """
        raw = await self._upstream.get(engine, f"{url}/v1/models", self._timeout_s)
        models = read(_MODELS.decode, raw).data
        base = {one.id for one in models if one.parent is None}
        listed = {one.id: _path(one.root) for one in models if one.parent is not None}
        paths = {name: path for name, path in listed.items() if name not in base}
        if len(paths) > ADAPTERS_MAX:
            _log.warning(
                "engine %s serves %d LoRA adapters: only the first %d are used",
                engine, len(paths), ADAPTERS_MAX,
            )  # fmt: skip
            paths = dict(list(paths.items())[:ADAPTERS_MAX])
        weights = await self._weights({path for path in paths.values() if path})
        adapters = {
            name: LoraAdapter(path, weights.get(path) if path else None)
            for name, path in paths.items()
        }
        first = next((one for one in models if one.parent is None), None)
        if first is None:
            return ServedModels(None, adapters)
        return ServedModels(first.id, adapters, _length(first))

    async def _weights(self, paths: Collection[str]) -> _Weights:
        """Fingerprints of the files at these paths; those that are not read in time are absent."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_WEIGHTS_S):
                while new := self._unknown(paths):
                    self._unread |= dict.fromkeys(new[: _WEIGHTS_KEPT_MAX - len(self._unread)])
                    self._read_next()
                    jobs = [job for _, job in self._jobs.values()]
                    await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        return {path: self._known[path][1] for path in paths if path in self._known}

    def _unknown(self, paths: Collection[str]) -> list[str]:
        now = time.monotonic()
        return [path for path in paths if self._known.get(path, (0.0, None))[0] <= now]

    def _read_next(self) -> None:
        """Read one path after the other, also when nobody waits, but for those that hang."""
        now = time.monotonic()
        if len(self._jobs) >= _THREADS_MAX or any(now < late for late, _ in self._jobs.values()):
            return
        path = next((one for one in self._unread if one not in self._jobs), None)
        if path is not None:
            job = _in_thread(self._fingerprint, path)
            self._jobs[path] = now + _LATE_S, job
            job.add_done_callback(partial(self._keep, path))

    def _keep(self, path: str, job: _Job) -> None:
        del self._jobs[path], self._unread[path]
        if len(self._known) >= _WEIGHTS_KEPT_MAX:
            self._known.clear()
        self._known[path] = time.monotonic() + _WEIGHTS_KEPT_S, job.result()
        with suppress(RuntimeError):  # no more threads: whoever asks next tries again
            self._read_next()


def _path(root: object) -> str | None:
    return root if isinstance(root, str) and 0 < len(root) <= _PATH_MAX else None


def _length(model: _Model) -> int | None:
    length = model.max_model_len
    return length if isinstance(length, int) and 0 < length <= LENGTH_MAX else None


def _in_thread(fingerprint: Callable[[str], str], path: str) -> _Job:
    """Read a fingerprint in a thread, which may wait for ever for a file system that hangs."""
    loop = asyncio.get_running_loop()
    done: _Job = loop.create_future()

    def work() -> None:
        found = None
        try:
            # ValueError: a path with a null byte; RecursionError: a folder that is too deep.
            with suppress(OSError, ValueError, RecursionError):
                found = fingerprint(path)
        finally:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(done.set_result, found)

    threading.Thread(target=work, name="kvstore-adapters", daemon=True).start()
    return done


def _unnamed(entry: EngineEntry, error: EngineError | UnreadableError) -> EngineError:
    what = error.what if isinstance(error, EngineError) else str(error)
    return EngineError(entry.id, f"{what}; {_NAME_MODEL}")


def protocol_of(entry: EngineEntry, said: DescribedEngine, *, listed: bool) -> str:
    """The protocol by which an engine hands KV over.

    Args:
        entry: its registration.
        said: what it says itself.
        listed: it has no ``GET /v1/engine``, so it is taken for vLLM.

    Raises:
        BadRequestError: the engine names one that is unknown.
    """
    if entry.protocol is not None:
        return entry.protocol
    if said.protocol is not None and said.protocol not in own_protocols():
        what = f"the engine says {said.protocol[:64]!r}, not one of {', '.join(own_protocols())}"
        raise BadRequestError("protocol", what)
    return said.protocol or ("vllm" if listed else "reference")


def machine(entry: EngineEntry, said: DescribedEngine) -> tuple[str, str]:
    """Names of an engine's shape and hardware; what it says itself counts only if it is known."""
    try:
        machine_of(said.shape or "", said.hardware or "")
        known = (said.shape, said.hardware)
    except ValueError as error:
        _log.info("engine %s: %s", entry.id, error)
        known = (None, None)
    return entry.shape or known[0] or "", entry.hardware or known[1] or ""
