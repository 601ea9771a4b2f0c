"""Goal: a value comes from where the operator thinks; a mistake names its key and source."""

import tomllib
from typing import get_args, get_type_hints

import pytest

from conductor.config import load_conductor
from kvstore.config import HostConfig, HttpConfig, ServerConfig, load, show
from kvstore.protocol.errors import ConfigError
from kvstore.state.choice.policies import POLICIES


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
    [("8GiB", 8 << 30), ("8Gi", 8 << 30), ("8GB", 8 * 10**9), ("8G", 8 * 10**9),
     ("8g", 8 * 10**9), ("512 mib", 512 << 20), ("1.5GiB", 3 << 29), ("0.5T", 5 * 10**11),
     ("1048576", 1 << 20), ("268435456B", 256 << 20), ("524288KiB", 512 << 20), ("64k", 64_000)],
)  # fmt: skip
def test_sizes_have_units_of_1000_or_with_an_i_of_1024(text, expected):
    overrides = [f"host.session_quota_bytes={text}"]

    assert load(ServerConfig, None, {}, overrides).config.host.session_quota_bytes == expected
    assert load(ServerConfig, None, {}, [f"ssd.bytes_per_day_max={text}"]).config.ssd


@pytest.mark.parametrize(
    "text", ["eight", "", "-1", "GiB", "8Gib/s", "8 iB", "8E", "1,5GiB", "1.0001KiB", "0.5"]
)
def test_a_size_that_is_none_is_refused_with_key_and_source(text):
    with pytest.raises(ConfigError, match=r"--set host\.capacity_bytes.*host\.capacity_bytes"):
        load(ServerConfig, None, {}, [f"host.capacity_bytes={text}"])


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [("host.policy=arc", "'arc' is not allowed: it must be one of kvstore, lru, lfu, tinylfu"),
     ("ssd.sync=never", "'never' is not allowed: it must be one of none, interval, always"),
     ("node.name=a b", "'a b' is not allowed: it must be 1 to 64 of A-Z a-z 0-9 . _ -"),
     ("http.port=70000", "it must be a whole number, at least 0, at most 65,535"),
     ("http.port=many", "'many' is not allowed: it must be a whole number"),
     ("host.extent_bytes=1000000",
      "1000000 is not allowed: it must be a size, at least 64KiB, at most 4GiB, a multiple of"
     " 4KiB"),
     ("host.lease_s_max=0", "'0' is not allowed: it must be a number, more than 0"),
     ("host.prefault=perhaps", "'perhaps' is not allowed: it must be true or false"),
     ("host.capacity_bytes=8 apples", "8GiB or 8Gi (8 x 2^30), 8GB or 8G (8 x 10^9), 1.5GiB")],
)  # fmt: skip
def test_what_is_allowed_is_said(setting, allowed):
    key = setting.partition("=")[0]
    with pytest.raises(ConfigError) as refused:
        load(ServerConfig, None, {}, [setting])

    assert str(refused.value).startswith(f"--set {key}: {key}: ")
    assert allowed in str(refused.value)


def test_what_is_allowed_is_said_of_entries_of_lists_too(tmp_path):
    path = tmp_path / "conductor.toml"
    path.write_text("[[engines]]\nid = 'a'\nrole = 'prefil'\nurl = 'http://h'\n")

    said = r"engines\[0\]\.role: 'prefil' is not allowed: it must be one of prefill, decode, mixed"
    with pytest.raises(ConfigError, match=said):
        load_conductor(path, {})
    with pytest.raises(ConfigError, match=r"directories\[1\]: 2 is not allowed: it must be a text"):
        read(tmp_path, "[ssd]\ndirectories = ['/a', 2]\n")


def test_a_secret_that_does_not_fit_is_not_repeated(tmp_path):
    with pytest.raises(ConfigError, match=r"http\.read_token") as refused:
        read(tmp_path, "[http]\nread_token = 8675309\n")

    assert "8675309" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("KVSTORE_HOST_CAPACITY_BYTES", "KVSTORE__HOST__CAPACITY_BYTES"),
     ("KVSTORE_HOST__CAPACITY_BYTES", "KVSTORE__HOST__CAPACITY_BYTES"),
     ("KVSTORE_HOST_CAPCITY_BYTES", "KVSTORE__HOST__CAPACITY_BYTES"),
     ("KVSTORE_HOST_CAPACITY", "KVSTORE__HOST__CAPACITY_BYTES"),
     ("KVSTORE_SSD_DIRECTORY", "KVSTORE__SSD__DIRECTORIES"),
     ("kvstore__http__port", "KVSTORE__HTTP__PORT"), ("KVSTORE_HTTP_PORT", "KVSTORE__HTTP__PORT"),
     ("KVSTORE_EVENTS_ENDPOINT", "KVSTORE__EVENTS__ENDPOINT")],
)  # fmt: skip
def test_a_variable_that_nearly_is_one_of_ours_is_refused_with_the_right_name(name, meant):
    value = "tcp://127.0.0.1:7" if "ENDPOINT" in name else "7"
    with pytest.raises(ConfigError, match=rf"^{name}: .*did you mean {meant}\?$"):
        load(ServerConfig, None, {name: value})


