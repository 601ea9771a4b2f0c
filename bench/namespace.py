"""A network of its own for programs, in which there is only loopback.

``python -m bench.namespace hold`` makes it and keeps it until it is ended;
``... join PID [NAME=VALUE]... -- PROGRAM`` runs a program in the one that process PID holds.
"""

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def hold() -> None:
    user = 0 if os.geteuid() == 0 else CLONE_NEWUSER
    _checked(_libc.unshare(user | CLONE_NEWNET))
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
    sys.stdout.write(f"holding {os.getpid()}\n")
    sys.stdout.flush()
    signal.pause()


def join(arguments: list[str]) -> None:
    at = arguments.index("--")
    for name in ("user", "net") if os.geteuid() else ("net",):
        with Path(f"/proc/{arguments[0]}/ns/{name}").open("rb") as opened:
            _checked(_libc.setns(opened.fileno(), 0))
    variables = dict(one.split("=", 1) for one in arguments[1:at])
    program = arguments[at + 1 :]
    os.execve(program[0], program, os.environ | variables)


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold()
    else:
        join(sys.argv[2:])
