"""TLS between the nodes of one cluster: both sides show a certificate of the cluster's authority.

Whoever has a certificate of that authority is a node of the cluster; the names in certificates are
not compared. So the authority must be one that serves this cluster only. TLS 1.3 is needed.
"""

import ssl
from pathlib import Path

import msgspec

from kvstore.protocol.errors import InvalidArgument, reason


class CertificateFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files.

    Attributes:
        certificate: this node's certificate, followed by those between it and the authority's.
        key: its private key, not encrypted.
        authority: the certificates of the authority that signs the certificates of all nodes.
    """

    certificate: str
    key: str
    authority: str

    def connecting(self) -> ssl.SSLContext:
        """The context of who connects; see :meth:`accepting`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return self._filled(context)

    def accepting(self) -> ssl.SSLContext:
        """The context of who listens. Reads the files.

        Raises:
            InvalidArgument: a file cannot be read or used; ``field`` is its attribute here.
        """
        return self._filled(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def _filled(self, context: ssl.SSLContext) -> ssl.SSLContext:
        for field in ("certificate", "key", "authority"):
            path = getattr(self, field)
            try:
                with Path(path).open("rb"):
                    pass
            except (OSError, ValueError) as error:
                raise InvalidArgument(field, f"{path}: {reason(error)}") from error
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(self.authority)
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                "authority", f"{self.authority}: not a certificate in PEM: {reason(error)}"
            ) from error
        try:
            # Without a password, an encrypted key would make OpenSSL ask at the terminal.
            context.load_cert_chain(self.certificate, self.key, password=lambda: b"")
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                "certificate",
                f"{self.certificate} and the key {self.key} are not a certificate and its"
                f" unencrypted key in PEM: {reason(error)}",
            ) from error
        return context
