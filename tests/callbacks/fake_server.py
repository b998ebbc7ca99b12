"""A tracking server on the loopback interface: the part of MLflow's REST interface that a run needs."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class TrackingServer:
    """Keeps one run in memory; `answers = False` refuses every request, a cleared `may_answer` lets them wait."""

    def __init__(self) -> None:
        self.answers = True
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.refused = threading.Event()
        self.metrics: list[dict[str, Any]] = []
        self.status = "RUNNING"
        self.statuses: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        info = {"run_id": "a" * 32, "run_uuid": "a" * 32, "experiment_id": "1", "status": self.status}
        run = {"run": {"info": info | {"lifecycle_stage": "active", "artifact_uri": "file:///nowhere"}, "data": {}}}
        if path.endswith("experiments/get-by-name"):
            return {"experiment": {"experiment_id": "1", "name": "dare", "lifecycle_stage": "active"}}
        if path.endswith(("runs/create", "runs/get")):
            return run
        if path.endswith("runs/update"):
            self.status = body["status"]
            self.statuses.append(self.status)
            return {"run_info": info}
        if path.endswith("runs/log-batch"):
            self.metrics += body.get("metrics", [])
        return {}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                server.may_answer.wait(60)
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                content = server.answer(self.path.split("?")[0], json.loads(body or b"{}")) if server.answers else {}
                if not server.answers:
                    server.refused.set()
                self.send_response(200 if server.answers else 503)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(content).encode())

            def log_message(self, *args: object) -> None:
                pass

        return Handler
