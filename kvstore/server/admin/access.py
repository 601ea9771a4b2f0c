"""Who may read and who may operate: by bearer token, or by the Unix socket's peer credentials."""

import hmac
import os
from collections.abc import Mapping
from typing import Final, Literal

from kvstore.server.admin.connections import HttpPeer
from kvstore.server.channel import Caller
from kvstore.server.refusal import Refusal

Role = Literal["read", "operate"]

_NO_PEER: Final = HttpPeer("nobody", unix=False)


class Access:
    """The tokens of one node; one that operates may read too.

    Args:
        tokens: role → token; at least one.
        group: whether peers of the node's group may operate over the Unix socket.
        tenants: whether these have tenants of their own, and must not read each other's prompts.
        token_file: where the token is that the node made itself; empty = it made none.
    """

    def __init__(
        self, tokens: Mapping[str, str], *, group: bool, tenants: bool, token_file: str
    ) -> None:
        self._tokens = {role: token.encode() for role, token in tokens.items()}
        self._group = group
        self._tenants = tenants
        where = f"; it is in {token_file}" if token_file else ""
        self._advice = (
            f"send 'Authorization: Bearer TOKEN' with a known token{where}; over its Unix socket"
            " the node's user needs none"
        )

    def check(
        self, peer: HttpPeer | None, authorization: str, role: Role, *, prompts: bool = False
    ) -> Caller:
        """Who asks; if they may not, they are refused.

        Args:
            peer: who is at the other end.
            authorization: the header of that name.
            role: what is needed.
            prompts: whether the answer tells what engines of any tenant were asked.

        Raises:
            Refusal: 401 without a known token, 403 when it does not suffice.
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
        """Whether a process may operate because of whose it is: as for the node's own socket."""
        group = self._group and not (prompts and self._tenants)
        return peer.uid in (0, os.geteuid()) or (group and os.getegid() in peer.groups)

    def _role(self, token: bytes) -> str | None:
        found = [role for role, known in self._tokens.items() if hmac.compare_digest(token, known)]
        return found[0] if found else None
