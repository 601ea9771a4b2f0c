"""Sends one assigned request to its engines, and the answer to its client.

A request is sent to one engine, or to a pair, as its protocol says
(:data:`conductor.protocols.PROTOCOLS`). In turn, the prefill engine answers first, and the KV waits
until the decode engine has a place; at once, both get the request, and the decode engine's answer
is relayed.
"""

import secrets
from collections.abc import Awaitable
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from conductor.front.openai import refuses_transfer
from conductor.front.pairs import PairTasks
from conductor.front.parts import Parts
from conductor.front.relaying import Half, Relay
from conductor.front.runs import Run
from conductor.front.upstream import EngineError, EngineRefusedError
from conductor.front.waiting import Lease
from conductor.protocols import PROTOCOLS
from conductor.protocols.base import Fields, PairProtocol, PairRequest, hinted
from conductor.protocols.hints import fetch_hint
from conductor.routing.choices import Assign, Plan
from conductor.routing.decisions import Attempt, Measured
from conductor.routing.engines import Health, Role
from kvstore.handoff.rooms import BOOT_MAX, RoomNumbers
from kvstore.protocol.errors import CapacityError

_EXPECTED_S: Final = 10.0
"""For how long an engine is expected to have a prompt that it got, until its events tell of it."""
_UNPUBLISHED_S: Final = 120.0
"""Likewise, an engine without events."""
_BOOT_BITS: Final = BOOT_MAX.bit_length()

_Result = TypeVar("_Result")


