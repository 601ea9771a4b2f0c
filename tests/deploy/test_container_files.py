"""Goal: the container files name what exists, and fit together; no container engine is needed."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from kvstore.cli.command import main as kvstore
from kvstore.config import ServerConfig, load
from kvstore.protocol.sizes import size_of
from tests.conftest import ROOT

DEPLOY = ROOT / "deploy"
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


class Instruction(NamedTuple):
    """One of a Containerfile: in which stage, its word, and what follows."""

    stage: str
    word: str
    text: str


def instructions() -> Iterator[Instruction]:
    text = (DEPLOY / "Containerfile").read_text()
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    stage = ""
    for line in lines:
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            stage = rest.split()[-1]
        if word:
            yield Instruction(stage, word, rest.strip())


ALL = list(instructions())


def of(stage: str, word: str) -> list[str]:
    return [one.text for one in ALL if (one.stage, one.word) == (stage, word)]


def command(stage: str, word: str) -> list[str]:
    """The words of a command in exec form."""
    [text] = of(stage, word)
    return json.loads(text[text.index("[") :])


def environment(stage: str) -> dict[str, str]:
    words = [word for text in of(stage, "ENV") for word in shlex.split(text)]
    return dict(word.split("=", 1) for word in words)


@cache
def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def service(name: str) -> dict[str, Any]:
    return compose()["services"][name]


def configured(name: str) -> ServerConfig:
    """What the daemon of a service would run with."""
    options = service(name)["command"]
    assert all(one.startswith("--set=") for one in options)
    sets = [one.removeprefix("--set=") for one in options]
    return load(ServerConfig, environ=environment(name), overrides=sets).config


def test_every_file_that_is_copied_exists_and_is_not_ignored():
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    for one in (one for one in ALL if one.word == "COPY"):
        *sources, _ = [part for part in one.text.split() if not part.startswith("--")]
        if "--from=" in one.text:
            [stage] = re.findall(r"--from=(\S+)", one.text)
            assert of(stage, "FROM"), f"{one}: there is no such stage"
            continue
        for source in sources:
            assert (ROOT / source).exists(), one
            assert f"!{source.partition('/')[0]}" in kept, f".dockerignore leaves {source} out"


def test_every_package_is_copied():
    copied = {source for text in of("build", "COPY") for source in text.split()[:-1]}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]

    assert {name.partition(".")[0] for name in packages} <= copied
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE"} <= copied


@pytest.mark.parametrize("stage", ["node", "engine"])
def test_nothing_runs_as_root(stage):
    [user] = of(stage, "USER")
    uid, gid = user.split(":")

    assert int(uid) > 0
    assert int(gid) > 0


def test_the_node_is_the_image_that_is_built_by_default():
    assert ALL[-1].stage == "node"
    assert command("node", "ENTRYPOINT") == ["kvstore-server"]
    assert "kvstore-server" in SCRIPTS
    assert str(Path(configured("node").socket.path).parent) in of("node", "RUN")[0]
    assert str(Path(configured("node").http.socket_path).parent) in of("node", "RUN")[0]


def test_the_health_check_asks_the_node_of_its_image(capsys):
    program, *verb = command("node", "HEALTHCHECK")
    environ = environment("node")

    assert program in SCRIPTS
    assert environ["KVSTORE_URL"] == f"unix://{configured('node').http.socket_path}"
    with pytest.raises(SystemExit) as end:
        kvstore([*verb, "--help"])
    assert end.value.code == 0
    assert verb[0] in capsys.readouterr().out


def test_the_engines_health_check_is_a_program_and_its_command_line_is_taken():
    program, dash_c, code = command("engine", "HEALTHCHECK")
    python, dash_m, module = command("engine", "ENTRYPOINT")
    given = service("engine")["command"]

    compile(code, "HEALTHCHECK", "exec")
    assert (program, dash_c, python, dash_m) == ("python3", "-c", "python3", "-m")
    assert given == command("engine", "CMD"), "an engine alone does what it does in compose.yaml"
    assert f":{given[given.index('--port') + 1]}/health" in code
    text = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True,
        timeout=60, cwd=ROOT, env={**os.environ, "COLUMNS": "200"},
    ).stdout  # fmt: skip
    for option in (word for word in given if word.startswith("--")):
        assert option in text


def test_the_engine_reaches_the_socket_and_may_use_it_and_nothing_else_of_the_node():
    node, engine = configured("node"), service("engine")
    given = engine["command"]
    [volume] = engine["volumes"]
    name, path, mode = volume.split(":")
    [user] = of("engine", "USER")

    assert given[given.index("--store") + 1] == f"unix://{node.socket.path}"
    assert path == str(Path(node.socket.path).parent)
    assert f"{name}:{path}" in service("node")["volumes"]
    assert mode == "ro"
    assert f"default={user.partition(':')[0]}" in node.socket.tenants
    assert not Path(node.http.socket_path).is_relative_to(path), "the engine could operate the node"


def test_the_node_fits_into_its_memory_and_descriptors():
    node = configured("node")
    limit = size_of(service("node")["mem_limit"].replace("m", "Mi"))

    assert node.needs.memory_bytes <= 0.9 * limit
    assert service("node")["memswap_limit"] == service("node")["mem_limit"], (
        "pages would be swapped"
    )
    extents = node.host.capacity_bytes // node.host.extent_bytes
    assert service("node")["ulimits"]["nofile"] >= extents + 2 * node.socket.connections_max


def test_volumes_and_targets_of_compose_exist():
    used = set()
    for name, one in compose()["services"].items():
        used |= {volume.partition(":")[0] for volume in one["volumes"]}
        build = one["build"]
        assert (DEPLOY / build["context"]).resolve() == ROOT
        assert (ROOT / build["dockerfile"]).is_file()
        assert of(build["target"], "FROM"), name
    assert used == set(compose()["volumes"])
