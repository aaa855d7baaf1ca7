"""Every case of every kernel, and the table of what they cover."""

from __future__ import annotations

from collections.abc import Iterable

from tests.interpreter.attention_cases import attention_cases
from tests.interpreter.case import Case, dtype_name
from tests.interpreter.layer_cases import layer_cases
from tests.interpreter.storage_cases import storage_cases

CASES: tuple[Case, ...] = (*layer_cases(), *attention_cases(), *storage_cases())


def coverage_lines(cases: Iterable[Case]) -> list[str]:
    """One line for each kernel and shape, with its dtypes: a Markdown table."""
    dtypes: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        dtypes.setdefault((case.kernel, case.shape), []).append(dtype_name(case.dtype))
    rows = [f"| {kernel} | {shape} | {' '.join(of)} |" for (kernel, shape), of in dtypes.items()]
    return ["| kernel | shape | dtypes |", "|---|---|---|", *rows]


if __name__ == "__main__":
    print("\n".join(coverage_lines(CASES)))
