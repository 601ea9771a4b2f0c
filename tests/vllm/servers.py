"""vLLM's own servers in the hands of a test, asked over HTTP."""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.cluster import loopback
from tests.conftest import Process, Spawn, wait_for
from tests.vllm.engines import ENGINE, ENVIRONMENT, START_WAIT_S, transfer_config

RETAIN = {"retain": {"seconds": 600.0, "bytes": 1 << 30}}
"""Only requests with a session id are kept."""
_PORT = 8000
ENVIRONMENT_OF_SERVERS = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def ask(url: str, body: dict[str, Any] | None = None, token: str = "") -> dict[str, Any]:
    """The answer to one request."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    call = urllib.request.Request(url, data=data, headers=headers)
    try:
        with urllib.request.urlopen(call, timeout=60) as answer:
            found: dict[str, Any] = json.loads(answer.read() or b"{}")
            return found
    except urllib.error.HTTPError as error:
        pytest.fail(f"{url}: {error.code} {error.read().decode()}")


class Server:
    """A server of vLLM with the connector.

    Attributes:
        url: where it listens, once :meth:`wait_ready` has returned.
    """

    def __init__(
        self, spawn: Spawn, python: Path, model: Path, address: str, events: Path | None = None,
        more: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Begin to start it, with events at endpoints in a folder, and with more flags."""
        host = loopback()  # a free port of 127.0.0.1 could be taken by another engine meanwhile
        flags = ["--kv-transfer-config", json.dumps(transfer_config(address, extra=RETAIN))]
        if events is not None:
            told = {
                "enable_kv_cache_events": True, "publisher": "zmq",
                "endpoint": f"ipc://{events}/events", "replay_endpoint": f"ipc://{events}/replay",
            }  # fmt: skip
            flags += ["--kv-events-config", json.dumps(told)]
        self.url = f"http://{host}:{_PORT}"
        self._process: Process = spawn(
            [
                str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
                "--served-model-name", "tiny", "--host", host, "--port", str(_PORT),
                "--dtype", str(ENGINE["dtype"]), "--max-model-len", str(ENGINE["max_model_len"]),
                "--max-num-seqs", "4", "--enforce-eager",
                "--block-size", str(ENGINE["block_size"]), "--num-gpu-blocks-override", "320",
                "--enable-prompt-tokens-details", *flags, *more,
            ],
            env=ENVIRONMENT_OF_SERVERS,
        )  # fmt: skip

    def wait_ready(self) -> None:
        """Wait until it answers."""
        process = self._process
        ready = wait_for(lambda: self._answers() or process.returncode is not None, START_WAIT_S)
        assert ready, process.report()
        assert process.returncode is None, process.report()

    def complete(self, tokens: list[int], max_tokens: int, **parameters: Any) -> dict[str, Any]:
        """The answer to a prompt; greedy, with the tokens."""
        body = {
            "model": "tiny", "prompt": tokens, "max_tokens": max_tokens, "temperature": 0.0,
            "return_token_ids": True, **parameters,
        }  # fmt: skip
        return ask(f"{self.url}/v1/completions", body)

    def metric(self, name: str) -> float:
        """The sum of one of its metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
