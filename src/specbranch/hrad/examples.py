"""Collect H-RAD's training examples from a pair of models; store and read them.

There is one example for each token that the target generated. Its features are the target's hidden states that
predicted this token, and the embedding of the token. Its run is the number of draft tokens accepted after it, counted
without drafting: how many of the target's next tokens, without a gap, are the draft's most likely ones. That equals
drafting a window and comparing it, because a greedy draft departs from the target's sequence only where it is rejected.

Features cost no extra step: they are kept while the target generates the token. Each batch is written to disk as one
part, so an interrupted collection continues where it stopped.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specbranch.core.distribution import Distribution
from specbranch.engines.models import load_model, load_tokenizer, resolve_model
from specbranch.errors import EngineError, SpecBranchError
from specbranch.machine import provenance
from specbranch.trace import Answer, Header, Trace, read_trace, write_trace

FORMAT = "specbranch-examples"
VERSION = 1
SPLITS = ("train", "held-out", "test")
_SPLIT_OF = ("test", "held-out", "train", "train", "train", "test", "train", "train")

Array = NDArray[Any]
CollectDtype = Literal["auto", "int8"]
CollectProgress = Callable[[int, int], None]  # parts done, all parts
_TOP_K = 10
_TRACE_SUFFIX = ".jsonl.gz"
_ATTENTION = "specbranch-collect"  # our name in the attention registries of Transformers
_TOKENS_AT_ONCE = 24_576  # of prompts in a batch; their hidden states are all in memory
_DISTRIBUTIONS_AT_ONCE = 8  # answers; a distribution over a large vocabulary needs much memory


class ExamplesError(SpecBranchError, ValueError):
    """A directory holds no examples of this version, the directories do not match, or a split has no examples."""


@dataclass(frozen=True, slots=True)
class ExamplesCard:
    """Where the examples of a directory come from: models and their dtype, layers, temperature and tasks."""

    target: str
    draft: str
    num_layers: int
    hidden_len: int
    temperature: float
    tasks: tuple[str, ...]
    dtype: str = "auto"

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **{name: getattr(self, name) for name in self.__slots__}}


@dataclass(frozen=True, slots=True)
class Examples:
    """Training examples as columns of equal length, with one row for each position, which is a token of an answer.

    `runs` has the number of draft tokens accepted after the position, and `left` the number of tokens after it: where
    both are equal, the answer's end ended the run. `distributions` describes the draft's distribution of the token
    after the position: the two highest probabilities, and the entropy in nats.
    """

    card: ExamplesCard
    features: Array  # [n, d_in] float16
    distributions: Array  # [n, 3] float32
    runs: Array  # [n] int32
    left: Array  # [n] int32
    tasks: Array  # [n] int32, index into the card's tasks
    prompts: Array  # [n] int64, hash of the prompt

    def __len__(self) -> int:
        return len(self.runs)

    def take(self, chosen: Array | slice) -> Examples:
        """Return the examples that `chosen` selects: an array of indices, a mask or a slice."""
        rows = ("features", "distributions", "runs", "left", "tasks", "prompts")
        return replace(self, **{name: getattr(self, name)[chosen] for name in rows})

    def settled(self, window: int) -> Examples:
        """Return the examples for which it is known how much of a window was accepted.

        Left out are positions where the answer ends within the window and all tokens up to its end were accepted.
        """
        return self.take((self.runs < self.left) | (self.left >= window))

    def split(self, name: str) -> Examples:
        """Return the examples of the split `name`, one of `SPLITS`; all positions of a prompt are in the same split."""
        return self.take(np.array([split_of(int(prompt)) == name for prompt in self.prompts], dtype=bool))

    def of_task(self, task: str) -> Examples:
        """Return the examples of one task."""
        return self.take(self.tasks == self.card.tasks.index(task))

    def with_last_layers(self, num_layers: int) -> Examples:
        """Return the same examples with features of only the last `num_layers` layers of those that were collected."""
        if not 1 <= num_layers <= self.card.num_layers:
            raise ExamplesError(f"{num_layers} layers of these examples, which have {self.card.num_layers}")
        first = (self.card.num_layers - num_layers) * self.card.hidden_len
        card = replace(self.card, num_layers=num_layers)
        return replace(self, card=card, features=self.features[:, first:])

    def classes(self, window: int) -> Array:
        """Return H-RAD's class of each example: 0, 1 or 2 if no, some or all tokens of the window were accepted."""
        return np.where(self.runs == 0, 0, np.where(self.runs >= window, 2, 1))


def split_of(prompt: int) -> str:
    """Return the split, one of `SPLITS`, that a prompt belongs to; `prompt` is the hash of its text."""
    return _SPLIT_OF[prompt % len(_SPLIT_OF)]


