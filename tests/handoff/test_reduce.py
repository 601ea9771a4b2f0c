"""Goal: ranks in processes of their own agree on each state by one reduce a step, and all end."""

from kvstore.handoff.ranks import RankPart
from tests.handoff.ranked import HEADS, LAYERS

BLOCKS = 4
WAIT_S = 20.0
PARTS = tuple(RankPart((0, LAYERS), (half, half + HEADS // 2)) for half in (0, HEADS // 2))
