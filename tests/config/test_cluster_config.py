"""Goal: a cluster that cannot work, or would let strangers in, is refused with the key's name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.config import load_conductor
from kvstore.cluster.configured import check_stores
from kvstore.config import ServerConfig, load, show
from kvstore.config.addresses import Address, is_loopback, read_address
from kvstore.protocol.errors import ConfigError
from kvstore.server.cluster import advertised_admin

FILES = ["cluster.certificate=/c", "cluster.key=/k", "cluster.authority=/a"]
NAMED = ["cluster.name=c"]


def read(*overrides):
    return load(ServerConfig, None, {}, overrides).config


def test_a_node_is_alone_unless_the_cluster_has_a_name():
    assert read().cluster.name == ""
    assert read().cluster.others("local") == {}


@pytest.mark.parametrize("key", ["listen", "transfer_listen"])
@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.2", "node-a", "[::]", "127.evil.example"])
def test_a_service_beyond_loopback_needs_certificates(key, host):
    with pytest.raises(ConfigError, match=rf"^--set cluster\.{key}: .*cluster\.certificate") as no:
        read(*NAMED, f"cluster.{key}={host}:7400")
    assert f"cluster.{key}={host}:7400" in str(no.value)
    assert read(*NAMED, f"cluster.{key}={host}:7400", *FILES).cluster.has_certificates
    assert read(f"cluster.{key}={host}:7400").cluster.name == ""  # nothing listens


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "[::1]"])
def test_on_loopback_certificates_may_be_left_out(host):
    cluster = read(*NAMED, f"cluster.listen={host}:0").cluster
    assert not cluster.has_certificates


@pytest.mark.parametrize("left_out", range(3))
def test_one_certificate_file_needs_the_others(left_out):
    given = [one for number, one in enumerate(FILES) if number != left_out]
    missing = FILES[left_out].partition("=")[0]
    with pytest.raises(ConfigError, match=f"needs {missing} as well"):
        read(*NAMED, *given)


def test_this_node_may_be_in_the_list_and_is_none_of_the_others():
    config = read(*NAMED, "node.name=a", "cluster.nodes=a=10.0.0.1:7400,b=[fd00::2]:7400")
    assert config.cluster.others("a") == {"b": Address("fd00::2", 7400)}
    assert str(config.cluster.others("a")["b"]) == "[fd00::2]:7400"


@pytest.mark.parametrize(
    ("entry", "says"),
    [("b", "NODE=host:port"), ("=h:1", "NODE=host:port"), ("a b=h:1", "1 to 64 of"),
     ("b=h", "'h' is not host:port"), ("b=:1", "host:port"), ("b=h:x", "host:port"),
     ("b=h:70000", "host:port"), ("b=fd00::2:1", "host:port"), ("b=[h]:1", "host:port"),
     ("b=peer://h:1", "host:port"), ("b=h:0", "port 0"), ("b=a..b:1", "host:port"),
     ("b=.h:1", "host:port"),
     (f"b={64 * 'h'}:1", "host:port"), ("a=h:2", "a is there twice"),
     ("b=h:1", "another node has this address"), ("b=[::]:3", ":: is no address"),
     ("b=0.0.0.0:3", "0.0.0.0 is no address to connect to"), ("b\n=h:3", "NODE=host:port"),
     ("b=h:٣", "host:port"), ("b=u@h:3", "host:port")],
)  # fmt: skip
def test_an_entry_that_names_no_node_is_refused(entry, says):
    with pytest.raises(ConfigError) as refused:
        load(ServerConfig, None, {}, [*NAMED, f'cluster.nodes=["a=h:1", {toml(entry)}]'])
    assert says in str(refused.value)
    assert str(refused.value).startswith("--set cluster.nodes: cluster: cluster.nodes=")


def toml(text):
    return '"' + text.replace("\n", "\\n") + '"'


@pytest.mark.parametrize("text", ["", "h", "7400", "h:1:2", "h:-1"])
def test_an_address_to_listen_on_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match=r"cluster\.listen=.*is not host:port"):
        read(f"cluster.listen={text}")


def test_nodes_without_a_name_of_the_cluster_are_refused():
    with pytest.raises(ConfigError, match=r"cluster\.nodes needs cluster\.name"):
        read("cluster.nodes=b=h:1")


def test_sixteen_nodes_are_served_and_the_first_one_beyond_is_named():
    others = [f"n{number}=h:{number}" for number in range(1, 16)]
    nodes = ",".join(others)
    assert len(read(*NAMED, f"cluster.nodes={nodes}").cluster.others("local")) == 15
    assert read(*NAMED, f"cluster.nodes={nodes},local=h:99").cluster.name == "c"
    with pytest.raises(ConfigError, match="16 nodes at most") as refused:
        read(*NAMED, f"cluster.nodes={nodes},n16=h:16")
    said = str(refused.value)
    assert said.startswith("--set cluster.nodes: cluster.nodes=n1=h:1,")
    assert said.endswith("the first one too many is n16")


@pytest.mark.parametrize("name", ["a b", "x" * 65, "ü", "c\n"])
def test_a_name_of_a_cluster_is_as_one_of_a_node(name):
    with pytest.raises(ConfigError, match=r"cluster\.name.*1 to 64 of"):
        read(f"cluster.name={name}")


def test_addresses_are_read_as_they_are_written():
    assert read_address("10.0.0.2:7400") == Address("10.0.0.2", 7400)
    assert str(read_address("[::1]:0")) == "[::1]:0"
    assert [is_loopback(host) for host in ("::1", "localhost", "localhost.example", "")] == [
        True, True, False, False,
    ]  # fmt: skip


@given(st.text() | st.from_regex(r"\[?[a-z0-9.:]*\]?:[0-9]*", fullmatch=True))
def test_whatever_is_read_as_an_address_is_written_as_it_was(text):
    try:
        address = read_address(text)
    except ValueError:
        return
    assert read_address(str(address)) == address
    assert address.host
    assert 0 <= address.port <= 65_535


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (['cluster.transports=["mooncake"]'], "tcp among them"),
        (['cluster.transports=["tcp", "tcp"]'], "each once"),
        (['cluster.transports=["nvlink"]'], "transports"),
        (['cluster.rdma_tenants=["t"]'], "of no use without mooncake"),
        (
            [
                'cluster.transports=["mooncake", "tcp"]', "cluster.transfer_listen=0.0.0.0:1",
                *FILES,
            ],
            "stands for all addresses",
        ),
        (['cluster.transports=["mooncake", "tcp"]', "cluster.mooncake_protocol=x"], "mooncake_pr"),
    ],
)  # fmt: skip
def test_transports_that_cannot_work_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        read(*NAMED, *settings)


def test_mooncake_may_be_preferred_to_tcp_for_the_tenants_that_are_named():
    chosen = ['cluster.transports=["mooncake", "tcp"]', 'cluster.rdma_tenants=["t"]']
    cluster = read(*NAMED, *chosen).cluster
    assert (cluster.transports, cluster.rdma_tenants) == (("mooncake", "tcp"), ("t",))
    assert read().cluster.transports == ("tcp",)


def test_a_membership_in_a_store_needs_its_servers_and_no_list():
    config = read(*NAMED, "cluster.membership=etcd", "etcd.endpoints=h:2379,[fd00::2]:2379")
    assert config.etcd.endpoints == ("h:2379", "[fd00::2]:2379")
    assert config.cluster.stores == {"etcd": "cluster.membership=etcd"}
    both = read(
        *NAMED, "cluster.membership=redis", "cluster.directory=redis", "redis.endpoints=h:1"
    )
    assert both.cluster.stores == {"redis": "cluster.membership=redis"}


@pytest.mark.parametrize("chosen", ["membership=etcd", "membership=redis", "directory=redis"])
def test_a_store_without_a_cluster_is_refused(chosen):
    servers = ["etcd.endpoints=h:1", "redis.endpoints=h:1"]
    with pytest.raises(ConfigError, match=r"cluster\.(membership|directory) needs cluster\.name"):
        read(f"cluster.{chosen}", *servers)
    read(f"cluster.{chosen}", *NAMED, *servers)
    assert read("cluster.membership=local", "cluster.directory=peers").cluster.stores == {}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["cluster.membership=etcd"], ["cluster.membership=etcd", "etcd.endpoints"]),
        (["cluster.directory=redis"], ["cluster.directory=redis", "redis.endpoints"]),
        (["cluster.membership=redis", "etcd.endpoints=h:1"], ["redis.endpoints"]),
        (["cluster.membership=zookeeper"], ["one of local, etcd, redis"]),
        (["cluster.directory=etcd"], ["one of peers, redis"]),
        (["cluster.membership=etcd", "etcd.endpoints=h:1", "cluster.nodes=b=h:2"],
         ["cluster.nodes=b=h:2", "cluster.membership=etcd"]),
        (["etcd.endpoints=h"], ["etcd.endpoints=h", "host:port"]),
        (["redis.endpoints=h:0"], ["redis.endpoints=h:0", "port 0"]),
        (["redis.endpoints=h:1,h:1"], ["redis.endpoints=h:1,h:1 names one twice"]),
        (["etcd.certificate=/c"], ["etcd.certificate=/c needs etcd.key"]),
        (["etcd.key=/k"], ["etcd.key=/k needs etcd.certificate"]),
        (["redis.key=/k", "redis.certificate=/c"], ["redis.certificate=/c needs redis.authority"]),
        (["cluster.advertise=h"], ["cluster.advertise=h", "host:port"]),
        (["cluster.advertise=0.0.0.0:1"], ["cluster.advertise=0.0.0.0:1", "all addresses"]),
        (["cluster.membership=etcd", "etcd.endpoints=h:1", "cluster.listen=[::]:7400", *FILES],
         ["cluster.membership=etcd needs cluster.advertise", "cluster.listen=[::]:7400"]),
    ],
)  # fmt: skip
def test_settings_of_stores_that_cannot_work_together_are_refused_by_their_names(settings, says):
    with pytest.raises(ConfigError) as refused:
        read(*NAMED, *settings)
    for words in says:
        assert words in str(refused.value)


def test_files_of_a_store_are_checked_and_never_shown(tmp_path):
    login = tmp_path / "login"
    login.write_text("root:s3cret\n")
    settings = [
        *NAMED, "cluster.membership=redis", "redis.endpoints=h:1", f"redis.login={login}"
    ]  # fmt: skip
    config = read(*settings)
    check_stores(config)
    assert "s3cret" not in show(load(ServerConfig, None, {}, settings))
    login.write_text("s3cret")
    with pytest.raises(ConfigError, match=r"^redis\.login: .*login.* user:password") as refused:
        check_stores(config)
    assert "s3cret" not in str(refused.value)
    login.unlink()
    with pytest.raises(ConfigError, match=r"^redis\.login: .*No such file"):
        check_stores(config)


def test_a_client_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    config = read(*NAMED, "cluster.membership=etcd", "etcd.endpoints=h:1")
    monkeypatch.setattr("kvstore.cluster.configured.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"aetcd: pip install '\.\[etcd\]'"):
        check_stores(config)


@pytest.mark.parametrize(
    "url",
    ["10.0.0.1:7780", "unix:///run/kvstore.sock", "http://user:secret@10.0.0.1:7780",
     "http://10.0.0.1", "http://10.0.0.1:0", "http://0.0.0.0:7780", "https://[::]:7780",
     "http://10.0.0.1:7780/secret"],
)  # fmt: skip
def test_an_admin_api_that_nobody_can_connect_to_is_not_advertised(url):
    with pytest.raises(ConfigError, match=r"http\.advertise: ") as refused:
        read(f"http.advertise={url}")
    assert "secret" not in str(refused.value).partition("http.advertise: ")[2]
    assert read("http.advertise=https://node-a:443").http.advertise == "https://node-a:443"


@pytest.mark.parametrize(
    ("advertise", "listening", "host", "told"),
    [("https://a.example:443", "http://127.0.0.1:7780", "10.0.0.1", "https://a.example:443"),
     ("", "http://10.0.0.9:7780", "10.0.0.1", "http://10.0.0.9:7780"),
     ("", "http://0.0.0.0:7781", "10.0.0.1", "http://10.0.0.1:7781"),
     ("", "http://*:7781", "fd00::1", "http://[fd00::1]:7781"),
     ("", "http://[::]:7781", "fd00::1", "http://[fd00::1]:7781"),
     ("", "http://127.0.0.1:7780", "10.0.0.1", ""),
     ("", "http://127.0.0.1:7780", "127.0.0.2", "http://127.0.0.1:7780"),
     ("", "http://[::1]:7780", "node-a", ""),
     ("", "http://node-a:7780", "10.0.0.1", "http://node-a:7780")],
)  # fmt: skip
def test_the_record_of_a_node_tells_the_admin_api_as_others_reach_it(
    advertise, listening, host, told
):
    assert advertised_admin(advertise, listening, host) == told


def conduct(*overrides):
    return load_conductor(None, {}, overrides).config


@pytest.mark.parametrize(
    ("overrides", "why"),
    [(["cluster.membership=etcd"], "cluster.membership=etcd needs cluster.name"),
     (["cluster.name=blue", "cluster.membership=redis"], "needs redis.endpoints"),
     (["cluster.name=a b"], "cluster.name"),
     (["cluster.membership=zookeeper"], "cluster.membership"),
     (["etcd.endpoints=h"], "etcd.endpoints=h"),
     (["redis.endpoints=h:1", "redis.key=/k"], "redis.certificate")],
)  # fmt: skip
def test_a_conductor_that_cannot_follow_a_cluster_says_which_setting_is_missing(overrides, why):
    with pytest.raises(ConfigError, match=why):
        conduct(*overrides)


def test_a_conductor_follows_the_clusters_of_nodes_with_the_same_settings():
    shared = ["cluster.name=blue", "cluster.membership=etcd", "etcd.endpoints=h:1,g:1"]
    assert conduct(*shared).etcd == read(*shared).etcd
    assert conduct().cluster.membership == "local"
