"""`specbranch generate`: one answer or a chat in the terminal, with a draft model that works beside the target."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from specbranch.bench.timeline_file import TimelineError, read_timeline, shares
from specbranch.cli.answer import Answer
from specbranch.cli.chat import Chat, Message
from specbranch.cli.console import UsageError, friendly_errors, print_json
from specbranch.cli.interrupt import Interrupt
from specbranch.cli.painter import Painter
from specbranch.cli.pair import LoadError, Pair, PairOptions
from specbranch.cli.screen import Screen
from specbranch.cli.timeline import print_shares
from specbranch.cli.values import table
from specbranch.core.planners import PLANNERS, SettingError
from specbranch.plugins.vllm.target import Request
from specbranch.service.process import StartError

_WARM_TOKENS = 4


def generate(
    target: Annotated[
        str, typer.Argument(help="Model that answers: a path, a name in $SPECBRANCH_MODELS, or a hub name.")
    ],
    draft: Annotated[str | None, typer.Option(help="Model that drafts: GGUF or Transformers, named likewise.")] = None,
    prompt: Annotated[
        str | None, typer.Option(help="One question. Without it a chat, or standard input if piped.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Chat, even if standard input is piped: a question a line.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of the sampler, above temperature 0.")] = None,
    planner: Annotated[str, typer.Option(help=f"One of {', '.join(PLANNERS)}.")] = "specbranch",
    gamma: Annotated[int, typer.Option(help="Longest submission.", min=1)] = 8,
    settings: Annotated[list[str] | None, typer.Option("--set", help="A setting of the planner: KEY=VALUE.")] = None,
    deadline_ms: Annotated[float, typer.Option(help="Longest wait of a step for drafts.", min=0)] = 1000.0,
    bare: Annotated[bool, typer.Option("--bare", help="Without a draft: vLLM alone.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Answer without drafts as well, and compare.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto and `specbranch timeline`.")] = None,
    dtype: Annotated[str, typer.Option(help="Number format of the target.")] = "auto",
    max_model_len: Annotated[int, typer.Option(help="Longest text, question and answer together.", min=16)] = 2048,
    draft_engine: Annotated[str | None, typer.Option(help="llamacpp or torch. Default: what suits it.")] = None,
    draft_device: Annotated[str, typer.Option(help="Where the draft runs.")] = "cpu",
    vllm_arg: Annotated[list[str] | None, typer.Option(help="An argument of vllm.LLM: KEY=VALUE.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document as the last line of stdout.")] = False,
) -> None:
    """Answer a question, or chat. Accepted draft tokens are green, the target's own are plain.

    In a chat: /quit or Ctrl-D leaves, /clear forgets the history, Ctrl-C stops an answer.
    """
    errors = (UsageError, LoadError, StartError, SettingError, TimelineError, OSError)
    with friendly_errors(*errors), _leaving_at_ctrl_c():
        if not bare and draft is None:
            raise UsageError("give --draft MODEL, or --bare to go without one")
        ours = {"planner": planner, "settings": table("--set", settings)}
        section = {**ours, "deadline_ms": deadline_ms, "is_gated": False}
        given = {"max_model_len": max_model_len, "dtype": dtype, **table("--vllm-arg", vllm_arg)}
        options = PairOptions(target, None if bare else draft, section, gamma, draft_engine, draft_device, trace, given)
        is_chat = chat or (prompt is None and sys.stdin.isatty())
        if is_chat and (as_json or compare or raw or prompt is not None):
            raise UsageError("a chat takes none of --prompt, --raw, --json and --compare")
        _check(options, compare)
        messages = [] if is_chat else _messages(system, sys.stdin.read() if prompt is None else prompt)
        sampling = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        document: dict[str, Any] = {}
        with Pair(options) as pair:
            talk = _Talk(pair, sampling, max_model_len, raw, None if as_json else _screen())
            if is_chat:
                _chat(talk, system)
            else:
                document = _one_answer(talk, messages, compare)
        if as_json:
            print_json({"target": target, "draft": options.draft, "planner": None if bare else planner, **document})
        if trace and not as_json:
            _print_trace(trace)


@dataclass(slots=True)
class _Talk:
    """The loaded pair, how to sample, and where to show what it says (None: nowhere)."""

    pair: Pair
    sampling: dict[str, Any]
    max_model_len: int
    is_raw: bool
    screen: Screen | None

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The prompt; one that leaves no room for an answer raises."""
        target = self.pair.target
        if self.is_raw:
            prompt = target.encode(messages[-1]["content"])
        else:
            try:
                prompt = target.encode_chat(messages)
            except ValueError as error:
                raise UsageError(f"this model cannot chat ({error}); use --raw to continue a text") from error
        if not prompt or len(prompt) >= self.max_model_len:
            raise UsageError(f"the prompt has {len(prompt)} tokens; --max-model-len is {self.max_model_len}")
        return prompt

    def answer(self, prompt: Sequence[int], **sampling: Any) -> Answer:
        """Let the target answer, and show it as it comes. Ctrl-C stops it after the step under way."""
        tokenizer = self.pair.target.llm.get_tokenizer()
        painter = Painter(lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)))
        waited_s = self.pair.wait_s()
        answer = Answer(time.monotonic())
        stream = self.pair.target.stream([Request(prompt, {**self.sampling, **sampling})])
        with self.screen or contextlib.nullcontext(), Interrupt() as interrupt, contextlib.closing(stream):
            for piece in stream:
                answer.take(piece)
                answer.wait_s = self.pair.wait_s() - waited_s
                if self.screen:
                    self.screen.write(painter.paint(piece.tokens, piece.text))
                    self.screen.show_figures(answer.figures())
                if interrupt.is_asked:
                    answer.is_stopped = True
                    break
        return answer


