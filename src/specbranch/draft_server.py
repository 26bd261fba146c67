"""A draft service for an engine of your own: started, kept alive and stopped from Python.

    with DraftServer("Qwen/Qwen2.5-Coder-0.5B-Instruct", device="cuda:1") as draft:
        llm = LLM("Qwen/Qwen2.5-Coder-7B-Instruct", **draft.vllm_args(planner="budget"))

The engine itself stays as it is; this only gives it arguments.
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
from specbranch.service.client.interface import DraftSettings
from specbranch.service.wire.addresses import check_address, normalize_addresses

log = logging.getLogger(__name__)

# At exit Python runs what was registered last first. vLLM stops its engine by a finalizer, and `multiprocessing` joins
# what is left of it. So `multiprocessing` must be registered before the first finalizer, which may be one of ours.
assert multiprocessing.util


class DraftKeywords(TypedDict, total=False):
    """How to draft for an engine that decodes one text at a time; `DraftAddress.vllm_args` says what each means."""

    planner: str
    max_draft_tokens: int | None
    settings: Mapping[str, Any]
    deadline_ms: float
    namespace: str | None
    is_gated: bool


class DraftAddress:
    """Where a draft service listens, or several do; `keys` is the directory of their CURVE keys, needed for TCP."""

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
        """Arguments for `vllm.LLM(model, **args)`: `speculative_config` and `additional_config`.

        `planner` decides what is drafted, `settings` are the planner's own. vLLM verifies at most `max_draft_tokens`
        per sequence and step (None: what suits the planner), and a step waits at most `deadline_ms` for them. Targets
        with one `namespace` share drafts for equal prompts. `is_gated`: drafts are left out at loads where they were
        measured not to pay.
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
        longest = max_draft_tokens or draft_length_limit(planner)
        _refuse_wrong(chosen, longest)
        return proposer_arguments(chosen, longest)

    def transformers_args(self, **how: Unpack[DraftKeywords]) -> dict[str, Any]:
        """Arguments for `model.generate(**inputs, **args)` of Transformers; keep them for all texts.

        A streamer is then given as `text_streamer`: `generate` hands its own `streamer` to no loop but its own.
        """
        from specbranch.plugins.transformers import DraftedDecoding

        return {"custom_generate": DraftedDecoding(*self._settings(how))}

    def _settings(self, how: DraftKeywords) -> tuple[DraftSettings, int]:
        """The settings, and the most draft tokens to verify at once; what would be refused later raises now."""
        given: dict[str, Any] = dict(how)
        longest = given.pop("max_draft_tokens", None) or draft_length_limit(how.get("planner", DEFAULT_PLANNER))
        settings = DraftSettings(address=self.address, keys=self.keys, **given)
        _refuse_wrong(settings, longest)
        return settings, longest


class DraftServer(DraftAddress):
    """A draft service in a process of its own, with a private socket. Use it with `with`.

    `model` is a path, a GGUF file, a name below $SPECBRANCH_MODELS or a name on the Hugging Face hub. `engine` None is
    chosen by the model's format. On a CPU, `cores` keeps the draft apart from the target. The service is started again
    if it dies; meanwhile the target goes on without drafts. `timeline` and `record` are files to write.
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
        """A draft service that runs already, such as `specbranch draft` on another machine; or a list of them."""
        return DraftAddress(address, None if keys is None else str(keys))

    def start(self) -> None:
        """Start the service and wait until it answers. A server can be started once."""
        if self._is_started:
            raise StartError("this DraftServer was started before; make a new one")
        self._is_started = True
        self._process.__enter__()

    def stop(self) -> None:
        """Stop the service."""
        self._process.stop()

    def __enter__(self) -> DraftServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _refuse_wrong(settings: DraftSettings, longest: int) -> None:
    """Raise now what the engine's own client would refuse much later."""
    options = settings.client_options(longest)
    for address in normalize_addresses(options.address):
        check_address(address, options.keys)
