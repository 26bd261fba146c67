"""Hidden states of a draft along texts, which heads learn from: the draft answers prompts, or reads recorded answers.

While it answers, its states cost nothing extra. Each group of texts is one part on disk, so that work which was cut off
goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specbranch.trace import Answer, Trace
from specbranch.train.collect import Asked, end_ids, groups_of, share_keys
from specbranch.train.examples import Array, ExamplesError, part_path, write_part

Tell = Callable[[int, int], None]
_TOKENS_AT_ONCE = 8192  # of prompts
_ENDED = 0.85  # of a group; the rest is cut off, as few answers in a step cost as much as many


@dataclass(frozen=True, slots=True)
class StatesOptions:
    """Where the texts come from: tasks with prompts for the draft to answer, and recorded answers of a target."""

    draft: str
    messages: Mapping[str, Sequence[str]]
    traces: Sequence[Trace]
    _: KW_ONLY
    max_new_tokens: int = 160
    batch: int = 40
    device: str = "cpu"

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of all tasks; a trace that has none is called after its target."""
        return tuple(dict.fromkeys([*self.messages, *(task_of(trace) for trace in self.traces)]))


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and its answer. `states[i]` has seen the tokens up to `tokens[i]`; there may be none for the last."""

    task: str
    tokens: Array  # [n] int32
    states: Array  # [n or n - 1, hidden] float16
    start: int  # of the answer

    @property
    def prompt(self) -> tuple[int, ...]:
        """The prompt's tokens."""
        return tuple(self.tokens[: self.start].tolist())


def task_of(trace: Trace) -> str:
    """What the texts of a trace are called."""
    return trace.header.task or trace.header.target or "recorded"


def collect_states(options: StatesOptions, draft: Any, tokenizer: Any, out: Path, tell: Tell) -> list[Text]:
    """The texts with their states, read from `out` or written there; `tell` hears how many parts of how many."""
    out.mkdir(parents=True, exist_ok=True)
    tasks = options.tasks
    asked = [part for group in groups_of(tokenizer, options.messages, options.batch) for part in _parts(group)]
    recorded = [
        (task_of(trace), answer) for trace in options.traces for answer in trace.answers if len(answer.tokens) > 1
    ]
    if any(not answer.prompt for _, answer in recorded):
        raise ExamplesError("a trace was recorded without its prompts; heads cannot be trained on it")
    pieces = [recorded[start : start + options.batch] for start in range(0, len(recorded), options.batch)]
    if asked:
        share_keys(draft)
    texts = []
    for number in range(len(asked) + len(pieces)):
        tell(number, len(asked) + len(pieces))
        if not part_path(out, number).exists():
            if number < len(asked):
                found = _answer(draft, asked[number], end_ids(draft, tokenizer), tasks, options)
            else:
                found = read_over(draft, pieces[number - len(asked)], options.device)
            write_part(out, number, _arrays(found, tasks))
        texts += _read_part(part_path(out, number), tasks)
    tell(len(asked) + len(pieces), len(asked) + len(pieces))
    return texts


def read_over(draft: Any, answers: Sequence[tuple[str, Answer]], device: str) -> list[Text]:
    """Recorded answers, each with its task, and the draft's states along them."""
    import torch

    texts = []
    for task, answer in answers:
        tokens = np.array([*answer.prompt, *answer.tokens], dtype=np.int32)
        with torch.inference_mode():
            hidden = draft.base_model(input_ids=torch.from_numpy(tokens).long().to(device)[None]).last_hidden_state[0]
        texts.append(Text(task, tokens, hidden.to(torch.float16).cpu().numpy(), len(answer.prompt)))
    return texts


def _parts(group: list[Asked]) -> list[list[Asked]]:
    """A group in parts that are not too long to be held in memory."""
    size = max(1, _TOKENS_AT_ONCE // max((len(one.tokens) for one in group), default=1))
    return [group[start : start + size] for start in range(0, len(group), size)]


def _answer(
    draft: Any, group: Sequence[Asked], ends: set[int], tasks: Sequence[str], options: StatesOptions
) -> list[Text]:
    """What the draft says, token by token for the whole group, and its states along prompts and answers."""
    import torch

    longest = max(len(one.tokens) for one in group)
    ids = torch.tensor([[0] * (longest - len(one.tokens)) + one.tokens for one in group], device=options.device)
    mask = torch.tensor([[0] * (longest - len(one.tokens)) + [1] * len(one.tokens) for one in group]).to(ids.device)
    lengths = [0] * len(group)  # of answers that have ended
    said, states, cache = [], [], None
    head = draft.get_output_embeddings()
    with torch.inference_mode():
        for step in range(options.max_new_tokens):
            out = draft.base_model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :],
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            states.append(out.last_hidden_state.to(torch.float16).cpu())
            chosen = head(out.last_hidden_state[:, -1]).argmax(-1)
            said.append(chosen.cpu())
            for index, token in enumerate(said[-1].tolist()):
                if lengths[index] == 0 and token in ends:
                    lengths[index] = step + 1
            if sum(map(bool, lengths)) >= _ENDED * len(group):
                break
            ids = chosen[:, None]
            mask = torch.cat([mask, mask.new_ones(len(group), 1)], dim=-1)
    tokens, hidden = torch.stack(said, dim=1), torch.cat(states, dim=1).numpy()
    texts = []
    for index, one in enumerate(group):
        text = np.array(one.tokens + tokens[index, : lengths[index] or len(said)].tolist(), dtype=np.int32)
        own = hidden[index, longest - len(one.tokens) :][: len(text)]
        texts.append(Text(tasks[one.task], text, own, len(one.tokens)))
    return texts


def _arrays(texts: Sequence[Text], tasks: Sequence[str]) -> dict[str, Array]:
    return {
        "tokens": np.concatenate([text.tokens for text in texts]),
        "states": np.concatenate([text.states for text in texts]),
        "counts": np.array([(len(text.tokens), len(text.states), text.start) for text in texts], dtype=np.int32),
        "tasks": np.array([tasks.index(text.task) for text in texts], dtype=np.int32),
    }


def _read_part(path: Path, tasks: Sequence[str]) -> list[Text]:
    from safetensors.numpy import load_file

    part = load_file(str(path))
    texts, token, state = [], 0, 0
    for (num_tokens, num_states, start), task in zip(part["counts"].tolist(), part["tasks"].tolist(), strict=True):
        own = part["states"][state : state + num_states]
        texts.append(Text(tasks[task], part["tokens"][token : token + num_tokens], own, start))
        token, state = token + num_tokens, state + num_states
    return texts
