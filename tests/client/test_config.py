"""Goal: a value comes from where the operator thinks; a mistake names its key and source."""

import tomllib

import pytest

from kvstore.config import HostConfig, HttpConfig, ServerConfig, load, show
from kvstore.errors import ConfigError


def read(tmp_path, toml="", environ=None, overrides=()):
    path = tmp_path / "server.toml"
    path.write_text(toml)
    return load(ServerConfig, path, environ or {}, overrides)


def test_with_no_source_everything_is_its_default():
    loaded = load(ServerConfig, None, {})

    assert loaded.config == ServerConfig()
    assert loaded.sources == {}


def test_flags_beat_the_environment_and_that_beats_the_file(tmp_path):
    toml = '[node]\nname = "file"\n[http]\nport = 1\n[socket]\npath = "/file"\n'
    environ = {"KVSTORE__NODE__NAME": "env", "KVSTORE__HTTP__PORT": "2", "UNRELATED": "x"}

    loaded = read(tmp_path, toml, environ, ["node.name=flag"])

    assert loaded.config.node.name == "flag"
    assert loaded.config.http.port == 2
    assert loaded.config.socket.path == "/file"
    assert loaded.sources == {
        "node.name": "--set node.name",
        "http.port": "KVSTORE__HTTP__PORT",
        "socket.path": str(tmp_path / "server.toml"),
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8GiB", 8 << 30), ("512 mib", 512 << 20), ("1TiB", 1 << 40), ("1048576", 1 << 20),
     ("268435456B", 256 << 20), ("524288KiB", 512 << 20)],
)  # fmt: skip
def test_sizes_have_units(text, expected):
    overrides = [f"host.capacity_bytes={text}", "host.extent_bytes=1MiB"]

    assert load(ServerConfig, None, {}, overrides).config.host.capacity_bytes == expected


@pytest.mark.parametrize("text", ["8GB", "eight", "", "-1", "1.5GiB", "GiB"])
def test_a_size_that_is_none_is_refused_with_key_and_source(text):
    with pytest.raises(ConfigError, match=r"--set host\.capacity_bytes.*host\.capacity_bytes"):
        load(ServerConfig, None, {}, [f"host.capacity_bytes={text}"])


@pytest.mark.parametrize(
    ("toml", "environ", "overrides", "said"),
    [
        ("[host]\ncapacity_byte = 1\n", {}, (),
         ["server.toml", "host.capacity_byte", "did you mean host.capacity_bytes"]),
        ("[hosts]\ncapacity_bytes = 1\n", {}, (), ["server.toml", "hosts", "did you mean host?"]),
        ("", {"KVSTORE__HTTP__PROT": "1"}, (),
         ["KVSTORE__HTTP__PROT", "http.prot", "did you mean http.port"]),
        ("", {}, ["http.portt=1"], ["--set http.portt", "unknown key http.portt"]),
        ("", {}, ["http=1"], ["--set http", "is a section"]),
        ("", {}, ["http.port.x=1"], ["--set http.port.x", "unknown key http.port.x"]),
        ("", {}, ["http.port"], ["--set http.port", "expected key=value"]),
        ("http = 3\n", {}, (), ["server.toml", "http is a section"]),
        ("[http]\nport = 99999\n", {}, (), ["server.toml", "http.port"]),
        ("", {"KVSTORE__HTTP__PORT": "many"}, (), ["KVSTORE__HTTP__PORT", "http.port"]),
        ("", {}, ["node.name=a b"], ["--set node.name", "node.name"]),
        ("", {}, ["host.lease_s_max=0"], ["--set host.lease_s_max", "host.lease_s_max"]),
        ("", {}, ["host.prefault=perhaps"], ["--set host.prefault", "host.prefault"]),
        ("", {}, ["host.extent_bytes=65537"], ["--set host.extent_bytes", "host.extent_bytes"]),
        ("", {}, ["host.capacity_bytes=1MiB", "host.extent_bytes=2MiB"],
         ["--set", "smaller than host.extent_bytes"]),
        ("[http]\nhost = '::'\n", {}, ["http.port=1"], ["server.toml: http: http.host=::"]),
        ("[host]\ncapacity_bytes = '1GiB'\n", {}, ["host.extent_bytes=2GiB"],
         ["server.toml, --set host.extent_bytes: host: "]),
        ("", {}, ["host.capacity_bytes=99999TiB"], ["host.extent_bytes", "descriptor"]),
        ("", {}, ["host.lease_s_max=inf"], ["--set host.lease_s_max", "host.lease_s_max"]),
        ("", {}, ["ssd.sync_interval_s=inf"], ["ssd.sync_interval_s"]),
        ("[ssd]\ndirectories = [1]\n", {}, (), ["server.toml: ssd.directories"]),
        ("[ssd]\ndirectories = ['/a', '/b/../a/']\n", {}, (), ["ssd.directories", "twice"]),
        ("", {}, ["http.host=127.0.0.1.evil.example"], ["is not loopback"]),
        ("not toml", {}, (), ["server.toml"]),
    ],
)  # fmt: skip
def test_a_mistake_names_its_key_and_its_source(tmp_path, toml, environ, overrides, said):
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, toml, environ, overrides)

    for part in said:
        assert part in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        load(ServerConfig, tmp_path / "missing.toml", {})


def test_what_is_shown_is_toml_that_gives_the_same_tree(tmp_path):
    loaded = read(tmp_path, "", {}, ["host.capacity_bytes=1GiB", "socket.path=/a b", "http.port=0"])
    text = show(loaded)

    again = tmp_path / "again.toml"
    again.write_text(text)
    assert load(ServerConfig, again, {}).config == loaded.config
    assert "capacity_bytes = 1073741824  # --set host.capacity_bytes" in text
    assert set(tomllib.loads(text)) == {"node", "socket", "host", "ssd", "http", "events", "admin"}


def test_a_capacity_without_room_for_an_extent_is_refused_wherever_it_is_made():
    with pytest.raises(ValueError, match=r"host\.capacity_bytes"):
        HostConfig(capacity_bytes=1 << 20, extent_bytes=2 << 20)


def test_every_address_of_loopback_needs_no_token():
    for address in ("localhost", "127.0.0.1", "127.8.9.1", "::1"):
        assert HttpConfig(host=address).host == address


@pytest.mark.parametrize("text", ["/a,/b", " /a , /b ,", '["/a", "/b"]'])
def test_a_list_may_be_written_with_commas_or_as_in_toml(text):
    loaded = load(ServerConfig, None, {"KVSTORE__SSD__DIRECTORIES": text})

    assert loaded.config.ssd.directories == ("/a", "/b")


def test_a_broken_list_is_refused_with_its_key():
    with pytest.raises(ConfigError, match=r"ssd\.directories"):
        load(ServerConfig, None, {}, ['ssd.directories=["/a'])
