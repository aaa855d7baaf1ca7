"""Outcomes as a PNG: what filled the batch and the KV cache, and what clients waited for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError
from inflight.simulator.outcome import Moment, Outcome

_COLOURS = ("#1b6ca8", "#d98c3f", "#5d9e6e", "#8c4f9f")
_MOMENTS = (
    ("batch fill", "batch_fill"),
    ("KV blocks in use", "kv_use"),
    ("waiting", "num_waiting"),
)
_TIER_MOMENTS = (("host memory in use", "host_use"), ("disk in use", "disk_use"))
_SOURCES = (
    ("computed", 1.0),
    ("from the pool", 0.7),
    ("from host memory", 0.45),
    ("from disk", 0.2),
)
"""Where context tokens come from, and how dark they are drawn."""
_POINTS = 240
"""Of a line; a point is the mean of the moments around it."""


def check_can_draw() -> None:
    """Raises ConfigError where there is no matplotlib, before anything is computed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--png: needs matplotlib: pip install matplotlib") from None


def draw(outcomes: Sequence[Outcome], target: Path) -> None:
    """Writes the PNG, a colour for each outcome. Raises ConfigError where it cannot be written."""
    check_can_draw()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    has_tiers = any(outcome.tiers for outcome in outcomes)
    figure = Figure(figsize=(10.5, 9.3 if has_tiers else 6.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(3 if has_tiers else 2, 3)
    for panel, (title, field) in zip(panels[0], _MOMENTS, strict=True):
        _draw_timeline(panel, outcomes, title, field)
    for panel, (title, field) in zip(
        panels[1][:2],
        (("time to first token", "time_to_first_token"), ("time between tokens", "inter_token")),
        strict=True,
    ):
        _draw_percentiles(panel, outcomes, title, field)
    _draw_counts(panels[1][2], outcomes)
    if has_tiers:
        for panel, (title, field) in zip(panels[2][:2], _TIER_MOMENTS, strict=True):
            _draw_timeline(panel, [o if o.tiers else None for o in outcomes], title, field)
        _draw_sources(panels[2][2], outcomes)
    figure.legend(
        handles=[
            panels[0][0].plot([], [], color=colour, label=outcome.name)[0]
            for outcome, colour in zip(outcomes, _COLOURS, strict=False)
        ],
        loc="outside lower center",
        ncols=len(outcomes),
        frameon=False,
    )
    try:
        figure.savefig(target, dpi=130, format="png")
    except OSError as error:
        raise ConfigError(f"--png: {target}: {error.strerror}") from None


def _draw_timeline(panel: Any, outcomes: Sequence[Outcome | None], title: str, field: str) -> None:
    """None: an outcome that has no such line."""
    for outcome, colour in zip(outcomes, _COLOURS, strict=False):
        if outcome is None:
            continue
        moments = outcome.timeline
        size = max(1, len(moments) // _POINTS)
        groups = [moments[at : at + size] for at in range(0, len(moments), size)]
        panel.plot(
            [group[0].seconds for group in groups],
            [_mean(group, field) for group in groups],
            color=colour,
            lw=1,
        )
    panel.set_ylim(bottom=0, top=None if field == "num_waiting" else 1.02)
    _finish(panel, title, "simulated seconds")


def _draw_percentiles(panel: Any, outcomes: Sequence[Outcome], title: str, field: str) -> None:
    width = 0.8 / len(outcomes)
    for place, (outcome, colour) in enumerate(zip(outcomes, _COLOURS, strict=False)):
        values = getattr(outcome, field)
        panel.bar([at + place * width for at in range(3)], values, width, color=colour)
    panel.set_xticks([at + 0.4 - width / 2 for at in range(3)], ["p50", "p90", "p99"])
    _finish(panel, title, "seconds")


def _draw_counts(panel: Any, outcomes: Sequence[Outcome]) -> None:
    """Waste in percent of held slots, and pauses for a hundred requests: both are small."""
    width = 0.8 / len(outcomes)
    for place, (outcome, colour) in enumerate(zip(outcomes, _COLOURS, strict=False)):
        pauses = 100 * outcome.num_pauses / max(outcome.num_completed, 1)
        heights = (100 * outcome.waste, pauses)
        bars = panel.bar([at + place * width for at in range(2)], heights, width, color=colour)
        panel.bar_label(bars, fmt="%.1f", fontsize=7)
    panel.set_xticks([at + 0.4 - width / 2 for at in range(2)], ["waste, %", "pauses / 100 req."])
    _finish(panel, "waste and pauses", "")


def _draw_sources(panel: Any, outcomes: Sequence[Outcome]) -> None:
    """Context tokens by where they came from, a stack for each outcome."""
    for place, (outcome, colour) in enumerate(zip(outcomes, _COLOURS, strict=False)):
        tiers = outcome.num_onboarded_tokens
        below = tiers.get("host", 0) + tiers.get("disk", 0)
        parts = (
            outcome.num_context_tokens,
            max(0, outcome.num_reused_tokens - below),
            tiers.get("host", 0),
            tiers.get("disk", 0),
        )
        bottom = 0
        for part, (_, alpha) in zip(parts, _SOURCES, strict=True):
            panel.bar([place], [part], 0.8, bottom=bottom, color=colour, alpha=alpha)
            bottom += part
    names = ", ".join(name for name, _ in _SOURCES)
    panel.set_xticks([])
    _finish(panel, "context tokens", f"dark to light: {names}")


def _finish(panel: Any, title: str, unit: str) -> None:
    panel.set_title(title, fontsize=9)
    panel.set_xlabel(unit, fontsize=7)
    panel.tick_params(labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)


def _mean(moments: Sequence[Moment], field: str) -> float:
    return sum(float(getattr(moment, field)) for moment in moments) / len(moments)
