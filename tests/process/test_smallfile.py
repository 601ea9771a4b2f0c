"""Goal: a wrong path in a setting fails at once, and neither waits nor fills the memory."""

import os
from pathlib import Path

import pytest

from conductor.front.auth import read_token_file
from conductor.front.local_tokenizers import LocalTokenizer
from kvstore.config import HttpConfig, ServerConfig, load
from kvstore.handoff.greeting import read_secret
from kvstore.process.smallfile import TOKEN_FILE_BYTES_MAX, read_small, read_token
from kvstore.protocol.errors import ConfigError
from kvstore.server.auth import tokens_of


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A pipe that nobody writes to."""
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o600)
    return path


def test_a_file_or_a_link_to_it_is_read_up_to_the_limit(tmp_path):
    path, link = tmp_path / "token", tmp_path / "link"
    path.write_text(" a token\n")
    link.symlink_to(path)
    assert read_token(path) == read_token(link) == "a token"
    path.write_bytes(b"x" * TOKEN_FILE_BYTES_MAX)
    assert len(read_small(path)) == TOKEN_FILE_BYTES_MAX
    path.write_bytes(b"x" * (TOKEN_FILE_BYTES_MAX + 1))
    with pytest.raises(OSError, match="more than 4,096 bytes"):
        read_small(path)
    assert len(read_small(path, TOKEN_FILE_BYTES_MAX + 1)) == TOKEN_FILE_BYTES_MAX + 1


def test_devices_pipes_and_folders_are_refused_at_once(tmp_path, pipe):
    for path in (Path("/dev/zero"), pipe, tmp_path):
        with pytest.raises(OSError, match=r"regular file|directory"):
            read_small(path)


@pytest.mark.parametrize("wrong", ["/dev/zero", "pipe"])
def test_every_setting_that_names_a_small_file_refuses_what_is_none(tmp_path, pipe, wrong):
    path = pipe if wrong == "pipe" else Path(wrong)
    with pytest.raises(ConfigError, match="not a regular file"):
        tokens_of(HttpConfig(read_token_file=str(path)))
    with pytest.raises(ConfigError, match="not a regular file"):
        read_token_file("http.read_token_file", str(path))
    with pytest.raises(ConfigError, match="not a regular file"):
        LocalTokenizer(path)
    with pytest.raises(ConfigError, match=r"not a regular file|chmod"):
        read_secret(path)


def test_a_configuration_that_never_ends_is_refused():
    with pytest.raises(ConfigError, match="more than 1,048,576 bytes"):
        load(ServerConfig, Path("/dev/zero"))
