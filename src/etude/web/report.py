"""Writes a run's `report.html`: one self-contained page with the before/after table, the curves, and rollouts to read.

Reads `summary.json`, `metrics.jsonl` and `rollouts.jsonl` of the run folder and nothing else, so it can be made again at
any time (`etude runs report`). No script, no outside address.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import msgspec

from etude.coordinator.metrics import ProbeMetrics, StepMetrics, read
from etude.coordinator.summary import ReadableRollout, Summary
from etude.records.errors import BadInput
from etude.web import charts

_STYLE = Path(__file__).with_name("report.css").read_text(encoding="utf-8")


def _escape(text: object) -> str:
    return html.escape(str(text), quote=True)


def _table(summary: Summary) -> str:
    if not summary.table:
        return ""
    rows = []
    for line in summary.table:
        change = line.after - line.before
        if line.change_low is None or line.change_high is None:
            interval, verdict = "", ""
        else:
            interval = f"{line.change_low:+.3f} to {line.change_high:+.3f}"
            verdict = "not resolved in this short run" if line.change_low <= 0 <= line.change_high else "resolved"
        rows.append(
            f"<tr><td>{_escape(line.name)}</td><td>{line.before:.3f}</td><td>{line.after:.3f}</td>"
            f"<td>{change:+.3f}</td><td>{interval}</td><td>{verdict}</td></tr>"
        )
    head = "<tr><th>held-out tasks</th><th>before</th><th>after</th><th>change</th><th>95% interval</th><th></th></tr>"
    return f"<h2>Before and after</h2><table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def _panel(title: str, hint: str, svg: str) -> str:
    return f"<figure><figcaption>{_escape(title)}<span>{_escape(hint)}</span></figcaption>{svg}</figure>"


def _panels(steps: Sequence[StepMetrics], probes: Sequence[ProbeMetrics]) -> str:
    if not steps:
        return "<p>No training step was finished.</p>"
    tools = sorted({name for row in steps for name in row.tool_calls})
    drawn = [
        _panel("Success", "verifier only; held-out probes decide nothing", charts.success(steps, probes)),
        _panel(
            "Reward",
            "mean total reward of training groups",
            charts.lines(steps, [("", [r.reward_mean for r in steps])], "reward"),
        ),
        _panel(
            "KL to the starting policy",
            "mean k1 per sampled token",
            charts.lines(steps, [("", [r.kl for r in steps])], "nats"),
        ),
        _panel(
            "Entropy",
            "of the sampling distribution, per token",
            charts.lines(steps, [("", [r.entropy for r in steps])], "nats"),
        ),
        _panel(
            "Staleness",
            "trainer step minus the step of a group's oldest token",
            charts.lines(
                steps,
                [("mean", [r.staleness_mean for r in steps]), ("largest", [float(r.staleness_max) for r in steps])],
                "steps",
            ),
        ),
        _panel(
            "Signal",
            "groups with both outcomes; distinct solutions in a group",
            charts.lines(
                steps,
                [
                    ("mixed groups, share", [r.mixed_groups for r in steps]),
                    ("distinct solutions", [r.distinct_solutions for r in steps]),
                    ("well-formed rollouts, share", [r.well_formed for r in steps]),
                ],
                "",
            ),
        ),
        _panel(
            "Length",
            "sampled tokens of a rollout",
            charts.lines(steps, [("", [r.sampled_tokens_mean for r in steps])], "tokens"),
        ),
        _panel("Turns", "actions of a rollout", charts.lines(steps, [("", [r.turns_mean for r in steps])], "turns")),
        _panel("Tool use", "calls per rollout", charts.stacked(steps, tools, "calls")),
        _panel(
            "Throughput",
            "rollouts finished per minute",
            charts.lines(steps, [("", [r.rollouts_per_minute for r in steps])], "rollouts / min"),
        ),
        _panel(
            "Time of a step",
            "training, and waiting for a batch before it",
            charts.lines(
                steps, [("training", [r.step_s for r in steps]), ("waiting", [r.wait_s for r in steps])], "seconds"
            ),
        ),
        _panel(
            "Off-policy weight",
            "min(pi / mu, C) per sampled token: mean and largest",
            charts.lines(
                steps,
                [("mean", [r.importance_mean for r in steps]), ("largest", [r.importance_max for r in steps])],
                "weight",
            ),
        ),
        _panel("Gradient norm", "before clipping", charts.lines(steps, [("", [r.grad_norm for r in steps])], "norm")),
    ]
    return f'<h2>Curves</h2><div class="grid">{"".join(drawn)}</div>'


def _rollouts(rollouts: Sequence[ReadableRollout]) -> str:
    if not rollouts:
        return ""
    blocks = []
    for index, rollout in enumerate(rollouts):
        parts = "".join(
            f'<div class="part {_escape(kind)}"><div class="kind">{_escape(kind)}</div><pre>{_escape(text)}</pre></div>'
            for kind, text in rollout.parts
        )
        colour = "good" if rollout.solved else "bad"
        blocks.append(
            f"<details{' open' if index == 0 else ''}><summary>{_escape(rollout.title)} "
            f'<span class="{colour}">{_escape(rollout.outcome)}</span></summary>{parts}</details>'
        )
    return f"<h2>Rollouts to read</h2>{''.join(blocks)}"


def render(
    summary: Summary,
    steps: Sequence[StepMetrics],
    probes: Sequence[ProbeMetrics],
    rollouts: Sequence[ReadableRollout],
) -> str:
    """The page as text."""
    facts = "".join(f"<div><dt>{_escape(k)}</dt><dd>{_escape(v)}</dd></div>" for k, v in summary.facts.items())
    notes = "".join(f"<p>{_escape(note)}</p>" for note in summary.notes)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{_escape(summary.title)}</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>{_escape(summary.title)}</h1><p class="lead">run {_escape(summary.run)}</p><dl>{facts}</dl>'
        f"{_table(summary)}{notes}{_panels(steps, probes)}{_rollouts(rollouts)}</main></body></html>"
    )


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` in the run folder, atomically. Raises BadInput when the folder holds no `summary.json`."""
    place = run_dir / "summary.json"
    try:
        summary = msgspec.json.decode(place.read_bytes(), type=Summary)
    except FileNotFoundError:
        raise BadInput(
            str(place), "file", "missing", "a run folder that `etude quickstart` or `etude train` made"
        ) from None
    except msgspec.DecodeError as error:
        raise BadInput(str(place), "content", str(error), "a run summary") from error
    rows = list(read(run_dir / "metrics.jsonl"))
    readable = run_dir / "readable.json"
    rollouts = msgspec.json.decode(readable.read_bytes(), type=list[ReadableRollout]) if readable.exists() else []
    page = render(
        summary,
        [row for row in rows if isinstance(row, StepMetrics)],
        [row for row in rows if isinstance(row, ProbeMetrics)],
        rollouts,
    )
    target = run_dir / "report.html"
    temporary = target.with_suffix(".html.tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(target)
    return target
