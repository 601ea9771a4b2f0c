"""All routes besides completions: engines, nodes, decisions, health, metrics."""

import logging
import re
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from conductor.config import EngineEntry, NodeEntry
from conductor.front import answers
from conductor.front.advising import Adviser
from conductor.front.auth import Auth, CallerRole
from conductor.front.bodies import Bodies, TooManyBodiesError
from conductor.front.completions import Route
from conductor.front.matching import MatchBody
from conductor.front.membership import Membership
from conductor.front.metrics import Metrics
from conductor.front.nodes import NodeUnreadableError, RegisteredNode
from conductor.front.openai import (
    BadRequestError,
    ModelName,
    error_response,
    parse,
)
from conductor.front.parts import Parts
from conductor.front.prompts import Prompts
from conductor.front.proxy import Proxy
from conductor.front.upstream import EngineError, EngineRefusedError
from conductor.routing.choices import Candidate, Candidates
from conductor.routing.engines import Engine, EngineRegistry
from conductor.routing.joining import ADVICE
from conductor.routing.packing import PackedCandidates
from conductor.routing.prefixes import MediumMatch
from kvstore.index.face import INDEX_FAULTS
from kvstore.process.faults import Faults
from kvstore.protocol.page import PrefixKeys

DECISIONS_LIMIT_MAX: Final = 1000
_DECISIONS_LIMIT: Final = 20
_TOKENIZE_TRIES: Final = 3
"""Engines that are asked for tokens, one after another; each may use up its deadline."""

_log = logging.getLogger(__name__)


class _TokenizeBody(msgspec.Struct):
    prompt: str | msgspec.UnsetType = msgspec.UNSET
    messages: list[msgspec.Raw] | msgspec.UnsetType = msgspec.UNSET
    model: ModelName | None = None

    def __post_init__(self) -> None:
        """Refuse a body without anything to tokenise."""
        if self.prompt is msgspec.UNSET and self.messages is msgspec.UNSET:
            raise ValueError("prompt: needed, unless messages are given")