SERVICE_LINKS = {
    "KVSTORE_SERVICE_HOST": "10.0.0.1", "KVSTORE_SERVICE_PORT": "7780",
    "KVSTORE_SERVICE_PORT_HTTP": "7780", "KVSTORE_PORT": "tcp://10.0.0.1:7780",
    "KVSTORE_PORT_7780_TCP": "tcp://10.0.0.1:7780", "KVSTORE_PORT_7780_TCP_PROTO": "tcp",
    "KVSTORE_PORT_7780_TCP_PORT": "7780", "KVSTORE_PORT_7780_TCP_ADDR": "10.0.0.1",
    "KVSTORE_HTTP_PORT": "tcp://10.0.0.2:7780", "KVSTORE_HTTP_SERVICE_PORT": "7780",
    "KVSTORE_HOME": "/opt/other", "KVSTORE_VERSION": "17",
}  # fmt: skip
"""What Kubernetes sets in a container beside services called kvstore and kvstore-http; and more."""


def test_variables_of_others_are_warned_of_and_stop_nothing(caplog):
    assert load(ServerConfig, None, SERVICE_LINKS).config == ServerConfig()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    for name in SERVICE_LINKS:
        assert name in caplog.text


def test_variables_of_our_other_programs_are_nobodys_mistake(caplog):
    ours = {"KVSTORE_URL": "http://n", "KVSTORE_TOKEN": "t", "KVSTORE_CONDUCTOR__HTTP__PORT": "1"}

    assert load(ServerConfig, None, ours).config == ServerConfig()
    assert load_conductor(None, {**ours, "KVSTORE_HOST_POLICY": "x"}).config.http.port == 1
    assert not caplog.records


def test_the_conductors_variables_are_looked_at_in_the_same_way(caplog):
    with pytest.raises(ConfigError, match="did you mean KVSTORE_CONDUCTOR__QUEUE__WAITING_MAX"):
        load_conductor(None, {"KVSTORE_CONDUCTOR_QUEUE_WAITING_MAX": "1"})
    load_conductor(None, {"KVSTORE_CONDUCTOR_PORT": "tcp://10.0.0.1:7700"})
    assert "KVSTORE_CONDUCTOR_PORT" in caplog.text


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
        ("", {}, ["socket.path=kv.sock"], ["--set socket.path", "socket.path=kv.sock is relative"]),
        ("", {}, ["ssd.directories=/a,b"], ["--set ssd.directories", "b is relative"]),
        ("http = 3\n", {}, (), ["server.toml", "http is a section"]),
        ("[http]\nport = 99999\n", {}, (), ["server.toml", "http.port"]),
        ("", {"KVSTORE__HTTP__PORT": "many"}, (), ["KVSTORE__HTTP__PORT", "http.port"]),
        ("", {}, ["node.name=a b"], ["--set node.name", "node.name"]),
        ("", {}, ["host.lease_s_max=0"], ["--set host.lease_s_max", "host.lease_s_max"]),
        ("", {}, ["host.prefault=perhaps"], ["--set host.prefault", "host.prefault"]),
        ("", {}, ["host.extent_bytes=65537"], ["--set host.extent_bytes", "host.extent_bytes"]),
        ("", {}, ["host.capacity_bytes=1MiB", "host.extent_bytes=2MiB"],
         ["--set", "smaller than host.extent_bytes=2MiB; raise it, or lower host.extent_bytes"]),
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
        ('[ssd]\ndirectories = ["/a\\u0000"]\n', {}, (),
         ["server.toml", "ssd.directories", "NUL"]),
        ("", {}, ["socket.path=/a\0"], ["--set socket.path", "NUL"]),
        (f"a = {'[' * 3000}{']' * 3000}\n", {}, (), ["server.toml", "recursion"]),
        ("", {}, [f"ssd.directories={'[' * 3000}"], ["--set ssd.directories", "not a list"]),
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
    sections = {
        "node", "socket", "host", "ssd", "http", "events", "cluster", "etcd", "redis",
        "admin", "debug",
    }  # fmt: skip
    assert set(tomllib.loads(text)) == sections


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


def test_every_policy_can_be_configured():
    assert set(get_args(get_type_hints(HostConfig)["policy"])) == set(POLICIES)
