"""examine: every look at this machine, in the order in which a start depends on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import inflight
from inflight.api.config import InflightConfig
from inflight.cli.doctor import accelerator, engine, processor, server, storage
from inflight.cli.doctor.finding import Finding, Status, guarded
from inflight.cli.launch import server_environment
from inflight.cli.ports import Endpoints
from inflight.cli.preflight import has_compiler


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The start that is asked about: what ``inflight serve`` would be given."""

    config: InflightConfig
    endpoints: Endpoints
    model_repository: Path


def examine(plan: Plan) -> list[Finding]:
    """Changes nothing, and loads no torch into this process."""
    return [guarded(what, look) for what, look in _looks(plan)]


def _looks(plan: Plan) -> Sequence[tuple[str, Callable[[], Finding]]]:
    config, environment = plan.config, server_environment({}, None)
    return (
        ("CPU", processor.look_at_cpu),
        ("cores", processor.look_at_cores),
        ("kernels", processor.look_at_compiler),
        ("GPU", accelerator.look_at_card),
        ("torch on GPU", lambda: accelerator.look_at_torch_cuda(config.device)),
        ("GPU kernels", accelerator.look_at_kernel_language),
        ("libraries", engine.look_at_libraries),
        ("checkpoint", lambda: engine.look_at_checkpoint(config)),
        ("runner", lambda: engine.look_at_runner(config, _place(config.device))),
        ("memory", lambda: engine.look_at_memory(config, accelerator.free_on_card(config.device))),
        ("cache", lambda: storage.look_at_cache(config.cache_dir)),
        ("disk", lambda: storage.look_at_disk(config.cache_dir, engine.first_start_bytes(config))),
        ("huge pages", storage.look_at_huge_pages),
        ("tritonserver", server.look_at_server),
        ("stub", lambda: server.look_at_stub(environment)),
        ("numpy", server.look_at_numpy),
        ("python3", lambda: server.look_at_first_python(environment)),
        ("shared memory", server.look_at_shared_memory),
        ("ports", lambda: server.look_at_ports(plan.endpoints)),
        ("model repository", lambda: server.look_at_model_repository(plan.model_repository)),
        ("perf_analyzer", server.look_at_perf_analyzer),
    )


def _place(device: str) -> engine.Place:
    return engine.Place(
        has_gpu=accelerator.computes_on_card(device),
        has_compiler=has_compiler(),
        has_triton=accelerator.compiles_kernels(),
        has_flashinfer=accelerator.installed_version("flashinfer-python") is not None,
    )


def serves(findings: Sequence[Finding]) -> bool:
    """Nothing that is needed is missing."""
    return all(finding.status is not Status.BAD for finding in findings)


def as_text(findings: Sequence[Finding]) -> str:
    """For a person: what was found, what it means, what to do; the verdict comes last."""
    width = max(len(finding.what) for finding in findings)
    lines = []
    for finding in findings:
        mark = "BAD " if finding.status is Status.BAD else finding.status.value
        indent = " " * (len(mark) + width + 4)
        lines.append(f"{mark}  {finding.what:{width}}  {finding.found}")
        lines.append(f"{indent}{finding.means}")
        if finding.remedy and finding.status is not Status.GOOD:
            lines.append(f"{indent}do: {finding.remedy}")
    return "\n".join([*lines, "", _verdict(findings)])


def as_json(findings: Sequence[Finding]) -> str:
    """``{"inflight", "serves", "findings": [{"what", "found", "means", "status", "remedy"}]}``."""
    listed = [asdict(finding) | {"status": finding.status.value} for finding in findings]
    head = {"inflight": inflight.__version__, "serves": serves(findings)}
    return json.dumps(head | {"findings": listed}, indent=1)


def _verdict(findings: Sequence[Finding]) -> str:
    bad = [finding.what for finding in findings if finding.status is Status.BAD]
    if bad:
        return f"this machine does not serve: {', '.join(bad)}"
    return "this machine serves: inflight serve"
