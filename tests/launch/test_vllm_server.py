"""How `vllm serve` is started, without vLLM: flags, merged settings, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from specbranch.cli import app
from specbranch.errors import FlagError
from specbranch.launch.vllm_flags import Flags
from specbranch.launch.vllm_server import HttpEndpoint, VllmServeCommand
from specbranch.plugins.vllm import installed
from specbranch.plugins.vllm.settings import ProposerSettings, merged_settings


@pytest.fixture(autouse=True)
def no_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


OURS = {"address": "ipc:///d", "planner": "pearl"}  # what `specbranch serve` sets
DEFAULTS = {
    "settings": {}, "predictor": "confidence", "deadline_ms": 100.0, "is_gated": True, "pad": "auto", "runner": "v1",
    "rule": "match", "max_services": 4,
}  # fmt: skip


def options(*words: str, cores: tuple[int, ...] | None = (0,)) -> VllmServeCommand:
    flags = Flags(words)
    settings = merged_settings(OURS, flags.take_json("--additional-config")[0])
    return VllmServeCommand("/models/big", "big", settings=settings, num_speculative_tokens=6, flags=flags, cores=cores)


def argument(words: list[str], name: str) -> Any:
    return json.loads(words[words.index(name) + 1])


def test_vllm_gets_the_proposer_its_settings_and_every_other_flag_unchanged() -> None:
    given = ["--max_model_len=512", "-O3", "--enforce-eager", "--served-model-name", "a", "b"]
    words = options(*given).arguments()

    assert words[:2] == ["serve", "/models/big"]
    assert words[-len(given) :] == given
    assert argument(words, "--speculative-config") == {
        "method": "custom_class",
        "model": "specbranch.plugins.vllm.SpecBranchProposer",
        "num_speculative_tokens": 6,
    }
    assert argument(words, "--additional-config") == {"specbranch": {**OURS, **DEFAULTS}}


def test_clients_call_the_target_by_the_name_that_was_given() -> None:
    words = options().arguments()
    as_it_is = VllmServeCommand("big", "big", settings=ProposerSettings()).arguments()

    assert words[words.index("--served-model-name") + 1] == "big"
    assert "--served-model-name" not in as_it_is


def test_beside_a_draft_on_the_cpu_vllm_asks_for_less_memory_than_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself it asks for 0.92 and does not start if a draft has taken more than the rest."""
    assert options().memory_flags(0.8) == ["--gpu-memory-utilization", "0.70"]
    assert options().memory_flags(1.0) == ["--gpu-memory-utilization", "0.90"]
    assert options().memory_flags(0.15) == [], "too little for both; vLLM says so itself"
    assert options().memory_flags(None) == []
    assert options(cores=None).memory_flags(0.8) == [], "on a GPU it is the GPU's memory"
    assert VllmServeCommand("big", "big", settings=None, cores=(0,)).memory_flags(0.8) == [], (
        "bare vLLM has no draft beside it"
    )
    assert options("--gpu_memory_utilization=0.5").memory_flags(0.8) == []
    assert options("--kv-cache-memory-bytes", "1G").memory_flags(0.8) == []
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert options().memory_flags(0.8) == []


def test_additional_config_is_merged_whole_and_dotted() -> None:
    flags = ['--additional_config={"x": {"y": 1}}', "--port", "1", "--additional-config.specbranch.namespace", "team"]
    words = options(*flags, "--additional-config.x.z", "2").arguments()

    assert argument(words, "--additional-config") == {
        "x": {"y": 1, "z": 2},
        "specbranch": {"namespace": "team", **OURS, **DEFAULTS},
    }
    assert words[-2:] == ["--port", "1"]
    assert words.count("--additional-config") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--speculative-config", "{}"], "use --draft, --gamma"),
        (["--speculative_config.method=ngram"], "use --draft, --gamma"),
        (["-sc", "{}"], "use --draft, --gamma"),
        (["--spec-tokens", "3"], "use --draft, --gamma"),
        (["--additional-config", '{"specbranch": {"address": "x"}}'], "sets specbranch.address"),
        (["--additional-config", '{"specbranch": 3}'], "give a table"),
        (["--additional-config", "[1]"], "give a JSON object"),
        (["--additional-config"], "has no value"),
        (["-tp", "many"], "--tensor-parallel-size is 'many'"),
    ],
)
def test_flags_that_clash_with_ours_are_refused_with_their_advice(words: list[str], message: str) -> None:
    with pytest.raises(FlagError, match=message):
        options(*words).arguments()