def name_of(text: str) -> int:
    """Return the name of a prompt: a hash of its text, which is the same in every collection."""
    return zlib.crc32(text.encode())


def positions(answer: Answer) -> tuple[Array, Array, Array]:
    """Return the columns `distributions`, `runs` and `left` of `Examples` for an answer.

    The last token of the answer has no row, because no token follows it.
    """
    nexts = answer.distributions[1:]
    looks = [[float(one.probs[0]), float(one.probs[1]) if len(one.probs) > 1 else 0.0, one.entropy] for one in nexts]
    left = np.arange(len(nexts), 0, -1, dtype=np.int32)
    return np.array(looks, dtype=np.float32).reshape(-1, 3), np.array(answer.runs()[1:-1], dtype=np.int32), left


def write_part(directory: Path, number: int, arrays: dict[str, Array]) -> None:
    """Write the arrays of part `number` of a collection to its file (`part_path`), completely or not at all."""
    from safetensors.numpy import save_file

    path = part_path(directory, number)
    draft = path.with_suffix(".part")
    save_file(arrays, str(draft))
    draft.rename(path)


def part_path(directory: Path, number: int) -> Path:
    """Return the path of the file with the examples of part `number` of the collection in `directory`.

    A part is one batch of prompts; parts are numbered from 0.
    """
    return directory / f"part-{number:04}.safetensors"


def trace_path(directory: Path, number: int) -> Path:
    """Return the path of the trace with the target's answers to the prompts of part `number` (see `part_path`)."""
    return part_path(directory, number).with_suffix(_TRACE_SUFFIX)


def write_examples_card(directory: Path, card: ExamplesCard) -> None:
    """Write the card of a collection to `card.json` in its directory."""
    (directory / "card.json").write_text(json.dumps(card.as_json(), indent=1) + "\n")


def read_examples_card(directory: Path) -> ExamplesCard:
    """Read and return the card of a collection; raise `ExamplesError` if the directory holds none of this version."""
    try:
        document = json.loads((directory / "card.json").read_bytes())
        if document.pop("format") != FORMAT or document.pop("version") != VERSION:
            raise ExamplesError(f"{directory} holds no examples of this version; collect them anew")
        return ExamplesCard(**{**document, "tasks": tuple(document["tasks"])})
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ExamplesError(f"{directory} holds no examples; `specbranch train collect` makes them") from error


