"""Find a model by its name, read its config and size, and load it without running code from its repository.

A wrong name is found here within seconds and reported clearly; Transformers would report it only after a minute.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from specbranch.errors import EngineError

_HUB_S = 4.0  # how long to wait for the hub's answer
_GGUF = b"GGUF"
_CONFIGS = ("config.json", "params.json")
_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
_KINDS = ("*.safetensors", "*.gguf", "*.bin", "*.pt")  # only files of the first kind present count


@dataclass(frozen=True, slots=True)
class HubAnswer:
    """The hub's answer about a model; if both fields are None, the model exists.

    `refusal` says why the model cannot be downloaded, `unknown` why it is not known whether it can.
    """

    refusal: str | None = None
    unknown: str | None = None


def check_model_exists(what: str, model: str) -> str | None:
    """Raise `EngineError` if a model does not exist.

    Returns None if it exists, or a note that says why that could not be checked. `what` names the model in messages,
    such as TARGET.
    """
    path = local_model(model)
    if path is not None:
        _require_files(what, path)
        return None
    if "://" in model:
        return f"{what}: {model} was not checked, because vLLM reads such a store itself"
    return _require_elsewhere(what, model)


def _require_files(what: str, path: Path) -> None:
    if path.is_dir():
        if not any((path / name).is_file() for name in _CONFIGS) and not any(path.glob("*.gguf")):
            raise EngineError(f"{what} is {path}, which has neither config.json nor a GGUF file; name a model")
        return
    if path.suffix != ".gguf":
        raise EngineError(f"{what} is the file {path}; name a directory with config.json, or a GGUF file")
    with path.open("rb") as file:
        if file.read(len(_GGUF)) != _GGUF:
            raise EngineError(f"{what} is {path}, which is not a GGUF file; was its download interrupted?")


def _require_elsewhere(what: str, model: str) -> str | None:
    """Look on the hub for a model that is not on this machine.

    Raises `EngineError` if the hub does not have it or the name is a path. Returns None if the hub has it, or a note
    that says why the hub could not be asked.
    """
    repository = model.partition(":")[0]
    if _is_path(model):
        path = Path(model).expanduser()
        raise EngineError(f"{what}: there is no {path}{_near(path.name, path.parent)}")
    store = os.environ.get("SPECBRANCH_MODELS")
    hint = _near(model, Path(store)) if store else ""
    places = "it is not a path here, not in $SPECBRANCH_MODELS" if store else "it is not a path here"
    answer = ask_hub(repository)
    if answer.refusal is not None:
        raise EngineError(f"{what}: {model!r} was not found: {places}, and {answer.refusal}{hint}")
    return answer.unknown and f"{what}: {model!r} was not checked on the Hugging Face hub: {answer.unknown}"


def _is_path(model: str) -> bool:
    """Return whether `model` must be a path: names on the hub are `name` or `owner/name`, optionally with `:file`."""
    is_file = model.endswith((".gguf", ".safetensors")) and ":" not in model
    return is_file or model.startswith(("/", ".", "~")) or model.partition(":")[0].count("/") > 1 or not model


def _near(name: str, directory: Path) -> str:
    """Return the end of a message, which suggests the most similar name in a directory; "" if none is similar."""
    names = [entry.name for entry in directory.iterdir()] if directory.is_dir() else []
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def ask_hub(repository: str) -> HubAnswer:
    """Ask the Hugging Face hub whether it has a model, and return the answer.

    If any revision of the model was downloaded before, it exists, and no request is sent.
    """
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return HubAnswer(unknown="VLLM_USE_MODELSCOPE is set, so vLLM downloads it from ModelScope")
    try:
        from huggingface_hub import HfApi, constants
        from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
    except ImportError:
        return HubAnswer(unknown="huggingface_hub is not installed")

    def ask() -> HubAnswer:
        try:
            if constants.HF_HUB_OFFLINE:
                return HubAnswer("HF_HUB_OFFLINE forbids looking on the Hugging Face hub")
            HfApi().model_info(repository, timeout=_HUB_S)
        except GatedRepoError:
            return HubAnswer("on the Hugging Face hub it needs permission: accept its terms and run `hf auth login`")
        except (RepositoryNotFoundError, HFValidationError):
            return HubAnswer("not on the Hugging Face hub either")
        except Exception as error:  # network libraries raise many types
            name = type(error).__name__
            if "Connect" in name or isinstance(error, ConnectionError):
                return HubAnswer(f"the Hugging Face hub cannot be reached ({name})")
            return HubAnswer(unknown=f"the hub answered with an error ({name})")
        return HubAnswer()

    return HubAnswer() if _is_cached(constants.HF_HUB_CACHE, repository) else _within(_HUB_S, ask)


def _is_cached(cache: str, repository: str) -> bool:
    """Return whether the hub's cache has any revision of a repository; the libraries check later if it is complete."""
    snapshots = Path(cache) / f"models--{repository.replace('/', '--')}" / "snapshots"
    return snapshots.is_dir() and any(snapshots.iterdir())


