"""Checks engines' offers for handoffs: a decode engine is sent to the URL in the offer.

The URL of a registry comes from the prefill engine, and decode engines ask it. So that no engine
can send others to a third party, its host must be that of the engine's own URL, which the operator
has registered, or one that the configuration names.
"""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from conductor.config import EngineEntry, check_url
from conductor.front.openai import BadRequestError
from conductor.front.served import DescribedEngine
from conductor.protocols import PROTOCOLS
from conductor.routing.engines import HandoffOffer, PushOffer, Role


def offer_of(
    entry: EngineEntry, said: DescribedEngine, protocol: str, hosts: Collection[str]
) -> HandoffOffer | None:
    """What an engine offers over its protocol; None = nothing.

    Args:
        entry: its registration; its ``handoff`` counts instead of what the engine says.
        said: what it says itself.
        protocol: its protocol; offers over other ones do not count.
        hosts: further hosts where a registry may be.

    Raises:
        BadRequestError: the URL of its registry is missing or not allowed; names the field.
    """
    offer = entry.handoff if entry.handoff is not None else said.handoff
    if offer is None or offer.push is None or PROTOCOLS["push"].over != protocol:
        return None
    if entry.role is not Role.PREFILL:
        return HandoffOffer(PushOffer())
    field = "handoff.push.registry"
    registry = offer.push.registry
    if registry is None:
        raise BadRequestError(field, "a prefill engine that pushes needs one")
    try:
        check_url(registry)
    except ValueError as error:
        raise BadRequestError(field, str(error).removeprefix("url: ")) from error
    parts = urlsplit(registry)
    if parts.port is None:  # check_url takes http and https only
        raise BadRequestError(field, "must be http://host:port or https://host:port")
    allowed = {_host(urlsplit(entry.url).hostname), *map(_host, hosts)}
    if _host(parts.hostname) not in allowed:
        what = "its host is not that of the engine's url, and not in handoff.registry_hosts"
        raise BadRequestError(field, what)
    return HandoffOffer(PushOffer(registry))


def _host(host: str | None) -> str:
    """A host in one form; all names and addresses of loopback are the same."""
    name = (host or "").lower().rstrip(".")
    try:
        address = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name
    return "localhost" if address.is_loopback else str(address)
