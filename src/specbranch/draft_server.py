"""Start, restart and stop a draft service from Python, for a target that you load yourself in vLLM or Transformers.

    with DraftServer("Qwen/Qwen2.5-Coder-0.5B-Instruct", device="cuda:1") as draft:
        llm = LLM("Qwen/Qwen2.5-Coder-7B-Instruct", **draft.vllm_args(planner="budget"))

The target needs no other change than these arguments.
"""

from __future__ import annotations

import logging
import multiprocessing.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict, Unpack

from specbranch.core.planners import DEFAULT_PLANNER, draft_length_limit
from specbranch.launch.draft_process import DraftProcess, DraftServiceOptions, StartError
from specbranch.plugins.vllm.settings import ProposerSettings, proposer_arguments
from specbranch.service.client.discovery import check_addresses
from specbranch.service.client.interface import DraftSettings
from specbranch.service.wire.addresses import normalize_addresses

log = logging.getLogger(__name__)

# At exit Python runs the handler that was registered last first. vLLM stops its engine in a finalizer, and then
# `multiprocessing` joins the processes that are left. So `multiprocessing` must be imported, which registers it, before
# the first finalizer, which may be one of ours.
assert multiprocessing.util


class DraftKeywords(TypedDict, total=False):
    """The keyword arguments of `DraftAddress.transformers_args`; `DraftAddress.vllm_args` explains each of them."""

    planner: str
    max_draft_tokens: int | None
    settings: Mapping[str, Any]
    deadline_ms: float
    namespace: str | None
    is_gated: bool


class DraftAddress:
    """The address of one or more draft services; `keys` is the directory of the client's CURVE keys, needed for TCP."""

    def __init__(self, address: str | Sequence[str], keys: str | None = None) -> None:
        self.address = address if isinstance(address, str) else list(address)
        self.keys = keys

    def vllm_args(
        self,
        planner: str = DEFAULT_PLANNER,
        max_draft_tokens: int | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        predictor: str = "confidence",
        deadline_ms: float = 100.0,
        namespace: str | None = None,
        is_gated: bool = True,
    ) -> dict[str, Any]:
        """Return arguments for `vllm.LLM(model, **args)`: `speculative_config` and `additional_config`.

        `planner` decides what to draft, and `settings` are the planner's own. `predictor` estimates how many draft
        tokens will be accepted: the name of a built-in predictor, or the directory of a trained one. vLLM verifies at
        most `max_draft_tokens` per sequence and step (None: the planner's default), and a step waits at most
        `deadline_ms` for a draft. Targets in the same `namespace` share drafts for equal prompts. `is_gated`: do not
        draft at loads where drafts were measured not to make decoding faster.
        """
        chosen = ProposerSettings(
            address=self.address,
            planner=planner,
            settings=dict(settings or {}),
            predictor=predictor,
            deadline_ms=deadline_ms,
            namespace=namespace,
            keys=self.keys,
            is_gated=is_gated,
        )
        num_tokens = max_draft_tokens or draft_length_limit(planner)
        _check(chosen, num_tokens)
        return proposer_arguments(chosen, num_tokens)

    def transformers_args(self, **how: Unpack[DraftKeywords]) -> dict[str, Any]:
        """Return arguments for `model.generate(**inputs, **args)` of Transformers; pass the same result to all calls.

        `how` are the keyword arguments of `DraftKeywords`. Give a streamer to `generate` as `text_streamer`, because it
        passes `streamer` to its own loops only.
        """
        from specbranch.plugins.transformers import DraftedDecoding

        return {"custom_generate": DraftedDecoding(*self._settings(how))}

    def _settings(self, how: DraftKeywords) -> tuple[DraftSettings, int]:
        """Check these keyword arguments; return them as settings, and the maximum of draft tokens to verify at once."""
        given: dict[str, Any] = dict(how)
        num_tokens = given.pop("max_draft_tokens", None) or draft_length_limit(how.get("planner", DEFAULT_PLANNER))
        settings = DraftSettings(address=self.address, keys=self.keys, **given)
        _check(settings, num_tokens)
        return settings, num_tokens


class DraftServer(DraftAddress):
    """A draft service in a process of its own, with a private socket. Use it with `with`.

    `model` is a path, a GGUF file, a name below $SPECBRANCH_MODELS or a name on the Hugging Face hub. Without `engine`
    the model's format decides. On a CPU, `cores` keeps the draft off the target's cores. A service that dies is
    restarted, and meanwhile the target goes on without drafts. `timeline` and `record` are files that the service
    writes: what target and draft did and when, and a trace of verdicts and draft distributions.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "cpu",
        engine: str | None = None,
        dtype: str = "auto",
        cores: Sequence[int] | None = None,
        threads: int | None = None,
        timeline: str | Path | None = None,
        record: str | Path | None = None,
    ) -> None:
        options = DraftServiceOptions(
            model=str(model),
            engine=engine,
            device=device,
            dtype=dtype,
            cores=cores,
            threads=threads,
            timeline=timeline,
            record=record,
        )
        self._process = DraftProcess(options, on_event=log.warning)
        super().__init__(self._process.address)
        self._is_started = False

    @staticmethod
    def at(address: str | Sequence[str], keys: str | Path | None = None) -> DraftAddress:
        """Return the address of one or more draft services that run already, e.g. on other machines.

        `keys` is the directory of the client's CURVE keys, needed for TCP.
        """
        return DraftAddress(address, None if keys is None else str(keys))

    def start(self) -> None:
        """Start the service and wait until it answers; raise `StartError` if it does not, and on a second call."""
        if self._is_started:
            raise StartError("this DraftServer was started before; make a new one")
        self._is_started = True
        self._process.__enter__()

    def stop(self) -> None:
        """Stop the service and end its process."""
        self._process.stop()

    def __enter__(self) -> DraftServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _check(settings: DraftSettings, max_draft_tokens: int) -> None:
    """Raise an error if the settings are wrong; the client inside the target would raise it only much later."""
    options = settings.client_options(max_draft_tokens)
    check_addresses(normalize_addresses(options.address), options.keys)
