"""Resolves host names with a deadline, which ``getaddrinfo`` lacks."""

import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from kvstore.protocol.errors import PeerUnreachable, TransferTimeout, reason

NAMES_MAX = 64
"""Names that are being resolved; a name server that does not answer holds a thread for each."""
Resolve = Callable[[str], list[str]]
"""Returns the addresses of a host name; may wait."""


def resolve(host: str) -> list[str]:
    """The addresses of a host name, as the system knows them.

    Raises:
        OSError: it has none.
        UnicodeError: it cannot be the name of a host.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class HostNames:
    """Resolves names in threads of its own, at most one per name at a time.

    Args:
        ask: resolves one name.
    """

    def __init__(self, ask: Resolve = resolve) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        #: Name → the question under way.
        self._asking: dict[str, _Question] = {}

    def addresses(self, host: str, deadline_ns: int) -> list[str]:
        """The addresses of a host, at least one; resolved again on each call.

        Raises:
            TransferTimeout: no answer before the deadline, in ``time.monotonic_ns()``.
            PeerUnreachable: there is no such host, or too many others are being resolved.
        """
        if _is_address(host):
            return [host]
        with self._lock:
            question = self._asking.get(host)
            if question is None:
                if len(self._asking) >= NAMES_MAX:
                    raise PeerUnreachable(f"{host}: {NAMES_MAX} names are being resolved already")
                question = _Question()
                thread = threading.Thread(
                    target=self._answer, args=(host, question), name="kvstore-names", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:  # no threads are left
                    raise PeerUnreachable(f"{host}: {error}") from error
                self._asking[host] = question
        left_s = (deadline_ns - time.monotonic_ns()) / 1e9
        if not question.answered.wait(max(0.0, left_s)):
            raise TransferTimeout(f"the name {host} was not resolved in time")
        if not question.addresses:
            raise PeerUnreachable(f"{host}: {question.error}")
        return question.addresses

    def _answer(self, host: str, question: "_Question") -> None:
        try:
            question.addresses = self._ask(host)
        except (OSError, UnicodeError) as error:
            question.error = reason(error)
        finally:
            with self._lock:
                del self._asking[host]
            question.answered.set()


class _Question:
    """A name that is being resolved; ``error`` says why it has no address."""

    def __init__(self) -> None:
        self.answered: Final = threading.Event()
        self.addresses: list[str] = []
        self.error = "it has no address"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
