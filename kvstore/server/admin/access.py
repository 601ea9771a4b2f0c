"""Access control by bearer token, or by the peer's credentials on the Unix socket."""

import hmac
import os
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Final, Literal
from urllib.parse import urlsplit

from kvstore.server.admin.connections import HttpPeer
from kvstore.server.channel import Caller
from kvstore.server.refusal import Refusal

Role = Literal["read", "operate"]

_NO_PEER: Final = HttpPeer("nobody", unix=False)


def is_of_no_site(host: str) -> bool:
    """Whether a ``Host`` header has an address or ``localhost``, as no web site does.

    A page in a browser may only read answers of the name that it came from itself. It can have that
    name lead to loopback, but not be without it.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name != "localhost":
            ip_address(name)
    except ValueError:
        return False
    return True


class Access:
    """The tokens of one node; the operate token may also read.

    Args:
        tokens: role → token; at least one.
        group: whether peers of the node's group may operate over the Unix socket.
        tenants: whether ``socket.tenants`` separates these, so that they must not read each other's
            prompts.
        token_file: file of the generated token; empty = none.
    """

    def __init__(
        self, tokens: Mapping[str, str], *, group: bool, tenants: bool, token_file: str
    ) -> None:
        self._tokens = {role: token.encode() for role, token in tokens.items()}
        self._group = group
        self._tenants = tenants
        where = f"; it is in {token_file}" if token_file else ""
        self._advice = (
            f"send 'Authorization: Bearer TOKEN' with a known token{where}; over the Unix socket"
            " the node's user needs none"
        )

    def check(
        self, peer: HttpPeer | None, authorization: str, role: Role, *, prompts: bool = False
    ) -> Caller:
        """Check access; returns the caller.

        Args:
            peer: the peer of the connection.
            authorization: the ``Authorization`` header.
            role: the required role.
            prompts: whether the answer shows prompts of any tenant.

        Raises:
            Refusal: 401 without a valid token, 403 if its role is too low.
        """
        peer = peer or _NO_PEER
        if peer.unix and self._admits(peer, prompts=prompts):
            return Caller("operate", peer.address)
        kind, _, token = authorization.partition(" ")
        held = self._role(token.strip().encode()) if kind.lower() == "bearer" else None
        if held is None:
            raise Refusal(401, "unauthorized", self._advice)
        if role == "operate" and held != "operate":
            raise Refusal(
                403, "forbidden", "this token may read; operating needs http.operate_token"
            )
        return Caller(held, peer.address)

    def _admits(self, peer: HttpPeer, *, prompts: bool) -> bool:
        """Whether the peer's user or group may operate, as for the node's own socket."""
        group = self._group and not (prompts and self._tenants)
        return peer.uid in (0, os.geteuid()) or (group and os.getegid() in peer.groups)

    def _role(self, token: bytes) -> str | None:
        found = [role for role, known in self._tokens.items() if hmac.compare_digest(token, known)]
        return found[0] if found else None
