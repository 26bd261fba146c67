"""A target of a simulated world: the real client, and an engine that verifies every token itself."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions, SequenceUpdate
from specbranch.service.client.stats import StatsClient
from specbranch.simulation import scripted
from tests.world.engine import VOCAB, target_token
from tests.world.faults import MAX_TEXT
from tests.world.invariants import Invariants
from tests.world.network import Network, WorldLink
from tests.world.schedule import Actor, Clock, Schedule

_PLANNERS = ("budget", "budget", "pearl", "specbranch", "sps", "ssd", "adaedl")
_CALM_STEP_S = 0.02


@dataclass(slots=True)
class Request:
    """One text that grows, and what was proposed for it."""

    name: str | None
    tokens: list[int]
    end_len: int
    proposal: list[int] = field(default_factory=list)
    num_new: int = 0  # since it was told


class Target:
    """Decodes a few requests at a time, greedily, until it is told to leave."""

    def __init__(
        self,
        number: int,
        namespace: bytes,
        schedule: Schedule,
        clock: Clock,
        network: Network,
        rng: random.Random,
        invariants: Invariants,
    ) -> None:
        self._number = number
        self.namespace = namespace
        self._clock = clock
        self._network = network
        self._rng = rng
        self._invariants = invariants
        self._options = _options(namespace, rng)
        self._most = rng.randint(1, 4)  # requests at once
        self._cuts = rng.random() < 0.3  # the engine verifies fewer tokens than were proposed, at times
        self._skips = rng.random() < 0.3  # the engine goes on without asking, at times
        self._requests: list[Request] = []
        self._num_requests = 0
        self._is_leaving = self._is_restarting = False
        self.is_calm = False
        self.num_accepted = 0
        self.num_rounds = 0
        self._called_s = 0.0
        self.client: DraftClient | None = None
        self.actor = Actor(schedule, self._live)

    def __str__(self) -> str:
        return f"target {self._number} ({self._options.planner}, {self.namespace.decode()})"

    @property
    def is_thrifty(self) -> bool:
        """Whether it submits nothing, however good its drafts are, while steps with drafts seem long."""
        return bool(self._options.settings.get("cost_aware"))

    def restart(self) -> None:
        self._is_restarting = True

    def leave(self) -> None:
        self._is_leaving = True

    def calm_down(self) -> None:
        """One request at a time, and nothing unusual from now on."""
        self.is_calm = True
        self.num_accepted = self.num_rounds = 0
        self._most, self._cuts, self._skips = 1, False, False
        del self._requests[1:]

    def _live(self) -> None:
        while not self._is_leaving:
            self._is_restarting = False
            if not self.is_calm and self._rng.random() < 0.5:
                self._requests.clear()
            link, report_link = (WorldLink(self._network, self.actor) for _ in range(2))
            self.client = DraftClient(self._options, transport=link, clock=self._clock)
            stats_client = StatsClient("", self.namespace, transport=report_link, clock=self._clock)
            while not (self._is_leaving or self._is_restarting):
                self._step(self.client, stats_client)
            self.client.close()
            stats_client.close()

    def _step(self, client: DraftClient, stats_client: StatsClient) -> None:
        self._admit(client)
        self.actor.wait(_CALM_STEP_S if self.is_calm else self._rng.uniform(0.002, 0.04))
        rows = [request for request in self._requests if self._verify(request)]
        if not rows:
            return
        for request in rows:
            self._invariants.verified(self.namespace, request.tokens)
        start_s, leapt_s = self._clock.now_s, self._clock.leapt_s
        step_s = start_s - self._called_s if self._rng.random() < 0.5 else None
        drafts = client.propose([self._committed(request) for request in rows], step_s)
        self._called_s = start_s
        found = [draft.tokens for draft in drafts]
        took_s = self._clock.now_s - start_s - (self._clock.leapt_s - leapt_s)
        self._invariants.call_ended(client, took_s, self._options.deadline_s, found, len(rows))
        self.num_rounds += 1
        for request, proposal in zip(rows, found, strict=True):
            request.proposal = proposal[: self._rng.randint(0, len(proposal))] if self._cuts else proposal
            request.num_new = 0
        self._requests = [request for request in self._requests if len(request.tokens) < request.end_len]
        if self._rng.random() < 0.03:
            stats_client.poll(0.05)
            self._invariants.reported(self.namespace, stats_client.stats)

    def _admit(self, client: DraftClient) -> None:
        while len(self._requests) < self._most and (not self._requests or self._rng.random() < 0.5):
            self._num_requests += 1
            prompt = self._prompt()
            name = f"{self._number}-{self._num_requests}" if self._rng.random() < 0.8 else None
            self._requests.append(Request(name, prompt, len(prompt) + self._rng.randint(5, 60)))
            if self._rng.random() < 0.5:
                self._invariants.verified(self.namespace, prompt)
                client.announce_prompts([prompt])

    def _prompt(self) -> list[int]:
        """Few, so that targets often have the same; some are the beginning of others, or what an answer became."""
        rng = self._rng
        if not self.is_calm and rng.random() < 0.05:
            return [1, VOCAB + 1, 2]  # the draft does not know this token
        length = rng.choice([2, 16, 33, 70])
        if self._requests and rng.random() < 0.3:
            return [*self._requests[0].tokens[: MAX_TEXT - 75], 7, 8]
        return [(number * number + length) % VOCAB for number in range(length)]

    def _verify(self, request: Request) -> bool:
        """Let a text grow by a verdict of the target; whether the service is told of it."""
        base, proposal = tuple(request.tokens), request.proposal
        verdict = scripted.match(proposal, lambda index: target_token((*base, *proposal[:index])[-3:]))
        committed = verdict.committed(proposal)
        self.num_accepted += verdict.accepted
        request.tokens += committed
        request.num_new += len(committed)
        self._invariants.text_grew(request.tokens, len(committed))
        if self._skips and self._rng.random() < 0.2:
            request.proposal = []
            return False
        return True

    def _committed(self, request: Request) -> SequenceUpdate:
        is_told = self._cuts or self._skips or request.name is None or self._rng.random() < 0.5
        longest = self._rng.choice([None, 2]) if self._cuts else None
        num_submitted = len(request.proposal) if is_told else None
        return SequenceUpdate(
            list(request.tokens), request.num_new, num_submitted, name=request.name, max_draft_tokens=longest
        )


def _options(namespace: bytes, rng: random.Random) -> ClientOptions:
    planner = rng.choice(_PLANNERS)
    settings: dict[str, int | bool] = {"gamma": rng.randint(2, 6)}
    if planner == "specbranch":
        settings["wait_for_draft"] = rng.random() < 0.5
    if planner == "budget":
        settings["cost_aware"] = rng.random() < 0.5
        settings["takes_turns"] = rng.random() < 0.3
    return ClientOptions(
        "world",
        planner,
        settings,
        deadline_s=rng.uniform(0.01, 0.1),
        namespace=namespace,
        vocab_len=VOCAB,
        step_share=rng.choice([None, 0.5]),
    )
