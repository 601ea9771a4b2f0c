"""Goal: tests get the servers of etcd and Redis, or say by name that there are none."""

import pytest

from bench import store_programs
from bench.store_programs import NoProgramError, Program
from tests.cluster_processes.store_scenes import start_server


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Neither on PATH nor in the cache, and no way to get them."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("name", ["etcd", "redis-server"])
def test_a_program_that_cannot_be_had_is_named(no_programs: None, name: str) -> None:
    with pytest.raises(NoProgramError, match=name):
        store_programs.find(name)


def test_a_program_on_path_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "etcd").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert store_programs.find("etcd") == (tmp_path / "etcd", {})


def test_the_command_that_is_printed_has_the_libraries_of_an_unpacked_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "etcd").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["store_programs", "etcd"])
    assert store_programs.main() == 0
    assert capsys.readouterr().out == f"{tmp_path}/etcd\n"
    unpacked = Program(tmp_path / "etcd", {"LD_LIBRARY_PATH": "/a:/b"})
    assert unpacked.command == f"env LD_LIBRARY_PATH=/a:/b {tmp_path}/etcd"

    monkeypatch.setattr("sys.argv", ["store_programs", "redis"])
    with pytest.raises(SystemExit):
        store_programs.main()
    assert "none of etcd, redis-server" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["store_programs", "--help"])
    with pytest.raises(SystemExit):
        store_programs.main()
    assert "LD_LIBRARY_PATH" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["etcd", "redis"])
def test_without_a_program_a_test_is_skipped_by_name_but_fails_in_ci(
    no_programs: None, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=kind):
        start_server(kind, tmp_path / kind)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=kind):
        start_server(kind, tmp_path / kind)
