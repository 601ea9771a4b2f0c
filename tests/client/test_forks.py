"""Goal: in a forked child, each object is reset, whatever becomes of the others."""

import weakref

from kvstore.client import forks


class Member:
    def __init__(self, *, fails: bool) -> None:
        self._fails = fails
        self.resets = 0

    def forked(self) -> None:
        self.resets += 1
        if self._fails:
            raise OSError("a descriptor")


def test_a_member_that_cannot_be_reset_does_not_keep_others_from_it(monkeypatch, caplog):
    members = [Member(fails=at % 2 == 0) for at in range(6)]
    monkeypatch.setattr(forks, "_members", weakref.WeakSet(members))
    monkeypatch.setattr(forks, "_forks", forks.generation())

    forks._in_child()

    assert [member.resets for member in members] == [1] * 6
    assert len([one for one in caplog.records if "was not reset" in one.message]) == 3
