"""Goal: whatever answers the command ``kvstore``, and wherever it prints, it ends with a reason."""

import json
import ssl
import sys
from pathlib import Path, PosixPath

import pytest

from kvstore.cli import main
from kvstore.cli.decoding import Reply
from kvstore.cli.remote import Remote
from kvstore.protocol.errors import PeerUnreachable
from kvstore.server import client

URL = "http://127.0.0.1:1"


@pytest.mark.parametrize("answer", [b"{}", b"[]", b"3", b'{"spaces": [], "next": 7}'])
def test_a_listing_that_is_not_of_a_node_is_said(answer, monkeypatch, capsys):
    asked: list[object] = []

    def send(*to, **_how):
        asked.append(to)
        assert len(asked) < 50, "it is asked without end"
        return 200, answer

    monkeypatch.setattr(client, "send", send)

    assert main(["spaces", "--url", URL]) == 1
    assert "is not the HTTP API of a node" in capsys.readouterr().err


def endless(kind: str, number: int) -> bytes:
    """One stretch of a listing that has no end: its cursor is the old one, or its entries are."""
    row = {"space": 0 if kind == "entries" else number}
    cursor: object = number if kind == "entries" else number % 3
    return json.dumps({"spaces": [row], "next": [cursor] if kind == "list" else cursor}).encode()


@pytest.mark.parametrize("kind", ["entries", "cursor", "list"])
def test_a_listing_whose_stretches_repeat_ends(kind, monkeypatch):
    asked: list[object] = []

    def send(*to, **_how):
        asked.append(to)
        assert len(asked) < 50, "it is asked without end"
        return 200, endless(kind, len(asked))

    monkeypatch.setattr(client, "send", send)

    with pytest.raises(PeerUnreachable, match="not the HTTP API of a node"):
        Remote(URL).listed("spaces", "/v1/spaces", dict, {}, 1 << 40)


def test_a_certificate_that_is_not_valid_is_named(monkeypatch, capsys):
    def send(*_to, **_how):
        raise ssl.SSLCertVerificationError(1, "certificate verify failed: self-signed certificate")

    monkeypatch.setattr(client, "send", send)

    assert main(["stats", "--url", "https://127.0.0.1:1"]) == 1
    said = capsys.readouterr().err
    assert "certificate of https://127.0.0.1:1" in said
    assert "self-signed" in said


def test_a_socket_of_another_user_is_told_with_what_helps(monkeypatch, capsys):
    def send(*_to, **_how):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(client, "send", send)

    assert main(["stats", "--url", "unix:///run/theirs.admin"]) == 1
    said = capsys.readouterr().err
    assert "permission denied at unix:///run/theirs.admin: run as the node's" in said
    assert "--url http://HOST:PORT --token TOKEN" in said
    assert "is it running?" not in said


def test_a_folder_of_another_user_is_told_in_the_same_way(monkeypatch, capsys):
    class Hidden(PosixPath):
        def is_socket(self):
            raise PermissionError(13, "Permission denied")

    def send(*_to, **_how):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(client, "admin_socket", lambda: Hidden(client.HERE[len("unix://") :]))
    monkeypatch.setattr(client, "send", send)
    monkeypatch.delenv("KVSTORE_URL", raising=False)

    assert main(["stats"]) == 1
    assert f"permission denied at {client.HERE}: run as the node's user" in capsys.readouterr().err


def test_without_a_default_node_both_places_are_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(client, "admin_socket", lambda: tmp_path / "none.admin")
    monkeypatch.setattr(client, "HERE_TCP", URL)
    monkeypatch.delenv("KVSTORE_URL", raising=False)

    assert main(["stats"]) == 1
    said = capsys.readouterr().err
    assert f"no node answers at {client.HERE} (no such socket) or {URL} (Connection ref" in said
    assert "is it running?" in said


def test_an_index_needs_the_address_of_a_conductor(monkeypatch, capsys):
    monkeypatch.delenv("KVSTORE_URL", raising=False)

    assert main(["index"]) == 2
    assert "--url: give the Conductor's URL, http://HOST:PORT" in capsys.readouterr().err


def test_a_path_in_the_address_of_a_node_is_told_as_the_cause(monkeypatch, capsys):
    fault = {"error": {"code": "not_found", "message": "Not Found", "field": ""}}
    monkeypatch.setattr(client, "send", lambda *_to, **_how: (404, json.dumps(fault).encode()))

    assert main(["stats", "--url", f"{URL}/foo"]) == 1
    said = capsys.readouterr().err
    assert f"Not Found; a node's address has no path: give --url {URL}" in said
    assert main(["stats", "--url", URL]) == 1
    assert "has no path" not in capsys.readouterr().err


def test_a_full_disk_of_the_output_is_said(monkeypatch, capsys):
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)

        assert main(["stats", "--json", "--url", URL]) == 1, "no node"
        patched.setattr(client, "send", lambda *_to, **_how: (200, b"{}"))
        assert main(["stats", "--json", "--url", URL]) == 1
    assert "No space left on device" in capsys.readouterr().err


def test_emptying_a_node_without_standard_input_needs_a_word(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)

    assert main(["clear", "--all", "--url", URL]) == 2
    assert "--yes" in capsys.readouterr().err


def test_whoever_waits_for_a_silent_node_is_told_that_the_job_goes_on(monkeypatch, capsys):
    def silent(_self, _job, _wait):
        raise PeerUnreachable("timed out")

    row = {"job": 17, "kind": "verify", "state": "running", "subject": {}, "done": 0,
           "total": 1, "result": {}, "error": None, "seconds": 0.0}  # fmt: skip
    monkeypatch.setattr(Remote, "send", lambda _self, _method, _path, kind, _body: Reply(row, kind))
    monkeypatch.setattr(Remote, "finished", silent)

    assert main(["verify", "--url", URL]) == 1
    assert "job 17 continues; stop it: kvstore jobs 17 --cancel" in capsys.readouterr().err