def read_examples(directories: Sequence[Path]) -> Examples:
    """Read all examples of the collections in these directories, and return them.

    Raise `ExamplesError` if they differ in more than the temperature, or if there are no examples.
    """
    from safetensors.numpy import load_file

    cards = [read_examples_card(directory) for directory in directories]
    for card, directory in zip(cards, directories, strict=True):
        if replace(card, temperature=0.0) != replace(cards[0], temperature=0.0):
            raise ExamplesError(f"{directory} is of another pair, other layers or other tasks than {directories[0]}")
    parts = [load_file(str(path)) for directory in directories for path in sorted(directory.glob("part-*.safetensors"))]
    if not parts:
        raise ExamplesError(f"{directories[0]} holds no finished part; let `specbranch train collect` run to its end")
    return Examples(cards[0], **{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def read_answers(directory: Path) -> list[tuple[str, int, Answer]]:
    """Read a collection's answers, and return tuples of task, hash of the prompt and answer, in the examples' order.

    Answers of one token are left out, because they have no examples.
    """
    from safetensors.numpy import load_file

    card = read_examples_card(directory)
    found = []
    for path in sorted(directory.glob("part-*.safetensors")):
        part = load_file(str(path))
        row = 0
        for answer in read_trace(path.with_suffix(_TRACE_SUFFIX)).answers:
            if len(answer.tokens) > 1:  # one token has no position
                found.append((card.tasks[part["tasks"][row]], int(part["prompts"][row]), answer))
            row += len(answer.tokens) - 1
    return found


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """The options of a collection: the pair, and how its answers are generated.

    `num_layers` is how many of the target's last layers become features, `batch` how many prompts are answered at once.
    With the dtype int8, which is for a CPU, the linear layers of both models have 8-bit weights and activations.
    """

    target: str
    draft: str
    _: KW_ONLY
    num_layers: int = 4
    max_new_tokens: int = 160
    temperature: float = 0.0
    batch: int = 64
    device: str = "cpu"
    dtype: CollectDtype = "auto"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt: the index of its task, the hash of its text (`name`), and its tokens in the model's chat template."""

    task: int
    name: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class _TargetAnswer:
    """The tokens of an answer, and the features of each token, [tokens, d_in]."""

    tokens: list[int]
    features: Any


def collect(
    options: CollectOptions, messages: Mapping[str, Sequence[str]], out: Path, on_progress: CollectProgress
) -> None:
    """Generate answers to all messages, given by task, and write their examples and traces to the directory `out`.

    Parts that exist already are kept. `on_progress` is called with the number of finished parts and of all parts.
    """
    import torch

    out.mkdir(parents=True, exist_ok=True)
    paths = [resolve_model(options.target), resolve_model(options.draft)]
    tokenizer = load_tokenizer(paths[0])
    groups = groups_of(tokenizer, messages, options.batch)
    missing = [number for number in range(len(groups)) if not part_path(out, number).exists()]
    if missing:
        target, draft = (_load(path, options) for path in paths)
        share_keys(target)
        names = (Path(paths[0]).name, Path(paths[1]).name)
        hidden_len = int(target.config.hidden_size)
        write_examples_card(
            out,
            ExamplesCard(*names, options.num_layers, hidden_len, options.temperature, tuple(messages), options.dtype),
        )
        header = Header(target=names[0], draft=names[1], temperature=options.temperature)
        for number in missing:
            on_progress(number, len(groups))
            torch.manual_seed(options.seed + number)
            said = _answer(target, tokenizer, groups[number], options)
            answers = _read_over(draft, groups[number], said, options.device)
            write_trace(trace_path(out, number), Trace(header, tuple(answers)))
            write_part(out, number, _arrays(groups[number], said, answers))
    on_progress(len(groups), len(groups))


def _load(path: str, options: CollectOptions) -> Any:
    import torch

    if options.dtype == "auto":
        return load_model(path, dtype=_dtype(options.device)).to(options.device).eval()
    from specbranch.engines.torch.linear import PACKED, can_int8, pack_linears

    if options.device != "cpu" or not can_int8():
        raise EngineError("dtype int8 is for a CPU, with a build of torch that has kernels for it; give auto")
    return pack_linears(load_model(path, dtype=torch.float32).eval(), PACKED["int8"])


def _dtype(device: str) -> Any:
    """Return the data type for both models: bfloat16, or float32 on a CPU that can only emulate bfloat16.

    The choice depends only on the device and its instruction set, because a resumed collection must use the same type.
    """
    import torch

    is_native = device != "cpu" or {"avx512_bf16", "amx_bf16"} & set(provenance()["instruction_sets"])
    return torch.bfloat16 if is_native else torch.float32


def share_keys(model: Any) -> None:
    """Replace the model's attention by one that computes all query heads of a key head together in steps of one token.

    With padding, Transformers' own attention copies the keys for each query head, which takes most of a step's time.
    """
    from torch.nn.functional import scaled_dot_product_attention
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **asked: Any) -> tuple[Any, None]:
        batch, num_heads, length, width = query.shape
        if length > 1:
            out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **asked)
            return out, None
        folded = query.reshape(batch, key.shape[1], -1, width)
        out = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=asked.get("scaling"))
        return out.reshape(batch, 1, num_heads, width), None

    AttentionInterface.register(_ATTENTION, attend)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
    model.set_attn_implementation(_ATTENTION)


