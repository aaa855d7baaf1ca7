"""What the doctor reads without loading anything is what the libraries find by themselves."""

from __future__ import annotations

import pytest
import torch

from inflight.cli.doctor.accelerator import _ask_torch
from inflight.cli.doctor.processor import best_kernels
from inflight.native.build import find_compiler
from tests.numeric.native_library import native_library

pytestmark = pytest.mark.numeric


def test_the_best_instruction_set_is_that_of_the_library() -> None:
    library = native_library()
    best, _ = best_kernels(find_compiler())
    assert library.best_isa.name.lower() == best


def test_torch_says_the_same_from_a_process_of_its_own() -> None:
    assert _ask_torch() == (torch.version.cuda, torch.cuda.is_available())
