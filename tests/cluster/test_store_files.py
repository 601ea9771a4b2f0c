"""Goal: the files of a store are read as they are described, and nothing of them is repeated."""

import sys
from pathlib import Path

import pytest

from kvstore.cluster.access import EndpointTurns, Login, StoreServers, read_login, tls_context
from kvstore.cluster.stores import open_store
from kvstore.protocol.errors import ConfigError, InvalidArgument

CERTIFICATES = Path(__file__).parent / "certificates"


@pytest.mark.parametrize("text", ["u:p:w", "u:p:w\n", "u:p:w\r\n"])
def test_a_login_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "login").write_bytes(text.encode())
    found = read_login(StoreServers(("h:1",), str(tmp_path / "login")))
    assert found == Login("u", "p:w")
    assert repr(found) == str(found) == "Login(…)"


@pytest.mark.parametrize(
    "text", [b"", b"sesame", b":sesame", b"sesame:", b"u:p\nsesame", b"\xffs:e"]
)
def test_what_is_no_login_is_refused_without_its_words(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "login"
    path.write_bytes(text)
    with pytest.raises(InvalidArgument, match=r"one line user:password") as caught:
        read_login(StoreServers(("h:1",), str(path)))
    assert caught.value.field == "login"
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "files"),
    [
        ("authority", {"authority": "absent.pem"}),
        ("authority", {"authority": "node.key"}),
        ("certificate", {"authority": "authority.pem", "certificate": "absent", "key": "node.key"}),
        ("key", {"authority": "authority.pem", "certificate": "node.pem", "key": "absent"}),
        (
            "certificate",
            {"authority": "authority.pem", "certificate": "node.pem", "key": "encrypted.key"},
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_named(field: str, files: dict[str, str]) -> None:
    paths = {name: str(CERTIFICATES / file) for name, file in files.items()}
    with pytest.raises(InvalidArgument) as caught:
        tls_context(StoreServers(("h:1",), "", **paths))
    assert caught.value.field == field
    assert paths[field] in str(caught.value)


def test_endpoints_are_tried_in_turns() -> None:
    turns = EndpointTurns(StoreServers(("a:1", "[::1]:2")))
    assert [str(turns.next()) for _ in range(3)] == ["a:1", "[::1]:2", "a:1"]


@pytest.mark.parametrize("kind", ["etcd", "redis"])
def test_a_package_that_is_missing_is_named_with_its_extra(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = {"etcd": "kvstore.cluster.etcd", "redis": "kvstore.cluster.redis_records"}[kind]
    monkeypatch.delitem(sys.modules, module, raising=False)
    for package in {"etcd": ["aetcd"], "redis": ["redis", "redis.asyncio"]}[kind]:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"'\.\[{kind}\]"):
        open_store(kind, StoreServers(("h:1",)), "blue")  # type: ignore[arg-type]
