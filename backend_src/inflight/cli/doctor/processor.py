"""The CPU, the cores this process may use, the compiler, and the kernels that follow from them."""

from __future__ import annotations

import os

from inflight.cli.doctor.finding import Finding, Status
from inflight.native.build import Compiler, NativeUnavailableError, find_compiler
from inflight.native.cpu import computes_bf16, cpu_name, instruction_sets, usable_cores

_SETS = {
    "amx": "AMX (bf16, int8)",
    "avx512": "AVX-512 (BF16, VNNI)",
    "avx2": "AVX2",
    "portable": "portable",
}
_EXPANDED = "kernels expand bf16 as they multiply, torch is slow in it"
_INSTALL_COMPILER = "apt-get install g++"


def look_at_cpu() -> Finding:
    """Its name, and those of its instruction sets for which there are kernels."""
    names = [_SETS[name] for name in reversed(instruction_sets())]
    bf16 = "bf16 is computed by the CPU itself" if computes_bf16() else _EXPANDED
    if not names:
        return Finding(
            what="CPU",
            found=f"{cpu_name()}: none of the instruction sets with kernels of their own",
            means=f"the portable kernels run, which are slower; {bf16}",
            status=Status.NOTE,
        )
    return Finding(what="CPU", found=f"{cpu_name()}: {', '.join(names)}", means=bf16)


def look_at_cores() -> Finding:
    """What affinity and control group leave of the machine's."""
    usable, all_cores = usable_cores(), os.cpu_count() or 1
    found = f"{usable} of {all_cores} may be used"
    if usable == all_cores:
        return Finding(what="cores", found=found, means="the engine computes on all of them")
    means = "affinity or the control group's quota leaves so many; the engine computes on those"
    return Finding(what="cores", found=found, means=means)


def look_at_compiler() -> Finding:
    """A compiler, and the kernels that run when CPU and compiler are put together."""
    try:
        compiler = find_compiler()
    except NativeUnavailableError as error:
        return Finding(
            what="kernels",
            found=str(error),
            means="torch computes on the CPU instead of native kernels, slower",
            status=Status.NOTE,
            remedy=_INSTALL_COMPILER,
        )
    found = f"{compiler.version.splitlines()[0]} in {compiler.path}"
    best, unknown = best_kernels(compiler)
    if unknown:
        return Finding(
            what="kernels",
            found=f"{found}, which does not know {_SETS[unknown]}",
            means=f"kernels run with {_SETS[best]}, slower than this CPU could",
            status=Status.NOTE,
            remedy=f"{_INSTALL_COMPILER} (of a newer release)",
        )
    means = f"kernels are compiled once and run with {_SETS[best]}"
    return Finding(what="kernels", found=found, means=means)


def best_kernels(compiler: Compiler) -> tuple[str, str | None]:
    """The highest set of CPU and compiler, and the first that only the CPU has."""
    best = "portable"
    for name in instruction_sets():
        if name not in compiler.isas:
            return best, name
        best = name
    return best, None
