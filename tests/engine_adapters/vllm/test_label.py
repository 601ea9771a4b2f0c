"""What a vLLM engine's processes say of their engine."""

from types import SimpleNamespace

import pytest

from engine_adapters.vllm.label import label_of, served_at, sources_of
from kvstore.engine.label import EngineSources

SERVER = "/venv/lib/vllm/entrypoints/openai/api_server.py"


@pytest.mark.parametrize(
    ("command", "address"),
    [
        ([SERVER, "--model", "m"], "*:8000"),
        ([SERVER, "--host", "10.0.0.1", "--port", "81"], "10.0.0.1:81"),
        ([SERVER, "--host=::1", "--port=81"], "[::1]:81"),
        ([SERVER, "--host", "0.0.0.0", "--port", "81"], "*:81"),
        ([SERVER, "--host", "::"], "*:8000"),
        (["/bin/vllm", "serve", "m", "--port", "81"], "*:81"),
        (["/bin/vllm", "bench", "m", "--port", "81"], ""),
        ([SERVER, "--port", "0"], ""),
        ([SERVER, "--port", "x"], ""),
        ([SERVER, "--port"], ""),
        ([SERVER, "--config", "serve.yaml"], ""),
        ([SERVER, "--uds=/run/vllm.sock"], ""),
        (["offline.py", "--port", "81"], ""),
        ([], ""),
    ],
)
def test_the_address_is_that_of_the_command_line_or_unknown(command, address) -> None:
    assert served_at(command) == address


def events(endpoint="tcp://*:5557", replay=None, **fields):
    plain = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint,
             "replay_endpoint": replay}  # fmt: skip
    return SimpleNamespace(**plain | fields)


@pytest.mark.parametrize(
    ("config", "rank", "expected"),
    [
        (events(), 0, EngineSources("tcp://*:5557")),
        (events(), 3, EngineSources("tcp://*:5560")),
        (events("tcp://[::]:5557", "tcp://*:5600"), 1,
         EngineSources("tcp://*:5558", "", "tcp://*:5601")),
        (events("ipc:///run/e", "ipc:///run/r"), 0,
         EngineSources("ipc:///run/e", "", "ipc:///run/r")),
        (events("tcp://10.0.0.1:5557"), 0, EngineSources("", "tcp://10.0.0.1:5557")),
        (events("inproc://e"), 0, EngineSources()),
        (events("tcp://*:0"), 0, EngineSources()),
        (events(enable_kv_cache_events=False), 0, EngineSources()),
        (events(publisher="null"), 0, EngineSources()),
        (None, 0, EngineSources()),
    ],
)  # fmt: skip
def test_followers_connect_where_vllm_listens_and_listen_where_it_connects(
    config, rank, expected
) -> None:
    assert sources_of(config, rank) == expected


def configured(rank=0, size=1, engine_id="id", instance_id="abcde"):
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id=engine_id),
        parallel_config=SimpleNamespace(
            data_parallel_index=rank, data_parallel_rank=0, data_parallel_size=size
        ),
        kv_events_config=events(),
        instance_id=instance_id,
    )


def test_processes_of_one_engine_are_one_and_two_engines_of_one_configuration_are_two() -> None:
    scheduler, worker = (label_of(configured(), "e", 16) for _ in range(2))
    other = label_of(configured(instance_id="fghij"), "e", 16)

    assert scheduler == worker
    assert scheduler.instance != other.instance
    assert scheduler.name == other.name == "e"


def test_the_data_parallel_rank_is_part_of_the_name(monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/vllm", "serve", "m", "--port", "81"])
    names = [label_of(configured(rank, 2), "", 16).name for rank in range(2)]

    assert names == ["*:81/dp0", "*:81/dp1"]
    assert label_of(configured(1, 1), "e", 16).name == "e/dp1", "of a model without experts"
    assert label_of(configured(1, 2), "e", 16).events == "tcp://*:5558"
    monkeypatch.setattr("sys.argv", ["offline.py"])
    assert label_of(configured(), "", 16) is None
