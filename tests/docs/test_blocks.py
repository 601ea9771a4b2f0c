"""Goal: what README.md and the documentation tell people to type works as it stands."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from configparser import ConfigParser
from functools import cache, partial
from pathlib import Path

import pytest
import yaml

from conductor.config import load_conductor
from kvstore.config import ServerConfig, load
from kvstore.protocol.errors import ConfigError
from tests.conftest import ROOT, Process
from tests.docs.blocks import LANGUAGES, REASONS, Block, blocks_of

FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [block for path in FILES for block in blocks_of(ROOT, path)]
RUN = [block for block in BLOCKS if block.language in ("sh", "python")]
END_S = 45.0
NAMESPACES = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc"]
if os.geteuid() != 0:
    NAMESPACES[1:1] = ["--user", "--map-root-user"]


def of(*languages: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "block", [one for one in BLOCKS if one.language in languages], ids=str
    )


@cache
def namespaces_are_missing() -> str:
    if shutil.which("unshare") is None:
        return "there is no unshare"
    tried = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True, timeout=30)
    return tried.stderr.strip() if tried.returncode else ""


Run = Callable[[Block], str]


@pytest.fixture
def run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run(block)``: what it writes; fails when it fails, or does not end in time."""

    def ran(block: Block) -> str:
        folder = tmp_path_factory.mktemp("home")  # short: there may be sockets in it
        script = folder / f"block.{block.language}"
        script.write_text(block.text)
        command = {"sh": ["bash", "-euo", "pipefail"], "python": ["python"]}[block.language]
        inside = [sys.executable, "-m", "tests.docs.inside", *(["node"] * block.with_node)]
        environ = {
            name: text for name, text in os.environ.items() if not name.startswith("KVSTORE")
        } | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        process = Process([*NAMESPACES, *inside, *command, script], environ, tmp_path / "output")
        try:
            if block.until:
                process.wait_ready(re.escape(block.until), END_S)
            else:
                status = process.wait(END_S)
                assert status == 0, f"{block} ended with {status}\n{process.report()}"
        finally:
            process.kill()  # and with it everything in its namespaces
        return process.stdout + process.stderr

    return ran


@pytest.mark.parametrize("block", RUN, ids=str)
def test_a_block_that_people_type_works(block: Block, run: Run):
    if block.not_run:
        pytest.skip(f"{block}: {block.not_run}: {REASONS[block.not_run]}")
    if missing := namespaces_are_missing():
        pytest.skip(f"{block}: no namespaces here: {missing}")
    if "curl " in block.text and shutil.which("curl") is None:
        pytest.skip(f"{block}: curl is not installed")

    output = run(block)

    assert not missing_in(output, block.prints), f"{block} printed something else:\n{output}"


def missing_in(output: str, lines: list[str]) -> list[str]:
    """Those of the lines that are not in the output behind the ones before them."""
    missing, at = [], 0
    for line in lines:
        found = output.find(line, at)
        if found < 0:
            missing.append(line)
        else:
            at = found + len(line)
    return missing


def test_a_block_that_fails_is_noticed_and_so_is_another_output(run: Run):
    if missing := namespaces_are_missing():
        pytest.skip(f"no namespaces here: {missing}")
    block = Block(Path("none.md"), 1, "sh", False, "", "", "false\necho never\n")

    with pytest.raises(AssertionError, match=r"none\.md:1 ended with 1"):
        run(block)
    assert missing_in("one two three", ["one", "three"]) == []
    assert missing_in("one two three", ["two", "one"]) == ["one"]


@of("toml")
def test_a_configuration_is_one_of_a_node_or_a_conductor(block: Block, tmp_path: Path):
    path = tmp_path / "config.toml"
    path.write_text(block.text)
    refusals = []

    for read in (partial(load, ServerConfig), load_conductor):
        try:
            assert read(path, environ={}).sources, "it sets nothing"
        except ConfigError as error:
            refusals.append(str(error))

    assert len(refusals) == 1, "\n".join(refusals)


@of("json", "ini", "yaml")
def test_data_can_be_read(block: Block):
    match block.language:
        case "json":
            assert json.loads(block.text)
        case "yaml":
            assert yaml.safe_load(block.text)
        case _:
            parser = ConfigParser(interpolation=None, strict=False)
            parser.read_string(block.text)
            assert parser.sections()


def test_every_block_says_what_it_is():
    faults = [f"{one}: {one.language!r}" for one in BLOCKS if one.language not in LANGUAGES]
    faults += [
        f"{one}: not-run: {one.not_run}" for one in BLOCKS if one.not_run not in ("", *REASONS)
    ]
    faults += [f"{one}: python and sh only" for one in BLOCKS if one.not_run and one not in RUN]

    assert not faults, "tests/docs/blocks.py says how a block begins:\n" + "\n".join(faults)


def test_every_reason_not_to_run_a_block_is_needed():
    assert {block.not_run for block in BLOCKS} - {""} == set(REASONS)


def test_readme_shows_how_the_store_is_used_and_both_ways_run():
    shown = {one.language for one in RUN if one.path == Path("README.md") and not one.not_run}

    assert shown == {"sh", "python"}
