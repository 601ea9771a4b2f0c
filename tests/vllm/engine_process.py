"""One vLLM engine in a process of its own, run by the engine's environment, not the project's.

Reads commands from one descriptor and answers on another, one JSON object a line; its standard
output is vLLM's. The first command makes the engine, the others use it.
"""

import base64
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]
DEVICE_WORKS = "the device works"
"""What an engine ``on a late device`` says."""


class Engine:
    """What the commands work on."""

    def __init__(self) -> None:
        """Make nothing yet."""
        self.llm: Any = None

    def start(self, hooks: list[str], **arguments: Any) -> Answer:
        """Make the engine, after switching off what ``hooks`` names."""
        for hook in hooks:
            HOOKS[hook]()
        from vllm import LLM

        self.llm = LLM(disable_log_stats=False, **arguments)
        return {}

    def generate(self, prompts: list[Answer], max_tokens: int, **sampling: Any) -> Answer:
        """Answer requests at once: ``tokens``, perhaps ``salt``, ``transfer``, ``adapter``."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        inputs, parameters, adapters = [], [], []
        for prompt in prompts:
            one: Answer = {"prompt_token_ids": prompt["tokens"]}
            if prompt.get("salt"):
                one["cache_salt"] = prompt["salt"]
            inputs.append(one)
            folder = prompt.get("adapter")
            adapters.append(
                LoRARequest(folder, 1 + hash(folder) % 1000, folder) if folder else None
            )
            extra = {"kv_transfer_params": prompt["transfer"]} if prompt.get("transfer") else None
            parameters.append(
                SamplingParams(
                    max_tokens=max_tokens, ignore_eos=True, extra_args=extra,
                    **{"temperature": 0.0, **sampling},
                )
            )  # fmt: skip
        outputs = self.llm.generate(
            inputs, parameters, use_tqdm=False, lora_request=adapters if any(adapters) else None
        )
        return {
            "answers": [
                {
                    "tokens": list(output.outputs[0].token_ids),
                    "cached": output.num_cached_tokens,
                    "transfer": output.kv_transfer_params,
                    "finish": output.outputs[0].finish_reason,
                    "logprobs": [
                        [round_[token].logprob for token in sorted(round_)]
                        for round_ in output.outputs[0].logprobs or []
                    ],
                }
                for output in outputs
            ]
        }

    def settle(self) -> Answer:
        """Step until no job is in flight."""
        core = self.llm.llm_engine.engine_core.engine_core
        while core.scheduler.has_requests():
            self.llm.llm_engine.step()
        return {}

    def forget(self) -> Answer:
        """Empty the engine's own prefix cache."""
        assert self.llm.reset_prefix_cache(), "blocks are in use"
        return {}

    def metrics(self) -> Answer:
        """Every counter and gauge: name and labels besides the model's, to value."""
        from prometheus_client import REGISTRY

        found: Answer = {}
        for sample in (sample for family in REGISTRY.collect() for sample in family.samples):
            labels = [v for k, v in sample.labels.items() if k not in {"model_name", "engine"}]
            name = " ".join([sample.name.removesuffix("_total"), *labels])
            found[name] = found.get(name, 0) + sample.value
        return found

    def let_go(self) -> Answer:
        """End stuck loads."""
        _let_go.set()
        return {}

    def free_blocks(self) -> Answer:
        """How many of the engine's blocks nobody holds."""
        core = self.llm.llm_engine.engine_core.engine_core
        pool = core.scheduler.kv_cache_manager.block_pool
        return {"free": pool.get_num_free_blocks(), "all": pool.num_gpu_blocks}

    def device(self, *, stalled: bool = False, fails: int = 0, pause_s: float = 0.0) -> Answer:
        """Tell the hook ``on a late device``: do nothing more; fail so often; take so long a step.

        Returns:
            ``preempted``: requests that were preempted while the device had work.
        """
        late = _device["device"]
        late.stalled = stalled
        late.failures += [("run", RuntimeError("CUDA error: as told"))] * fails
        _device["told"].set()  # a pause that was told before ends
        _device.update(pause_s=pause_s, says=True, told=threading.Event())
        return {"preempted": _device["preempted"], "failures_left": len(late.failures)}

    def drafts(self) -> Answer:
        """What the hook ``keep drafts`` has kept since the last call."""
        kept = list(_drafts)
        _drafts.clear()
        return {"kept": kept}

    def guess(self, tokens: list[int]) -> Answer:
        """What the hook ``known drafts`` drafts from now on: tokens of a prompt and its answer."""
        _answers[:] = tokens
        return {}

    def policy(self) -> Answer:
        """What the engine does when pages cannot be loaded."""
        core = self.llm.llm_engine.engine_core.engine_core
        config = core.vllm_config.kv_transfer_config
        return {
            "policy": config.kv_load_failure_policy,
            "recomputes": core.scheduler.recompute_kv_load_failures,
        }

    def time_lookups(self, count: int, tokens: list[int]) -> Answer:
        """Seconds that each of so many calls of the connector's scheduler side takes."""
        from time import perf_counter

        from vllm import SamplingParams
        from vllm.v1.request import Request

        connector = self.llm.llm_engine.engine_core.engine_core.scheduler.connector
        seconds = []
        for number in range(count):
            request = Request(
                f"timed-{number}", tokens, SamplingParams(max_tokens=1), None, block_hasher=None
            )
            begin = perf_counter()
            connector.get_num_new_matched_tokens(request, 0)
            seconds.append(perf_counter() - begin)
            connector.request_finished(request, [])
        return {"seconds": seconds}

    def stop(self) -> Answer:
        """Shut the engine down as vLLM does."""
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        return {}


