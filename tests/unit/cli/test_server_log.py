from __future__ import annotations

import io

import pytest

from inflight.cli.server_log import ServerLog, is_worth_showing

NOISE = [
    'W1130 00:18:43.261297 7841 pinned_memory_manager.cc:273] "Unable to allocate pinned system '
    'memory, pinned memory pool will not be available: CUDA driver version is insufficient"',
    'E1130 00:18:43.261529 7841 server.cc:241] "CudaDriverHelper has not been initialized."',
    'W1130 00:19:01.139930 7841 pinned_memory_manager.cc:170] "failed to allocate pinned system '
    'memory: no pinned memory pool, falling back to non-pinned system memory"',
    "Error: Failed to initialize NVML",
    'W1130 00:18:44.695815 7841 metrics.cc:798] "DCGM unable to start: DCGM initialization error"',
    "I1130 00:18:44.693853 7841 server.cc:604] ",
    "+------------------+------+",
    "| Repository Agent | Path |",
    "",
]
TELLING = [
    "I1130 00:18:44.693719 7841 model_lifecycle.cc:839] \"successfully loaded 'ensemble'\"",
    'I1130 00:18:44.691473 7841 model.py:7] "512 blocks of 32 tokens"',
    'W1130 00:18:44.691473 7841 model.py:7] "something of note"',
    'E1130 00:24:04.116037 9861 backend_model.cc:692] "ERROR: Failed to create instance"',
    "2026-01-02T03:04:05.678Z info inflight.engine: 512 blocks",
    "Traceback (most recent call last):",
]


@pytest.mark.parametrize("line", NOISE)
def test_noise_is_left_out(line: str) -> None:
    assert not is_worth_showing(line)


@pytest.mark.parametrize("line", TELLING)
def test_what_tells_something_is_shown(line: str) -> None:
    assert is_worth_showing(line)


def reason_of(*lines: str) -> str:
    log = ServerLog(io.StringIO("\n".join(lines) + "\n"), show=lambda line: None)
    log.close()
    return log.reason()


@pytest.mark.parametrize("wrapped", ["", "TritonModelException: "])
def test_the_reason_is_the_model_s_own_error_without_its_trace(wrapped: str) -> None:
    failed = (
        "E1130 00:24:04.116182 9861 model_lifecycle.cc:642] \"failed to load 'inflight_llm' "
        f"version 1: Internal: {wrapped}ConfigError: max_batch_size: 0 must be 1 or larger"
        '\\n\\nAt:\\n  /models/model.py(3): initialize\\n"'
    )
    reason = reason_of(*NOISE, failed, "error: creating server: Internal - failed to load")
    assert reason == "ConfigError: max_batch_size: 0 must be 1 or larger"


def test_without_a_failed_model_the_last_errors_are_the_reason() -> None:
    bad = 'E1130 00:24:04.116182 9861 server.cc:1] "cannot bind"'
    assert reason_of(*NOISE, *TELLING[:2], bad) == "cannot bind"
    assert reason_of(*NOISE, "error: creating server: no") == "error: creating server: no"
    assert reason_of(*NOISE) == "its log says nothing"


def test_a_terminal_that_is_gone_does_not_stop_the_server() -> None:
    seen = []

    def show(line: str) -> None:
        seen.append(line)
        raise BrokenPipeError

    log = ServerLog(io.StringIO("one\ntwo\n"), show)
    log.close()
    assert seen == ["one", "two"]
