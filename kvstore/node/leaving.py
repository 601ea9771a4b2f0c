"""Processes that lost their connection, or have ended: they let go of what they hold, in turns.

Of a **lost** process nobody knows whether it still accesses bytes: the slots that it writes go to
LIMBO. One that has **ended** accesses none any more: all that it held is released.
"""

from kvstore.state.table.deadlines import Retirement
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.sessions import Process


class LeavingProcesses:
    """The processes of one node that are leaving it.

    Args:
        pages: what they hold.
        turn_pages: maximum pages that one turn releases.
        unwatched_ns: see :class:`~kvstore.state.table.deadlines.Retirement`.

    Attributes:
        losing: lost processes with puts that are not given up yet.
        ending: ended processes that hold more than one turn releases.
        retirement: what lost processes hold whose end nobody reports.
    """

    def __init__(self, pages: PageTable, turn_pages: int, unwatched_ns: int) -> None:
        self._pages = pages
        self._turn_pages = turn_pages
        self.losing: dict[Process, None] = {}
        self.ending: dict[Process, None] = {}
        self.retirement = Retirement(pages.residents, unwatched_ns)

    def lose(self, process: Process) -> None:
        """The connection of a process of this machine was lost; it may still access bytes."""
        assert process not in self.ending
        process.lost = True
        self.losing[process] = None

    def end(self, process: Process) -> None:
        """The process accesses no bytes any more; it waits for nothing."""
        process.lost = True
        self.retirement.remove(process)
        self.losing.pop(process, None)
        self.ending[process] = None

    def go_on(self, now_ns: int) -> list[Process]:
        """Give up puts, and release what ended processes held, up to the limit of one turn.

        Returns:
            the ended processes that hold nothing any more.
        """
        left, gone = self._turn_pages, list[Process]()
        while self.losing and left > 0:
            process = next(iter(self.losing))
            given_up = self._pages.lose(process, left)
            if given_up < left:  # all of them
                del self.losing[process]
                if not process.peer.watched:
                    self.retirement.add(process, now_ns)
            left -= 1 + given_up
        while self.ending and left > 0:
            process = next(iter(self.ending))
            assert process.lost
            left -= 1 + self._pages.end(process, left)
            if process.idle:
                del self.ending[process]
                gone.append(process)
        return gone
