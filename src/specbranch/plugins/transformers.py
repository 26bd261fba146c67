"""Drafts for Transformers: `model.generate(**inputs, custom_generate=DraftedDecoding(settings))`.

`generate` prepares everything as usual and then calls us instead of its decoding loop. We call its assisted decoding,
with candidates from the draft service instead of an assistant model. This relies on a callable `custom_generate`, and
on `_assisted_decoding`, which gets its candidates from `_get_candidate_generator`. Candidates have no probabilities:
the loop selects every token itself, and keeps candidates while they equal its selection. So the output is that of the
same model without drafts: greedy, or sampled from the same distribution.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from specbranch.engines.vocabulary import VocabFingerprint, read_fingerprint
from specbranch.errors import SpecBranchError
from specbranch.extensions import optional_import
from specbranch.plugins.single_sequence import SingleSequenceDrafts
from specbranch.service.client.interface import DraftSettings

with optional_import("torch"):
    import torch
    from transformers import DynamicCache
    from transformers.generation import (
        CandidateGenerator,
        EosTokenCriteria,
        GenerationMode,
        MaxLengthCriteria,
        MaxTimeCriteria,
        SynthIDTextWatermarkLogitsProcessor,
        UnbatchedClassifierFreeGuidanceLogitsProcessor,
    )

log = logging.getLogger(__name__)

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# Other criteria could stop a sequence in the middle of the tokens that one step adds.
_SEEN_IN_TIME = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria)
_WITH_MEMORY = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)


class ModeError(SpecBranchError, ValueError):
    """A generation mode does not support drafts; the message says which option to leave out."""


class DraftedDecoding:
    """A decoding loop for `generate` that verifies drafts from the draft service, at most `longest` tokens at once.

    Several models can share one instance, which drafts for one sequence at a time. If drafts could change the output,
    or Transformers' assisted decoding does not support the request, it decodes without drafts and logs a warning.
    """

    def __init__(self, settings: DraftSettings, longest: int = 8) -> None:
        self._settings = settings
        self._longest = longest
        self._drafts: WeakKeyDictionary[Any, SingleSequenceDrafts] = WeakKeyDictionary()  # by model
        self._warned: set[str] = set()

    @property
    def num_accepted(self) -> int:
        """The number of draft tokens that all models together have accepted so far."""
        return sum(drafts.num_accepted for drafts in self._drafts.values())

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        text_streamer: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Decode `input_ids` [rows, length]; arguments and return value are those of `generate`'s own decoding loop.

        Call `generate` with `text_streamer` instead of `streamer`, which it does not pass on. Raise `ModeError` for a
        mode other than greedy decoding and sampling.
        """
        mode = generation_config.get_generation_mode()
        if mode not in _MODES:
            raise ModeError(f"drafts are for greedy decoding and sampling; leave out what asks for {mode.value}")
        if text_streamer is not None:
            text_streamer.put(input_ids.cpu())  # every streamer gets the prompt first
        arguments = dict(
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            streamer=text_streamer,
            **kwargs,
        )
        obstacle = _obstacle(model, input_ids, kwargs.get("past_key_values"), logits_processor, stopping_criteria)
        if obstacle is not None:
            self._warn(obstacle)
            return type(model)._sample(model, input_ids, **arguments)
        candidates = ServiceCandidates(self._drafts_for(model), generation_config)
        return type(model)._assisted_decoding(_WithCandidates(model, candidates), input_ids, **arguments)

    def _drafts_for(self, model: Any) -> SingleSequenceDrafts:
        if model not in self._drafts:
            name = getattr(model, "name_or_path", "")
            target = VocabFingerprint(
                model.config.get_text_config().vocab_size, read_fingerprint(name) if name else b""
            )
            self._drafts[model] = SingleSequenceDrafts(self._settings, self._longest, target)
        return self._drafts[model]

    def _warn(self, obstacle: str) -> None:
        if obstacle not in self._warned:
            self._warned.add(obstacle)
            log.warning("drafts do not support %s; such texts are decoded without drafts", obstacle)


class ServiceCandidates(CandidateGenerator):
    """Candidates for one sequence from the draft service, never beyond the maximum length of the sequence."""

    def __init__(self, drafts: SingleSequenceDrafts, generation_config: Any) -> None:
        self._drafts = drafts
        self._max_length = generation_config.max_length
        self._is_sampled = generation_config.get_generation_mode() is GenerationMode.SAMPLE
        ends = getattr(generation_config, "_eos_token_tensor", None)
        self._ends = frozenset() if ends is None else frozenset(ends.flatten().tolist())
        self._has_begun = False

    def get_candidates(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """Return the sequence [1, length] with candidates appended, and None for their logits, which are unknown.

        The first call, before the prefill, announces the prompt to the draft service and appends no candidates.
        """
        text = input_ids[0].cpu().numpy()
        if not self._has_begun:
            self._has_begun = True
            self._drafts.announce_prompt(text)
            return input_ids, None
        # The seed of a sampler is not visible here, so assume that any sampled sequence has one.
        draft = self._drafts.after(text, self._max_length - len(text) - 1, has_recurring_noise=self._is_sampled)
        end = next((place for place, token in enumerate(draft) if token in self._ends), len(draft))
        return torch.cat((input_ids, input_ids.new_tensor([draft[:end]])), dim=1), None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Do nothing: the next request tells the service which candidates were accepted."""


class _WithCandidates:
    """A proxy of a model that replaces its candidate generator by ours; the model itself is unchanged."""

    def __init__(self, model: Any, candidates: CandidateGenerator) -> None:
        self._model = model
        self._candidates = candidates

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def _get_candidate_generator(self, **kwargs: Any) -> CandidateGenerator:
        return self._candidates


def _obstacle(
    model: Any, input_ids: torch.Tensor, cache: Any, logits_processor: Any, stopping_criteria: Any
) -> str | None:
    """Return a phrase for a warning that names the obstacle to drafting for a sequence; None if there is none."""
    if len(input_ids) != 1:
        return "several texts at once"
    if model.config.is_encoder_decoder or model._is_stateful:
        return f"{type(model).__name__}, which has an encoder or cannot take tokens back"
    if type(cache) is not DynamicCache or cache.get_seq_length():
        return "a cache that is not a new dynamic one"
    if remembering := _names(one for one in logits_processor if isinstance(one, _WITH_MEMORY)):
        return f"{remembering}, which would remember rejected tokens"
    if late := _names(one for one in stopping_criteria if not isinstance(one, _SEEN_IN_TIME)):
        return f"{late}, which is checked only between steps"
    return None


def _names(objects: Iterable[object]) -> str:
    return ", ".join(sorted({type(one).__name__ for one in objects}))
