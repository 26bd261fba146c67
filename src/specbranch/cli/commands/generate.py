"""`specbranch generate`: one answer or a chat in the terminal, with drafts of a draft model or by n-gram lookup."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from specbranch.bench.timeline import read_timeline, time_shares
from specbranch.cli.commands.timeline import print_shares
from specbranch.cli.console import CtrlCGuard, friendly_errors, print_json, warn
from specbranch.cli.options import (
    AsJson,
    DeadlineMs,
    DraftAddress,
    DraftArg,
    DraftCores,
    DraftDevice,
    DraftDtype,
    DraftEngineName,
    DraftKeys,
    Dtype,
    Gamma,
    MaxTokens,
    OptionalDraft,
    Planner,
    Predictor,
    Settings,
    Target,
    TargetCores,
    TimelineFile,
    VllmArg,
    draft_arguments,
    may_take_turns,
    parse_key_values,
    remote_draft,
    vllm_arguments,
)
from specbranch.cli.pair import (
    LocalPair,
    LocalPairOptions,
    answer_alone,
    compare_answers,
    comparison_line,
    shared_cores,
)
from specbranch.cli.terminal import COMMANDS, Chat, DraftHighlighter, Message, StreamedAnswer, TerminalView
from specbranch.core.planners import DEFAULT_PLANNER, draft_length_limit
from specbranch.errors import SpecBranchError, UsageError
from specbranch.launch.draft_process import DraftServiceOptions, place_pair
from specbranch.launch.vllm_engine import Request
from specbranch.launch.vllm_install import slow_type_here
from specbranch.plugins.vllm.settings import ParallelLayout

_WARM_TOKENS = 4


def generate(
    context: typer.Context,
    target: Target,
    draft: OptionalDraft = None,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The question. Default: standard input if it is piped, else a chat."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Chat even if standard input is piped: each line is one question.")
    ] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the model's chat template.")
    ] = False,
    max_tokens: MaxTokens = 256,
    temperature: Annotated[float, typer.Option(metavar="T", help="Sampling temperature; 0 is greedy.", min=0)] = 0.0,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Sampler seed; used if temperature > 0, and then without drafts.")
    ] = None,
    planner: Planner = DEFAULT_PLANNER,
    gamma: Gamma = None,
    settings: Settings = None,
    predictor: Predictor = "confidence",
    deadline_ms: DeadlineMs = 1000.0,
    bare: Annotated[bool, typer.Option("--bare", help="Run vLLM without drafts.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also answer without drafts on the same cores; compare speed and tokens.")
    ] = False,
    timeline: TimelineFile = None,
    dtype: Dtype = "auto",
    max_model_len: Annotated[
        int, typer.Option(metavar="N", help="Maximum tokens of a request, prompt and answer together.", min=16)
    ] = 2048,
    draft_engine: DraftEngineName = None,
    draft_device: DraftDevice = "auto",
    draft_dtype: DraftDtype = "auto",
    draft_arg: DraftArg = None,
    draft_address: DraftAddress = None,
    draft_keys: DraftKeys = None,
    target_cores: TargetCores = None,
    draft_cores: DraftCores = None,
    vllm_arg: VllmArg = None,
    as_json: AsJson = False,
) -> None:
    """Answer one question, or chat, in the terminal.

    Without --draft and --draft-address, drafts come from the text: what followed the same few tokens before.
    Accepted draft tokens are green, the target's own tokens plain.
    In a chat, /quit or Ctrl-D leaves, /clear clears the history, Ctrl-C stops.
    All other flags go to vLLM.
    """
    errors = (SpecBranchError, OSError)
    with friendly_errors(*errors), _leaving_at_ctrl_c():
        if not bare and draft is not None and draft_address:
            raise UsageError("give only one of --draft MODEL and --draft-address ADDRESS")
        own = parse_key_values("--set", settings)
        section = {"planner": planner, "settings": own, "predictor": predictor}
        given = vllm_arguments(context, vllm_arg)
        how = None
        if draft is not None and not bare:
            how = DraftServiceOptions(
                draft,
                engine=draft_engine,
                device=draft_device,
                dtype=draft_dtype,
                timeline=timeline,
                extra=draft_arguments(draft_arg),
            )
        turns = may_take_turns(planner, own)
        layout = ParallelLayout.of_arguments(given)
        place = place_pair(how, layout, target_cores, draft_cores, may_take_turns=turns)
        options = LocalPairOptions(
            target=target,
            draft=place.draft,
            section=place.with_turns({**section, "deadline_ms": deadline_ms, "is_gated": False}),
            gamma=gamma or draft_length_limit(planner),
            remote=None if bare else remote_draft(draft_address, draft_keys),
            has_text_drafts=not bare,
            # Without a draft on this machine the target is not pinned, unless the user names its cores.
            target_cores=place.target_cores if how or target_cores is not None else None,
            timeline=timeline,
            arguments={"max_model_len": max_model_len, "dtype": dtype, **given},
        )
        is_chat = chat or (prompt is None and sys.stdin.isatty())
        if is_chat and (as_json or compare or raw or prompt is not None):
            raise UsageError("a chat does not go with --prompt, --raw, --json or --compare")
        _check(options, compare)
        warn(place.warning)
        if options.is_drafting:
            warn(slow_type_here(target, options.arguments["dtype"]))
        messages = [] if is_chat else _messages(system, sys.stdin.read() if prompt is None else prompt)
        sampling = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        document: dict[str, Any] = {}
        cores = shared_cores(options)
        with LocalPair(options) as pair:
            talk = _Talk(pair, sampling, max_model_len, raw, None if as_json else _screen())
            if is_chat:
                _chat(talk, system)
            else:
                encoded = talk.encode(messages)
                plain = _without_drafts(talk, encoded) if compare and cores is None else None
                answer = talk.answer(encoded)
                _end_answer(talk, answer)
                document = answer.as_json()
        if compare:
            # Only after the pair has released its cores and memory.
            plain = plain or answer_alone(options, cores or (), encoded, sampling)
            document |= {"plain": plain.as_json(), "plain_cores": cores, **compare_answers(answer, plain)}
            _tell(comparison_line(answer, plain, cores, is_greedy=not temperature))
        if as_json:
            print_json(
                {
                    "target": target,
                    "draft": options.draft.model if options.draft else None,
                    "planner": None if bare else planner,
                    **document,
                }
            )
        if timeline and not as_json:
            _print_timeline(timeline)


@dataclass(slots=True)
class _Talk:
    """The loaded pair, the sampling parameters, and the view that shows answers (None: no view)."""

    pair: LocalPair
    sampling: dict[str, Any]
    max_model_len: int
    is_raw: bool
    screen: TerminalView | None

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt's tokens; raise `UsageError` if there are none, or at least `max_model_len`."""
        target = self.pair.target
        if self.is_raw:
            prompt = target.encode(messages[-1]["content"])
        else:
            try:
                prompt = target.encode_chat(messages)
            except ValueError as error:
                raise UsageError(f"this model has no chat template ({error}); use --raw to continue a text") from error
        if not prompt or len(prompt) >= self.max_model_len:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens, which leaves no room for an answer in --max-model-len "
                f"{self.max_model_len}; give a larger one"
            )
        return prompt

    def answer(self, prompt: Sequence[int], **sampling: Any) -> StreamedAnswer:
        """Generate the target's answer, stream it to the view and return it. Ctrl-C stops it after the current step."""
        tokenizer = self.pair.target.llm.get_tokenizer()
        highlighter = DraftHighlighter(lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)))
        waited_s = self.pair.wait_s()
        answer = StreamedAnswer(time.monotonic())
        stream = self.pair.target.stream([Request(prompt, {**self.sampling, **sampling})])
        with self.screen or contextlib.nullcontext(), CtrlCGuard() as interrupt, contextlib.closing(stream):
            for piece in stream:
                runs = highlighter.split(piece.tokens, piece.text)
                answer.take(piece, runs)
                if self.screen:
                    self.screen.write(runs)
                    self.screen.show_stats(answer.stats())
                if interrupt.is_asked:
                    answer.is_stopped = True
                    break
        answer.wait_s = self.pair.wait_s() - waited_s  # once at the end, because it calls all workers
        return answer


