"""Load a target in this process together with a draft service, and compare an answer with one without drafts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any

from specbranch.cli.console import ProgressBar, redirect_output
from specbranch.cli.options import check_directory
from specbranch.cli.preflight import Preflight
from specbranch.cli.terminal import StreamedAnswer, TextRun
from specbranch.errors import SpecBranchError
from specbranch.launch import vllm_worker
from specbranch.launch.child import name_cores, pinned
from specbranch.launch.draft_process import DraftProcess, DraftServiceOptions, RemoteDraft
from specbranch.launch.vllm_engine import LocalEngine, LocalEngineOptions, StepOutput
from specbranch.launch.vllm_log import FailureParser
from specbranch.launch.vllm_worker import TargetProcess
from specbranch.plugins.vllm import installed
from specbranch.plugins.vllm.settings import ProposerSettings, merged_settings

_WARM_TOKENS = 4


class ModelLoadError(SpecBranchError, RuntimeError):
    """A model could not be loaded; the message names the log file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPairOptions:
    """The target to load, with a draft service to start (`draft`), one that runs already (`remote`), or none.

    Without a service, drafts come from n-gram lookup in the text if `has_text_drafts`; otherwise vLLM runs bare.
    `section` holds the proposer's settings without the address, `gamma` is the maximum of draft tokens to verify at
    once, and `arguments` are passed to `vllm.LLM`. Without `target_cores` the target is not pinned. `timeline` is the
    file that the draft service will write.
    """

    target: str
    draft: DraftServiceOptions | None
    section: Mapping[str, Any] = field(default_factory=dict)
    gamma: int = 8
    remote: RemoteDraft | None = None
    has_text_drafts: bool = False
    target_cores: Sequence[int] | None = None
    timeline: Path | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Check directories, settings and all that `Preflight` checks, before a model loads; raise the first error."""
        check_directory("--timeline", self.timeline)
        if self.is_drafting:
            self.settings(self.where).checked_settings(self.gamma)
        Preflight(
            target=self.target,
            draft=self.draft,
            remote=self.remote,
            has_text_drafts=self.has_text_drafts,
            arguments=self.vllm_arguments(),
            target_cores=self.target_cores,
        ).run()

    @property
    def is_drafting(self) -> bool:
        """Whether vLLM runs with our proposer: there is a draft, or drafts come from n-gram lookup in the text."""
        return self.draft is not None or self.remote is not None or self.has_text_drafts

    @property
    def where(self) -> dict[str, Any]:
        """The settings that say where the draft service is; {} for one to be started, whose address is not known."""
        return self.remote.section if self.remote else {} if self.draft else {"address": None}

    def settings(self, more: Mapping[str, Any]) -> ProposerSettings:
        """Return the proposer's settings; `more` adds to `section` or replaces values in it, such as the address."""
        return merged_settings({**self.section, **more}, self.arguments.get("additional_config", {}))

    def vllm_arguments(self) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM`; `enforce_eager` is True only on a CPU, unless `arguments` set it."""
        return {"enforce_eager": installed.runs_on_cpu(), **self.arguments}


class LocalPair:
    """A context manager that loads target and draft; while they load, their output goes to a log file."""

    target: LocalEngine

    def __init__(self, options: LocalPairOptions) -> None:
        self._options = options
        self._exit = ExitStack()
        self._address: str | None = None

    def use_planner(self, planner: str) -> None:
        """Switch to another planner from the next request on; `none` decodes without drafts."""
        self.target.configure(self._settings(planner=planner, settings={}))

    def use_own_planner(self) -> None:
        """Switch back to the planner and settings that the pair was created with, from the next request on."""
        self.target.configure(self._settings())

    def wait_s(self) -> float:
        """Return the seconds that the target waited for drafts since its planner last changed; 0 without drafts."""
        return self.target.proposer_counts().get("wait_s", 0.0) if self._options.is_drafting else 0.0

    def __enter__(self) -> LocalPair:
        directory = Path(tempfile.mkdtemp(prefix="specbranch-log-"))
        try:
            self._load(directory / "load.log")
        except BaseException:
            self._exit.close()
            raise
        self._exit.callback(shutil.rmtree, directory, ignore_errors=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def _load(self, log_file: Path) -> None:
        options = self._options
        self._exit.enter_context(pinned(options.target_cores))
        loading = f"loading {options.target}" + (f" and {options.draft.model}" if options.draft else "")
        with redirect_output(log_file, loading) as on_progress:
            draft = DraftProcess(options.draft, log_file, on_progress) if options.draft else None
            if draft is not None:
                self._exit.callback(draft.stop)
                draft.launch()  # it loads while this process loads the target
                self._address = draft.address
            settings = self._settings() if options.is_drafting else None
            how = LocalEngineOptions(options.target, settings, options.gamma, options.vllm_arguments())
            try:
                self.target = LocalEngine(how)
            except Exception as error:
                # A worker in a process of its own writes the cause to the log only.
                log = f"{log_file.read_text(errors='replace')}\n{type(error).__name__}: {error}"
                cause = FailureParser(log.splitlines()).cause(None)
                raise ModelLoadError(f"vLLM cannot load {options.target}: {cause}; see {log_file}") from error
            self._exit.callback(self.target.close)
            if draft is not None:
                draft.wait_until_up()

    def _settings(self, **changes: Any) -> ProposerSettings:
        where = {"address": self._address} if self._address else self._options.where
        return self._options.settings({**where, **changes})


def shared_cores(options: LocalPairOptions) -> tuple[int, ...] | None:
    """Return all cores of target and draft: for a fair comparison, a target without a draft model runs on all of them.

    Return None if the target runs on a GPU, or if the cores of the target or the draft are not given.
    """
    draft_cores = options.draft.cores if options.draft else None
    if not installed.runs_on_cpu() or not options.target_cores or not draft_cores:
        return None
    return tuple(sorted({*options.target_cores, *draft_cores}))


def answer_alone(
    options: LocalPairOptions, cores: Sequence[int], prompt: Sequence[int], sampling: Mapping[str, Any]
) -> StreamedAnswer:
    """Load vLLM without drafts in a process of its own on `cores`, and return its answer after a short warm-up.

    `prompt` has the prompt's tokens, `sampling` the arguments of `vllm.SamplingParams`.
    """
    request = vllm_worker.PromptRequest("", dict(sampling), tokens=list(prompt))
    warm_up = vllm_worker.PromptRequest("", {**sampling, "max_tokens": _WARM_TOKENS}, tokens=list(prompt))
    how = LocalEngineOptions(options.target, None, arguments=options.vllm_arguments())
    with tempfile.TemporaryDirectory(prefix="specbranch-log-") as directory, ProgressBar() as progress:
        progress.show(f"loading {options.target} without a draft, on {name_cores(cores)}")
        with TargetProcess(how, Path(directory) / "load.log", cores) as target:
            progress.show(f"answering without drafts, on {name_cores(cores)}")
            target.run(vllm_worker.DecodeJob([warm_up]))
            (said,) = target.run(vllm_worker.DecodeJob([request])).answers
    return _as_answer(said)


def compare_answers(answer: StreamedAnswer, plain: StreamedAnswer) -> dict[str, Any]:
    """Compare an answer with the answer without drafts (`plain`), and return a JSON dict.

    It has the speedup (None if the speed of `plain` is unknown), whether all tokens are equal, and how many are equal
    from the start.
    """
    tokens = zip(answer.tokens, plain.tokens, strict=False)
    return {
        "speedup": answer.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else None,
        "is_equal": answer.tokens == plain.tokens,
        "num_equal_tokens": sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], tokens)),
    }


def comparison_line(answer: StreamedAnswer, plain: StreamedAnswer, cores: Sequence[int] | None, is_greedy: bool) -> str:
    """Return one line that compares an answer with the answer without drafts (`plain`).

    `cores` are the cores of the separately loaded target that generated `plain`; None if the target that generated
    `answer` also generated `plain`. Without `is_greedy` the line compares only the speeds, not the tokens.
    """
    found = compare_answers(answer, plain)
    place = f" on the same {name_cores(cores)}" if cores else ""
    line = f"without drafts{place} {plain.tokens_per_s:.1f} tokens/s, with drafts {answer.tokens_per_s:.1f}"
    if found["speedup"] is not None:
        line += f": {found['speedup']:.2f}x"
    if not is_greedy:
        return f"{line}; sampled answers are not compared"
    if found["is_equal"]:
        return f"{line}; both answers are equal"
    where = f"{line}; the answers differ after {found['num_equal_tokens']} equal tokens"
    return f"{where} (nearly equally likely tokens may swap by rounding; --dtype float32 makes that very rare)"


def _as_answer(said: vllm_worker.DecodedOutput) -> StreamedAnswer:
    """Convert the output of a target's process into an answer with one piece for each step."""
    answer, begin = StreamedAnswer(asked_s=0.0), 0
    for (at_s, num_tokens), text in zip(said.steps, said.texts, strict=True):
        tokens = said.tokens[begin : begin + num_tokens]
        begin += num_tokens
        reason = said.finish_reason if begin == len(said.tokens) else None
        piece = StepOutput(index=0, tokens=tokens, text=text, finish_reason=reason, at_s=at_s)
        answer.take(piece, [TextRun(text, False)] if text else [])
    return answer
