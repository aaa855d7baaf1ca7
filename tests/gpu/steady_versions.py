"""Prints how many versions a warm-up compiles, and those that later iterations would compile.

    python tests/gpu/steady_versions.py

A request must never wait for the compiler. Nothing is compiled here, and no card is needed.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "backend_src")]

from tests.gpu.compile_kernels import recorded  # noqa: E402  (before any kernel is defined)

# isort: split
import torch  # noqa: E402

from inflight.kernels.attention import AttentionPlan, AttentionRows, attend  # noqa: E402
from inflight.kernels.blocks import copy_blocks  # noqa: E402
from inflight.kernels.combine import combine  # noqa: E402
from inflight.kernels.expert_linears import expert_gate_ups, expert_linears  # noqa: E402
from inflight.kernels.launch import default_launches  # noqa: E402
from inflight.kernels.likeliest import likeliest, likeliest_parts  # noqa: E402
from inflight.kernels.logit_edits import edit_logits  # noqa: E402
from inflight.kernels.rms_norm import rms_norm  # noqa: E402
from inflight.kernels.rope import rope_and_write  # noqa: E402
from inflight.kernels.routing import Routing, route  # noqa: E402
from inflight.kernels.sampling import sample  # noqa: E402
from inflight.kernels.sampling_rows import SamplingRows  # noqa: E402
from tests.gpu.kernel_works import Rules  # noqa: E402

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCAB = 8, 2, 64, 512, 9000
EXPERTS, CHOSEN, INNER = 3, 2, 96
MOST = 64
RULES = Rules(num_heads=HEADS, head_dim=HEAD_DIM, cos_sin=torch.zeros(MOST, HEAD_DIM))


class Model:
    """The buffers of a runner, and one layer's calls on the rows of an iteration."""

    def __init__(self) -> None:
        self.hidden = torch.zeros(MOST, WIDTH)
        self.qkv = torch.zeros(MOST, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.query = torch.zeros(MOST, HEADS, HEAD_DIM)
        self.out = torch.zeros(MOST, HEADS, HEAD_DIM)
        self.storage = torch.zeros(1, 2, 16, KV_HEADS, 16, HEAD_DIM)
        self.logits = torch.zeros(MOST, VOCAB)
        self.counts = torch.zeros(MOST, VOCAB, dtype=torch.int32)
        parts = MOST * likeliest_parts(VOCAB)
        self.room = (torch.zeros(parts), torch.zeros(parts, dtype=torch.int32))
        self.ids, self.largest = torch.zeros(MOST, dtype=torch.int32), torch.zeros(MOST)
        plan = AttentionPlan.allocate(
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            launches=default_launches(HEAD_DIM, torch.float32),
            device=CPU,
        )
        self.plan = replace(plan, wanted_programs=64)
        self.experts = Experts()

    def step(self, contexts: int, generations: int, *, shift: int, longest: int) -> None:
        """``shift``: where metadata lies in its buffer, in numbers."""
        sequences, rows = contexts + generations, 3 * contexts + generations
        metadata = torch.zeros(4096, dtype=torch.int32)[shift:]
        wide = torch.zeros(4096, dtype=torch.int64)[shift:]
        rms_norm(self.hidden[:rows], self.hidden[0], 1e-5, self.hidden[:rows])
        self.experts.step(self.hidden[:rows])
        rope_and_write(
            self.qkv[:rows],
            self.query[:rows],
            self.storage[0],
            wide[:rows],
            wide[rows : 2 * rows],
            RULES,
        )
        iteration = AttentionRows(
            cu_seqlens_q=metadata[: sequences + 1],
            context_lens=metadata[100 + shift :][:sequences],
            block_tables=metadata[200 + shift :][: sequences * 9].view(sequences, 9),
            num_context_sequences=contexts,
            num_context_tokens=3 * contexts,
            longest=longest,
        )
        attend(self.query[:rows], self.storage[0], iteration, RULES, self.out[:rows], self.plan)
        shown = slice(shift, shift + sequences)
        likeliest(self.logits[:sequences], self.ids[shown], self.largest[shown], self.room)
        self.sample(sequences, metadata, wide[shift:].view(torch.float64))
        copy_blocks(self.storage, metadata[:2], metadata[2:4])

    def sample(self, num_rows: int, metadata: torch.Tensor, doubles: torch.Tensor) -> None:
        numbers, floats = metadata[:num_rows], metadata.view(torch.float32)[:num_rows]
        starts, listed = metadata[: num_rows + 1], metadata[: num_rows % 5 + 1]
        logits = self.logits[:num_rows]
        rows = SamplingRows(
            temperatures=floats,
            top_ks=numbers,
            top_ps=doubles[:num_rows],
            min_p_offsets=doubles[:num_rows],
            uniforms=doubles[:num_rows],
            wants_log_prob=numbers,
            is_left=numbers,
            bias_starts=starts,
            bias_ids=listed,
            biases=listed.view(torch.float32),
            masked_starts=starts,
            masked_ids=listed,
            repetition_penalties=floats,
            presence_penalties=floats,
            frequency_penalties=floats,
            slots=numbers,
            fresh_slots=listed,
            counted_starts=starts,
            counted_ids=listed,
            counts=self.counts,
            has_penalties=True,
            normalize_log_probs=num_rows % 2 == 0,
        )
        edit_logits(logits, rows)
        sample(logits, rows, numbers, floats)


class Experts:
    """Those of a layer, with a shared one."""

    def __init__(self) -> None:
        self.gate_ups = torch.zeros(EXPERTS, 2 * INNER, WIDTH)
        self.downs = torch.zeros(EXPERTS, WIDTH, INNER)

    def step(self, x: torch.Tensor) -> None:
        """What is between the products is new in each iteration, as it is in the runner."""
        routing = Routing.allocate(
            len(x), num_experts=EXPERTS, num_chosen=CHOSEN, num_shared=1, device=CPU
        )
        route(torch.zeros(len(x), EXPERTS + 1), routing, is_softmax_of_chosen=True)
        inner = torch.zeros(len(x) * CHOSEN, INNER)
        expert_gate_ups(x, self.gate_ups, routing, inner, "silu")
        results = torch.zeros(len(x) * CHOSEN, WIDTH)
        expert_linears(inner, self.downs, routing, results)
        combine(results, routing, torch.zeros_like(x), torch.zeros_like(x))


def main() -> None:
    model = Model()
    with recorded() as versions:
        model.step(1, 1, shift=0, longest=200)
        model.step(0, 32, shift=0, longest=20)
        model.step(0, MOST, shift=0, longest=20)
        warmed_up = set(versions)
        for contexts, generations in ((0, 1), (1, 0), (2, 3), (0, 2), (16, 0), (1, 16), (0, 33)):
            for shift in (0, 1, 4, 7):
                for longest in (1, 16, 17, 200):
                    model.step(contexts, generations, shift=shift, longest=longest)
    new = [key for key in versions if key not in warmed_up]
    print(json.dumps({"warm_up": len(warmed_up), "new": new}))


if __name__ == "__main__":
    main()
