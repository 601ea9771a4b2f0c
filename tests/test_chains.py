"""Goal: no line reaches through one object after another to what belongs to a distant one."""

import ast

from tests.test_tidy import PRODUCT, dotted, nodes, python_files, refuse, shown

CHAIN_NAMES_MAX = 5
"""``self.node.pages.slots.address`` has five."""


def test_no_chain_of_attributes_reaches_through_the_house():
    faults = []
    for path in python_files(*PRODUCT):
        for node, _ in nodes(path):
            chain = dotted(node) if isinstance(node, ast.Attribute) else ""
            if chain.count(".") == CHAIN_NAMES_MAX:  # a longer one holds one of that length
                faults.append(f"{shown(path)}:{node.lineno} {chain}")

    refuse(faults, "ask the object that owns it, or keep what is needed when the object is made")
