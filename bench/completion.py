"""One completion over HTTP, streamed, with the times and tokens that a client sees."""

import json
import time
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from bench.cluster import ClusterError

TIMEOUT_S: Final = 600.0


@dataclass(slots=True)
class Completion:
    """What came back.

    Attributes:
        request_id: what the server calls it.
        tokens: ids of the output.
        text: the output.
        ttft_s: from sending the request to its first token.
        total_s: to the end of the stream.
        timings: the engine's own account (of the engine that answered).
    """

    request_id: str = ""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    ttft_s: float = 0.0
    total_s: float = 0.0
    timings: dict[str, Any] = field(default_factory=dict)


async def complete(
    session: aiohttp.ClientSession, url: str, prompt: list[int],
    tokens_at: list[float] | None = None, **parameters: Any,
) -> Completion:  # fmt: skip
    """Send one streamed ``/v1/completions``.

    Args:
        session: shared by all requests.
        url: of the Conductor or of an engine.
        prompt: token ids.
        tokens_at: gets the time of each token, so that it can be read before the end.
        parameters: further fields of the body (``max_tokens``, ``temperature``, ``seed`` …).

    Raises:
        ClusterError: the answer is an error, or the stream ends with one.
    """
    body = {"prompt": prompt, "stream": True, "return_token_ids": True, **parameters}
    result = Completion()
    start = time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with session.post(f"{url}/v1/completions", json=body, timeout=timeout) as answer:
        if answer.status != 200:
            raise ClusterError(f"{url}: {answer.status} {(await answer.text())[:500]}")
        result.request_id = answer.headers.get("X-Request-Id", "")
        async for line in answer.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise ClusterError(f"{url}: the stream broke: {chunk['error']}")
            for choice in chunk["choices"]:
                tokens = choice.get("token_ids") or []
                if tokens and not result.tokens:
                    result.ttft_s = time.perf_counter() - start
                result.tokens += tokens
                if tokens_at is not None:
                    tokens_at += [time.perf_counter()] * len(tokens)
                result.text += choice.get("text") or ""
            result.timings = chunk.get("timings") or result.timings
    result.total_s = time.perf_counter() - start
    return result
