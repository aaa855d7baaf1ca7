#!/usr/bin/env python3
"""Streams one answer over HTTP with the standard library alone.

python client/stream_http.py "The capital of France is" --max-tokens 32
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import uuid


def post(url: str, path: str, fields: dict[str, object]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(url.removeprefix("http://").rstrip("/"))
    connection.request("POST", path, json.dumps(fields), {"Content-Type": "application/json"})
    return connection


def print_answer(reply: http.client.HTTPResponse) -> None:
    """Prints deltas as they come: lines `data: {...}`. The last one has the finish reason.

    An error may have any status: an answer that fails on its way began with 200.
    """
    finish_reason = ""
    for line in reply:
        line = line.removeprefix(b"data:").strip()
        if not line:
            continue
        event = json.loads(line)
        if "error" in event:
            sys.exit(f"\nerror: {event['error']}")
        print(event["text_output"], end="", flush=True)
        finish_reason = event["finish_reason"]
    if not finish_reason:
        sys.exit("\nerror: the server closed the connection before the end of the answer")
    print(f"\n[{finish_reason}]")


def main() -> None:
    parser = argparse.ArgumentParser(description="Streams one answer over HTTP.")
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    parser.add_argument("--url", default="localhost:8000")
    parser.add_argument("--model", default="inflight_llm", choices=["inflight_llm", "ensemble"])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, help="left out: greedy")
    parser.add_argument("--seed", type=int, help="left out: a new one each time")
    args = parser.parse_args()

    fields: dict[str, object] = {
        "id": uuid.uuid4().hex,
        "text_input": args.prompt,
        "stream": True,
        "max_tokens": args.max_tokens,
    }
    for name in ("temperature", "seed"):
        if getattr(args, name) is not None:
            fields[name] = getattr(args, name)
    try:
        connection = post(args.url, f"/v2/models/{args.model}/generate_stream", fields)
    except OSError as error:
        sys.exit(f"error: no server at {args.url}: {error}")
    try:
        print_answer(connection.getresponse())
    except KeyboardInterrupt:
        if args.model == "ensemble":  # the server does not pass a closed connection through it
            stop = {"id": fields["id"], "stop": True}
            post(args.url, f"/v2/models/{args.model}/generate", stop).getresponse().read()
        sys.exit("\n[cancelled]")
    except (OSError, http.client.HTTPException) as error:
        sys.exit(f"\nerror: the connection broke: {error!r}")
    finally:
        connection.close()


if __name__ == "__main__":
    main()
