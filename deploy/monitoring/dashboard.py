#!/usr/bin/env python
"""Make the Grafana dashboard of our metrics: deploy/monitoring/dashboard.py writes dashboard.json beside itself.

It needs specbranch to be installed, and takes the answers to "Does it help?" from there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from specbranch.cli.diagnosis import KINDS

OWN = '{model_name=~"$model"}'
WINDOW = "[$__rate_interval]"


def per_second(metric: str, labels: str = "") -> str:
    """The rate of a counter, summed over engines."""
    chosen = '{model_name=~"$model"' + (f", {labels}" if labels else "") + "}"
    return f"sum(rate({metric}{chosen}{WINDOW}))"


SUBMITTED = f"({per_second('specbranch_submitted_tokens_sum')} - {per_second('specbranch_text_tokens_total')})"
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
        "Acceptance rate",
        "percentunit",
        "Tokens of the draft model that the target accepted, of those that it verified.",
        {"accepted": f"{per_second('specbranch_accepted_tokens_total')} / {SUBMITTED}"},
    ),
    (
        "Mean acceptance length",
        "short",
        "Tokens that a verification yields, the target's own token included; and how many it could yield.",
        {
            "accepted": f"1 + {per_second('specbranch_accepted_tokens_total')} / {ROUNDS}",
            "if all were accepted": f"1 + {SUBMITTED} / {ROUNDS}",
        },
    ),
    (
        "Tokens per second with and without drafts",
        "short",
        "What the gate measured last, by requests in a step, as a mean over engines; the faster way is used.",
        {"{{rows}} in a step, {{way}}": f"avg by (rows, way) (specbranch_gate_tokens_per_second{OWN})"},
    ),
    (
        "Prepared verification results",
        "percentunit",
        "Verification results for which a draft branch was ready.",
        {"prepared": f"{per_second('specbranch_hits_total')} / {ROUNDS}"},
    ),
    (
        "Discarded draft tokens per emitted token",
        "short",
        "Drafted tokens that a verification result made useless, by cause.",
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


def answers() -> dict[str, Any]:
    """The text panel that explains each answer to "Does it help?" as `specbranch top` gives it."""
    rows = "\n".join(f"| **{kind.title}** | {kind.action} |" for kind in KINDS)
    content = (
        "`specbranch top http://HOST:PORT` and `specbranch doctor --server http://HOST:PORT` say which of these hold "
        f"now, with figures.\n\n| Finding | What to do |\n|---|---|\n{rows}\n"
    )
    return {
        "id": len(PANELS) + 1,
        "title": "Does it help?",
        "type": "text",
        "gridPos": {"h": 13, "w": 24, "x": 0, "y": 8 * ((len(PANELS) + 1) // 2)},
        "options": {"mode": "markdown", "content": content},
    }


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    source = {"type": "prometheus", "uid": "prometheus"}
    panels: list[dict[str, Any]] = [
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
        "panels": [*panels, answers()],
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    path = Path(__file__).with_name("dashboard.json")
    path.write_text(json.dumps(dashboard(), indent=1) + "\n")


if __name__ == "__main__":
    main()
