"""Goal: the example configuration has every setting with its default, and only those."""

import re

import msgspec
import pytest

from kvstore.config import ServerConfig, load
from kvstore.protocol.errors import ConfigError
from tests.conftest import ROOT

EXAMPLE = ROOT / "deploy/kvstore.toml"
SETTING = re.compile(r"^# (\w+ = \S.*)$", re.MULTILINE)


def uncommented() -> str:
    """The file with every setting in it taken out of its comment."""
    return SETTING.sub(r"\1", EXAMPLE.read_text())


def keys_of(text: str) -> list[str]:
    """Dotted names of what is set, as often as it is set."""
    found, section = [], ""
    for line in text.splitlines():
        if header := re.fullmatch(r"\[(\w+)\]", line):
            section = header[1]
        elif setting := re.match(r"(\w+) = ", line):
            found.append(f"{section}.{setting[1]}")
    return found


def test_as_it_is_it_changes_nothing():
    assert load(ServerConfig, EXAMPLE, environ={}).config == ServerConfig()
    assert not load(ServerConfig, EXAMPLE, environ={}).sources


def test_every_setting_is_there_once_with_its_default(tmp_path):
    path = tmp_path / "kvstore.toml"
    path.write_text(uncommented())
    tree = msgspec.to_builtins(ServerConfig())
    every = {f"{section}.{key}" for section, keys in tree.items() for key in keys}

    shown = keys_of(uncommented())

    assert sorted(shown) == sorted(every)
    assert load(ServerConfig, path, environ={}).config == ServerConfig()


def test_a_setting_that_is_gone_would_be_noticed(tmp_path):
    path = tmp_path / "kvstore.toml"
    path.write_text(uncommented().replace("prefault = ", "prefaulted = "))

    with pytest.raises(ConfigError, match=r"host\.prefaulted"):
        load(ServerConfig, path, environ={})
