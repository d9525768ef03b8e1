"""The dashboard and the alert rules ask only for metrics and labels that there are."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.architecture.generated import ROOT

FOLDER = ROOT / "docs/monitoring"
ROW = re.compile(r"^\| `(mlx_isolate_\w+)` \| (\w+) \| (.*?) \|", re.MULTILINE)
NAME = re.compile(r"\bmlx_isolate_\w+")
SELECTOR = re.compile(r"(mlx_isolate_\w+)\{([^}]*)\}")
GROUPING = re.compile(r"\bby \(([^)]*)\)")


def documented() -> dict[str, set[str]]:
    """Metric names with their labels, as docs/observability.md lists them; histograms by series."""
    found: dict[str, set[str]] = {}
    for name, kind, labels in ROW.findall((ROOT / "docs/observability.md").read_text()):
        names = set(re.findall(r"`(\w+)`", labels))
        if kind == "histogram":
            found[name + "_bucket"] = names | {"le"}
            found[name + "_sum"] = found[name + "_count"] = names
        else:
            found[name] = names
    return found


def expressions() -> Iterator[tuple[str, str]]:
    dashboard = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    rules: Any = yaml.safe_load((FOLDER / "alerts.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_expression_uses_what_there_is(title: str, expression: str) -> None:
    known = documented()
    names = NAME.findall(expression)
    assert names or "up{" in expression
    labels = set[str]()
    for name in names:
        assert name in known, f"{title} asks for {name}"
        labels |= known[name]
    for name, selector in SELECTOR.findall(expression):
        for label in re.findall(r"(\w+)\s*[=!]", selector):
            assert label in known[name], f"{title}: {name} has no label {label}"
    for group in GROUPING.findall(expression):
        assert {part.strip() for part in group.split(",")} <= labels, title
    assert expression.count("(") == expression.count(")")


def test_panels_have_their_own_ids_and_places() -> None:
    panels = json.loads((FOLDER / "grafana-dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)


def test_every_metric_is_on_the_dashboard_or_named_as_left_out() -> None:
    shown = {name for _, expression in expressions() for name in NAME.findall(expression)}
    left_out = {
        "mlx_isolate_build_info",
        "mlx_isolate_cache_dropped_spills_total",
        "mlx_isolate_cache_entries",
        "mlx_isolate_cache_hit_tokens_total",
        "mlx_isolate_cache_limit_bytes",
        "mlx_isolate_cache_pending_spill_bytes",
        "mlx_isolate_cache_quarantined_total",
        "mlx_isolate_cache_restores_total",
        "mlx_isolate_cache_spills_total",
        "mlx_isolate_engine_completions_total",
        "mlx_isolate_engine_incarnation",
        "mlx_isolate_event_readers",
        "mlx_isolate_event_readers_dropped_total",
        "mlx_isolate_supervisor_uptime_seconds",
    }
    names = {name for name in documented() if not name.endswith(("_sum", "_count"))}
    assert names - shown == left_out


def test_alerts_have_a_severity_and_a_sentence() -> None:
    rules: Any = yaml.safe_load((FOLDER / "alerts.yml").read_text())
    for rule in rules["groups"][0]["rules"]:
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"]["summary"].endswith((".", "?"))


def test_promtool_accepts_the_rules() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool on the PATH")
    done = subprocess.run(
        [promtool, "check", "rules", str(Path(FOLDER / "alerts.yml"))],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
