"""A server on loopback that answers as much of wandb's protocol as an online run needs, and keeps what it is sent."""

import gzip
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

API_KEY = "local" + "0" * 40


class Received:
    """What the server was sent.

    Attributes:
        operations: Names of the GraphQL operations, in order.
        variables: Their variables.
        rows: The history rows of the file stream.
    """

    def __init__(self) -> None:
        self.url = ""
        self.operations: list[str] = []
        self.variables: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The data of a GraphQL answer."""
        found = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])
        name = found.group(1) if found else ""
        variables = request.get("variables") or {}
        self.operations.append(name)
        self.variables.append(variables)
        project = {"name": variables.get("project") or "p", "entity": {"name": "me"}}
        if name == "Viewer":
            return {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        if name == "UpsertBucket":
            run = variables.get("name") or "r"
            bucket = {"id": "b", "name": run, "displayName": run, "config": "{}", "historyLineCount": 0}
            return {"upsertBucket": {"bucket": {**bucket, "sweepName": None, "project": project}, "inserted": True}}
        if name == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.url}/upload/{file}"} for file in variables.get("files", [])]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        if name == "RunResumeStatus":
            return {"model": {"id": "m", "name": "p", "entity": {"name": "me"}, "bucket": None}}
        return {"serverInfo": {"features": []}}


@contextmanager
def wandb_server() -> Iterator[Received]:
    """Serve on a free port of loopback; point ``WANDB_BASE_URL`` at ``.url``."""
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self._body()
            if self.path == "/graphql":
                self._send({"data": received.answer(json.loads(body))})
            elif self.path.endswith("/file_stream"):
                lines = json.loads(body).get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
                received.rows += [json.loads(line) for line in lines]
                self._send({})
            else:
                self._send({}, 404)  # wandb's own usage reports, for one

        def do_PUT(self) -> None:
            self._body()
            self._send({})

        def do_GET(self) -> None:
            self._send({}, 404)

        def _body(self) -> bytes:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

        def _send(self, answer: dict[str, Any], status: int = 200) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        received.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield received
        finally:
            server.shutdown()
            thread.join()
