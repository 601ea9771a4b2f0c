"""A client process that does what a test tells it, and stops at gates in the middle of a move.

Run as ``python -m tests.faults.puppet ADDRESS COMMANDS GATES [TIMEOUT_S]``. Commands come as JSON
lines through the named pipe COMMANDS, each with a number; answers go to standard output as JSON
lines with that number. At a gate it says ``{"at": name}`` there and waits for a line in the pipe of
that name in the folder GATES.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from tests.faults.commands import open_pipe, say
from tests.faults.forks import Parent


def main() -> None:
    address, commands, gates, *timeout_s = sys.argv[1:]
    puppet = Parent(address, Path(gates), float(timeout_s[0]) if timeout_s else 2.0)

    def obey(number: int, command: dict[str, Any]) -> None:
        say({"answer": number, "value": puppet.obey(command)})

    with open_pipe(Path(commands)) as lines:
        say({"ready": os.getpid()})
        for line in lines:
            message = json.loads(line)
            number, background = message.pop("number"), message.pop("background")
            if background:
                threading.Thread(target=obey, args=(number, message), daemon=True).start()
            else:
                obey(number, message)


if __name__ == "__main__":
    main()
