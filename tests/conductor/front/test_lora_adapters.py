"""Goal: a request for a LoRA adapter goes where it is served, and is matched in its scope only."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from conductor.front import membership, served
from conductor.front.served import ADAPTERS_MAX, ServedReader
from conductor.routing.engines import LoraAdapter
from conductor.routing.naming import lora_of, own_domain
from conductor.routing.places import engine_worker, node_worker
from engine_adapters.vllm.names import names_of
from kvstore.engine.identity import chain_seed
from kvstore.engine.requests import weights_fingerprint
from kvstore.events.publisher import EventPublisher, StoredEvent
from kvstore.protocol.page import page_keys
from tests.conductor.fakes import Client, FakeEngine, like_vllm, serving
from tests.conductor.routing.test_prefixes import ONE, PAGE, SPACE, TOKENS, Cluster
from tests.loops import eventually, in_loop

LOOPBACK = "tcp://127.0.0.1:*"
PROMPT = "the quick brown fox"
BASE = ""
LORAS = ("sql", "law")


def weights(folder: Path, name: str) -> str:
    """A folder with the weights of an adapter."""
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "adapter_model.safetensors").write_bytes(name.encode())
    return str(folder / name)


def vllm_seed(lora: str, path: str, salt: str = "") -> bytes:
    """The seed of a request's keys, as the adapter for vLLM makes it."""
    adapter = SimpleNamespace(lora_name=lora, lora_path=path, lora_int_id=1) if lora else None
    request = SimpleNamespace(
        lora_request=adapter, cache_salt=salt or None, mm_features=[], prompt_embeds=None,
        resumable=False,
    )  # fmt: skip
    return chain_seed(names_of(request, strong_hashes=True, secret="").parts)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """An engine with two LoRA adapters, whose names are equally long, and its node."""
    cluster = Cluster()
    adapters = {}
    for name in LORAS:
        path = weights(tmp_path, name)
        adapters[name] = LoraAdapter(path, weights_fingerprint(path))
    info = cluster.engine(shards=(ONE,), adapters=adapters)
    cluster.follows(node_worker("n"))
    cluster.follows(engine_worker("e"), own_domain(info))
    return cluster


def own_blocks(cluster: Cluster, lora: str, salt: str = "") -> None:
    """The engine publishes the prompt's first blocks as vLLM does."""
    keys = ([lora] if lora else []) + ([salt] if salt else [])
    rest = [[lora]] if lora else [None]
    fields = {"lora_id": LORAS.index(lora) + 1, "lora_name": lora} if lora else {}
    extra = [keys or None, *rest * 2]
    cluster.blocks(engine_worker("e"), 3, extra_keys=extra, **fields)


def node_pages(cluster: Cluster, tmp_path: Path, lora: str, salt: str = "") -> None:
    """The node has pages that the engine has stored there."""
    seed = vllm_seed(lora, str(tmp_path / lora), salt)
    keys = [bytes(key) for key in page_keys(TOKENS, PAGE, seed=seed)]
    cluster.tell(
        node_worker("n"), block_hashes=keys[:5], block_size=PAGE, medium="CPU", space=SPACE,
        shard=0, shard_digest=ONE[:16],
    )  # fmt: skip


@pytest.mark.parametrize("salt", ["", "sql"])
@pytest.mark.parametrize("lora", [BASE, *LORAS])
def test_a_prompt_meets_the_blocks_and_pages_of_its_own_adapter_only(
    cluster: Cluster, tmp_path: Path, lora: str, salt: str
) -> None:
    own_blocks(cluster, lora, salt)
    node_pages(cluster, tmp_path, lora, salt)
    for asked in (BASE, *LORAS):
        for other in {"", salt, "law"}:
            found = cluster.prefix(salt=other, model=asked or "m")[:3]
            same = (asked, other) == (lora, salt)
            assert found == ((6, 5 * PAGE, 5 * PAGE) if same else (0, 0, 0)), (asked, other)


