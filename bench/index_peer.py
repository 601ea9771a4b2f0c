"""Another program that indexes the same events, where it runs."""

import subprocess
from collections.abc import Callable, Sequence
from typing import Final

from bench import environments
from bench.index_feed import Lines
from bench.index_ours import Cores
from bench.measure import Progress

PEERS: Final = ("dynamo",)


def dynamo_lines(peers: Sequence[str], progress: Progress) -> Callable[[], Lines] | None:
    """What starts Dynamo's indexer on the core of ours; None if nobody asked, or it cannot."""
    if not peers:
        return None
    try:
        python = environments.dynamo()
        command = [str(python), "-m", "bench.index_dynamo"]
        subprocess.run([str(python), "-c", "import dynamo.llm"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        progress.note(f"Dynamo does not run here, so it is no bound: {error}")
        return None
    return lambda: Lines(command, cores=Cores.present().indexer)
