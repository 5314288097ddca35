from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from etude.coordinator.metrics import ProbeMetrics, StepMetrics, append, read
from etude.coordinator.summary import ReadableRollout, Summary, SummaryLine, write_json
from etude.records.errors import BadInput
from etude.web.report import write_report


def step(number: int) -> StepMetrics:
    values: dict[str, object] = {}
    for field in msgspec.structs.fields(StepMetrics):
        kind = field.type
        values[field.name] = {int: number, float: number / 10, str: "", dict[str, float]: {"run": 1.0}}.get(
            kind, {"finish": 3}
        )
    return StepMetrics(**values)  # type: ignore[arg-type]


class Outside(HTMLParser):
    """Collects every address that a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href") and not (v or "").startswith("#")]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for number in range(1, 4):
        append(tmp_path / "metrics.jsonl", step(number))
    probe = ProbeMetrics(step=2, time_s=1.0, policy_version=2, tasks=8, attempts=4, mean=0.25, best_of_k=0.5)
    append(tmp_path / "metrics.jsonl", probe)
    table = (SummaryLine("mean success", 0.2, 0.3, -0.01, 0.2), SummaryLine("best of 4", 0.4, 0.6, 0.1, 0.3))
    write_json(tmp_path / "summary.json", Summary(title="T & <t>", run="r", facts={"steps": "3"}, table=table))
    text = "<script>alert(1)</script>"
    rollout = ReadableRollout(title=text, outcome="solved", solved=True, parts=(("action", text),))
    write_json(tmp_path / "readable.json", [rollout])
    return tmp_path


def test_report_is_self_contained_and_says_what_is_not_resolved(run_dir: Path) -> None:
    page = write_report(run_dir).read_text(encoding="utf-8")
    found = Outside()
    found.feed(page)
    assert found.addresses == [] and found.scripts == 0
    assert page.count("not resolved in this short run") == 1 and page.count(">resolved<") == 1
    assert "T &amp; &lt;t&gt;" in page and page.count("<svg") == 13
    assert "training groups" in page and "held-out probe" in page


def test_rows_round_trip_and_a_torn_last_line_is_passed_over(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    rows = list(read(path))
    assert rows[0] == step(1) and isinstance(rows[3], ProbeMetrics)
    path.write_bytes(path.read_bytes() + b'{"kind":"step","st')
    assert list(read(path)) == rows


def test_folder_that_is_no_run_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"summary\.json"):
        write_report(tmp_path)
