"""Files of one user that programs of that user find: tokens made at start.

They lie in the first of a few directories that can be used: the one of the node's socket, what the
system gives to a user who is logged in, a folder of the user's own in ``/tmp``. A file counts only
if nobody else could have written it or may read it.
"""

import contextlib
import os
import secrets
import stat
from pathlib import Path
from urllib.parse import urlsplit

from kvstore.errors import ConfigError


def directories() -> list[tuple[Path, int]]:
    """Where such files may be, best first, and the mode in which the directory is made."""
    user = os.geteuid()
    return [
        (Path("/run/kvstore"), 0o755),
        (Path(f"/run/user/{user}/kvstore"), 0o700),
        (Path(f"/tmp/kvstore-{user}"), 0o700),
    ]


def write(name: str, text: str) -> Path:
    """Write such a file; it appears whole or not at all.

    Returns:
        where it is.

    Raises:
        ConfigError: no directory can be used; says why.
    """
    why: list[str] = []
    for directory, mode in directories():
        try:
            directory.mkdir(mode=mode, exist_ok=True)
            _check(directory.lstat(), directory=True)
            path = directory / name
            write_at(path, text)
        except OSError as error:
            why.append(f"{directory}: {error}")
        else:
            return path
    raise ConfigError(f"no directory for {name}: {'; '.join(why)}")


def write_at(path: Path, text: str) -> None:
    """Write a file that only this user may read; it appears whole or not at all.

    Whatever has that name is replaced, and a link not followed.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    draft.replace(path)


def find(name: str) -> str | None:
    """What such a file says; None when there is none that counts."""
    for directory, _ in directories():
        with contextlib.suppress(OSError, UnicodeDecodeError):
            _check(directory.lstat(), directory=True)
            descriptor = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor) as file:
                _check(os.fstat(descriptor), directory=False)
                return file.read(4_096).strip()
    return None


def token_name(program: str, port: int) -> str:
    """The file of the token that a program made which listens on this port."""
    return f"{program}-{port}.token"


def token_for(program: str, url: str) -> str:
    """The token that a program of this user at ``url`` made; empty when there is none that counts.

    It is only told to this machine: elsewhere another program may listen on that port.
    """
    parts = urlsplit(url)
    if parts.hostname not in ("127.0.0.1", "::1", "localhost") or parts.port is None:
        return ""
    return find(token_name(program, parts.port)) or ""


def remove(path: Path, text: str) -> None:
    """Remove such a file, if it still says ``text``."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if path.read_text() == text:
            path.unlink()


def _check(found: os.stat_result, *, directory: bool) -> None:
    """Refuse what others own or may use.

    Raises:
        PermissionError: they do.
    """
    kind = stat.S_ISDIR if directory else stat.S_ISREG
    others = 0o022 if directory else 0o077
    if not kind(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & others:
        raise PermissionError("it is not this user's alone")