def _check(options: LocalPairOptions, compare: bool) -> None:
    if not options.is_drafting and (compare or options.timeline):
        raise UsageError("--bare has no drafts; --compare and --timeline need some")
    if options.remote is not None and options.timeline:
        raise UsageError("--timeline is written by the draft service: give it to `specbranch draft`")
    if options.draft is None and options.timeline:
        raise UsageError("--timeline is written by the draft service, and there is none; name a --draft")
    options.check()


def _without_drafts(talk: _Talk, prompt: Sequence[int]) -> StreamedAnswer:
    """Switch drafts off, answer the prompt with the loaded target, switch drafts on again, and return the answer.

    The target first generates a short answer as a warm-up, which is discarded. A comparison with the answer is only
    fair if the target could not use the draft's device.
    """
    talk.pair.use_planner("none")
    quiet = _Talk(talk.pair, talk.sampling, talk.max_model_len, talk.is_raw, None)
    quiet.answer(prompt, max_tokens=_WARM_TOKENS)
    plain = quiet.answer(prompt)
    talk.pair.use_own_planner()
    return plain


def _chat(talk: _Talk, system: str | None) -> None:
    def answer(history: Sequence[Message]) -> str | None:
        try:
            prompt = talk.encode(history)
        except UsageError as error:
            _tell(f"{error}; or type /clear to clear the history")
            return None
        said = talk.answer(prompt)
        _end_answer(talk, said)
        return said.text

    _tell(COMMANDS)
    Chat(_read_line, answer, _tell, system).run()


def _read_line() -> str | None:
    if not sys.stdin.isatty():
        return sys.stdin.readline() or None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # editing and history for input()
    try:
        return input("\n> ")
    except (EOFError, KeyboardInterrupt):
        return None


def _end_answer(talk: _Talk, answer: StreamedAnswer) -> None:
    if talk.screen:
        sys.stdout.write("\n")
        sys.stdout.flush()
    _tell(answer.stats() + (" · stopped" if answer.is_stopped else ""))


def _tell(line: str) -> None:
    """Print a line about the answer to stderr, because stdout holds only the answer."""
    Console(stderr=True).print(line, style="dim", highlight=False, markup=False, soft_wrap=True)


def _print_timeline(path: Path) -> None:
    timeline = read_timeline(path).between(0.0, math.inf)
    print_shares(Console(stderr=True), timeline, [time_shares(timeline, lane) for lane in timeline.targets])


def _screen() -> TerminalView:
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return TerminalView(sys.stdout, is_terminal, is_terminal and not os.environ.get("NO_COLOR"))


def _messages(system: str | None, text: str) -> list[Message]:
    if not text.strip():
        raise UsageError("the prompt is empty; give --prompt TEXT")
    start = [{"role": "system", "content": system}] if system else []
    return [*start, {"role": "user", "content": text}]


@contextlib.contextmanager
def _leaving_at_ctrl_c() -> Any:
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
