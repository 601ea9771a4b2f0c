"""Goal: what users import is named, is there, and changes only on purpose."""

import importlib
import subprocess
import sys
import tomllib

import pytest

import kvstore
from kvstore.protocol import errors
from tests.conftest import ROOT

PUBLIC = {
    "CanonicalLayout", "CapacityError", "ConfigError", "DeviceSlabConfig", "DeviceUnavailable",
    "DurabilityUnavailable", "EngineLabel", "EngineNameTaken", "Hit", "InvalidArgument", "KVPool",
    "KVStore", "KVStoreError", "LayoutMismatch", "NotFound", "OpaqueLayout", "PageCorrupt",
    "PageViews", "PeerUnreachable", "PrefixKeys", "ProtocolError", "PutResult", "RestoreJob",
    "RestoreResult", "ShardSpec", "Space", "SpaceIdentity", "StoreJob", "TierUnavailable",
    "TooFewCopies", "TransferError", "TransferTimeout", "__version__", "page_keys",
}  # fmt: skip


def test_users_import_these_names_and_no_others():
    assert set(kvstore.__all__) == PUBLIC, "a name that goes breaks users; say so in CHANGELOG.md"
    assert set(dir(kvstore)) >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_a_public_name_is_what_its_module_defines(name):
    found = getattr(kvstore, name)

    assert found.__name__ == name
    assert getattr(importlib.import_module(found.__module__), name) is found
    assert found.__doc__


def test_every_error_that_users_may_meet_is_public():
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.KVStoreError)
    }
    assert kinds <= PUBLIC


def test_a_name_that_is_not_public_is_no_attribute():
    with pytest.raises(AttributeError, match="'kvstore' has no attribute 'Nothing'"):
        _ = kvstore.Nothing


def test_the_version_is_that_of_the_distribution():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "kvstore-server", "`kvstore` on PyPI is somebody else's"
    assert kvstore.__version__ == project["version"]


def test_a_daemon_loads_no_client_for_the_names():
    asked = "import kvstore.server.daemon, sys; print('kvstore.client' in sys.modules)"
    told = subprocess.run(
        [sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert told.stdout == "False\n"


@pytest.mark.parametrize("module", ["kvstore.cli", "kvstore.server.daemon", "conductor.service"])
def test_every_command_says_its_version(module):
    run = f"import sys; from {module} import main; sys.exit(main(['--version']))"
    told = subprocess.run(
        [sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stdout.split()[-1]) == (0, kvstore.__version__)
