"""A network of its own for programs, in which there is only loopback.

``python -m bench.namespace hold`` makes it and keeps it until it is ended; ``... join PID
[NAME=VALUE]... -- PROGRAM`` runs a program in the one that process PID holds, and ``... run
[NAME=VALUE]... -- PROGRAM`` in a new one.
"""

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1
_libc: Final = ctypes.CDLL(None, use_errno=True)


def alone(program: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """The command that runs a program in a new network."""
    return _command("run", program, variables)


def joined(holder: int, program: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """The command that runs a program in the network that another process holds."""
    return _command("join", program, variables, str(holder))


def holder() -> list[str]:
    """The command of the process that holds a network; it says ``holding PID``."""
    return [sys.executable, "-m", "bench.namespace", "hold"]


def _command(
    how: str, program: Sequence[str], variables: Mapping[str, str], *more: str
) -> list[str]:
    given = [f"{name}={value}" for name, value in variables.items()]
    return [sys.executable, "-m", "bench.namespace", how, *more, *given, "--", *program]


def _checked(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _leave() -> None:
    """Leave the network of this process for a new one, with loopback up."""
    user = 0 if os.geteuid() == 0 else _CLONE_NEWUSER
    _checked(_libc.unshare(user | _CLONE_NEWNET))
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))


def _join(pid: str) -> None:
    for name in ("user", "net") if os.geteuid() else ("net",):
        with Path(f"/proc/{pid}/ns/{name}").open("rb") as opened:
            _checked(_libc.setns(opened.fileno(), 0))


def main(arguments: Sequence[str]) -> None:
    """Hold a network, or run a program in one."""
    if arguments[0] == "hold":
        _leave()
        sys.stdout.write(f"holding {os.getpid()}\n")
        sys.stdout.flush()
        signal.pause()
    at = list(arguments).index("--")
    given = list(arguments[1:at])
    if arguments[0] == "join":
        _join(given.pop(0))
    else:
        _leave()
    variables = dict(one.split("=", 1) for one in given)
    program = list(arguments[at + 1 :])
    os.execve(program[0], program, os.environ | variables)


if __name__ == "__main__":
    main(sys.argv[1:])