def test_one_worker_on_the_cpu_runs_inside_the_engine_process() -> None:
    one = options(cores=(0, 1, 2))

    assert one.arguments()[6:8] == ["--distributed-executor-backend", "uni"]
    assert one.environment() == {"OMP_NUM_THREADS": "3", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def test_the_executor_that_somebody_chose_stands_and_is_bound_to_the_cores() -> None:
    chosen = options("--distributed-executor-backend=mp", cores=(0, 1, 2))

    assert chosen.arguments().count("--distributed-executor-backend") == 0
    assert chosen.environment() == {"VLLM_CPU_OMP_THREADS_BIND": "0,1,2"}


def test_several_workers_share_the_cores_equally() -> None:
    assert options("-tp", "2", cores=(0, 1, 2, 5)).environment() == {"VLLM_CPU_OMP_THREADS_BIND": "0,1|2,5"}
    assert options("-tp=2", "--data-parallel-size", "2", cores=(4, 5, 6, 7)).num_workers == 4
    with pytest.raises(FlagError, match="2 workers need as many cores"):
        options("--tensor_parallel_size", "2").environment()


def test_a_binding_of_ones_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")

    assert options().environment() == {}
    assert "uni" not in options().arguments()


def test_on_a_gpu_nothing_is_pinned() -> None:
    assert options(cores=None).environment() == {}
    assert "uni" not in options(cores=None).arguments()


@pytest.mark.parametrize(
    ("words", "url"),
    [
        ([], "http://127.0.0.1:8000"),
        (["--host", "0.0.0.0", "--port=9"], "http://127.0.0.1:9"),
        (["--host", "::", "--ssl-certfile", "x"], "https://[::1]:8000"),
        (["--uds", "/run/v.sock"], "unix:/run/v.sock"),
    ],
)
def test_the_url_follows_vllms_flags(words: list[str], url: str) -> None:
    assert str(HttpEndpoint.of(Flags(words))) == url


def test_nobody_at_the_endpoint_is_not_healthy() -> None:
    assert not HttpEndpoint("127.0.0.1", 9).is_healthy()
    assert not HttpEndpoint("", 0, path="/nowhere/v.sock").is_healthy()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "1", "big", "--draft", "d"], "name TARGET first"),
        (["big", "--draft", "d", "--planner", "perl"], "did you mean 'pearl'"),
        (["big", "--draft", "d", "--set", "gama=2"], "did you mean 'gamma'"),
        (["big", "--draft", "d", "--set", "gamma"], "give KEY=VALUE"),
        (["big", "--draft", "d", "--draft-cores", "9999"], "--draft-cores is 9999; this process may use"),
        (["big", "--draft", "d", "-sc", "{}"], "-sc is set by `specbranch serve`"),
        (["big", "--draft", "d", "--additional-config.specbranch.adress", "x"], "did you mean 'address'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "is_installed", lambda: True)
    result = CliRunner().invoke(app, ["serve", *words])

    assert result.exit_code == 2
    assert message in result.stderr


def test_without_vllm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "is_installed", lambda: False)
    result = CliRunner().invoke(app, ["serve", "big", "--draft", "d"])

    assert result.exit_code == 2
    assert "vLLM is not installed: pip " in result.stderr
