#!/usr/bin/env python
"""Make the Grafana dashboard of our metrics: deploy/monitoring/dashboard.py writes dashboard.json beside itself."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

OWN = '{model_name=~"$model"}'
WINDOW = "[$__rate_interval]"


def per_second(metric: str, labels: str = "") -> str:
    """The rate of a counter, summed over engines."""
    chosen = '{model_name=~"$model"' + (f", {labels}" if labels else "") + "}"
    return f"sum(rate({metric}{chosen}{WINDOW}))"


ROUNDS = f"({per_second('specbranch_hits_total')} + {per_second('specbranch_misses_total')})"
# title, unit, what it means, then lines: legend and query
PANELS: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    (
        "State",
        "short",
        "1: on, closed by the gate, late, another vocabulary, unreachable, or off.",
        {"{{state}}": f"max by (state) (specbranch_state{OWN})"},
    ),
    (
        "Tokens per second",
        "short",
        "What vLLM emits, and how many of these were drafted and accepted.",
        {
            "emitted": per_second("vllm:generation_tokens_total"),
            "accepted drafts": per_second("specbranch_accepted_tokens_total"),
        },
    ),
    (
        "Hit rate",
        "percentunit",
        "Verdicts that the draft had prepared for.",
        {"hits": f"{per_second('specbranch_hits_total')} / {ROUNDS}"},
    ),
    (
        "Tokens per round",
        "short",
        "Of one row: draft tokens submitted, draft tokens accepted.",
        {
            "submitted": f"{per_second('specbranch_submitted_tokens_sum')} / {per_second('specbranch_submitted_tokens_count')}",
            "accepted": f"{per_second('specbranch_accepted_tokens_total')} / {ROUNDS}",
        },
    ),
    (
        "Rolled back per emitted token",
        "short",
        "Drafted tokens that a verdict made useless, by cause.",
        {
            "{{cause}}": f"sum by (cause) (rate(specbranch_rolled_back_tokens_total{OWN}{WINDOW}))"
            f" / ignoring(cause) group_left sum(rate(vllm:generation_tokens_total{OWN}{WINDOW}))"
        },
    ),
    (
        "Wait of the target",
        "s",
        "Time that a step waited for drafts, on average.",
        {"wait": f"{per_second('specbranch_wait_seconds_total')} / {per_second('specbranch_calls_total')}"},
    ),
    (
        "Answers",
        "percentunit",
        "Rows whose draft was there before they asked, and calls that ended otherwise than in time.",
        {
            "ahead, of rows": f"{per_second('specbranch_prefetched_total')} / {ROUNDS}",
            "too late, of calls": f"{per_second('specbranch_timeouts_total')} / {per_second('specbranch_calls_total')}",
            "not reached, of calls": f"{per_second('specbranch_unreachable_total')} / {per_second('specbranch_calls_total')}",
        },
    ),
    (
        "Draft rows and sessions",
        "short",
        "Rows that the draft runs for this target per second, and the sessions that it holds.",
        {"rows per second": per_second("specbranch_draft_rows_total"), "sessions": f"sum(specbranch_sessions{OWN})"},
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    source = {"type": "prometheus", "uid": "prometheus"}
    panels = [
        {
            "id": index + 1,
            "title": title,
            "description": meaning,
            "type": "timeseries",
            "datasource": source,
            "gridPos": {"h": 8, "w": 12, "x": 12 * (index % 2), "y": 8 * (index // 2)},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 10}}, "overrides": []},
            "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
            "targets": [
                {"refId": chr(ord("A") + place), "expr": query, "legendFormat": legend, "datasource": source}
                for place, (legend, query) in enumerate(lines.items())
            ],
        }
        for index, (title, unit, meaning, lines) in enumerate(PANELS)
    ]
    model = {
        "name": "model",
        "type": "query",
        "datasource": source,
        "query": {"query": "label_values(specbranch_state, model_name)", "refId": "model"},
        "includeAll": True,
        "multi": True,
        "refresh": 2,
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "title": "SpecBranch",
        "uid": "specbranch",
        "schemaVersion": 41,
        "version": 1,
        "timezone": "browser",
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "tags": ["vllm", "speculative decoding"],
        "templating": {"list": [model]},
        "panels": panels,
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    path = Path(__file__).with_name("dashboard.json")
    path.write_text(json.dumps(dashboard(), indent=1) + "\n")


if __name__ == "__main__":
    main()
