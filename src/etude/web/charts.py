"""Draws the curves of a run as inline SVG with matplotlib: one figure per question a person asks of a run.

Takes rows of `metrics.jsonl`, gives SVG text. Training groups and held-out probes are labelled apart (SPEC R6).
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from etude.coordinator.metrics import ProbeMetrics, StepMetrics

# Categorical colours in a fixed order, told apart by people with colour-vision deficiencies as well.
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#2a6fb0", "#d9822b", "#2f8f6b", "#c0392b", "#7a5195", "#6b7280"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)

plt.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "etude",
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#9aa1ab",
        "axes.labelcolor": "#374151",
        "axes.grid": True,
        "grid.color": "#e5e7eb",
        "grid.linewidth": 0.6,
        "xtick.color": "#4b5563",
        "ytick.color": "#4b5563",
        "legend.frameon": False,
        "legend.fontsize": 8,
    }
)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Trailing mean over at most `window` values."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / (i + 1 - max(0, i - window + 1)) for i in range(len(values))]


def _figure(draw: Callable[[Axes], None], label_x: str = "training step") -> str:
    figure, axes = plt.subplots(figsize=(5.2, 2.7), layout="constrained")
    try:
        draw(axes)
        axes.set_xlabel(label_x)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        if axes.get_legend_handles_labels()[1]:
            axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, borderaxespad=0.2, handlelength=1.6)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    finally:
        plt.close(figure)
    svg = buffer.getvalue()
    return re.sub(r"^.*?(?=<svg)", "", svg, flags=re.DOTALL)


def _trend(axes: Axes, steps: list[int], values: list[float], colour: str, label: str) -> None:
    window = max(1, len(values) // 12)
    if window > 1:
        axes.plot(steps, values, color=colour, alpha=0.22, linewidth=1)
    axes.plot(steps, smoothed(values, window), color=colour, linewidth=1.8, label=label)


def success(steps: Sequence[StepMetrics], probes: Sequence[ProbeMetrics]) -> str:
    """Mean and best-of-K success: training groups as lines, held-out probes as marks."""

    def draw(axes: Axes) -> None:
        x = [row.step for row in steps]
        if steps:
            _trend(axes, x, [row.success_mean for row in steps], BLUE, "training groups, mean")
            _trend(axes, x, [row.best_of_k for row in steps], ORANGE, f"training groups, best of {steps[0].k}")
        if probes:
            px = [row.step for row in probes]
            axes.plot(px, [row.mean for row in probes], "o--", color=GREEN, linewidth=1, label="held-out probe, mean")
            best = f"held-out probe, best of {probes[0].attempts}"
            axes.plot(px, [row.best_of_k for row in probes], "s--", color=PURPLE, linewidth=1, label=best)
        axes.set_ylim(0, 1)
        axes.set_ylabel("share solved")

    return _figure(draw)


def lines(steps: Sequence[StepMetrics], series: Sequence[tuple[str, Sequence[float]]], label_y: str) -> str:
    """A panel of one or more series over the training steps."""

    def draw(axes: Axes) -> None:
        for colour, (label, values) in zip(CYCLE, series):
            _trend(axes, [row.step for row in steps], list(values), colour, label if len(series) > 1 else "")
        axes.set_ylabel(label_y)

    return _figure(draw)


def stacked(steps: Sequence[StepMetrics], names: Sequence[str], label_y: str) -> str:
    """Tool calls per rollout, one band per tool."""

    def draw(axes: Axes) -> None:
        window = max(1, len(steps) // 12)
        bands = [smoothed([row.tool_calls.get(name, 0.0) for row in steps], window) for name in names]
        axes.stackplot([row.step for row in steps], *bands, labels=list(names), colors=CYCLE, alpha=0.85)
        axes.set_ylabel(label_y)

    return _figure(draw)
