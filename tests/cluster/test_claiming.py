"""Goal: a node takes the name of the dead, never that of the living."""

import string
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvstore.cluster.claiming import (
    PUT_MAX,
    AskThere,
    NameClaim,
    OwnRecord,
    Presence,
    PutRecord,
    RefuseName,
    TryLater,
)
from kvstore.cluster.records import NodeRecord, write_record

PLACES = ("10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1")


@dataclass
class Contender:
    """A process that says it is node `a`; only one at a time has an endpoint's socket."""

    claim: NameClaim
    joined: bool = False

    @property
    def record(self) -> NodeRecord:
        return self.claim.record


class Name(RuleBasedStateMachine):
    """Processes that want one name, the store's record of it, and which endpoints answer."""

    def __init__(self) -> None:
        super().__init__()
        self.there: bytes = b""
        self.alive: dict[str, Contender] = {}
        self.cut: set[str] = set()
        self.boots = iter(range(1, 1_000))

    @rule(place=st.sampled_from(PLACES))
    def starts(self, place: str) -> None:
        """On a machine, in place of the process that was there."""
        record = NodeRecord(name="a", boot=bytes([next(self.boots) % 256] * 16), endpoint=place)
        self.alive[place] = Contender(NameClaim(record))

    @rule(place=st.sampled_from(PLACES))
    def dies(self, place: str) -> None:
        self.alive.pop(place, None)

    @rule(place=st.sampled_from(PLACES))
    def is_cut_off(self, place: str) -> None:
        self.cut ^= {place}

    @rule()
    def lease_runs_out(self) -> None:
        """Only that of who is dead or cut off: the others renew theirs."""
        owner = self.owner()
        if owner is None or owner.record.endpoint in self.cut:
            self.there = b""

    @precondition(lambda self: self.there)
    @rule()
    def is_emptied(self) -> None:
        self.there = b""

    @precondition(lambda self: not self.there)
    @rule(text=st.sampled_from([b"\xff", b"{}", b'{"name":"b"}']))
    def somebody_writes_nonsense(self, text: bytes) -> None:
        self.there = text

    @rule(place=st.sampled_from(PLACES))
    def looks(self, place: str) -> None:
        """A process that has joined sees what is under its name."""
        one = self.alive.get(place)
        if one is None or not one.joined or place in self.cut:
            return
        seen = one.claim.seen(self.there or None)
        assert (seen is OwnRecord.KEPT) == (self.there == one.claim.value)
        if seen is not OwnRecord.KEPT:
            one.joined = False

    @rule(places=st.permutations(PLACES))
    def all_try(self, places: list[str]) -> None:
        """Processes try to get the name, one after another."""
        for place in places:
            self.tries(place)

    def tries(self, place: str) -> None:
        """A process tries to get the name; nothing happens meanwhile."""
        one = self.alive.get(place)
        if one is None or one.joined or place in self.cut:
            return
        before, owner = self.there, self.owner()
        step = one.claim.there(self.there)
        if isinstance(step, AskThere):
            assert step.record.endpoint != place, "it asks itself"
            step = one.claim.answered(self.there, self.presence(step.record))
        if isinstance(step, PutRecord):
            assert step.expected == (self.there or None)
            self.there, one.joined = one.claim.value, True
        else:
            assert isinstance(step, RefuseName | TryLater)
        if owner is not None and owner is not one:
            assert not one.joined, "it took the name of a live node"
            assert self.there == before
            refused = isinstance(step, RefuseName)
            assert refused == (owner.record.endpoint not in self.cut), "refused by who is silent"
        if owner is None and before and not one.joined:
            nonsense = not before.startswith(b'{"boot"')
            silent = self.presence_of(before) is Presence.SILENT if not nonsense else False
            assert nonsense or silent, "it did not take the name of a dead node"

    def owner(self) -> Contender | None:
        """The live process whose record is there."""
        owners = [one for one in self.alive.values() if one.claim.value == self.there]
        return owners[0] if owners else None

    def presence(self, record: NodeRecord) -> Presence:
        if record.endpoint in self.cut:
            return Presence.SILENT
        there = self.alive.get(record.endpoint)
        lives = there is not None and there.record.boot == record.boot
        return Presence.LIVE if lives else Presence.DEAD

    def presence_of(self, value: bytes) -> Presence:
        endpoint = next(place for place in PLACES if place.encode() in value)
        return Presence.SILENT if endpoint in self.cut else Presence.DEAD


TestName = Name.TestCase
TestName.settings = settings(max_examples=150)


def node(boot: str, endpoint: str = PLACES[0], **more: str) -> NodeRecord:
    assert boot in string.ascii_letters
    return NodeRecord(name="a", boot=boot.encode() * 16, endpoint=endpoint, **more)  # type: ignore[arg-type]


def test_two_machines_that_say_one_address_do_not_take_the_name_in_turns() -> None:
    older, newer = NameClaim(node("x")), NameClaim(node("y"))
    assert newer.there(older.value) == PutRecord(older.value)
    assert isinstance(older.seen(newer.value), RefuseName)
    assert isinstance(older.there(newer.value), RefuseName)
    assert older.there(b"") == PutRecord(None), "the other one has ended"


def test_what_a_process_has_put_before_is_its_own_whatever_has_changed_in_it() -> None:
    claim = NameClaim(node("x"))
    first = claim.value
    claim.change(node("x", PLACES[1], state="draining"))
    assert claim.seen(first) is OwnRecord.LOST
    assert claim.there(first) == PutRecord(first)
    assert claim.seen(write_record(claim.record)) is OwnRecord.KEPT


def test_all_that_a_process_may_have_put_since_the_last_answer_is_its_to_take_away() -> None:
    claim = NameClaim(node("x"))
    first = claim.value
    claim.asked(first)
    claim.change(node("x", state="draining"))
    assert claim.put == (first,), "the new record is in no store yet"
    claim.asked(claim.value)
    claim.asked(claim.value)
    assert claim.put == (first, claim.value)
    claim.confirmed(claim.value)
    assert claim.put == (claim.value,)
    for number in range(2 * PUT_MAX):
        claim.asked(b"%d" % number)
    assert claim.put == tuple(b"%d" % number for number in range(PUT_MAX, 2 * PUT_MAX))
