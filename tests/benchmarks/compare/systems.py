"""Which systems can be compared on this machine, and how each is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.compare.driver import LoadOptions
from tests.benchmarks.compare.workloads import Workload, warm_up_of

MOST_SLOTS = 32
"""No workload has more requests in flight."""

DRIVERS = "tests.benchmarks.compare.drivers."

OURS = ("inflight", "inflight-direct", "inflight-ensemble")
PEERS = ("transformers", "vllm", "llamacpp", "openvino")
DTYPES = ("bf16", "fp32", "int8", "int4")


class NotInstalledError(Exception):
    """A peer that cannot take part; one line that says why and what would help."""


@dataclass(frozen=True)
class System:
    name: str
    """Its ``peer`` in the result file."""
    driver: str
    """Full name of its driver's module; systems of one driver share one process."""
    weights: str
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)
    label: str = ""
    door: str = ""
    files: str = ""
    model_file: str = ""

    def options_for(self, workload: Workload, checkpoint: str, threads: int) -> LoadOptions:
        """How it must be loaded to serve the workload: as rarely differently as its kind allows."""
        slots, slot_tokens = MOST_SLOTS, 0
        if self.driver == DRIVERS + "llama_cpp":
            warm_up = warm_up_of(workload.name)
            slots = workload.concurrency
            slot_tokens = max(workload.longest_sequence, warm_up.longest_sequence)
        elif self.name in OURS and len(workload.jobs) > workload.concurrency:
            slots = workload.concurrency  # the engine holds back what is not in flight
        return LoadOptions(
            checkpoint=checkpoint,
            weights=self.weights,
            slots=slots,
            slot_tokens=slot_tokens,
            reuse=workload.reuses_prefixes,
            threads=threads,
            files=self.files,
            model_file=self.model_file,
        )


def our_systems(dtype: str) -> list[System]:
    engine, direct, ensemble = OURS
    return [
        System(engine, DRIVERS + "inflight_engine", dtype),
        System(direct, DRIVERS + "inflight_triton", dtype, door="inflight_llm"),
        System(ensemble, DRIVERS + "inflight_triton", dtype, door="ensemble"),
    ]


def peers_home(environment: Mapping[str, str] = os.environ) -> Path:
    return Path(environment.get("PEERS_HOME") or Path.home() / ".cache" / "inflight-peers")


def choose_peers(asked: str, dtype: str, home: Path, say: Callable[[str], None]) -> list[System]:
    """``asked``: none, all, or names with commas between them.

    Of "all", a peer that is not there is told in one line and left out; one that was asked for by
    name raises NotInstalledError. Raises ValueError for a name that is not known.
    """
    if asked == "none":
        return []
    names = PEERS if asked == "all" else tuple(asked.split(","))
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ValueError(f"{unknown[0]}: not one of none, all, {', '.join(PEERS)}")
    found = []
    for name in names:
        try:
            found.append(find_peer(name, dtype, home))
        except NotInstalledError as reason:
            if asked != "all":
                raise
            say(f"left out: {reason}")
    return found


def find_peer(name: str, dtype: str, home: Path) -> System:
    """Raises NotInstalledError."""
    return {
        "transformers": _transformers,
        "vllm": _vllm,
        "llamacpp": _llamacpp,
        "openvino": _openvino,
    }[name](dtype, home)


def _transformers(dtype: str, home: Path) -> System:
    _check_weights("transformers", dtype, ("bf16", "fp32"))
    return System("hf-cb", DRIVERS + "transformers_cb", dtype)


def _vllm(dtype: str, home: Path) -> System:
    _check_weights("vllm", dtype, ("bf16", "fp32"))
    python = _environment_with("vllm", "vllm", home)
    preload = [str(path) for path in _vllm_libraries(python.parent.parent)]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(preload),
    }
    label = "+".join(Path(path).name.split(".")[0].removeprefix("lib") for path in preload)
    return System("vllm-cpu", DRIVERS + "vllm_cpu", dtype, str(python), environment, label)


def _vllm_libraries(venv: Path) -> list[Path]:
    """The allocator and the OpenMP of vLLM's advice for CPUs, of its own environment."""
    found = [sorted((venv / "lib").glob(f"{n}*.so*")) for n in ("libtcmalloc_minimal", "libiomp5")]
    return [paths[0] for paths in found if paths]


def _llamacpp(dtype: str, home: Path) -> System:
    weights = {"bf16": "bf16", "fp32": "f32", "int8": "q8_0", "int4": "q4_0"}[dtype]
    built = home / "llcpp" / "vendor" / "llama.cpp" / "build" / "bin"
    binaries = Path(os.environ.get("LLAMA_BIN") or built)
    _require(binaries / "llama-server", "llamacpp")
    model = _require(home / "gguf" / f"smollm2-{weights}.gguf", "llamacpp")
    return System(
        "llama.cpp", DRIVERS + "llama_cpp", weights, files=str(binaries), model_file=str(model)
    )


def _openvino(dtype: str, home: Path) -> System:
    python = _environment_with("openvino_genai", "openvino", home)
    exported = "fp32" if dtype == "bf16" else dtype
    files = _require(home / f"ov_{exported}", "openvino")
    return System("openvino", DRIVERS + "openvino_genai", dtype, str(python), files=str(files))


def _check_weights(name: str, dtype: str, has: Sequence[str]) -> None:
    if dtype not in has:
        raise NotInstalledError(f"{name}: compared in {' and '.join(has)}, not in {dtype}")


def _environment_with(package: str, peer: str, home: Path) -> Path:
    """The Python of the first virtual environment below ``home`` that has the package."""
    for python in sorted(home.glob("*/bin/python")):
        if any(python.parent.parent.glob(f"lib/python3*/site-packages/{package}")):
            return python
    raise NotInstalledError(f"{peer}: no environment below {home} has it; {_advice(peer)}")


def _require(path: Path, peer: str) -> Path:
    if not path.exists():
        raise NotInstalledError(f"{peer}: {path} is not there; {_advice(peer)}")
    return path


def _advice(peer: str) -> str:
    return f"bash scripts/lib/install_peers.sh {peer}"
