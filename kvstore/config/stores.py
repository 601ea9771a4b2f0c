"""The settings of etcd and of Redis: one shape for both."""

from kvstore.config.addresses import read_address
from kvstore.config.section import Section


class StoreConfig(Section, frozen=True):
    """Servers outside of the nodes, and the credentials for them.

    Attributes:
        endpoints: ``host:port`` of each server; they are tried in turns.
        login: file with one line ``user:password``; empty = none. Never printed.
        authority: PEM file with the certificate of the authority that signed the servers';
            empty = no TLS.
        certificate: PEM file with the certificate to show to them; empty = none.
        key: PEM file with its private key, not encrypted.
    """

    endpoints: tuple[str, ...] = ()
    login: str = ""
    authority: str = ""
    certificate: str = ""
    key: str = ""

    def refusal(self, section: str) -> str:
        """Why these settings cannot be used; empty if they can.

        Args:
            section: the name of the section.
        """
        for endpoint in self.endpoints:
            try:
                port = read_address(endpoint).port
            except ValueError as error:
                return f"{section}.endpoints={endpoint}: {error}"
            if not port:
                return f"{section}.endpoints={endpoint}: port 0 is no address to connect to"
        if len(set(self.endpoints)) < len(self.endpoints):
            return f"{section}.endpoints={','.join(self.endpoints)} names one twice"
        for field, other in (("certificate", "key"), ("key", "certificate")):
            path = getattr(self, field)
            if path and not getattr(self, other):
                return f"{section}.{field}={path} needs {section}.{other} as well"
        if self.certificate and not self.authority:
            return f"{section}.certificate={self.certificate} needs {section}.authority as well"
        return ""