class Sender:
    """Sends requests to engines.

    Args:
        parts: shared with the rest of the service.
        relay: asks single engines.
        push_s: deadline for a prefill engine to end its push after the decode engine's answer.
    """

    def __init__(self, parts: Parts, relay: Relay, push_s: float) -> None:
        self._parts = parts
        self._relay = relay
        self._rooms = RoomNumbers(secrets.randbits(_BOOT_BITS))
        self._pairs = PairTasks(parts.metrics, parts.membership, push_s)

    async def close(self) -> None:
        """End the requests to engines that outlast the answers to their clients."""
        await self._pairs.close()

    async def send(
        self, run: Run, lease: Lease, assign: Assign, attempt: Attempt
    ) -> web.StreamResponse:
        """Send the request to the engines of one assignment; returns the client's response.

        Raises:
            EngineError: an engine failed; before the first byte, if ``run.response`` is None.
            EngineRefusedError: an engine refused the request as invalid.
            RejectedError: no decode engine had a place for its KV in time.
        """
        for engine_id, rank in assign.ranks.items():
            self._expect(run.number, engine_id, rank)
        run.prefill_done = run.handed_at = None
        if assign.plan is Plan.ALONE:
            return await self._alone(run, assign, attempt)
        protocol = PROTOCOLS[assign.protocol]
        pair = PairRequest(
            run.body.fields,
            self._room(),
            self._relay.url(assign.prefill),
            self._relay.url(assign.decode),
            self._registry_url(assign.prefill) if protocol.over is not None else "",
            prefill=assign.prefill,
            decode=assign.decode,
            hint=self._hint(run, assign),
        )
        attempt.way = protocol.way
        if assign.at_once:
            attempt.room = pair.room
            return await self._at_once(run, lease, assign, attempt, protocol, pair)
        return await self._in_turn(run, lease, assign, attempt, protocol, pair)

    async def _alone(self, run: Run, assign: Assign, attempt: Attempt) -> web.StreamResponse:
        """Ask one engine."""
        protocol = PROTOCOLS[assign.protocol]
        hint = self._hint(run, assign)
        body = run.body.body() if hint is None else _encoded(hinted(run.body.fields, hint))
        if protocol.alone is not None:
            body = _encoded(protocol.alone(run.body.fields, assign.decode))
        half = Half(assign.decode, assign.ranks[assign.decode], body)
        try:
            return await self._relay.serve_apart(run, half, attempt)
        except EngineRefusedError as error:
            if protocol.misses is None or not protocol.misses(error.body):
                raise
            raise EngineError(assign.decode, "is not known any more", sick=False) from error

    async def _in_turn(
        self, run: Run, lease: Lease, assign: Assign, attempt: Attempt,
        protocol: PairProtocol, pair: PairRequest,
    ) -> web.StreamResponse:  # fmt: skip
        """Ask the decode engine when the prefill engine has answered."""
        assert protocol.prefill is not None
        first = Half(
            assign.prefill, assign.ranks[assign.prefill], _encoded(protocol.prefill(pair)), protocol
        )
        started = self._parts.clock()
        try:
            transfer = await _if_understood(self._relay.prefill(run, first, attempt))
        finally:
            run.elsewhere_s += self._parts.clock() - started
        started = self._parts.clock()
        try:
            measured = attempt.prefilled or Measured()
            chosen = await lease.handed_over(measured.hit_tokens, measured.restored)
        finally:
            attempt.decode_queue_s = self._parts.clock() - started
            run.waited(attempt.decode_queue_s)
        if transfer is not None:
            run.handed_at = self._parts.clock()
        if chosen.decode != assign.decode:
            attempt.decode = chosen.decode
            self._expect(run.number, chosen.decode, chosen.rank)
        pair = pair._replace(decode_url=self._relay.url(chosen.decode), decode=chosen.decode)
        body = _encoded(protocol.decode(pair, transfer))
        second = Half(chosen.decode, chosen.rank, body, protocol)
        try:
            return await self._relay.serve_apart(run, second, attempt)
        except EngineRefusedError as error:
            if transfer is None or not refuses_transfer(error.body):
                raise
        # It cannot use what the prefill engine has answered: it is to compute the prompt itself.
        run.handed_at = None
        second = second._replace(body=_encoded(protocol.decode(pair, None)))
        return await self._relay.serve_apart(run, second, attempt)

    async def _at_once(
        self, run: Run, lease: Lease, assign: Assign, attempt: Attempt,
        protocol: PairProtocol, pair: PairRequest,
    ) -> web.StreamResponse:  # fmt: skip
        """Ask both engines; if either fails before the first byte, neither goes on."""
        second = Half(
            assign.decode, assign.ranks[assign.decode], _encoded(protocol.decode(pair, None)),
            protocol,
        )  # fmt: skip
        if protocol.prefill is None:
            run.prefill_done = lambda: lease.release(assign.prefill)
            return await self._through_decode(run, assign, attempt, second, protocol)
        first = Half(
            assign.prefill, assign.ranks[assign.prefill], _encoded(protocol.prefill(pair)), protocol
        )
        return await self._pairs.run(
            assign.prefill,
            lease.detach(assign.prefill),
            _if_understood(self._push(run, first, attempt)),
            _if_understood(self._relay.serve(run, second, attempt)),
            lambda: run.response is not None,
        )

    async def _through_decode(
        self, run: Run, assign: Assign, attempt: Attempt, half: Half, protocol: PairProtocol
    ) -> web.StreamResponse:
        """Ask the decode engine, which asks the prefill engine.

        Raises:
            EngineError: either failed, as far as the answer tells: of a decode engine that answers,
                the prefill engine is believed to be the reason, while there is another one.
        """
        try:
            return await self._relay.serve_apart(run, half, attempt)
        except EngineRefusedError as error:
            if protocol.misses is None or not protocol.misses(error.body):
                raise
            failure = EngineError(error.engine, str(error), sick=False, status=error.status)
        except EngineError as error:
            failure = error
        answered = failure.status and not failure.sick
        if answered and len(run.decision.attempts) % 2 and self._others(run, assign.prefill):
            failure = EngineError(assign.prefill, f"asked by {failure}", sick=False)
        raise failure

    def _others(self, run: Run, engine_id: str) -> bool:
        """Whether a further engine of the model could compute prompts."""
        return any(
            one.info.id != engine_id
            and one.info.role is not Role.DECODE
            and one.health.state is not Health.DEAD
            for one in self._parts.registry.of_model(run.decision.model)
        )

    async def _push(self, run: Run, half: Half, attempt: Attempt) -> None:
        """Ask the prefill engine of a pair that is asked at once; it has pushed when it answers."""
        await self._relay.prefill(run, half, attempt)
        if run.response is None:  # the decode engine has the KV, and has not told us
            prefilled = attempt.prefilled
            self._parts.queue.began(run.number, prefilled.hit_tokens if prefilled else None)

    def _room(self) -> int:
        try:
            return self._rooms.draw()
        except CapacityError:
            self._rooms = RoomNumbers(secrets.randbits(_BOOT_BITS))
            return self._rooms.draw()

    def _expect(self, number: int, engine_id: str, rank: int | None) -> None:
        """Tell the index what an engine will have in its cache."""
        engine = self._parts.registry.get(engine_id)
        if engine is not None and rank is not None:
            now = self._parts.clock()
            events = engine.info.events or engine.info.events_bind
            until = now + (_EXPECTED_S if events else _UNPUBLISHED_S)
            self._parts.prefixes.expect(number, engine_id, rank, now, until)

    def _hint(self, run: Run, assign: Assign) -> msgspec.Raw | None:
        """Where the node of the engine that computes the prompt finds more of it; None = nowhere.

        If another node has more leading pages than the engine and its node have, and the policy did
        not find it faster to compute them.
        """
        engine = self._parts.registry.get(assign.prefill)
        takes = assign.peer_tokens and PROTOCOLS[assign.protocol].takes_hints
        if engine is None or not takes:
            return None
        node, keys = self._parts.prefixes.peer_pages(run.number, engine.info)
        return fetch_hint(run.number, node, keys) if keys else None

    def _registry_url(self, engine_id: str) -> str:
        """Where decode engines find a prefill engine that pushes.

        Raises:
            EngineError: it does not push any more: it registered again after it was chosen.
        """
        engine = self._parts.registry.get(engine_id)
        offer = engine.info.handoff.push if engine is not None and engine.info.handoff else None
        if offer is None or offer.registry is None:
            raise EngineError(engine_id, "does not push any more", sick=False)
        return offer.registry


def _encoded(fields: Fields) -> bytes:
    return msgspec.json.encode(fields)


async def _if_understood(answer: Awaitable[_Result]) -> _Result:
    """An answer of an engine; one that refuses what the Conductor adds is only not to be used.

    Raises:
        EngineError: it refuses the transfer parameters: it has changed since it registered.
    """
    try:
        return await answer
    except EngineRefusedError as error:
        if not refuses_transfer(error.body):
            raise
        what = f"refuses the handoff: {error.body[:200].decode(errors='replace')}"
        raise EngineError(error.engine, what, sick=False) from error
