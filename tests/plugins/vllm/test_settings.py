"""The arguments that bring the proposer into vLLM, made without vLLM, and the layouts that it refuses."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from specbranch.core.planners import SettingError
from specbranch.launch.vllm_flags import Flags, layout_of
from specbranch.launch.vllm_server import VllmServeCommand
from specbranch.plugins.vllm.settings import (
    PROPOSER,
    LayoutError,
    ParallelLayout,
    ProposerSettings,
    TargetError,
    check_target,
    plugin_settings,
    proposer_arguments,
    read_settings,
)

PIPELINE, EVERY_RANK, ONE_PROCESS = "pipeline parallelism", "external_launcher", "one process"


def test_the_proposer_reads_the_settings_that_were_given() -> None:
    settings = ProposerSettings(address="ipc:///d", planner="pearl", settings={"gamma": 3}, deadline_ms=7.0)
    arguments = proposer_arguments(settings, 5)

    assert arguments["speculative_config"] == {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": 5,
    }
    assert set(arguments) == {"speculative_config", "additional_config"}
    assert read_settings(arguments["additional_config"]["specbranch"]) == settings


def test_an_address_of_none_is_not_mistaken_for_the_usual_one() -> None:
    settings = ProposerSettings(address=None)
    section = proposer_arguments(settings)["additional_config"]["specbranch"]

    assert section["address"] is None and "keys" not in section
    assert read_settings(section) == settings != ProposerSettings()
    assert settings.checked_settings(6) == {"gamma": 6}
    with pytest.raises(SettingError, match="name no draft service"):
        settings.client_options(6)


def test_they_are_made_without_vllm_and_without_heavy_libraries() -> None:
    program = (
        "import sys, specbranch.plugins.vllm.settings\n"
        "assert not {'vllm', 'torch', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("layout", "cause"),
    [
        (ParallelLayout(pipeline=2), PIPELINE),
        (ParallelLayout(pipeline=2, tensor=4), PIPELINE),
        (ParallelLayout(tensor=2, executor="external_launcher"), EVERY_RANK),
        (ParallelLayout(tensor=2, executor="uni"), ONE_PROCESS),
    ],
)
def test_a_layout_that_would_be_wrong_is_refused(layout: ParallelLayout, cause: str) -> None:
    with pytest.raises(LayoutError, match=cause):
        layout.check_supported()


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(),
        ParallelLayout(tensor=4),
        ParallelLayout(tensor=4, data=2, executor="mp"),
        ParallelLayout(executor="external_launcher"),
        ParallelLayout(data=2, executor="uni"),
    ],
)
def test_other_layouts_are_not(layout: ParallelLayout) -> None:
    layout.check_supported()


@pytest.mark.parametrize("words", [["-pp", "2"], ["--pipeline_parallel_size=2"], ["--pipeline-parallel-size", "2"]])
def test_the_flags_of_a_server_are_read(words: list[str]) -> None:
    assert layout_of(Flags(words)).pipeline == 2
    with pytest.raises(LayoutError, match="Use tensor parallelism"):
        VllmServeCommand("m", "m", settings=ProposerSettings(), flags=Flags(words))
    VllmServeCommand("m", "m", settings=None, flags=Flags(words))  # bare vLLM can do it


def test_the_arguments_of_the_python_class_are_read() -> None:
    arguments = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}

    assert ParallelLayout.of_arguments(arguments) == ParallelLayout(tensor=2, executor="external_launcher")
    assert ParallelLayout.of_arguments({"pipeline_parallel_size": None}) == ParallelLayout()
    assert ParallelLayout(tensor=2, pipeline=3, data=4).num_devices == 24
    for wrong in ("two", 0, 1.5):
        with pytest.raises(LayoutError, match="give a whole number"):
            ParallelLayout.of_arguments({"tensor_parallel_size": wrong})


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        (["-tp", "2", "-dp", "3"], 6),
        (["-dp", "16", "--data-parallel-size-local", "7"], 7),
        (["-tp", "16", "--nnodes", "2"], 8),
    ],
)
def test_only_devices_of_this_machine_count(words: list[str], devices: int) -> None:
    assert layout_of(Flags(words)).num_devices == devices


def test_a_hybrid_target_is_refused_where_vllm_answers_wrongly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def config(is_hybrid: bool, device: str) -> SimpleNamespace:
        model = SimpleNamespace(is_hybrid=is_hybrid, model="tiny")
        return SimpleNamespace(model_config=model, device_config=SimpleNamespace(device_type=device))

    monkeypatch.setattr("specbranch.plugins.vllm.installed.version", lambda: "0.31.2")
    check_target(config(False, "cpu"))
    with pytest.raises(TargetError, match=r"tiny has recurrent layers, and on a CPU.*serve --bare"):
        check_target(config(True, "cpu"))
    with pytest.raises(TargetError, match=r"0.31.2 is reported.*use vLLM 0.32"):
        check_target(config(True, "cuda"))
    monkeypatch.setattr("specbranch.plugins.vllm.installed.version", lambda: "0.32.0+cu129")
    check_target(config(True, "cuda"))
    assert "drafts are untested with it" in caplog.text


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("tcp://draft:5757", "tcp://draft:5757"),
        ("tcp://a:5757, tcp://b:5757,", ["tcp://a:5757", "tcp://b:5757"]),
        ("", ProposerSettings().address),
    ],
)
def test_the_environment_names_the_service_where_the_section_does_not(given: str, address: str | list[str]) -> None:
    environment = {"SPECBRANCH_ADDRESS": given, "SPECBRANCH_KEYS": "/keys"}

    assert plugin_settings({"planner": "pearl"}, environment) == ProposerSettings(
        address=address, keys="/keys", planner="pearl"
    )


@pytest.mark.parametrize("address", ["ipc:///ours", ["ipc:///one", "ipc:///two"], None])
def test_the_section_wins_over_the_environment(address: str | list[str] | None) -> None:
    environment = {"SPECBRANCH_ADDRESS": "tcp://draft:5757", "SPECBRANCH_KEYS": "/keys", "SPECBRANCH_ENABLED": "1"}
    settings = plugin_settings({"address": address, "keys": "/ours"}, environment)

    assert settings == ProposerSettings(address=address, keys="/ours")


def test_without_variables_the_section_is_all(caplog: pytest.LogCaptureFixture) -> None:
    assert plugin_settings({}, {"SPECBRANCH_ENABLED": ""}) == ProposerSettings()
    with pytest.raises(SettingError, match="give a table of settings"):
        plugin_settings(7, {"SPECBRANCH_ADDRESS": "ipc:///draft"})


def test_the_plugin_can_be_switched_off_by_the_environment() -> None:
    section = {"address": "ipc:///ours", "planner": "pearl", "settings": {"gamma": 3}, "pad": "on", "runner": "auto"}
    settings = plugin_settings(section, {"SPECBRANCH_ENABLED": "0"})

    assert (settings.address, settings.planner, settings.pad, settings.runner) == (None, "none", "off", "auto")
    assert settings.checked_settings(5) == {} and settings.text_drafter(5) is None
    with pytest.raises(SettingError, match="SPECBRANCH_ENABLED is 'no'; it takes 0 or 1"):
        plugin_settings(section, {"SPECBRANCH_ENABLED": "no"})
