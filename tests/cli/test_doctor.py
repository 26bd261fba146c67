"""`specbranch doctor` tells what is here, what would be chosen, and what would stop a pair."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbranch.cli import app
from specbranch.plugins.vllm.compat import launch
from specbranch.version import __version__

runner = CliRunner()
doctor = importlib.import_module("specbranch.cli.doctor")  # the package has the command under this name


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
    monkeypatch.setattr(launch, "is_installed", lambda: True)
    words = ["doctor", str(tmp_path / "none"), "--draft", "/nope.gguf"]
    shown, document = runner.invoke(app, words), json.loads(runner.invoke(app, [*words, "--json"]).stdout)
    causes = {one["check"]: one["cause"] for one in document["checks"]}

    assert shown.exit_code == 1
    assert f"TARGET: there is no {tmp_path}/none" in shown.output.replace("\n", "")
    assert causes["target"] and causes["draft"] and causes["vLLM"] is None


def test_what_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    found = doctor.software()

    assert found["vLLM"] is None
    assert found["missing"][:2] == ["specbranch[vllm]", "specbranch[llamacpp]"]
    assert "pip install 'specbranch[torch]'" in found["engines"]["torch"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("avx2 avx512f avx512_vnni amx_bf16", "bfloat16 targets and int8 drafts are fast"),
        ("avx2 avx512f avx512_vnni", "int8 drafts are fast; bfloat16 is emulated"),
        ("avx2 avx512f", "int8 works at half speed"),
        ("avx2", "8-bit weights"),
        ("sse", "no vector instructions"),
    ],
)
def test_what_instruction_sets_mean_is_said(monkeypatch: pytest.MonkeyPatch, flags: str, words: str) -> None:
    monkeypatch.setattr(doctor, "instruction_sets", lambda text: flags.split())

    assert doctor.machine()["what they mean"].startswith(words)
