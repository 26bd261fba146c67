"""Fit heads to what the draft itself would say: no target is needed, and every place of a text is an example.

At each place the head is given the draft's hidden state and the embedding of the token that follows, and learns the
distribution that the draft has behind that token. It is judged as it is used: where the draft's first choice is what
came, is the head's guess what came next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specbranch.engines.heads import Heads, HeadsCard
from specbranch.provenance import commit
from specbranch.train.examples import Array, ExamplesError
from specbranch.train.states import Text

Tell = Callable[[int, int], None]  # epochs done, of how many
_SKIPPED = 4  # first places of a text: their states are unlike all others
_SURE = 0.8  # confidence of a guess that is called sure
_ROWS = 512  # that are judged at a time


@dataclass(frozen=True, slots=True)
class HeadsOptions:
    """The network and how it is trained."""

    num_tokens: int = 8192  # that can be guessed
    width: int = 448
    rate: float = 1e-3
    decay: float = 1e-2
    batch: int = 256
    epochs: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Places:
    """Flat texts: `here` are places with a state whose next token has a state as well."""

    tokens: Array  # [n]
    states: Array  # [n, hidden] float16
    here: Array


def fit_heads(name: str, draft: Any, texts: Sequence[Text], options: HeadsOptions, tell: Tell) -> Heads:
    """Train the head of a draft; `name` is the draft's. The card has no scores yet."""
    import torch
    from torch import nn

    if not texts:
        raise ExamplesError("there is no text to train heads on; give more prompts or traces")
    torch.manual_seed(options.seed)
    embed, output = draft.get_input_embeddings(), draft.get_output_embeddings()
    vocab_len, hidden_len = output.weight.shape
    tokens = frequent_tokens(texts, min(options.num_tokens, vocab_len))
    places = _places(texts, tokens)
    chosen = torch.from_numpy(tokens).long().to(output.weight.device)
    narrow = output.weight[chosen].detach().float()
    bias = None if output.bias is None else output.bias[chosen].detach().float()
    scale = _spread(places, embed)
    inner, outer = nn.Linear(2 * hidden_len, options.width), nn.Linear(options.width, hidden_len, bias=False)
    modules = nn.ModuleList([inner, outer]).to(narrow.device)
    nn.init.zeros_(outer.weight)
    optimiser = torch.optim.AdamW(modules.parameters(), lr=options.rate, weight_decay=options.decay)
    order = np.random.default_rng(options.seed)
    num_steps = options.epochs * -(-len(places.here) // options.batch)
    pace = torch.optim.lr_scheduler.OneCycleLR(optimiser, options.rate, total_steps=num_steps, pct_start=0.1)
    for epoch in range(options.epochs):
        tell(epoch, options.epochs)
        shuffled = order.permutation(places.here)
        for start in range(0, len(shuffled), options.batch):
            here = shuffled[start : start + options.batch]
            hidden, nexts = (_tensor(places.states[index]).to(narrow) for index in (here, here + 1))
            with torch.no_grad():
                behind = nn.functional.linear(nexts, narrow, bias).softmax(dim=-1)
                embedded = embed(_tensor(places.tokens[here + 1]).long().to(narrow.device)).float()
                inputs = torch.cat([hidden, embedded], dim=-1) * scale
            made = hidden + outer(nn.functional.silu(inner(inputs))) / scale[:hidden_len]
            loss = nn.functional.cross_entropy(nn.functional.linear(made, narrow, bias), behind)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            pace.step()
    tell(options.epochs, options.epochs)
    card = HeadsCard(
        draft=name,
        hidden_len=hidden_len,
        vocab_len=vocab_len,
        tasks=list(dict.fromkeys(text.task for text in texts)),
        positions=len(places.here),
        commit=commit(Path(__file__).parent),
    )
    with torch.no_grad():  # the scales are part of the weights from now on
        weights = (inner.weight * scale, inner.bias, outer.weight / scale[:hidden_len, None])
    return Heads(card, tokens, *(one.detach().cpu().numpy().astype(np.float16) for one in weights))


def judge(heads: Heads, draft: Any, texts: Sequence[Text]) -> Heads:
    """The heads with their scores by task, on the answers of texts that they were not trained on."""
    scores: dict[str, dict[str, float]] = {}
    for task in dict.fromkeys(text.task for text in texts):
        found = [_judge(heads, draft, text) for text in texts if text.task == task]
        is_first_right, is_right, sureness = (np.concatenate(part) for part in zip(*found, strict=True))
        sure = sureness >= _SURE
        scores[task] = {
            "positions": float(len(is_first_right)),
            "first_right": _share(is_first_right),
            "guess_right": _share(is_right[is_first_right]),
            "sure": _share(sure[is_first_right]),
            "sure_right": _share(is_right[is_first_right & sure]),
        }
    return replace(heads, card=_with_scores(heads.card, scores))


def guess(heads: Heads, draft: Any, states: Array, firsts: Array) -> tuple[Array, Array]:
    """What the heads guess behind first choices [n] that were made from states [n, hidden]; and how sure they are."""
    import torch
    from torch.nn.functional import linear, silu

    embed, output = draft.get_input_embeddings(), draft.get_output_embeddings()
    chosen = torch.from_numpy(heads.tokens).long().to(output.weight.device)
    w_in, b_in, w_out = (
        torch.from_numpy(one).to(chosen.device).float() for one in (heads.w_in, heads.b_in, heads.w_out)
    )
    with torch.inference_mode():
        hidden = _tensor(states).to(chosen.device).float()
        inputs = torch.cat([hidden, embed(_tensor(firsts).long().to(chosen.device)).float()], dim=-1)
        made = hidden + linear(silu(linear(inputs, w_in, b_in)), w_out)
        bias = None if output.bias is None else output.bias[chosen].float()
        best = linear(made, output.weight[chosen].float(), bias).softmax(dim=-1).max(dim=-1)
    return heads.tokens[best.indices.cpu().numpy()], best.values.cpu().numpy()


def frequent_tokens(texts: Sequence[Text], count: int) -> Array:
    """The tokens that occur most often, those of answers before those that only prompts have; in order.

    Where the texts have fewer, the first ones of the vocabulary are added: tokenizers number frequent tokens first.
    """
    seen = np.concatenate([text.tokens for text in texts])
    said = np.concatenate([text.tokens[text.start :] for text in texts])
    num_ids = max(count, int(seen.max()) + 1)
    times = np.bincount(seen, minlength=num_ids) + len(seen) * np.bincount(said, minlength=num_ids)
    most = np.argsort(-times, kind="stable")[:count]
    return np.sort(most).astype(np.int32)


def _judge(heads: Heads, draft: Any, text: Text) -> tuple[Array, Array, Array]:
    """For each place of an answer with two tokens behind: was the first choice right, was the guess, how sure."""
    import torch

    start = text.start - 1
    nexts, seconds = text.tokens[start + 1 : -1], text.tokens[start + 2 :]
    states = text.states[start : start + len(nexts)]
    output = draft.get_output_embeddings()
    found = []
    for first in range(0, len(states), _ROWS):
        rows = states[first : first + _ROWS]
        with torch.inference_mode():
            firsts = output(_tensor(rows).to(output.weight)).argmax(-1).cpu().numpy()
        tokens, sureness = guess(heads, draft, rows, firsts)
        part = slice(first, first + _ROWS)
        found.append((firsts == nexts[part], tokens == seconds[part], sureness))
    is_first_right, is_right, sureness = (np.concatenate(part) for part in zip(*found, strict=True))
    return is_first_right, is_right, sureness


def _places(texts: Sequence[Text], tokens: Array) -> _Places:
    """The texts as one; a place counts if the token behind its next can be guessed."""
    lengths = [len(text.states) for text in texts]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    flat = np.concatenate([text.tokens[: len(text.states)] for text in texts])
    here = []
    for text, length, start in zip(texts, lengths, starts, strict=True):
        own = np.arange(min(_SKIPPED, length), length - 1)
        own = own[own + 2 < len(text.tokens)]
        here.append(start + own[np.isin(text.tokens[own + 2], tokens)])
    return _Places(flat, np.concatenate([text.states for text in texts]), np.concatenate(here))


def _spread(places: _Places, embed: Any) -> Any:
    """What brings hidden states and embeddings to size one, [2 * hidden]."""
    import torch

    some = places.here[:: max(1, len(places.here) // 4096)]
    states = _tensor(places.states[some]).to(embed.weight.device).float()
    with torch.inference_mode():
        embedded = embed(_tensor(places.tokens[some + 1]).long().to(states.device)).float()
        spread = torch.cat([states, embedded], dim=-1).pow(2).mean(0).sqrt().clamp(min=1e-3)
    return (1 / spread).clone()


def _with_scores(card: HeadsCard, scores: Mapping[str, Mapping[str, float]]) -> HeadsCard:
    import msgspec

    return msgspec.structs.replace(card, scores={task: dict(own) for task, own in scores.items()})


def _share(flags: Array) -> float:
    return round(float(flags.mean()), 4) if len(flags) else 0.0


def _tensor(array: Array) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(array))
