"""The demo's workload: a few people ask about one long document, several times each."""

from pathlib import Path
from typing import NamedTuple

DOCUMENT = """\
HARBOUR HANDBOOK OF THE TOWN OF LINDVIK, as read to every new pilot.

1. The harbour has two basins. The old basin lies behind the stone mole and is three metres deep \
at low water; only boats under twenty tonnes may use it. The new basin was dredged in the year of \
the great ice and takes ships of up to nine metres draught, but its entrance is narrow, and two \
ships may never pass in it.

2. A pilot boards every ship at the red buoy. Before boarding, the pilot asks for the ship's name, \
her draught, her cargo and the number of her crew, and writes all four into the blue book. A ship \
that does not answer waits outside; nobody makes an exception, not for the mayor and not for the \
weather.

3. The light on the mole shows white while the entrance is free, green while a ship leaves, and \
red while one arrives. If the light fails, the keeper lowers the black ball, and until it is \
raised again every ship counts as arriving. The keeper tests the light at noon and writes \
the result on the slate by the door.

4. Cargo that can burn is unloaded only at the outer quay, only by day, and only with the fire \
boat alongside. Grain is unloaded at the mill quay. Fish has precedence over everything else from \
the first of May until the last of September, because it will not wait.

5. Whoever finds something adrift brings it to the weigh house. If nobody asks for it within a \
year and a day, it belongs to the finder, except for barrels that bear the town's mark: those were \
never lost, only late.

6. In fog the bell rings twice a minute. A ship that hears it answers with one long note. Pilots \
trust the bell more than their eyes, and their eyes more than the chart, which was drawn by a man \
who disliked the sea and shows it wherever he could.
"""

QUESTIONS = {
    "Ada": (
        "How deep is the old basin, and who may use it?",
        "And what happens when two ships want to enter the new basin?",
        "Which colour would the light show then?",
        "What if the light has failed?",
    ),
    "Bo": (
        "What does a pilot write into the blue book?",
        "May the mayor's ship pass without it?",
        "Where does the pilot board?",
        "What should I do in fog?",
    ),
    "Cleo": (
        "Our ship carries grain and lamp oil. Where do we unload?",
        "We arrive on the third of May at dusk. Does that change anything?",
        "Who has precedence over us?",
        "We found a barrel on the way. Can we keep it?",
    ),
}


class Turn(NamedTuple):
    """One question of one person; ``number`` counts that person's turns from 1."""

    user: str
    number: int
    question: str


def turns(users: int, each: int) -> list[Turn]:
    """The built-in conversation: everybody's first turn, then everybody's second, and so on."""
    names = list(QUESTIONS)[:users]
    return [
        Turn(name, number + 1, QUESTIONS[name][number]) for number in range(each) for name in names
    ]


def turns_from(path: Path) -> list[Turn]:
    """A conversation from a file: one question a line, ``name: question``; ``#`` is a comment.

    Raises:
        ValueError: a line has no name.
    """
    found: list[Turn] = []
    counts: dict[str, int] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        user, colon, question = line.partition(":")
        if not colon or not question.strip():
            raise ValueError(f"{path}:{number}: expected `name: question`")
        counts[user] = counts.get(user, 0) + 1
        found.append(Turn(user.strip(), counts[user], question.strip()))
    if not found:
        raise ValueError(f"{path}: no questions")
    return found
