"""The rows of ``GET /v1/sessions``."""

from collections.abc import Iterable
from itertools import islice
from typing import Final

from kvstore.protocol.page import EngineLabel
from kvstore.server import answers
from kvstore.server.turns import Work
from kvstore.state.tree.sessions import Session

STRETCH_PROCESSES: Final = 1000
STRETCH_OPENED: Final = 4096
"""Maximum shards that the sessions in one answer have opened, but at least one session."""
SESSION_SHARDS_MAX: Final = 4096
"""Maximum opened shards shown per session, but at least one space."""
PROCESSES_MAX: Final = 1000
"""Maximum processes shown per session."""


def session_rows(sessions: Iterable[Session]) -> Work[list[answers.SessionRow]]:
    """The rows of the first of these sessions: as many as one answer may have, at least one."""
    rows: list[answers.SessionRow] = []
    processes = shards = 0
    for session in sessions:
        processes += len(session.processes)
        shards += sum(opened.bit_count() for opened in session.shards.values())
        if rows and (processes > STRETCH_PROCESSES or shards > STRETCH_OPENED):
            break
        spaces = yield from _opened(session)
        rows.append(_row(session, spaces))
        yield None
    return rows


def _opened(session: Session) -> Work[list[answers.OpenedSpaceRow]]:
    """The first spaces that a session has opened."""
    rows: list[answers.OpenedSpaceRow] = []
    left = SESSION_SHARDS_MAX
    for space in list(session.spaces.values()):
        opened = session.shards.get(space.number, 0)  # none if the session has just ended
        left -= opened.bit_count()
        if rows and left < 0:
            break
        shards = [one for number, one in enumerate(space.shards) if opened >> number & 1]
        rows.append(
            answers.OpenedSpaceRow(
                space=space.label, model=space.identity.model,
                page_tokens=space.identity.page_tokens, scope=space.identity.scope,
                shards=[one.label for one in shards],
                windows={one.label: one.window_pages for one in shards if one.window_pages},
            )
        )  # fmt: skip
        yield None
    return rows


def _row(session: Session, spaces: list[answers.OpenedSpaceRow]) -> answers.SessionRow:
    return answers.SessionRow(
        name=session.name,
        engine=_engine(session.engine) if session.engine is not None else None,
        peer=session.remote,
        spaces=spaces,
        spaces_total=len(session.spaces),
        tenant=session.domain,
        used_bytes=session.used_bytes,
        quota_bytes=session.quota_bytes,
        prefill_s_per_token=session.prefill_s_per_token,
        processes=[
            answers.ProcessRow(
                pid=process.peer.pid,
                watched=process.peer.watched,
                lost=process.lost,
                leases=len(process.leases),
                expired_leases=sum(one.expired for one in process.leases.values()),
                puts=len(process.puts),
            )
            for process in islice(session.processes.values(), PROCESSES_MAX)
        ],
    )


def _engine(label: EngineLabel) -> answers.EngineRow:
    return answers.EngineRow(
        name=label.name, events=label.events or None, events_bind=label.events_bind or None,
        events_replay=label.events_replay or None, block_tokens=label.block_tokens or None,
    )  # fmt: skip
