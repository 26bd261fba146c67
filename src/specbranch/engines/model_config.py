"""The `config.json` of a model, from this machine: nothing is loaded and nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specbranch.engines.options import local_model


def read_config(model: str) -> dict[str, Any] | None:
    """Read the config of a directory of Transformers, or of a name in the hub's cache; None if there is none here."""
    path = local_model(model)
    file = cached_file(model, "config.json") if path is None else path / "config.json"
    try:
        config = json.loads(file.read_text()) if file is not None else None
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def cached_file(repo: str, name: str) -> Path | None:
    """Find a file of a hub's repository, if it has been downloaded before."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(repo, name)
    except (ImportError, ValueError):  # not installed, or no name of a repository
        return None
    return Path(found) if isinstance(found, str) else None
