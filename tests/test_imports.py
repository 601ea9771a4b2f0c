"""Goal: what an engine's process imports of us cannot clash with what the engine needs."""

import subprocess
import sys

NOT_FOR_ENGINES = {
    "aiohttp", "google.protobuf", "grpc", "numba", "prometheus_client", "pydantic",
    "rich", "starlette", "torch", "uvicorn", "uvloop", "zmq",
}  # fmt: skip


def imported_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


def test_the_client_needs_only_numpy_msgspec_and_xxhash() -> None:
    assert imported_by("import kvstore.client.store") & NOT_FOR_ENGINES == set()


def test_the_embedded_store_needs_no_more_than_the_client() -> None:
    assert imported_by("import kvstore.client.embedded") & NOT_FOR_ENGINES == set()


def test_handoffs_need_no_more_than_the_client() -> None:
    loaded = imported_by(
        "import kvstore.handoff.prefill, kvstore.handoff.decode, kvstore.handoff.registry"
    )
    assert loaded & NOT_FOR_ENGINES == set()


def test_the_node_needs_no_torch() -> None:
    loaded = imported_by(
        "import kvstore.server.daemon, kvstore.server.admin.process, conductor.service, kvstore.cli"
    )
    assert loaded & {"torch", "vllm", "sglang"} == set()
    assert loaded & {"aetcd", "grpc", "redis"} == set(), "only the index process has such a client"
    assert "zmq" not in loaded, "events need no libzmq: decisions/0013"
    assert "uvicorn" in loaded, "the list above means something only while the daemon needs these"