def groups_of(tokenizer: Any, messages: Mapping[str, Sequence[str]], size: int) -> list[list[PromptTokens]]:
    """Return the messages, given by task, as tokenized chats in groups of at most `size` prompts of similar length.

    Such groups need little padding. A group of long prompts has fewer prompts, to limit memory.
    """
    asked = []
    for task, texts in enumerate(messages.values()):
        for text in texts:
            chat = [{"role": "user", "content": text}]
            templated = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            asked.append(PromptTokens(task, name_of(text), tokenizer(templated, add_special_tokens=False).input_ids))
    asked.sort(key=lambda one: len(one.tokens))
    groups: list[list[PromptTokens]] = [[]]
    for one in asked:
        if len(groups[-1]) >= max(1, min(size, _TOKENS_AT_ONCE // len(one.tokens))):
            groups.append([])
        groups[-1].append(one)
    return groups


def _answer(target: Any, tokenizer: Any, group: Sequence[PromptTokens], options: CollectOptions) -> list[_TargetAnswer]:
    """Generate the target's answers to a group of prompts, and return them with the features of each token."""
    import torch

    longest = max(len(one.tokens) for one in group)
    pad = tokenizer.pad_token_id or 0
    ids = torch.tensor([[pad] * (longest - len(one.tokens)) + one.tokens for one in group], device=options.device)
    mask = torch.tensor([[0] * (longest - len(one.tokens)) + [1] * len(one.tokens) for one in group]).to(ids.device)
    ends = end_ids(target, tokenizer)
    running = list(range(len(group)))  # answers that are not finished, in the batch's order
    tokens: list[list[int]] = [[] for _ in group]
    features: list[list[Any]] = [[] for _ in group]
    embed = target.get_input_embeddings()
    with torch.inference_mode():
        # The prompts without their last token first: the hidden states of all their tokens would fill the memory.
        ids, cache = _read_prompts(target, ids, mask)
        for _ in range(options.max_new_tokens):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            out = target(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                output_hidden_states=True,
                logits_to_keep=1,
            )
            cache = out.past_key_values
            chosen = _choose(out.logits[:, -1], options.temperature)
            hidden = [state[:, -1] for state in out.hidden_states[-options.num_layers :]]
            rows = torch.cat([*hidden, embed(chosen)], dim=-1).to(torch.float16).cpu().numpy()
            for index, row, token in zip(running, rows, chosen.tolist(), strict=True):
                tokens[index].append(token)
                features[index].append(row)
            kept = [place for place, index in enumerate(running) if tokens[index][-1] not in ends]
            if not kept:
                break
            if len(kept) < len(running):  # finished answers leave the batch
                running = [running[place] for place in kept]
                cache.batch_select_indices(torch.tensor(kept, device=ids.device))
                chosen, mask = chosen[kept], mask[kept]
            ids = chosen[:, None]
            mask = torch.cat([mask, mask.new_ones(len(running), 1)], dim=-1)
    return [_TargetAnswer(said, np.stack(rows)) for said, rows in zip(tokens, features, strict=True)]


def _read_prompts(target: Any, ids: Any, mask: Any) -> tuple[Any, Any]:
    """Run prompts [prompts, tokens] without their last token; return the last tokens and the cache of the others."""
    if ids.shape[1] == 1:
        return ids, None
    positions = (mask[:, :-1].cumsum(-1) - 1).clamp(min=0)
    out = target(
        input_ids=ids[:, :-1], attention_mask=mask[:, :-1], position_ids=positions, use_cache=True, logits_to_keep=1
    )
    return ids[:, -1:], out.past_key_values


def _choose(logits: Any, temperature: float) -> Any:
    if not temperature:
        return logits.argmax(-1)
    return (logits.float() / temperature).softmax(-1).multinomial(1)[:, 0]


def end_ids(target: Any, tokenizer: Any) -> set[int]:
    """Return the ids of the tokens that end an answer: those of the model's generation settings and the tokenizer's."""
    ends = target.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}


def _read_over(draft: Any, group: Sequence[PromptTokens], said: Sequence[_TargetAnswer], device: str) -> list[Answer]:
    """Run the draft over the target's answers, and return the answers with the draft's distribution for each token."""
    import torch

    answers = []
    head = draft.get_output_embeddings()
    for start in range(0, len(group), _DISTRIBUTIONS_AT_ONCE):
        pairs = list(zip(group, said, strict=True))[start : start + _DISTRIBUTIONS_AT_ONCE]
        texts = [[*one.tokens, *answer.tokens[:-1]] for one, answer in pairs]
        longest = max(len(text) for text in texts)
        # Padding on the right is invisible to earlier tokens.
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)
        with torch.inference_mode():
            hidden = draft.base_model(input_ids=ids).last_hidden_state
            for row, (one, answer) in enumerate(pairs):
                first = len(one.tokens) - 1
                logits = head(hidden[row, first : first + len(answer.tokens)])
                answers.append(Answer(tuple(answer.tokens), _distributions(logits), tuple(one.tokens)))
    return answers


def _distributions(logits: Any) -> tuple[Distribution, ...]:
    logs = logits.float().log_softmax(-1)  # [tokens, vocabulary]
    probs = logs.exp()
    top = probs.topk(_TOP_K, dim=-1)
    entropy = -(probs * logs).sum(-1)
    return tuple(
        Distribution(tuple(ids), tuple(round(prob, 5) for prob in heads), round(h, 4))
        for ids, heads, h in zip(top.indices.tolist(), top.values.tolist(), entropy.tolist(), strict=True)
    )


def _arrays(group: Sequence[PromptTokens], said: Sequence[_TargetAnswer], answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the columns of `Examples` for one part, by name.

    The last token of an answer has no row, because no token follows it.
    """
    looks = [positions(answer) for answer in answers]
    counts = [len(runs) for _, runs, _ in looks]
    return {
        "features": np.concatenate([one.features[:count] for one, count in zip(said, counts, strict=True)]),
        "distributions": np.concatenate([distributions for distributions, _, _ in looks]),
        "runs": np.concatenate([runs for _, runs, _ in looks]),
        "left": np.concatenate([left for _, _, left in looks]),
        "tasks": np.repeat(np.array([one.task for one in group], dtype=np.int32), counts),
        "prompts": np.repeat(np.array([one.name for one in group], dtype=np.int64), counts),
    }
