"""The files of `deploy/`: as far as they can be checked without a cluster, by the tools that will read them."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specbranch.cli.diagnosis import KINDS
from tests.root import ROOT

DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "monitoring" / "dashboard.json").read_text())
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
METRICS = set(re.findall(r"`(specbranch_\w+)", (ROOT / "docs" / "python.md").read_text()))


def name(path: Path) -> str:
    return path.name


def queries() -> list[str]:
    """The dashboard's queries, with values for Grafana's variables."""
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    return [query.replace("$__rate_interval", "5m").replace("$model", ".*") for query in found]


def documents(path: Path) -> list[Any]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all(path.read_text()))


def commands() -> Iterator[list[str]]:
    """The words that containers and units start with, as far as they are ours."""
    for path in MANIFESTS:
        for document in documents(path):
            pod = document["spec"].get("template", {}).get("spec", {})
            yield from (container["args"] for container in pod.get("containers", ()))
    services = documents(DEPLOY / "compose.yaml")[0]["services"].values()
    yield from (service["command"] for service in services if "command" in service)


def test_the_dashboard_is_what_its_script_makes() -> None:
    made = runpy.run_path(str(DEPLOY / "monitoring" / "dashboard.py"))["dashboard"]()

    assert json.dumps(made, indent=1) + "\n" == (DEPLOY / "monitoring" / "dashboard.json").read_text()


def test_the_dashboard_answers_in_the_words_of_the_commands() -> None:
    panels = {panel["title"]: panel for panel in DASHBOARD["panels"]}
    table = panels["Does it help?"]["options"]["content"].splitlines()

    assert [line for line in table if line.startswith("| **")] == [
        f"| **{kind.title}** | {kind.action} |" for kind in KINDS
    ]
    labels = {"acceptance rate", "mean acceptance length", "tokens per second with and without drafts"}
    assert labels <= {title.lower() for title in panels}


def test_the_dashboard_and_the_alerts_ask_for_metrics_that_there_are() -> None:
    text = " ".join([*queries(), (DEPLOY / "monitoring" / "alerts.yml").read_text()])
    asked = set(re.findall(r"\bspecbranch_\w+", text))

    assert len(asked) > 10
    assert {re.sub(r"_(sum|count)$", "", metric) for metric in asked} <= METRICS


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_can_read_every_query_and_the_alerts(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{index}", "expr": query} for index, query in enumerate(queries())]
    path = tmp_path / "rules.json"  # JSON is YAML
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    for arguments in (("rules", path), ("config", DEPLOY / "monitoring" / "prometheus.yml")):
        done = subprocess.run(["promtool", "check", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", MANIFESTS, ids=name)
def test_kubernetes_takes_the_manifests(path: Path) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for document in documents(path):
        validator.validate(document, "1.31", strict=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_units() -> None:
    done = subprocess.run(["systemd-analyze", "verify", *UNITS], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert not any(path.name in done.stderr for path in UNITS)


def test_our_commands_and_settings_are_as_the_files_say() -> None:
    import typer

    from specbranch.cli import app
    from specbranch.plugins.vllm.settings import PROPOSER, read_settings

    ours: Any = typer.main.get_command(app)
    flags = {
        command: {flag for param in ours.commands[command].params for flag in param.opts} for command in ours.commands
    }
    given = list(commands())
    given += [
        re.findall(r"\S+", line) for path in UNITS for line in path.read_text().splitlines() if "ExecStart" in line
    ]
    drafts = [words for words in given if "--listen" in words]
    targets = [words for words in given if "--additional-config" in words]
    served = [words for words in given if "serve" in words]

    assert len(drafts) == 4 and len(targets) == 2 and len(served) == 1
    for words in drafts:
        assert {word for word in words if word.startswith("--")} <= flags["draft"]
    for words in served:
        assert {word for word in words if word.startswith("--")} <= flags["serve"] | {"--port"}
    for words in targets:
        settings = read_settings(json.loads(words[words.index("--additional-config") + 1])["specbranch"])
        speculative = json.loads(words[words.index("--speculative-config") + 1])
        assert settings.planner == "budget"
        assert speculative["model"] == PROPOSER