def _no_verification() -> None:
    import kvstore.client.loads

    kvstore.client.loads.VERIFY = False


def _failing_loads() -> None:
    """Every second load finds half of its pages."""
    from kvstore.client.shard_loads import ShardLoader
    from kvstore.client.space import Space

    calls = iter(range(1 << 30))

    def failing(real: Any) -> Any:
        def load(self: Any, *arguments: Any, **more: Any) -> int:
            pages: int = real(self, *arguments, **more)
            return pages // 2 if next(calls) % 2 == 0 else pages

        return load

    Space.load_pieces = failing(Space.load_pieces)  # type: ignore[method-assign]
    ShardLoader._batch = failing(ShardLoader._batch)  # type: ignore[method-assign]


_let_go = threading.Event()
"""Ends stuck loads."""


def _stuck_loads() -> None:
    """Loads take until they are let go."""
    from kvstore.client.shard_loads import ShardLoader
    from kvstore.client.space import Space

    def stuck(real: Any) -> Any:
        def load(self: Any, *arguments: Any, **more: Any) -> Any:
            assert _let_go.wait(60.0), "nobody let it go"
            return real(self, *arguments, **more)

        return load

    Space.load_pieces = stuck(Space.load_pieces)  # type: ignore[method-assign]
    ShardLoader._load_shards = stuck(ShardLoader._load_shards)  # type: ignore[method-assign]


def _overtaken_loads() -> None:
    """Loads by layers begin when nobody waits for them any more, and come whole all the same."""
    import kvstore.client.space

    real = kvstore.client.space.Space.load_pieces

    def load(self: Any, keys: Any, target: Any, shard: int, progress: Any, order: Any,
             *state: Any) -> int:  # fmt: skip
        if order == "segment":
            looks = iter(range(6000))
            while not progress.cancelled:
                assert next(looks, None) is not None, "nobody gave it up"
                _let_go.wait(0.01)
            progress = None
        return real(self, keys, target, shard, progress, order, *state)

    kvstore.client.space.Space.load_pieces = load  # type: ignore[method-assign]


def _v1_runner() -> None:
    """The model runner with which vLLM computes again what a layer-wise load did not bring."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"


def _two_ranks() -> None:
    """Two ranks share the cores instead of wanting all of them each."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"


def _seeds_in_parts() -> None:
    """vLLM takes back what a part of a prompt drew by CUDA's offset; on CPUs it goes to the seed.

    That is the same: nothing of a request was drawn before the last part of its prompt.
    """
    import torch

    class Rewound(torch.Generator):
        def get_offset(self) -> int:
            return 0

        def set_offset(self, offset: int) -> None:
            del offset
            self.manual_seed(self.initial_seed())

    torch.Generator = Rewound  # type: ignore[misc]


_drafts: list[Answer] = []
"""Of every request that has ended: tokens, and the KV of the draft layer in its whole blocks."""


