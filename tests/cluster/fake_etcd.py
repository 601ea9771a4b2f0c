"""A channel in place of one to etcd: each method answers as the test says. It has no connection."""

import asyncio
from collections.abc import Callable
from typing import Any, Self

import grpc
from grpc import _common

import kvstore.cluster.etcd as under_test
from kvstore.cluster.access import StoreServers
from kvstore.cluster.etcd import EtcdStore


class FakeEtcd:
    """What etcd answers.

    Attributes:
        answers: for each method its answer, encoded, or what makes it of the request.
        watched: answers of a watch, encoded.
    """

    def __init__(self) -> None:
        self.answers: dict[str, bytes | Callable[[Any], bytes]] = {}
        self.watched: asyncio.Queue[bytes] = asyncio.Queue()
        self._closed = False

    def store(self, monkeypatch: Any) -> EtcdStore:
        """A store at this etcd."""
        monkeypatch.setattr(under_test.rpc, "insecure_channel", lambda *_, **__: self)
        return EtcdStore(StoreServers(("127.0.0.1:2379",)), "blue")

    def unary_unary(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Any:
        async def call(request: Any, **_: Any) -> Any:
            if self._closed:
                raise grpc.aio.UsageError("Channel is closed.")
            assert request_serializer(request) is not None
            answer = self.answers[path.rpartition("/")[2]]
            said = answer if isinstance(answer, bytes) else answer(request)
            return _common.deserialize(said, response_deserializer)  # type: ignore[no-untyped-call]

        return call

    def stream_stream(self, path: str, response_deserializer: Any, **_: Any) -> Any:
        return lambda *_, **__: _Stream(self.watched, response_deserializer)

    async def close(self) -> None:
        self._closed = True


class _Stream:
    def __init__(self, answers: asyncio.Queue[bytes], deserializer: Any) -> None:
        self._answers = answers
        self._deserializer = deserializer

    async def write(self, request: Any) -> None:
        pass

    async def read(self) -> Any:
        said = await self._answers.get()
        return _common.deserialize(said, self._deserializer)  # type: ignore[no-untyped-call]

    def cancel(self) -> Self:
        return self
