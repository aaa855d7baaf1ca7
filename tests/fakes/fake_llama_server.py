#!/usr/bin/env python3
"""Speaks what the comparison uses of llama-server: /health, /completion as a stream, --version.

Like the real one it holds back a token that ends inside of a character: the second of each answer
has no event of its own.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if len(asked["prompt"]) > 1000:
            self.send_error(400, "the prompt is too long")
            return
        self.send_response(200)
        self.end_headers()
        for place in range(asked["n_predict"]):
            if place != 1:
                self._event({"content": "x", "stop": False})
        self._event({"content": "", "stop": True, "tokens_predicted": asked["n_predict"]})

    def _event(self, event: object) -> None:
        line = "data: " + json.dumps(event, separators=(",", ":")) + "\n\n"
        self.wfile.write(line.encode())

    def log_message(self, *_: object) -> None:
        """Requests are not logged."""


if __name__ == "__main__":
    if "--version" in sys.argv:
        print("version: 7 (fake)", file=sys.stderr)
        sys.exit(0)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
