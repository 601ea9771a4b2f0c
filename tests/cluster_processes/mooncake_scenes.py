"""Programs with Mooncake in a network of their own; skipped where it cannot be had, never in CI."""

import os
from collections.abc import Sequence

import pytest

from bench import namespace
from bench.mooncake_wheel import NoMooncakeError, environment
from tests.conftest import Spawn


def variables() -> dict[str, str]:
    """What Mooncake needs."""
    try:
        return environment()
    except NoMooncakeError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"Mooncake: {error}")


class Alone:
    """A network in which there is only loopback."""

    def __init__(self, spawn: Spawn) -> None:
        self._variables = variables()
        self._holder = int(spawn(namespace.holder(), ready=r"holding (\d+)").ready.group(1))

    def program(self, arguments: Sequence[str]) -> list[str]:
        """A program that runs there."""
        return namespace.joined(self._holder, arguments, self._variables)
