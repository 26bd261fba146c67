"""The real Prometheus reads a real server and its draft service, and answers every query of the dashboard."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models import SHORT, require_pair
from tests.test_deploy import DEPLOY, queries
from tests.vllm.serving import serving, wait_for

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


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
