#!/usr/bin/env python3
"""A chat in the terminal. Needs `pip install 'tritonclient[grpc]'`.

Ctrl-C cancels the answer that is running and keeps the conversation. /reset forgets it, /exit ends.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
from collections.abc import Generator
from contextlib import closing

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

MODEL = "inflight_llm"  # the direct door: there a cancelled call stops the work behind it
HELP = "/reset forgets the conversation, /exit ends; Ctrl-C cancels the answer that is running"


def tensor(name: str, datatype: str, value: object, dtype: type) -> grpc.InferInput:
    """One value. The shape is [1, 1]: a batch of one conversation, with one value for it."""
    made = grpc.InferInput(name, [1, 1], datatype)
    made.set_data_from_numpy(np.array([[value]], dtype=dtype))
    return made


class Chat:
    def __init__(self, args: argparse.Namespace) -> None:
        self._client = grpc.InferenceServerClient(args.url)
        self._start = [{"role": "system", "content": args.system}] if args.system else []
        self._settings = [
            tensor("stream", "BOOL", True, np.bool_),
            tensor("max_tokens", "INT32", args.max_tokens, np.int32),
        ]
        if args.temperature is not None:
            self._settings.append(tensor("temperature", "FP32", args.temperature, np.float32))
        if args.seed is not None:
            self._settings.append(tensor("seed", "UINT64", args.seed, np.uint64))
        self.reset()

    def reset(self) -> None:
        self._messages = list(self._start)

    def ask(self, question: str) -> None:
        """Prints the answer as it comes. What was shown of it becomes part of the conversation."""
        self._messages.append({"role": "user", "content": question})
        answer = ending = ""
        try:
            with closing(self._stream()) as responses:
                for text, finish_reason in responses:
                    answer += text
                    ending = finish_reason
                    print(text, end="", flush=True)
            print("" if ending == "stop" else f" [{ending}]")
        except KeyboardInterrupt:
            print(" [cancelled]")
        except InferenceServerException as error:
            print(f"error: {error.message()}", file=sys.stderr)
        if answer:
            self._messages.append({"role": "assistant", "content": answer})
        else:
            self._messages.pop()

    def _stream(self) -> Generator[tuple[str, str], None, None]:
        """(text, finish reason) of each response. Leaving it early cancels the request."""
        events: queue.Queue[tuple[grpc.InferResult, InferenceServerException]] = queue.Queue()
        messages = tensor("messages", "BYTES", json.dumps(self._messages).encode(), np.object_)
        self._client.start_stream(lambda result, error: events.put((result, error)))
        try:
            self._client.async_stream_infer(MODEL, [messages, *self._settings])
            finish_reason = ""
            while not finish_reason:
                result, error = events.get()
                if error is not None:
                    raise error
                finish_reason = result.as_numpy("finish_reason")[0].decode()
                yield result.as_numpy("text_output")[0].decode(), finish_reason
        finally:
            self._client.stop_stream(cancel_requests=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="A chat in the terminal.", epilog=HELP)
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--system", default="", help="system message; left out: the template's own")
    parser.add_argument("--max-tokens", type=int, default=512, help="of one answer")
    parser.add_argument("--temperature", type=float, help="left out: greedy")
    parser.add_argument("--seed", type=int, help="left out: a new one each time")
    chat = Chat(parser.parse_args())
    print(HELP)
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line == "/exit":
            return
        if line == "/reset":
            chat.reset()
        elif line:
            chat.ask(line)


if __name__ == "__main__":
    main()