def _check(options: PairOptions, compare: bool) -> None:
    if options.trace and not options.trace.absolute().parent.is_dir():
        raise UsageError(f"--trace is {options.trace}; there is no directory {options.trace.parent}")
    if options.draft is None and (compare or options.trace):
        raise UsageError("--bare has no draft: --compare and --trace need one")
    options.check()


def _one_answer(talk: _Talk, messages: list[Message], compare: bool) -> dict[str, Any]:
    prompt = talk.encode(messages)
    if not compare:
        answer = talk.answer(prompt)
        _end_answer(talk, answer)
        return answer.as_json()
    pair = talk.pair
    pair.use_planner("none")
    quiet = _Talk(pair, talk.sampling, talk.max_model_len, talk.is_raw, None)
    quiet.answer(prompt, max_tokens=_WARM_TOKENS)
    plain = quiet.answer(prompt)
    pair.use_own_planner()
    answer = talk.answer(prompt)
    _end_answer(talk, answer)
    document = {**answer.as_json(), "plain": plain.as_json(), **_comparison(answer, plain)}
    if talk.screen:
        _tell(_comparison_line(answer, plain, is_greedy=not talk.sampling["temperature"]))
    return document


def _comparison(answer: Answer, plain: Answer) -> dict[str, Any]:
    tokens = zip(answer.tokens, plain.tokens, strict=False)
    return {
        "speedup": answer.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else None,
        "is_equal": answer.tokens == plain.tokens,
        "num_equal_tokens": sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], tokens)),
    }


def _comparison_line(answer: Answer, plain: Answer, is_greedy: bool) -> str:
    figures = _comparison(answer, plain)
    line = f"without drafts {plain.tokens_per_s:.1f} tokens/s, with drafts {answer.tokens_per_s:.1f}"
    if figures["speedup"] is not None:
        line += f": {figures['speedup']:.2f}x"
    if not is_greedy:
        return f"{line}; sampled texts are not compared"
    if figures["is_equal"]:
        return f"{line}; both texts are equal"
    where = f"{line}; the texts differ after {figures['num_equal_tokens']} equal tokens"
    return f"{where} (near-ties may fall otherwise in short number formats; --dtype float32 tells)"


def _chat(talk: _Talk, system: str | None) -> None:
    def answer(history: Sequence[Message]) -> str | None:
        try:
            prompt = talk.encode(history)
        except UsageError as error:
            _tell(f"{error}; /clear forgets the history")
            return None
        said = talk.answer(prompt)
        _end_answer(talk, said)
        return said.text

    _tell("/quit leaves, /clear forgets the history; Ctrl-C stops an answer.")
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


def _end_answer(talk: _Talk, answer: Answer) -> None:
    if talk.screen:
        sys.stdout.write("\n")
        sys.stdout.flush()
        _tell(answer.figures() + (" · stopped" if answer.is_stopped else ""))


def _tell(line: str) -> None:
    """A line about the answer; standard output holds nothing but the answer."""
    Console(stderr=True).print(line, style="dim", highlight=False, markup=False, soft_wrap=True)


def _print_trace(path: Path) -> None:
    timeline = read_timeline(path).between(0.0, math.inf)
    print_shares(Console(stderr=True), timeline, [shares(timeline, lane) for lane in timeline.targets])


def _screen() -> Screen:
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return Screen(sys.stdout, is_terminal, is_terminal and not os.environ.get("NO_COLOR"))


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
