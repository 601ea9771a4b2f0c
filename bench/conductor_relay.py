"""A bare relay of completions with aiohttp: the bound of what a front in Python costs.

``python -m bench.conductor_relay URL`` relays ``POST /v1/completions`` to one engine, reading and
checking nothing, and prints ``listening on URL``.
"""

import asyncio
import sys

import aiohttp
import uvloop
from aiohttp import web


async def _relay(engine: str) -> None:
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )

    async def completions(http: web.Request) -> web.StreamResponse:
        body = await http.read()
        async with session.post(f"{engine}/v1/completions", data=body) as answer:
            response = web.StreamResponse(headers={"Content-Type": answer.content_type})
            await response.prepare(http)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    app = web.Application()
    app.add_routes([web.post("/v1/completions", completions)])
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    sys.stdout.write(f"listening on http://127.0.0.1:{runner.addresses[0][1]}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_relay(sys.argv[1]))
