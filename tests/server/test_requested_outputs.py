"""Clients that name the outputs they want get these and no others, whichever model answers.

The server's stub survives an output that nobody requested only by luck: see
inflight.tritonserver.responses.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence

import pytest
import tritonclient.grpc as grpc

from tests.server.harness import Client, GrpcStream, tensors

ROUNDS = 10
FIELDS = {"text_input": "The capital of France is", "max_tokens": 4}


def requested(names: Sequence[str]) -> list[grpc.InferRequestedOutput]:
    return [grpc.InferRequestedOutput(name) for name in names]


def names_of(result: grpc.InferResult) -> set[str]:
    return {output.name for output in result.get_response().outputs}


@pytest.mark.parametrize("names", [["text_output"], ["finish_reason", "batch_index"]])
@pytest.mark.parametrize("stop", [False, True])
def test_a_stream_carries_the_named_outputs(
    client: Client, door: str, names: list[str], stop: bool
) -> None:
    answers: queue.Queue[tuple[grpc.InferResult | None, Exception | None]] = queue.Queue()
    inputs = tensors({"stop": True} if stop else FIELDS)
    with grpc.InferenceServerClient(client.grpc) as connection:
        connection.start_stream(lambda result, error: answers.put((result, error)))
        for _ in range(ROUNDS):
            connection.async_stream_infer(
                door, inputs, outputs=requested(names), request_id="named-outputs"
            )
            result, error = answers.get(timeout=60)
            assert error is None and result is not None
            assert names_of(result) == set(names)
        connection.stop_stream()


@pytest.mark.parametrize("names", [["text_output"], ["finish_reason"]])
def test_ensemble_sync_answers_with_the_named_outputs(client: Client, names: list[str]) -> None:
    with grpc.InferenceServerClient(client.grpc) as connection:
        for _ in range(ROUNDS):
            result = connection.infer("ensemble_sync", tensors(FIELDS), outputs=requested(names))
            assert names_of(result) == set(names)


def test_many_stops_through_the_ensemble(client: Client) -> None:
    """The ensemble takes no text_output from the engine: postprocessing makes it."""
    with GrpcStream(client) as stream:
        for _ in range(5 * ROUNDS):
            stream.ask("ensemble", "nobody", stop=True)
            assert stream.events(timeout=20)[-1].error is None
