"""Health, metrics and the admin API over HTTP, beside the state's loop.

Everything here runs in threads of its own and asks the state's loop for short turns only
(:class:`~kvstore.server.api.Turns`), so that no scrape and no listing delays an engine.
"""

import asyncio
import socket
import threading
from typing import Any, Final

import uvicorn
from fastapi import Depends, FastAPI, Response

from kvstore.config import HttpConfig
from kvstore.errors import ConfigError
from kvstore.server.api import ApiError, Observed, Refusal, Turns, answer_errors
from kvstore.server.auth import Auth
from kvstore.server.inspect import Inspection
from kvstore.server.jobs import Jobs
from kvstore.server.metrics import render
from kvstore.server.operate import Operation

_STOP_TIMEOUT_S: Final = 10.0


class HttpServer:
    """FastAPI in a thread.

    Args:
        config: where to listen, and the tokens.
        loop: the state's loop, which alone may touch ``observed``.
        observed: the daemon.
    """

    def __init__(
        self, config: HttpConfig, loop: asyncio.AbstractEventLoop, observed: Observed
    ) -> None:
        """Bind the address.

        Raises:
            ConfigError: the address cannot be had, or a token cannot be read.
        """
        self._turns = Turns(loop, observed)
        self._auth = Auth(config)
        self._jobs = Jobs()
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((config.host, config.port))
            self._listener.listen(128)  # from the ready line on, connections wait for the thread
        except OSError as error:
            self._listener.close()
            raise ConfigError(f"http.port={config.port} on {config.host}: {error}") from error
        self.url = f"http://{config.host}:{self._listener.getsockname()[1]}"
        settings = uvicorn.Config(
            self._app(), log_level="warning", access_log=False, lifespan="off"
        )
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._run, name="kvstore-http")

    def start(self) -> None:
        """Serve."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving; waits for the threads, but not for ever."""
        self._server.should_exit = True
        self._turns.close()
        self._jobs.stop()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)
        self._listener.close()

    def _run(self) -> None:
        self._server.run(sockets=[self._listener])

    def _app(self) -> FastAPI:
        refused: dict[int | str, dict[str, Any]] = {
            "default": {"model": Refusal, "description": "It was refused, or failed."}
        }
        app = FastAPI(
            title="kvstore node", version="1", docs_url="/docs", redoc_url=None, responses=refused
        )
        answer_errors(app)
        app.add_api_route("/healthz", _healthz, methods=["GET"])
        app.add_api_route("/readyz", self._readyz, methods=["GET"])
        read = [Depends(self._auth.require("read"))]
        app.add_api_route("/metrics", self._metrics, methods=["GET"], dependencies=read)
        app.include_router(Inspection(self._turns, self._auth).router)
        app.include_router(Operation(self._turns, self._auth, self._jobs).router)
        return app

    def _readyz(self) -> dict[str, Any]:
        """The node answers and has memory to store pages in."""
        pages = self._turns.observed.node.pages
        host, disk = self._turns.ask(lambda: (pages.slots.stats(), pages.disk))
        if not host.capacity_bytes:
            message = "all memory is held by clients of the previous boot"
            raise ApiError(503, "tier_unavailable", message)
        ssd = "off" if disk is None else "degraded" if disk.troubled else "ready"
        return {"status": "ready", "withheld_bytes": host.withheld_bytes, "ssd": ssd}

    def _metrics(self) -> Response:
        """Prometheus series."""
        stats = self._turns.ask(self._turns.observed.stats)
        return Response(render(stats), media_type="text/plain")


def _healthz() -> dict[str, str]:
    """The process runs."""
    return {"status": "ok"}