class Admin:
    """Handlers of these routes."""

    def __init__(
        self, parts: Parts, proxy: Proxy, auth: Auth, adviser: Adviser, bodies: Bodies
    ) -> None:
        self._bodies = bodies
        self._adviser = adviser
        self._registry: EngineRegistry = parts.registry
        self._prompts: Prompts = parts.prompts
        self._metrics: Metrics = parts.metrics
        self._parts = parts
        self._membership: Membership = parts.membership
        self._proxy = proxy
        self._auth = auth

    def routes(self) -> list[web.RouteDef]:
        """All routes."""

        def asks(handler: Handler) -> Handler:
            return self._auth.needs(CallerRole.CLIENT, handler)

        def reads(handler: Handler) -> Handler:
            return self._auth.needs(CallerRole.READ, handler)

        def operates(handler: Handler) -> Handler:
            return self._auth.needs(CallerRole.OPERATE, handler)

        return [
            web.get("/health", self._health),
            web.get("/readyz", self._ready),
            web.post(Route.COMPLETIONS, asks(self._proxy.completions)),
            web.post(Route.CHAT, asks(self._proxy.chat_completions)),
            web.get("/v1/models", asks(self._models)),
            web.post("/tokenize", asks(self._tokenize)),
            web.get("/metrics", reads(self._scrape)),
            web.get("/v1/engines", reads(self._engines)),
            web.get("/v1/engines/{id}", reads(self._engine)),
            web.get("/v1/nodes", reads(self._nodes)),
            web.get("/v1/index", reads(self._index)),
            web.get("/v1/advice", reads(self._advice)),
            web.post("/v1/index/match", reads(self._match)),
            web.get("/v1/decisions", reads(self._decisions)),
            web.get("/v1/decisions/{id}", reads(self._decision)),
            web.post("/v1/engines", operates(self._register)),
            web.delete("/v1/engines/{id}", operates(self._remove)),
            web.post("/v1/nodes", operates(self._add_node)),
            web.delete("/v1/nodes/{id}", operates(self._remove_node)),
        ]

    async def _models(self, _: web.Request) -> web.Response:
        data = [answers.ListedModel(id=model) for model in self._registry.models()]
        for name, model in self._registry.adapters().items():
            data.append(answers.ListedModel(id=name, parent=model))
        return _json(answers.Models(data=data))

    async def _tokenize(self, http: web.Request) -> web.Response:
        async with self._bodies.of(http) as raw:
            return await self._tokenized(raw)

    async def _tokenized(self, raw: bytes) -> web.Response:
        body = parse(raw, _TokenizeBody)
        if body.model is not None and not self._registry.of_model(body.model):
            return _not_served("model", body.model)
        models = [body.model] if body.model is not None else self._registry.models()
        askable = (one for model in models for one in self._prompts.askable(model))
        for engine_id in islice(askable, _TOKENIZE_TRIES):
            try:
                answer = await self._prompts.ask(engine_id, raw)
            except EngineError as error:
                if error.sick:
                    self._membership.broke(engine_id)
                continue
            return web.Response(body=answer, content_type="application/json")
        return error_response(503, "no_engine", "no engine answers", retry_after_s=1)

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        if self._proxy.closing:
            return error_response(503, "shutting_down", "shutting down", retry_after_s=1)
        if not self._registry.can_serve():
            what = "no mixed engine, and no pair of a prefill and a decode engine, is alive"
            return error_response(503, "no_engine", what, retry_after_s=1)
        return web.json_response({"status": "ready", "models": self._registry.models()})

    async def _scrape(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.text(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _advice(self, _: web.Request) -> web.Response:
        return _json(answers.ModelAdvice(models=await self._adviser.look()))

    async def _engines(self, _: web.Request) -> web.Response:
        return _json(
            answers.RegisteredEngines(engines=[self._row(engine) for engine in self._registry])
        )

    async def _engine(self, http: web.Request) -> web.Response:
        engine = self._registry.get(http.match_info["id"])
        return _json(self._row(engine)) if engine else _unknown("engine")

    def _row(self, engine: Engine) -> answers.EngineRow:
        dispatcher, info = self._parts.dispatcher, engine.info
        others = dispatcher.loads.others.reported(info.id)
        gaps = [(str(gap), *ADVICE[gap]) for gap in self._membership.gaps(engine)]
        return answers.EngineRow(
            **msgspec.structs.asdict(info),
            state=engine.health.state,
            failures=engine.health.failures,
            in_flight=dispatcher.in_flight(info.id),
            others=answers.OthersRow(**others._asdict()) if others is not None else None,
            gaps=[answers.GapRow(gap=gap, means=means, do=do) for gap, means, do in gaps],
        )

    async def _register(self, http: web.Request) -> web.Response:
        async with self._bodies.of(http) as raw:
            entry = parse(raw, EngineEntry)
        try:
            info = await self._membership.register(entry)
        except EngineError as error:
            return error_response(502, "engine_unreachable", f"url: {error}", field="url")
        return _json(info, status=201)

    async def _remove(self, http: web.Request) -> web.Response:
        engine_id = http.match_info["id"]
        if self._parts.registry.get(engine_id) is None:
            return _unknown("engine")
        self._parts.queue.forget(engine_id)  # before anything is decided without it
        self._membership.remove(engine_id)
        _log.info("engine %s was removed by %s", engine_id, http.remote)
        self._metrics.forget(engine_id)
        return web.Response(status=204)

    async def _nodes(self, _: web.Request) -> web.Response:
        cluster = self._membership.cluster
        rows = [_node_row(node) for node in self._membership.nodes]
        rows += [
            answers.NodeRow(id=node_id, source="membership", why_not=why.why, do=why.do)
            for node_id, why in sorted(cluster.left_out.items())
        ]
        return _json(answers.FollowedNodes(nodes=rows, membership=cluster.state()))

    async def _add_node(self, http: web.Request) -> web.Response:
        async with self._bodies.of(http) as raw:
            entry = parse(raw, NodeEntry)
        try:
            node = await self._membership.nodes.register(entry)
        except NodeUnreadableError as error:
            return error_response(502, "node_unreachable", f"url: {error}", field="url")
        where = entry.url or entry.events
        _log.info("node %s at %s was registered by %s", node.id, where, http.remote)
        return _json(_node_row(node), status=201)

    async def _remove_node(self, http: web.Request) -> web.Response:
        node_id = http.match_info["id"]
        node = self._membership.nodes.get(node_id)
        if node is None:
            return _unknown("node")
        if node.source == "membership":
            what = "it is followed because it is in the store of its cluster; stop the node"
            raise BadRequestError("id", what)
        self._membership.nodes.remove(node_id)
        _log.info("node %s was removed by %s", node_id, http.remote)
        return web.Response(status=204)

    async def _index(self, _: web.Request) -> web.Response:
        index = self._parts.prefix_index
        table, report = index.present()
        counts = index.fault_counts
        return _json(
            answers.IndexState(
                **msgspec.structs.asdict(report),
                up=table is not None,
                restarts=index.restarts,
                faults={cause: counts.get(cause, 0) for cause in INDEX_FAULTS},
            )
        )

    async def _match(self, http: web.Request) -> web.Response:
        async with self._bodies.of(http) as raw:
            body = parse(raw, MatchBody)
        asked = body.asked()
        engines = self._registry.of_model(body.model)
        if not engines:
            return _not_served("model", body.model)
        if body.lora and not any(body.lora in one.info.adapters for one in engines):
            return _not_served("lora", body.lora)
        found = self._parts.prefixes.match(body.model, asked, body.lora, body.cache_salt)
        rows = [_match_row(*one) for one in zip(asked, found, strict=True)]
        return _json(rows[0] if body.prompts is None else answers.Matches(prompts=rows))

    async def _decisions(self, http: web.Request) -> web.Response:
        text = http.query.get("limit", str(_DECISIONS_LIMIT))
        if not re.fullmatch("[0-9]{1,4}", text) or not 1 <= int(text) <= DECISIONS_LIMIT_MAX:
            raise BadRequestError("limit", f"must be in 1..{DECISIONS_LIMIT_MAX}")
        return _json(answers.Decisions(decisions=self._parts.decisions.newest(int(text))))

    async def _decision(self, http: web.Request) -> web.Response:
        decision = self._parts.decisions.get(http.match_info["id"])
        return _json(decision) if decision else _unknown("decision")


def _json(value: msgspec.Struct, status: int = 200) -> web.Response:
    body = msgspec.json.encode(value, enc_hook=_encodable)
    return web.Response(status=status, body=body, content_type="application/json")


def _encodable(value: object) -> list[Candidate]:
    """Candidates are kept in columns, and shown one by one."""
    assert isinstance(value, Candidates | PackedCandidates)
    return list(value)


def _node_row(node: RegisteredNode) -> answers.NodeRow:
    """A node without its tokens."""
    view, why = node.view, node.why_not()
    sessions = view.sessions if view is not None else []
    return answers.NodeRow(
        id=node.id,
        source=node.source,
        cluster=view.cluster if view is not None else None,
        url=node.entry.url,
        events=node.events,
        events_replay=node.events_replay,
        boot=view.boot if view is not None else None,
        engines=sorted({one.engine.name for one in sessions if one.engine is not None}),
        unnamed_sessions=view.unnamed if view is not None else None,
        why_not=why[0] if why is not None else None,
        do=why[1] if why is not None else None,
    )


def _not_served(field: str, name: str) -> web.Response:
    what = f"{field}: {name!r} is not served here"
    return error_response(404, "model_not_found", what, field=field)


def _match_row(
    asked: Sequence[int] | PrefixKeys, matches: list[MediumMatch]
) -> answers.PromptMatch:
    if isinstance(asked, PrefixKeys):
        return answers.PromptMatch(keys=len(asked), matches=matches)
    return answers.PromptMatch(prompt_tokens=len(asked), matches=matches)


def _unknown(what: str) -> web.Response:
    return error_response(404, f"unknown_{what}", f"this {what} is unknown", field="id")


def errors_as_json(faults: Faults, broken: Callable[[AssertionError], None]) -> Middleware:
    """A middleware that returns errors in OpenAI's format.

    Args:
        faults: counts internal errors.
        broken: called when an assertion failed, because the state cannot be trusted any more.
    """

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except BadRequestError as error:
            return error_response(400, "invalid_value", str(error), field=error.field)
        except TooManyBodiesError:
            faults.note("bodies", f"{request.path[:200]!r}: there is no room for its body")
            what = "the bodies of all requests together are too large now"
            return error_response(503, "bodies_full", what, retry_after_s=1)
        except EngineRefusedError as error:
            return web.Response(
                status=error.status, body=error.body, content_type=error.content_type
            )
        except web.HTTPException as error:
            what = error.reason
            if error.status == 404 and error is request.match_info.http_exception:
                what = f"no such path here; POST to {Route.CHAT} or {Route.COMPLETIONS}"
            return error_response(error.status, "http", what)
        except AssertionError as error:
            broken(error)
            raise
        except ConnectionError:
            raise  # the client has disconnected
        except Exception as error:
            faults.note("internal", f"{request.method} {request.path[:200]!r}: {error!r}")
            return error_response(500, "internal", "an internal error; see the Conductor's log")

    return answer
