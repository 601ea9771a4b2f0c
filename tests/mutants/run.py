"""``make mutants``: do the tests notice when a line of the product is wrong?

``mutants.toml`` beside this file lists one-line faults. Each names the function that it is in, the
text that it replaces and the tests that should fail, so that it survives moves of files. This
program applies them one at a time to a copy of the tree, runs those tests, and tells which faults
nobody noticed.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("kvstore", "conductor", "engine_adapters")
RUN_S_MAX: Final = 600.0
"""Tests that hang have noticed, too."""
_LEFT_OUT: Final = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache")


class Mutant(NamedTuple):
    """One fault.

    Attributes:
        function: ``Class.method`` or ``function``; ``package/Class.method`` where it is in several.
        text: what is replaced; once in the function.
        fault: what it becomes.
        tests: what should fail.
    """

    function: str
    text: str
    fault: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.function}: {self.text.strip()!r} -> {self.fault.strip()!r}"


class Place(NamedTuple):
    """Where a mutant's text begins in a file's text, and the file."""

    path: Path
    start: int


def mutants() -> list[Mutant]:
    """All that are listed."""
    listed = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text())["mutant"]
    return [
        Mutant(one["function"], one["text"], one["fault"], tuple(one["tests"])) for one in listed
    ]


def locate(mutant: Mutant, root: Path = ROOT) -> Place:
    """Where the mutant's text is.

    Raises:
        LookupError: not exactly one function of that name has it exactly once.
    """
    package, _, name = mutant.function.rpartition("/")
    found: list[Place] = []
    for path, source, start, end in _functions(root).get(name, ()):
        if f"/{package}".rstrip("/") not in f"/{path.parent}":
            continue
        at = source.find(mutant.text, start, end)
        while at >= 0:
            found.append(Place(path, at))
            at = source.find(mutant.text, at + 1, end)
    if len(found) != 1:
        raise LookupError(f"{mutant}: found {len(found)} times")
    return found[0]


def apply(mutant: Mutant, place: Place) -> str:
    """Put the fault into the file; returns what the file was."""
    source = place.path.read_text()
    end = place.start + len(mutant.text)
    place.path.write_text(source[: place.start] + mutant.fault + source[end:])
    return source


def is_noticed(mutant: Mutant, tree: Path) -> bool | None:
    """Whether the tests fail in the tree with the fault; None when they could not run."""
    command = [
        sys.executable, "-m", "pytest", "-x", "-q", "-m", "not soak and not vllm",
        "-p", "no:cacheprovider", *mutant.tests,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, timeout=RUN_S_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    if ended.returncode not in (0, 1, 2):
        sys.stdout.write(ended.stdout.decode()[-2000:])
        return None
    return ended.returncode != 0


@cache
def _functions(root: Path) -> dict[str, list[tuple[Path, str, int, int]]]:
    """Name of a class, function or file of C → each file that has it, its text, start and end.

    Read once: a fault is taken out again before the next one is looked for.
    """
    found: dict[str, list[tuple[Path, str, int, int]]] = {}
    for top in PACKAGES:
        for path in sorted((root / top).rglob("*")):
            if path.suffix == ".c":
                source = path.read_text()
                found.setdefault(path.name, []).append((path, source, 0, len(source)))
            elif path.suffix == ".py":
                source = path.read_text()
                for name, spans in _spans(source).items():
                    found.setdefault(name, []).extend((path, source, *span) for span in spans)
    return found


def _spans(source: str) -> dict[str, list[tuple[int, int]]]:
    """Where each class and function of a file begins and ends, by its dotted name."""
    found: dict[str, list[tuple[int, int]]] = {}
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def walk(node: ast.AST, above: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                dotted = f"{above}.{child.name}".lstrip(".")
                assert child.end_lineno is not None
                span = lines[child.lineno - 1], lines[child.end_lineno]
                found.setdefault(dotted, []).append(span)
                walk(child, dotted)

    walk(ast.parse(source), "")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Apply each in turn; exit status 1 when one survived or could not be tried."""
    parser = argparse.ArgumentParser(prog="make mutants", description=main.__doc__)
    parser.add_argument("only", nargs="*", help="names of functions, or parts of them; default all")
    options = parser.parse_args(arguments)
    chosen = [
        one for one in mutants() if not options.only or any(s in str(one) for s in options.only)
    ]
    survivors: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=_LEFT_OUT)
        for number, mutant in enumerate(chosen, 1):
            start = monotonic()
            place = locate(mutant, tree)
            before = apply(mutant, place)
            noticed = is_noticed(mutant, tree)
            place.path.write_text(before)
            word = {True: "noticed", False: "SURVIVED", None: "NOT TRIED"}[noticed]
            if not noticed:
                survivors.append(f"{word}: {mutant}")
            took = f"{monotonic() - start:.0f} s"
            sys.stdout.write(f"{number}/{len(chosen)} {word} ({took}) {mutant}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - len(survivors)} of {len(chosen)} noticed\n")
    sys.stdout.writelines(f"{line}\n" for line in survivors)
    return int(bool(survivors))


if __name__ == "__main__":
    raise SystemExit(main())
