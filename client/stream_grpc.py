#!/usr/bin/env python3
"""Streams one answer over gRPC. Needs `pip install 'tritonclient[grpc]'`.

python client/stream_grpc.py "The capital of France is" --max-tokens 32
"""

from __future__ import annotations

import argparse
import queue
import sys
import uuid

import numpy as np
import tritonclient.grpc as grpc


def tensor(name: str, datatype: str, value: object, dtype: type) -> grpc.InferInput:
    """One value. The shape is [1, 1]: a batch of one prompt, with one value for it."""
    made = grpc.InferInput(name, [1, 1], datatype)
    made.set_data_from_numpy(np.array([[value]], dtype=dtype))
    return made


def inputs_of(args: argparse.Namespace) -> list[grpc.InferInput]:
    inputs = [
        tensor("text_input", "BYTES", args.prompt.encode(), np.object_),
        tensor("stream", "BOOL", True, np.bool_),
        tensor("max_tokens", "INT32", args.max_tokens, np.int32),
    ]
    if args.temperature is not None:  # none of the sampling inputs: greedy
        inputs.append(tensor("temperature", "FP32", args.temperature, np.float32))
    if args.seed is not None:
        inputs.append(tensor("seed", "UINT64", args.seed, np.uint64))
    return inputs


def print_answer(events: queue.Queue[tuple[grpc.InferResult, Exception | None]]) -> None:
    """Prints deltas as they come. The last response has the finish reason and no text."""
    finish_reason = ""
    while not finish_reason:
        result, error = events.get()
        if error is not None:
            sys.exit(f"\nerror: {error}")
        print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
        finish_reason = result.as_numpy("finish_reason")[0].decode()
    print(f"\n[{finish_reason}]")


def main() -> None:
    parser = argparse.ArgumentParser(description="Streams one answer over gRPC.")
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--model", default="inflight_llm", choices=["inflight_llm", "ensemble"])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, help="left out: greedy")
    parser.add_argument("--seed", type=int, help="left out: a new one each time")
    args = parser.parse_args()

    request_id = uuid.uuid4().hex
    events: queue.Queue[tuple[grpc.InferResult, Exception | None]] = queue.Queue()
    client = grpc.InferenceServerClient(args.url)
    client.start_stream(lambda result, error: events.put((result, error)))
    try:
        client.async_stream_infer(args.model, inputs_of(args), request_id=request_id)
        print_answer(events)
    except KeyboardInterrupt:
        if args.model == "ensemble":  # the server does not pass a cancelled call through it
            stop = [tensor("stop", "BOOL", True, np.bool_)]
            client.async_stream_infer(args.model, stop, request_id=request_id)
            client.stop_stream()  # waits for both requests to end
        sys.exit("\n[cancelled]")
    finally:
        client.stop_stream(cancel_requests=True)


if __name__ == "__main__":
    main()
