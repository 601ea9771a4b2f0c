"""The credentials of a follower. Pure."""

import msgspec

from kvstore.process.tls import CertificateFiles


class PeerCredentials(msgspec.Struct, frozen=True):
    """The credentials of a node for the peer service of another one.

    Attributes:
        cluster: name of the cluster.
        node: its own name.
        scheme: its scheme of keys and digests.
        files: its certificates; None = no TLS, on one machine.
    """

    cluster: str
    node: str
    scheme: str
    files: CertificateFiles | None = None
