"""Goal: one node at a time has the path of a socket, and the next one learns who has it."""

import errno
import os
from pathlib import Path

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.server import place


def test_a_path_is_given_to_one_at_a_time_and_the_message_names_the_process(tmp_path):
    path = tmp_path / "kv.sock"
    descriptor = place.claim(path)

    with pytest.raises(ConfigError, match=rf"another kvstore-server \(pid {os.getpid()}\) uses"):
        place.claim(path)

    os.close(descriptor)
    os.close(place.claim(path))


@pytest.mark.parametrize("locks", ["", "1: FLOCK  ADVISORY  WRITE 7 fe:00:1 0 EOF\n", None])
def test_a_process_that_is_not_visible_here_is_not_named(tmp_path, monkeypatch, locks):
    monkeypatch.setattr(place, "_LOCKS", tmp_path / "locks")
    if locks is not None:
        (tmp_path / "locks").write_text(locks)
    descriptor = place.claim(tmp_path / "kv.sock")

    with pytest.raises(ConfigError, match="another kvstore-server uses it: stop it, or set"):
        place.claim(tmp_path / "kv.sock")

    os.close(descriptor)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EACCES, "Permission denied: give the node's user write access to /run/kvstore"),
        (errno.EROFS, "Read-only file system: /run/kvstore is read-only"),
    ],
)
def test_a_folder_that_cannot_be_written_is_told_as_the_sockets(monkeypatch, number, said):
    def refuse(*_arguments: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refuse)

    with pytest.raises(ConfigError) as told:
        place.claim(Path("/run/kvstore/kvstore.sock"))

    start = f"socket.path=/run/kvstore/kvstore.sock: {said}"
    assert str(told.value).startswith(start)
    assert str(told.value).endswith("set socket.path")
