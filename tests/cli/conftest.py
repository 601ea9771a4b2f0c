"""Fixtures: the daemon that the tests of the admin API ask."""

from tests.server.conftest import api, daemon, stored

__all__ = ["api", "daemon", "stored"]
