"""Our metrics on the endpoint of a stock `vllm serve`, beside vLLM's own; also when the draft service is dead."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner

from specbranch.cli import app
from specbranch.launch.draft_process import DraftProcess, DraftServiceOptions
from specbranch.plugins.vllm.settings import PROPOSER
from tests.models import require_pair
from tests.results import record
from tests.vllm.serving import StockServer, stock_serving

DRAFTING = json.dumps({"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 4})
ARGUMENTS = ("--dtype", "float32", "--max-model-len", "256", "--enforce-eager", "--max-num-seqs", "4")
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}


def value(page: str, name: str, **labels: str) -> float:
    """The value of the one sample with these labels among others."""
    found = [
        float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
        if re.match(rf"{re.escape(name)}(\{{|\s)", line)
        and all(f'{label}="{wanted}"' in line for label, wanted in labels.items())
    ]
    assert len(found) == 1, f"{name} {labels}: {found}"
    return found[0]


def state(page: str) -> str:
    states = ("on", "lagging", "unreachable", "off")
    (now,) = [name for name in states if value(page, "specbranch_state", state=name) == 1]
    return now


@pytest.mark.timeout(1200)
def test_vllms_endpoint_shows_our_metrics_and_does_not_mind_a_dead_service(tmp_path: Path) -> None:
    target, draft = require_pair()
    with DraftProcess(DraftServiceOptions(str(draft), threads=1), tmp_path / "draft.log") as service:
        section = {"address": service.address, "planner": "pearl", "deadline_ms": 60000, "is_gated": False}
        arguments = ("--speculative-config", DRAFTING, "--additional-config", json.dumps({"specbranch": section}))
        with stock_serving(target, tmp_path, *ARGUMENTS, *arguments, **ENVIRONMENT) as served:
            before = scrape_when_on(served)
            assert value(before, "specbranch_calls_total", engine="0", model_name="target") == 0

            text = served.complete("Here is a story about the sea.", 60)
            page = scrape_when_settled(served)
            (tmp_path / "page.txt").write_text(page)
            assert_figures_add_up(page)
            assert_top_shows_them(served, page)

            service.stop()
            assert_a_dead_service_is_told_and_costs_nothing(served, text)


def scrape_when_on(served: StockServer, timeout_s: float = 300.0) -> str:
    """The page as soon as the service has answered the process that makes it."""
    end_s = time.monotonic() + timeout_s
    while state(page := served.scrape()[0]) != "on":
        assert time.monotonic() < end_s, page
        time.sleep(0.2)
    return page


def scrape_when_settled(served: StockServer, timeout_s: float = 300.0) -> str:
    """The page as soon as the service has told all; it may answer late while the machine is busy."""
    end_s = time.monotonic() + timeout_s
    while True:
        page, _ = served.scrape()
        rounds = value(page, "specbranch_hits_total") + value(page, "specbranch_misses_total")
        if rounds == value(page, "specbranch_calls_total") or time.monotonic() > end_s:
            return page
        time.sleep(0.2)


def assert_figures_add_up(page: str) -> None:
    calls = value(page, "specbranch_calls_total")
    submitted = value(page, "specbranch_submitted_tokens_sum")
    accepted = value(page, "specbranch_accepted_tokens_total")
    rejected = value(page, "specbranch_rolled_back_tokens_total", cause="rejected")
    rounds = value(page, "specbranch_hits_total") + value(page, "specbranch_misses_total")
    assert value(page, "specbranch_answered_total") == calls > 10
    assert value(page, "specbranch_submitted_tokens_count") == calls
    assert value(page, "specbranch_hits_total") > 0
    assert value(page, "specbranch_wait_seconds_total") > 0
    # One sequence: the service heard of its prompt before the first call, so every call brings a verdict.
    assert rounds == calls
    # What was submitted last is never reported back: the request was over.
    assert 0 < accepted <= value(page, "vllm:spec_decode_num_accepted_tokens_total") <= accepted + 4
    assert accepted + rejected <= submitted <= accepted + rejected + 4
    assert state(page) == "on"


def assert_top_shows_them(served: StockServer, page: str) -> None:
    done = CliRunner().invoke(app, ["top", served.url, "--once", "--json"])
    read = json.loads(done.stdout)
    assert (read["model"], read["now"]["states"], read["now"]["sessions"]) == ("target", ["on"], 1)
    assert read["total"]["verdicts"] == value(page, "specbranch_calls_total")
    assert read["total"]["rejected"] == value(page, "specbranch_rolled_back_tokens_total", cause="rejected")
    assert read["now"]["first_row_ms"] > 0


def assert_a_dead_service_is_told_and_costs_nothing(served: StockServer, text: str) -> None:
    durations = []
    for _ in range(5):
        page, duration_s = served.scrape()
        durations.append(duration_s)
    assert state(page) == "unreachable"
    known, num_timeouts = (value(page, f"specbranch_{name}_total") for name in ("misses", "timeouts"))
    assert known > 0
    assert served.complete("Here is a story about the sea.", 60) == text
    page, _ = served.scrape()
    assert value(page, "specbranch_unreachable_total") > 0
    assert value(page, "specbranch_timeouts_total") <= num_timeouts + 1, "it was waited for more than once"
    assert value(page, "specbranch_misses_total") == known
    record("endpoint", scrape_s=round(median(durations), 4))