def test_weights_that_have_changed_or_cannot_be_seen_are_others(
    cluster: Cluster, tmp_path: Path
) -> None:
    own_blocks(cluster, "sql")
    node_pages(cluster, tmp_path, "sql")
    path = str(tmp_path / "sql")
    for known in (
        LoraAdapter(path, None), LoraAdapter(None, None), LoraAdapter(path, ""),
        LoraAdapter(path + "/", weights_fingerprint(path)), LoraAdapter(path, "ab" * 16),
    ):  # fmt: skip
        cluster.engine(shards=(ONE,), adapters={"sql": known})
        assert cluster.prefix(model="sql")[:3] == (6, 0, 6), known
    cluster.engine(shards=(ONE,), adapters={"sql": LoraAdapter(path, weights_fingerprint(path))})
    assert cluster.prefix(model="sql").node == 5 * PAGE


def test_a_lora_of_which_only_the_id_is_known_is_no_adapter_of_that_name(cluster: Cluster) -> None:
    cluster.engine(shards=(ONE,), adapters={"1": LoraAdapter()})
    cluster.blocks(engine_worker("e"), 3, lora_id=1)
    assert cluster.prefix(model="1")[:3] == (0, 0, 0)
    assert cluster.prefix()[:3] == (0, 0, 0)


def test_what_is_expected_of_an_adapter_is_not_expected_of_the_model(cluster: Cluster) -> None:
    assert cluster.prefix(model="sql").usable == 0
    cluster.view.expect(1, "e", 0, 1.0, 9.0)
    cluster.at(1.0)
    assert cluster.prefix(model="sql").usable == len(TOKENS)
    assert cluster.prefix(model="law").usable == cluster.prefix().usable == 0


def test_a_model_of_an_adapters_name_is_the_model(cluster: Cluster) -> None:
    cluster.engine("other", node=None, model="n", adapters={"m": LoraAdapter()})
    assert [one.info.id for one in cluster.registry.of_model("m")] == ["e"]
    assert cluster.registry.adapters() == {"law": "m", "sql": "m"}


def test_prefix_keys_and_tokens_of_an_adapter_match_alike(cluster: Cluster, tmp_path: Path) -> None:
    own_blocks(cluster, "sql")
    node_pages(cluster, tmp_path, "sql")
    keys = page_keys(TOKENS, PAGE, seed=vllm_seed("sql", str(tmp_path / "sql")))
    plain = page_keys(TOKENS, PAGE)
    by_name, as_model, of_base = (
        cluster.view.match("m", [TOKENS], "sql")[0], cluster.view.match("sql", [TOKENS])[0],
        cluster.view.match("m", [TOKENS])[0],
    )  # fmt: skip
    assert by_name == as_model
    assert {(one.worker, one.medium, one.tokens) for one in by_name} == {
        ("engine/e", "GPU", 6), ("engine/e", "EXPECTED", 0), ("node/n", "CPU", 20),
    }  # fmt: skip
    assert {one.tokens for one in of_base} == {0}
    batch = cluster.view.match("m", [keys, TOKENS, plain[:2], keys[:3]])
    told = [{(one.worker, one.tokens) for one in matches} for matches in batch]
    assert told == [
        {("node/n", 20)}, {("engine/e", 0), ("node/n", 0)}, {("node/n", 0)}, {("node/n", 12)}
    ]  # fmt: skip
    assert cluster.view.match("m", [TOKENS], "unknown") == [[]]


async def predicted(client: Client, model: str) -> tuple[str, int]:
    """Which engine a prompt went to, and what was predicted of it."""
    status, answer, headers = await client.complete(PROMPT, model=model)
    assert status == 200, answer
    [attempt] = (await client.decision(headers["X-Request-Id"]))["attempts"]
    return attempt["prefill"], attempt["predicted_hit_tokens"]


def told(lora: str | None, first: int) -> StoredEvent:
    """Three blocks of the prompt, as an engine with hashes of its own publishes them."""
    return StoredEvent(
        block_hashes=[first, first + 1, first + 2], parent_block_hash=None,
        token_ids=list(PROMPT.encode())[:12], block_size=4, medium="GPU", lora_name=lora,
    )  # fmt: skip


