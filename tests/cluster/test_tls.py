"""Goal: certificates that cannot be used stop the start, with the key that names them."""

import ssl
from pathlib import Path

import msgspec
import pytest

from kvstore.cluster.tls import certificate_files, client_context, server_context
from kvstore.config.cluster import ClusterConfig
from kvstore.protocol.errors import ConfigError
from tests.cluster.nodes import CERTIFICATES, files

GOOD = msgspec.structs.asdict(files())


def config(**changed: str) -> ClusterConfig:
    return ClusterConfig(name="c", **(GOOD | changed))


def test_with_certificates_both_sides_must_show_one_of_the_authority():
    for context in (server_context(config()), client_context(config())):
        assert context is not None
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3


def test_without_certificates_there_is_no_tls():
    alone = ClusterConfig(name="c")
    assert certificate_files(alone) is None
    assert server_context(alone) is None
    assert client_context(alone) is None


@pytest.mark.parametrize("field", ["certificate", "key", "authority"])
@pytest.mark.parametrize("made", [server_context, client_context])
def test_a_file_that_is_not_there_is_named(field, made):
    with pytest.raises(ConfigError, match=rf"cluster\.{field}: /no/such/file"):
        made(config(**{field: "/no/such/file"}))


@pytest.mark.parametrize(
    ("field", "name", "says"),
    [("authority", "node.key", r"cluster\.authority: .*node\.key"),
     ("certificate", "node.key", r"cluster\.certificate: .*node\.key"),
     ("certificate", "stranger.pem", r"cluster\.certificate: .*node\.key.*MISMATCH"),
     ("key", "encrypted.key", r"cluster\.certificate: .*encrypted\.key.*unencrypted"),
     ("key", "node.pem", r"cluster\.certificate: .*node\.pem")],
)  # fmt: skip
def test_a_file_that_is_something_else_is_named(field, name, says):
    with pytest.raises(ConfigError, match=f"(?i){says}"):
        server_context(config(**{field: str(CERTIFICATES / name)}))


def test_a_directory_in_place_of_a_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cluster\.key: .*directory"):
        server_context(config(key=str(tmp_path)))
