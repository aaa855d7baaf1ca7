"""The stages of the suite, in their order: what must hold first, then what is measured."""

from __future__ import annotations

from dataclasses import dataclass

SUITE_SECONDS = 505.0
"""All stages together; with unpacking, the table and the end of the last stage below 9 minutes."""

CPU_SUITE_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A module ``tests.gpu.<name>`` that prints rows."""

    name: str
    title: str
    seconds: float
    """Kept for it on a card; it gets what earlier ones left over besides, and is ended then."""
    cpu_seconds: float
    """And on the CPU stand-in."""
    arguments: tuple[str, ...] = ()

    def command(self, *, on_cpu: bool) -> tuple[str, ...]:
        """What follows the interpreter on the command line."""
        return ("-m", f"tests.gpu.{self.name}", *self.arguments, *(("--cpu",) if on_cpu else ()))

    def limit(self, *, on_cpu: bool) -> float:
        return self.cpu_seconds if on_cpu else self.seconds


_TUNE = ("--tune",)
"""What is judged runs with the launches that a server would have measured at its first load: those
of the 8B shape are measured by the kernels' stage, those of 1B by the engine's. Either takes most
of a minute, and finds them in the cache the next time."""

STAGES = (
    Stage(name="environment", title="Machine", seconds=20, cpu_seconds=40),
    Stage(name="kernel_correctness", title="Kernels: equality", seconds=80, cpu_seconds=90),
    Stage(name="kernel_speed", title="Kernels: speed", seconds=85, cpu_seconds=60, arguments=_TUNE),
    Stage(name="engine_speed", title="Engine", seconds=220, cpu_seconds=90, arguments=_TUNE),
    Stage(name="streaming", title="Streaming", seconds=100, cpu_seconds=120),
    Stage(name="flashinfer", title="FlashInfer", seconds=0, cpu_seconds=0),
)
"""The last gets what is left over."""
