"""Goal: what an engine's process imports of us cannot clash with what the engine needs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

NOT_FOR_ENGINES = {
    "aiohttp", "google.protobuf", "grpc", "numba", "prometheus_client", "pydantic",
    "rich", "starlette", "torch", "uvicorn", "uvloop", "zmq",
}  # fmt: skip
TORCH = {
    "kvstore.testing.device",
    "kvstore.tier.gpu",
    "kvstore.tier.push_memory",
    "kvstore.tier.slab",
}
"""Modules of ``kvstore`` that import torch, which are imported only for memory on a device."""


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


def test_torch_is_imported_only_for_memory_on_a_device():
    """And the modules that import it are imported within functions, or for type checkers only."""
    having: set[str] = set()
    faults = []
    for path in (ROOT / "kvstore").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node, at_start in imports(path):
            names = {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                names = {str(node.module)} | {f"{node.module}.{name}" for name in names}
            if "torch" in {name.partition(".")[0] for name in names}:
                having.add(module)
            elif names & TORCH and at_start and module not in TORCH:
                faults.append(f"{module}:{node.lineno}: imports torch with a module")
    faults += [f"{module}: imports torch" for module in having - TORCH]
    faults += [f"{module}: imports no torch: take it out of TORCH" for module in TORCH - having]

    assert not faults, "the store has to work without torch: see TORCH"


def imports(path: Path) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Imports that are run, and whether that is when the file is imported."""
    functions = ast.FunctionDef, ast.AsyncFunctionDef
    left: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text()), True)]
    while left:
        node, at_start = left.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, at_start
        if not isinstance(node, ast.If) or "TYPE_CHECKING" not in ast.unparse(node.test):
            left += [
                (one, at_start and not isinstance(node, functions))
                for one in ast.iter_child_nodes(node)
            ]
