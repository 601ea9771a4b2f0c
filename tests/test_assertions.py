"""The packages that change state assert what their steps rely on: a floor under their share."""

import ast
from typing import Final

from tests.test_tidy import code_lines, python_files, refuse, shown, tree_of, walk

ASSERTIONS_MIN: Final = {"kvstore/node": 24, "kvstore/state": 45, "kvstore/tier": 18}
"""Assertions per 1,000 code lines of the packages that change state: as measured, rounded down.
Raise one when there are more; the commit that lowers one gives the reason."""


def test_rooms_with_state_assert_what_their_steps_rely_on():
    faults = []
    for room, least in ASSERTIONS_MIN.items():
        paths = [path for path in python_files("kvstore") if shown(path).startswith(f"{room}/")]
        count = sum(isinstance(node, ast.Assert) for path in paths for node in walk(tree_of(path)))
        share = 1000 * count / sum(map(code_lines, paths))
        if share < least:
            faults.append(f"{room}: {share:.1f} assertions per 1,000 code lines, {least} at least")

    refuse(faults, "new code changes state and asserts nothing: assert what it needs and leaves")
