"""What a scenario needs of this machine: refused in seconds, with the method, the cause and the way out."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specbranch.bench import scenario as bench_scenario
from specbranch.bench.scenario import ScenarioError, check_methods, engines_that_fit, read_scenario
from specbranch.cli import app
from specbranch.cli.preflight import Preflight
from specbranch.launch.vllm_flags import KnownSpeculation, read_speculation
from specbranch.plugins.vllm import installed

CORE = min(os.sched_getaffinity(0))
NO_CORE = 999_999
HEAD = f"""
name = "small"
target = "t"
draft = "d"
target_cores = [{CORE}]
draft_cores = [{CORE}]
[[prompts]]
task = "gsm8k"
file = "g.jsonl"
count = 4
[[methods]]
name = "bare"
"""
KNOWN = KnownSpeculation(
    frozenset({"ngram", "suffix", "draft_model"}), frozenset({"method", "model", "num_speculative_tokens"})
)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM on the CPU with three methods, without the package of one of them; models of a gigabyte."""
    found = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name == "arctic_inference" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(bench_scenario, "known_speculation", lambda: KNOWN)
    monkeypatch.setattr(bench_scenario, "weight_bytes", lambda model, dtype=None: 10**9)
    monkeypatch.setattr(installed, "runs_on_cpu", lambda: True)
    monkeypatch.setattr("specbranch.machine.free_host_memory", lambda: 10**12)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("SPECBRANCH_MODELS", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def written(directory: Path, method: str, more: str = "") -> Path:
    path = directory / "s.toml"
    path.write_text(f'{more}{HEAD}[[methods]]\nname = "other"\n{method}\n')
    return path


def check(directory: Path, method: str, more: str = "") -> None:
    check_methods(read_scenario(written(directory, method, more)))


@pytest.mark.parametrize(
    ("method", "cause"),
    [
        ('{ method = "suffix" }', "needs the package arctic_inference, which is not installed; pip install"),
        ('{ method = "sufix" }', "vLLM has no speculative method 'sufix'; did you mean 'suffix'"),
        ('{ method = "ngram", num_speculative_token = 5 }', "did you mean 'num_speculative_tokens'"),
        ("{ num_speculative_tokens = 5 }", "neither a method nor a model; name one"),
        ('{ method = "draft_model" }', "needs a draft; name it as `model`"),
        ('{ method = "draft_model", model = "./none" }', "the model of its speculative_config: there is no none"),
    ],
)
def test_a_method_of_vllm_that_cannot_run_is_named_with_cause_and_way_out(
    tmp_path: Path, method: str, cause: str
) -> None:
    with pytest.raises(ScenarioError) as refused:
        check(tmp_path, f"speculative_config = {method}")

    assert str(refused.value).startswith("method 'other': ") and cause in str(refused.value)


def test_methods_that_can_run_pass(tmp_path: Path) -> None:
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "config.json").write_text("{}")

    check(tmp_path, 'speculative_config = { method = "draft_model", model = "peer", num_speculative_tokens = 4 }')
    check(tmp_path, f'speculative_config = {{ method = "ngram" }}\ncores = [{CORE}]')
    check(tmp_path, 'planner = "budget"')


def test_names_are_not_checked_where_vllm_does_not_tell_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_scenario, "known_speculation", lambda: None)

    check(tmp_path, 'speculative_config = { method = "newest", anything = 1 }')


def test_cores_that_the_machine_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=f"method 'other': cores has core {NO_CORE}, and this process may use"):
        check(tmp_path, f"cores = [{NO_CORE}]")

    path = written(tmp_path, 'planner = "budget"')
    path.write_text(path.read_text().replace(f"draft_cores = [{CORE}]", f"draft_cores = [{NO_CORE}]"))
    with pytest.raises(ScenarioError, match=f"draft_cores has core {NO_CORE}"):
        check_methods(read_scenario(path))


def test_settings_that_a_planner_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"method 'other': .*gama"):
        check(tmp_path, 'planner = "pearl"\nsettings = { gama = 3 }')


def test_engines_that_do_not_fit_together_are_refused_with_how_many_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine has a gigabyte of weights and a GiB of cache; the draft has a gigabyte too."""
    peer = 'speculative_config = { method = "ngram" }'
    monkeypatch.setattr("specbranch.machine.free_host_memory", lambda: 5 * 10**9)
    monkeypatch.setattr("specbranch.bench.scenario._LOAD_PACKAGE", "json")
    with pytest.raises(ScenarioError, match=r"2 engines at once need 4\.1 GB.*4\.0 GB.*set engines_at_once = 1"):
        check(tmp_path, peer)
    check(tmp_path, peer, "engines_at_once = 1\n")
    check(tmp_path, peer, "arguments = { kv_cache_memory_bytes = 100000000 }\n")
    check(tmp_path, f"{peer}\n[served]\nrates = [1.0]")

    monkeypatch.setattr("specbranch.machine.free_host_memory", lambda: 2 * 10**9)
    with pytest.raises(ScenarioError, match="use smaller models"):
        check(tmp_path, peer, "engines_at_once = 1\n")

    for free in (None, 2 * 10**9):
        monkeypatch.setattr("specbranch.machine.free_host_memory", lambda free=free: free)
        monkeypatch.setattr(installed, "runs_on_cpu", lambda free=free: free is None)  # a GPU has memory of its own
        check(tmp_path, peer)


def test_a_load_without_the_package_that_reads_its_prompts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbranch.bench.scenario._LOAD_PACKAGE", "no_such_package")
    with pytest.raises(ScenarioError, match="needs the package no_such_package: pip install no_such_package"):
        check(tmp_path, 'speculative_config = { method = "ngram" }\n[served]\nrates = [1.0]')


def test_the_engines_that_fit_are_counted_from_the_largest() -> None:
    assert [engines_that_fit([1, 3, 2], free) for free in (-1, 2, 3, 5, 6)] == [0, 0, 1, 2, 3]


def test_the_command_refuses_before_it_loads_or_writes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Preflight, "run", lambda self: None)
    scenario, out = written(tmp_path, 'speculative_config = { method = "suffix" }'), tmp_path / "out.jsonl"
    refused = CliRunner().invoke(
        app, ["bench", "run", str(scenario), "--data", str(tmp_path), "--out", str(out)], env={"COLUMNS": "300"}
    )

    assert refused.exit_code == 2
    assert "error: method 'other': it needs the package arctic_inference" in " ".join(refused.stderr.split())
    assert not out.exists()


def test_methods_and_keys_are_read_from_vllms_source(tmp_path: Path) -> None:
    assert read_speculation(tmp_path) is None

    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "speculative.py").write_text(
        """
Inner = Literal["eagle"]
SpeculativeMethod = Literal["ngram", "suffix", Inner]
Other = Literal["standard"]
class SpeculativeConfig:
    method: SpeculativeMethod | None = None
    model: str | None = None
"""
    )
    assert read_speculation(tmp_path) == KnownSpeculation(
        frozenset({"ngram", "suffix", "eagle"}), frozenset({"method", "model"})
    )


def test_the_installed_vllm_tells_the_methods_that_our_scenarios_use() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vllm is not installed")
    known = read_speculation(Path(next(iter(spec.submodule_search_locations))))

    assert known is not None
    assert {"ngram", "suffix", "draft_model", "eagle3"} <= known.methods
    assert {"method", "model", "num_speculative_tokens", "prompt_lookup_max"} <= known.keys
