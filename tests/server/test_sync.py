"""ensemble_sync: the same face for clients that cannot stream, many at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from tests.server.harness import Client, tensors
from tests.server.reference import Reference


def infer(client: Client, request_id: str = "", **fields: object) -> grpc.InferResult:
    with grpc.InferenceServerClient(client.grpc) as connection:
        return connection.infer("ensemble_sync", tensors(fields), request_id=request_id)


def text_of(result: grpc.InferResult) -> str:
    return str(result.as_numpy("text_output").reshape(-1)[0].decode())


def test_unary_grpc_and_http_infer(client: Client, reference: Reference) -> None:
    prompt = "The capital of France is"
    wanted = reference.greedy(prompt, 5)
    assert text_of(infer(client, text_input=prompt, max_tokens=5)) == wanted
    body = {
        "inputs": [
            {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": [prompt]},
            {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [5]},
        ]
    }
    status, answer = client.call("/v2/models/ensemble_sync/infer", body)
    assert status == 200, answer
    assert answer["outputs"][0]["name"] == "text_output"
    assert answer["outputs"][0]["data"] == [wanted]


def test_many_at_once_run_together(client: Client, reference: Reference) -> None:
    prompts = ["The capital of France is", "1, 2, 3, 4,", "Water boils at", "Once upon a"] * 4
    with ThreadPoolExecutor(16) as pool:
        results = list(
            pool.map(lambda p: text_of(infer(client, text_input=p, max_tokens=12)), prompts)
        )
    for prompt, text in zip(prompts, results, strict=True):
        assert text.startswith(reference.greedy(prompt, 12))


def test_errors_stay_with_their_request(client: Client) -> None:
    with ThreadPoolExecutor(4) as pool:
        good = [pool.submit(infer, client, text_input="1, 2,", max_tokens=4) for _ in range(3)]
        bad = pool.submit(infer, client, text_input="1, 2,", max_tokens=4, top_p=3.0)
        with pytest.raises(InferenceServerException, match="top_p"):
            bad.result()
        assert len({text_of(each.result()) for each in good}) == 1


def test_a_client_that_leaves_stops_its_request(client: Client) -> None:
    with grpc.InferenceServerClient(client.grpc) as connection:
        call = connection.async_infer(
            "ensemble_sync",
            tensors({"text_input": "Once", "max_tokens": 1500, "min_tokens": 1500}),
            callback=lambda result, error: None,
            request_id="leaves",
        )
        client.wait_for_metric("nv_trt_llm_request_metrics", '"active"', 1)
        began = time.monotonic()
        call.cancel()
        client.wait_for_metric("nv_trt_llm_request_metrics", '"active"', 0)
        assert time.monotonic() - began < 8


def test_counts_and_finish_reason(client: Client) -> None:
    result = infer(
        client,
        text_input="The capital of France is",
        max_tokens=3,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    assert int(np.ravel(result.as_numpy("num_input_tokens"))[0]) == 5
    assert int(np.ravel(result.as_numpy("num_output_tokens"))[0]) == 3
    assert result.as_numpy("finish_reason").reshape(-1)[0] == b"length"