def _keep_drafts() -> None:
    """Keep the KV of the last layer, that of the draft, of every request that ends."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    initialise, finish = GPUModelRunner.initialize_kv_cache_tensors, Scheduler._free_request
    caches: dict[str, Any] = {}

    def initialised(self: Any, *arguments: Any, **more: Any) -> Any:
        caches.update(initialise(self, *arguments, **more))
        return caches

    def finished(self: Any, request: Any, *arguments: Any, **more: Any) -> Any:
        last = max(caches, key=lambda name: [int(p) for p in name.split(".") if p.isdigit()])
        (table,) = self.kv_cache_manager.get_block_ids(request.request_id)
        whole = (request.num_tokens - 1) // self.block_size
        kv = caches[last][table[:whole]].float().contiguous().numpy()
        shown = base64.b64encode(kv.tobytes()).decode()
        tokens = list(request.all_token_ids)
        _drafts.append({"layer": last, "tokens": tokens, "shape": kv.shape, "kv": shown})
        return finish(self, request, *arguments, **more)

    GPUModelRunner.initialize_kv_cache_tensors = initialised
    Scheduler._free_request = finished


_answers: list[int] = []
"""All tokens of the request that ``known drafts`` drafts for."""


def _known_drafts() -> None:
    """The draft layer computes its KV as ever, but the drafts of one request are its own tokens.

    Every fifth one is wrong, so that some are rejected.
    """
    from vllm.v1.spec_decode.eagle import EagleProposer

    real = EagleProposer.propose

    def propose(self: Any, num_speculative_tokens: int, **given: Any) -> Any:
        drafts = real(self, num_speculative_tokens, **given)
        places = given["token_indices_to_sample"]
        last = -1 if places is None else int(places[0])
        begin = int(given["target_positions"][last]) + 2  # the next token is sampled already
        for at, token in enumerate(_answers[begin : begin + drafts.shape[1]]):
            drafts[0, at] = token if (begin + at) % 5 else (token + 1) % 500
        return drafts

    EagleProposer.propose = propose  # type: ignore[method-assign]


def _on_a_device() -> None:
    """Copy the engine's blocks as those of a device, which host memory plays."""
    from dataclasses import replace

    from engine_adapters.vllm import connector

    real = connector.pool_of
    connector.pool_of = lambda *given: replace(real(*given), device="cpu:0")


_device: dict[str, Any] = {"preempted": 0, "pause_s": 0.0, "told": threading.Event()}
"""The device of ``on a late device``, and what the test has told it."""


def _on_a_late_device() -> None:
    """The same, and the device does its work late, in random order, and as slowly as it is told.

    It says in the log when it works, after :meth:`Engine.device` was called.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvstore.testing.device import LateDevice
    from kvstore.tier import gpu

    class Device(LateDevice):
        @property
        def busy(self) -> bool:
            return any(stream.queued for stream in self._streams)

        def step(self) -> bool:
            if _device["pause_s"] and self.busy:
                _device["told"].wait(_device["pause_s"])
                if _device.pop("says", None):
                    sys.stdout.write(f"{DEVICE_WORKS}\n")
                    sys.stdout.flush()
            return super().step()

    _on_a_device()
    device = _device["device"] = Device()
    gpu.open_device = lambda name: device  # type: ignore[assignment]
    preempt = Scheduler._preempt_request

    def counted(self: Any, *arguments: Any, **more: Any) -> Any:
        _device["preempted"] += device.busy
        return preempt(self, *arguments, **more)

    Scheduler._preempt_request = counted  # type: ignore[method-assign]


HOOKS: dict[str, Callable[[], None]] = {
    "no verification": _no_verification,
    "failing loads": _failing_loads,
    "stuck loads": _stuck_loads,
    "overtaken loads": _overtaken_loads,
    "two ranks": _two_ranks,
    "V1 runner": _v1_runner,
    "seeds in parts": _seeds_in_parts,
    "on a device": _on_a_device,
    "on a late device": _on_a_late_device,
    "keep drafts": _keep_drafts,
    "known drafts": _known_drafts,
}


def serve(engine: object) -> int:
    """Serve commands, which are the methods of ``engine``, until there are no more."""
    commands, answers = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w")
    for line in commands:
        command, arguments = json.loads(line)
        try:
            answer = getattr(engine, command)(**arguments)
        except Exception as error:  # noqa: BLE001 the test is told, whatever it is
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


def main() -> int:
    """See the module."""
    engine = Engine()
    status = serve(engine)
    if engine.llm is not None:
        engine.stop()
    return status
