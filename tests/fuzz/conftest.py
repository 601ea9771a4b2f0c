"""Fuzzers of a real daemon use the scenes of the fault tests."""

from tests.faults.conftest import frail, scene, standing_daemon

__all__ = ["frail", "scene", "standing_daemon"]
