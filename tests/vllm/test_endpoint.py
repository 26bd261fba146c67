"""Our metrics beside vLLM's own: on a stock `vllm serve`, also with a dead draft service, and in a real Prometheus."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from typer.testing import CliRunner

from specbranch.cli import app
from specbranch.launch.draft_process import DraftProcess, DraftServiceOptions
from specbranch.plugins.vllm.settings import PROPOSER
from tests.measuring import record
from tests.models import SHORT, require_pair
from tests.test_deploy import DEPLOY, queries
from tests.vllm.serving import StockServer, serving, stock_serving, wait_for

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


@contextlib.contextmanager
def prometheus(directory: Path, target: int) -> Iterator[str]:
    """Prometheus with the rules of `deploy/`, looking at that port every second; its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(DEPLOY / "monitoring" / "alerts.yml")],
        "scrape_configs": [{"job_name": "vllm", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    words = ["prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def ask(url: str, path: str, **words: str) -> Any:
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(words)}", timeout=30) as answer:
        return json.load(answer)["data"]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_prometheus_reads_a_server_and_answers_the_dashboard(tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    target, draft = require_pair("openai", name=SHORT)
    words = ["--draft", str(draft), "--planner", "pearl", "--no-gate", "--dtype", "float32"]
    words += ["--max-model-len", "512", "--enforce-eager", "--served-model-name", "m"]
    with serving(tmp_path, str(target), *words) as served, prometheus(tmp_path, served.port) as url:
        wait_for(lambda: is_up(url), 60)
        for _ in range(6):
            complete(served.url)
            time.sleep(1.5)
        missing = [query for query in queries() if not ask(url, "query", query=query.replace("5m", "30s"))["result"]]
        alerts = ask(url, "rules")["groups"]

    assert missing == [], "queries without an answer"
    assert all(rule["health"] == "ok" for group in alerts for rule in group["rules"])


def is_up(url: str) -> bool:
    with contextlib.suppress(OSError):
        return any(one["value"][1] == "1" for one in ask(url, "query", query="up")["result"])
    return False


def complete(url: str) -> None:
    body = {"model": "m", "prompt": "Count to ten: 1, 2,", "max_tokens": 32, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=400).close()
