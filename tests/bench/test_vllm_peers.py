"""Goal: other stores start beside a vLLM on a machine without Debian's libibverbs1."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import mooncake_wheel, vllm_peers
from bench.cluster import ClusterError


def test_a_peer_finds_the_libraries_that_were_unpacked(monkeypatch: pytest.MonkeyPatch):
    asked: list[dict[str, str]] = []

    def started(*_: Any, env: dict[str, str], **__: Any) -> None:
        asked.append(env)
        raise OSError("not started here")

    found = {"LD_LIBRARY_PATH": "/unpacked/lib", "PYTHONPATH": "/unpacked/site"}
    monkeypatch.setattr(vllm_peers, "peers", lambda: Path("/peers"))
    monkeypatch.setattr(mooncake_wheel, "environment", lambda: found)
    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.delenv("PYTHONPATH", raising=False)

    with pytest.raises(ClusterError, match="mooncake: not started here"):
        vllm_peers.measure("mooncake", 3)

    assert asked[0]["LD_LIBRARY_PATH"] == "/unpacked/lib"
    assert "PYTHONPATH" not in asked[0], "packages of another interpreter"
    assert "PATH" in asked[0]


def test_without_these_libraries_a_peer_is_left_out_and_the_reason_said(
    monkeypatch: pytest.MonkeyPatch,
):
    def absent() -> dict[str, str]:
        raise mooncake_wheel.NoMooncakeError("Mooncake cannot be had: offline")

    monkeypatch.setattr(vllm_peers, "peers", lambda: Path("/peers"))
    monkeypatch.setattr(mooncake_wheel, "environment", absent)

    with pytest.raises(ClusterError, match="cannot be had: offline"):
        vllm_peers.measure("mooncake", 3)


def test_an_import_that_does_not_end_counts_as_absent(monkeypatch: pytest.MonkeyPatch):
    def stuck(command: list[str], *, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", stuck)

    with pytest.raises(mooncake_wheel.NoMooncakeError):
        mooncake_wheel.environment()