@in_loop
async def test_a_decision_predicts_no_hit_of_the_models_blocks_for_an_adapter() -> None:
    plain, serves = like_vllm("plain"), like_vllm("serves")
    plain.adapters, serves.adapters = {}, {"sql": "/loras/sql", "law": "/loras/law"}
    with EventPublisher(LOOPBACK, LOOPBACK, topic=b"kv-events@serves@aa") as publisher:
        async with serving(policy={"name": "longest-prefix"}) as client:
            for engine in (plain, serves):
                await engine.start()
            try:
                await client.register(plain)
                entry = {
                    "id": "serves", "role": "mixed", "url": serves.url,
                    "events": publisher.bound_endpoint,
                    "events_replay": publisher.bound_replay_endpoint,
                }  # fmt: skip
                assert (await client.operate("/v1/engines", entry))[0] == 201
                publisher.publish([told(None, 10)])
                await eventually(lambda: client.entries == 3)
                await eventually(lambda: client.is_current("engine/serves"))
                assert await predicted(client, "sql") == ("serves", 0)
                assert await predicted(client, "m") == ("serves", 12)
                publisher.publish([told("law", 20)])
                present = client.conductor.index.present
                await eventually(lambda: present().worker("engine/serves").pages["GPU"] == 6)
                assert await predicted(client, "law") == ("serves", 12)
                assert [body["model"] for body in serves.requests] == ["sql", "m", "law"]
                assert not plain.requests
            finally:
                for engine in (plain, serves):
                    await engine.stop()


@in_loop
async def test_an_adapter_is_served_as_long_as_an_engine_lists_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "_READ_S", 0.02)
    first, second = like_vllm("first"), like_vllm("second")
    first.adapters, second.adapters = {"sql": "/loras/sql"}, {}
    async with serving(first, second) as client:
        listed = (await client.get("/v1/models"))[1]["data"]
        assert listed == [
            {"id": "m", "object": "model"}, {"id": "sql", "object": "model", "parent": "m"}
        ]  # fmt: skip
        for _ in range(3):
            assert (await client.complete(model="sql"))[0] == 200
        assert (len(first.requests), len(second.requests)) == (3, 0)
        status, answer, _ = await client.complete(model="law")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")

        registry = client.conductor.registry
        first.adapters, second.adapters = {}, {"law": "/loras/law"}
        await eventually(lambda: registry.adapters() == {"law": "m"})
        assert (await client.complete(model="law"))[0] == 200
        assert len(second.requests) == 1
        status, answer, _ = await client.complete(model="sql")
        assert (status, answer["error"]["param"]) == (404, "model")
        assert (await client.post("/v1/completions", {"prompt": "x"}))[0] == 200, "the model"


@in_loop
async def test_an_engine_that_is_registered_with_an_adapter_as_its_model_serves_it() -> None:
    engine = like_vllm("e")
    engine.adapters = {"sql": "/loras/sql"}
    async with serving() as client:
        await engine.start()
        try:
            entry = {"id": "e", "role": "mixed", "url": engine.url, "model": "sql"}
            assert (await client.operate("/v1/engines", entry))[0] == 201
            info = client.conductor.registry.get("e").info
            assert (info.model, lora_of(info, "sql")) == ("sql", "sql")
            assert (await client.get("/v1/models"))[1]["data"] == [{"id": "sql", "object": "model"}]
            assert (await client.complete(model="sql"))[0] == 200
            assert (await client.complete(model="m"))[0] == 404
            engine.models_status = 500
            assert (await client.operate("/v1/engines", entry))[0] == 201
            assert client.conductor.registry.get("e").info.adapters == info.adapters
        finally:
            await engine.stop()


