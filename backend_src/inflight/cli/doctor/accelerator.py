"""The card, its driver, and whether torch and the kernel languages can use it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from inflight.api.config import process_environment
from inflight.cli.doctor.finding import Finding, Status, size_text
from inflight.cli.preflight import has_gpu
from inflight.kernels.compiler import lacking_to_compile

_QUERY = "name,memory.total,memory.free,driver_version,compute_cap"
_SMI_SECONDS = 10
_TORCH_SECONDS = 30
_MIB = 1 << 20
_LEAST_BF16 = (8, 0)
_LEAST_FP8 = (8, 9)
_ASK_TORCH = (
    "import json, torch; print(json.dumps([torch.version.cuda, torch.cuda.is_available()]))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The first card, as its driver describes it."""

    name: str
    total_bytes: int
    free_bytes: int
    driver: str
    capability: tuple[int, int]


class NoAnswerError(Exception):
    """A program that was asked said nothing of use; the text says what it said."""


def look_at_card() -> Finding:
    """The card and what its generation computes."""
    if not has_gpu():
        means = "the engine computes on the CPU"
        return Finding(what="GPU", found="no NVIDIA driver", means=means)
    try:
        card = read_card()
    except NoAnswerError as error:
        return Finding(
            what="GPU",
            found=f"a driver, of which nvidia-smi says nothing: {error}",
            means="torch decides below whether it can be used",
            status=Status.NOTE,
            remedy="nvidia-smi",
        )
    major, minor = card.capability
    found = (
        f"{card.name}, {size_text(card.free_bytes)} of {size_text(card.total_bytes)} free, "
        f"driver {card.driver}, compute capability {major}.{minor}"
    )
    if card.capability < _LEAST_BF16:
        means = "it computes fp16, no bf16 and no FP8"
        return Finding(what="GPU", found=found, means=means, status=Status.NOTE)
    has_fp8 = card.capability >= _LEAST_FP8
    return Finding(what="GPU", found=found, means=f"bf16, {'FP8 too' if has_fp8 else 'no FP8'}")


def look_at_torch_cuda(device: str) -> Finding:
    """Whether torch sees the card that the key ``device`` asks for.

    torch is imported, in a process of its own, only where there is a driver.
    """
    if device == "cpu":
        means = "the engine computes on the CPU, as the configuration says"
        return Finding(what="torch on GPU", found="not asked", means=means)
    found = _torch_and_card()
    if device != "cuda" or found.status is Status.GOOD and has_gpu():
        return found
    means = "device is cuda, and the engine cannot be loaded without a card"
    return replace(found, means=means, status=Status.BAD, remedy=found.remedy or "--device auto")


def _torch_and_card() -> Finding:
    if not has_gpu():
        return Finding(what="torch on GPU", found="not asked", means="there is no driver")
    try:
        built_for, is_available = _ask_torch()
    except NoAnswerError as error:
        found, means = f"torch could not be asked: {error}", "the engine cannot be loaded"
        return Finding(what="torch on GPU", found=found, means=means, status=Status.BAD)
    if is_available:
        found, means = f"it sees the card (CUDA {built_for})", "the engine computes on the GPU"
        return Finding(what="torch on GPU", found=found, means=means)
    if built_for is None:
        found, remedy = "torch is built without CUDA", "pip install --force-reinstall torch"
    else:
        found = f"torch is built for CUDA {built_for} and does not reach the card"
        remedy = "nvidia-smi (an older driver? a container without --gpus all?)"
    means = "the engine computes on the CPU"
    return Finding(what="torch on GPU", found=found, means=means, status=Status.NOTE, remedy=remedy)


def look_at_kernel_language() -> Finding:
    """Triton's language, in which the kernels for a card are written, and what it compiles with."""
    triton = installed_version("triton")
    found = f"triton {triton or 'is not installed'}"
    if not has_gpu():
        return Finding(what="GPU kernels", found=found, means="only a GPU needs it")
    lacking = lacking_to_compile(process_environment())
    if triton and not lacking:
        means = "kernels are compiled for the card"
        return Finding(what="GPU kernels", found=found, means=means)
    return Finding(
        what="GPU kernels",
        found="; ".join([found, *(f"no {thing}" for thing in lacking)]),
        means="transformers' classes run on the card, slower",
        status=Status.NOTE,
        remedy="apt-get install g++ python3-dev" if triton else "pip install triton",
    )


def compiles_kernels() -> bool:
    """Triton's language is here, and what it compiles with."""
    return installed_version("triton") is not None and not lacking_to_compile(process_environment())


@cache
def read_card() -> Card:
    """Raises NoAnswerError."""
    if shutil.which("nvidia-smi") is None:
        raise NoAnswerError("it is not on PATH")
    query = [f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    lines = _output(["nvidia-smi", *query], _SMI_SECONDS).splitlines()
    fields = [field.strip() for field in (lines or [""])[0].split(",")]
    try:
        name, total, free, driver, capability = fields
        major, minor = capability.split(".")
        return Card(
            name=name,
            total_bytes=int(total) * _MIB,
            free_bytes=int(free) * _MIB,
            driver=driver,
            capability=(int(major), int(minor)),
        )
    except ValueError:
        raise NoAnswerError(lines[0] if lines else "no line") from None


def computes_on_card(device: str) -> bool:
    """What the engine would compute on for a value of the key ``device``: True for a card."""
    if device == "cpu" or not has_gpu():
        return False
    try:
        return _ask_torch()[1]
    except NoAnswerError:
        return False


def free_on_card(device: str) -> int | None:
    """Bytes; None where the engine computes on the CPU, or nobody tells."""
    if not computes_on_card(device):
        return None
    try:
        return read_card().free_bytes
    except NoAnswerError:
        return None


def installed_version(package: str) -> str | None:
    """From its metadata; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _ask_torch() -> tuple[str | None, bool]:
    """The CUDA release that torch is built for, and whether it can use a card."""
    answer = _output([sys.executable, "-c", _ASK_TORCH], _TORCH_SECONDS)
    try:
        built_for, is_available = json.loads(answer)
    except ValueError:
        raise NoAnswerError(answer[:80]) from None
    return built_for, bool(is_available)


def _output(command: list[str], seconds: float) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoAnswerError(type(error).__name__) from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"exit {done.returncode}"]
        raise NoAnswerError(said[-1][:120])
    return done.stdout
