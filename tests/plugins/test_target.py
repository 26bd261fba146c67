"""How a vLLM engine is asked for, without vLLM: its arguments and its environment."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from specbranch.launch.vllm_engine import LocalEngineOptions
from specbranch.plugins.vllm import installed
from specbranch.plugins.vllm.settings import ProposerSettings

SETTINGS = ProposerSettings(address="ipc:///d", planner="sps")


def test_a_bare_engine_gets_the_arguments_as_they_are() -> None:
    given = {"tensor_parallel_size": 2, "additional_config": {"x": 1}}

    assert LocalEngineOptions("m", arguments=given).all_arguments() == {"disable_log_stats": False, **given}


def test_the_proposer_is_added_to_the_users_own_additional_config() -> None:
    given = {"additional_config": {"x": 1, "specbranch": {"pad": "on"}}}
    arguments = LocalEngineOptions("m", SETTINGS, 6, given).all_arguments()

    assert arguments["speculative_config"]["num_speculative_tokens"] == 6
    assert arguments["additional_config"]["x"] == 1
    assert arguments["additional_config"]["specbranch"]["planner"] == "sps"
    assert given == {"additional_config": {"x": 1, "specbranch": {"pad": "on"}}}


@pytest.mark.parametrize(
    ("is_cuda", "capability", "asked", "is_invariant"),
    [
        (True, 90, None, True),
        (True, 80, None, True),
        (True, 75, None, False),
        (False, 90, None, False),
        (True, 90, "0", False),
    ],
)
def test_batch_invariance_is_used_where_vllm_has_it(
    monkeypatch: pytest.MonkeyPatch, is_cuda: bool, capability: int, asked: str | None, is_invariant: bool
) -> None:
    platform = SimpleNamespace(is_cuda=lambda: is_cuda, has_device_capability=lambda least: capability >= least)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=sys.modules["vllm.platforms"]))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "unset")
    if asked is None:
        monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    else:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", asked)

    assert installed.be_batch_invariant() == installed.is_batch_invariant() == is_invariant


def test_what_the_user_set_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "unset")  # so that it is restored
        monkeypatch.delenv(name)
    installed.run_in_this_process({"OMP_NUM_THREADS": "3"})

    found = {name: os.environ[name] for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS")}
    assert found == {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "3"}
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