@in_loop
async def test_a_list_of_models_that_cannot_be_used_changes_nothing() -> None:
    engine = like_vllm("e")
    engine.adapters = {"m": "/as/the/model", "sql": {"no": "path"}, "law": "x" * 5_000, "ok": "\0"}
    async with serving(engine) as client:
        info = client.conductor.registry.get("e").info
        assert info.model == "m"
        assert info.adapters == {
            "sql": LoraAdapter(), "law": LoraAdapter(), "ok": LoraAdapter("\0", "")
        }  # fmt: skip
        engine.adapters = {f"a{number}": None for number in range(ADAPTERS_MAX + 1)}
        await client.register(engine)
        assert len(client.conductor.registry.get("e").info.adapters) == ADAPTERS_MAX


class _Listed:
    """Answers as an engine's ``GET /v1/models``."""

    async def get(self, _engine: str, url: str, _timeout_s: float) -> bytes:
        name = url.removeprefix("http://").removesuffix("/v1/models")
        return b'{"data":[{"id":"%b","parent":"m","root":"/%b"}]}' % ((name.encode(),) * 2)


@in_loop
async def test_a_file_system_that_hangs_delays_nobody_and_holds_one_thread() -> None:
    gate, asked = threading.Event(), []

    def hangs(path: str) -> str:
        asked.append(path)
        gate.wait()
        return "ab"

    reader = ServedReader(_Listed(), 1.0, hangs)  # type: ignore[arg-type]
    async with asyncio.timeout(10):
        found = await asyncio.gather(*(reader.read("e", f"http://{n}") for n in ("x", "y")))
    assert [one.adapters for one in found] == [
        {"x": LoraAdapter("/x", None)}, {"y": LoraAdapter("/y", None)}
    ]  # fmt: skip
    assert asked == ["/x"]
    gate.set()
    for name in ("x", "y", "x"):
        served = await reader.read("e", f"http://{name}")
        assert served.adapters == {name: LoraAdapter(f"/{name}", "ab")}
    assert asked == ["/x", "/y"], "what is known is not read again soon"


async def weights_of(reader: ServedReader, name: str) -> str | None:
    told = await reader.read("e", f"http://{name}")
    return told.adapters[name].weights


@in_loop
async def test_adapters_that_are_not_read_in_time_are_read_when_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served, "_WEIGHTS_S", 0.0)
    asked: list[str] = []
    reader = ServedReader(_Listed(), 1.0, lambda path: asked.append(path) or "ab")  # type: ignore[arg-type]
    paths = {f"/{number}" for number in range(80)}

    assert await reader._weights(paths) == {}
    await eventually(lambda: len(asked) == 80)

    assert set(asked) == paths


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [RecursionError, KeyError])
@in_loop
async def test_an_adapter_whose_reading_fails_in_any_way_keeps_no_other_from_being_read(
    error: type[Exception],
) -> None:
    def fails(path: str) -> str:
        if path == "/x":
            raise error
        return "ab"

    reader = ServedReader(_Listed(), 1.0, fails)  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        assert await weights_of(reader, "x") is None
        while await weights_of(reader, "y") != "ab":
            pass


@in_loop
async def test_a_file_system_that_hangs_for_long_delays_no_other_and_holds_few_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served, "_LATE_S", 0.0)
    monkeypatch.setattr(served, "_THREADS_MAX", 3)
    gate, asked = threading.Event(), []

    def hangs(path: str) -> str:
        asked.append(path)
        if path != "/y":
            gate.wait()
        return "ab"

    reader = ServedReader(_Listed(), 1.0, hangs)  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(30):
            assert await weights_of(reader, "h1") is None
            assert await weights_of(reader, "h2") is None
            while await weights_of(reader, "y") != "ab":
                pass
            for name in ("h3", "h4", "h1"):
                assert await weights_of(reader, name) is None
        assert asked == ["/h1", "/h2", "/y", "/h3"]
    finally:
        gate.set()
    async with asyncio.timeout(30):
        for name in ("h1", "h4"):
            while await weights_of(reader, name) != "ab":
                pass


@in_loop
async def test_an_engine_that_describes_itself_has_no_adapters() -> None:
    async with serving(FakeEngine("e", "mixed")) as client:
        assert client.conductor.registry.adapters() == {}
