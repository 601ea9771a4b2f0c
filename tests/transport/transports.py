"""What tests of transports share: certificates, and pairs of transports."""

import ssl
from pathlib import Path

CERTIFICATES = Path(__file__).parent / "certificates"
"""``node`` is signed by ``authority``, ``stranger`` by another one; valid until the year 2126."""


def context(*, server: bool, of: str = "node") -> ssl.SSLContext:
    """Mutual TLS with the certificate of one of the folder."""
    purpose = ssl.Purpose.CLIENT_AUTH if server else ssl.Purpose.SERVER_AUTH
    found = ssl.create_default_context(purpose, cafile=str(CERTIFICATES / "authority.pem"))
    found.load_cert_chain(CERTIFICATES / f"{of}.pem")
    found.verify_mode = ssl.CERT_REQUIRED
    return found
