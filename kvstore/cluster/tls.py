"""The TLS files of a node, according to its configuration."""

import ssl

from kvstore.cluster.records import SCHEME
from kvstore.config.cluster import ClusterConfig
from kvstore.index.credentials import PeerCredentials
from kvstore.process.tls import CertificateFiles
from kvstore.protocol.errors import ConfigError, InvalidArgument


def certificate_files(config: ClusterConfig) -> CertificateFiles | None:
    """The files of TLS between nodes; None = no TLS."""
    if not config.has_certificates:
        return None
    return CertificateFiles(config.certificate, config.key, config.authority)


def credentials(config: ClusterConfig, node: str) -> PeerCredentials:
    """The credentials with which a node follows the events of another one."""
    return PeerCredentials(config.name, node, SCHEME, certificate_files(config))


def server_context(config: ClusterConfig) -> ssl.SSLContext | None:
    """The context for connections of other nodes; None = no TLS. Reads the files.

    Raises:
        ConfigError: a file cannot be read or used; names its key.
    """
    return _context(config, connecting=False)


def client_context(config: ClusterConfig) -> ssl.SSLContext | None:
    """The context for connections to other nodes; see :func:`server_context`."""
    return _context(config, connecting=True)


def _context(config: ClusterConfig, *, connecting: bool) -> ssl.SSLContext | None:
    files = certificate_files(config)
    if files is None:
        return None
    try:
        return files.connecting() if connecting else files.accepting()
    except InvalidArgument as error:
        raise ConfigError(f"cluster.{error}") from error