def _within(limit_s: float, ask: Callable[[], HubAnswer]) -> HubAnswer:
    """Call `ask` in a thread and return its answer; after `limit_s`, return an answer that says it came too late.

    The field `unknown` of this answer has the explanation.
    """
    answers: list[HubAnswer] = []
    thread = Thread(target=lambda: answers.append(ask()), name="hub", daemon=True)
    thread.start()
    thread.join(limit_s)
    return answers[0] if answers else HubAnswer(unknown=f"the hub did not answer within {limit_s:g} s")


def weight_bytes(model: str, dtype: str | None = None) -> int:
    """Return the bytes that a model's weights take in memory, in `dtype` or, if None, in their own type.

    Returns 0 if the model is not on this machine.
    """
    path = local_model(model)
    if path is None:
        return 0
    if path.is_file():
        return path.stat().st_size
    files = next((found for kind in _KINDS if (found := _files(path, kind))), [])
    return int(sum(file.stat().st_size for file in files) * _growth(read_config(model) or {}, dtype))


def _files(path: Path, kind: str) -> list[Path]:
    """Return the files in the directory `path` that match the pattern `kind`.

    Some models have a second copy of all weights, named `consolidated*`; it is left out if there are other files.
    """
    files = list(path.glob(kind))
    return [file for file in files if not file.name.startswith("consolidated")] or files


def _growth(table: Mapping[str, Any], dtype: str | None) -> float:
    """Return the factor from the size of weights on disk to their size in `dtype`; `table` is the model's config.

    It is 1 for quantized weights, which keep their type, and if either type is unknown.
    """
    own = _BYTES.get(str(table.get("dtype") or table.get("torch_dtype")).removeprefix("torch."))
    asked = _BYTES.get((dtype or "").removeprefix("torch."))
    return asked / own if own and asked and "quantization_config" not in table else 1.0


def load_model(source: str, **arguments: Any) -> Any:
    """Load a language model with Transformers, from safetensors or GGUF only: a pickle could run any code.

    A model that also reads images is loaded whole. `arguments` are passed to `from_pretrained`.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    known = {"trust_remote_code": False, "use_safetensors": True, **arguments}
    try:
        return AutoModelForCausalLM.from_pretrained(source, **known)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        return AutoModelForImageTextToText.from_pretrained(source, **known)


def load_tokenizer(source: str) -> Any:
    """Load a model's tokenizer with Transformers, without running code from the model's repository."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source, trust_remote_code=False)


def load_config(source: str) -> Any:
    """Load a model's config with Transformers, without running code from the model's repository."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(source, trust_remote_code=False)


def resolve_model(model: str) -> str:
    """Return the path of a model on this machine, or else its name, for callers that download from the hub."""
    return str(local_model(model) or model)


def local_model(model: str) -> Path | None:
    """Return the path of a model as given or below $SPECBRANCH_MODELS; None if it is not on this machine."""
    given = Path(model).expanduser()
    if given.exists():
        return given
    store = os.environ.get("SPECBRANCH_MODELS")
    if store and (Path(store) / model).exists():
        return Path(store) / model
    return None


def read_config(model: str) -> dict[str, Any] | None:
    """Read the `config.json` of a model directory, or of a name in the hub's local cache.

    Returns None if this machine has none, or one that cannot be read.
    """
    path = local_model(model)
    file = cached_file(model, "config.json") if path is None else path / "config.json"
    try:
        config = json.loads(file.read_text()) if file is not None else None
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def cached_file(repo: str, name: str) -> Path | None:
    """Return the path of a file of a hub repository if it was downloaded before, else None."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(repo, name)
    except (ImportError, ValueError):  # not installed, or no valid repository name
        return None
    return Path(found) if isinstance(found, str) else None
