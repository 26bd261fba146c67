"""Does drafting help, and if not, why? Findings from one reading of a server's counters, in the same words everywhere.

`specbranch top`, `specbranch doctor --server` and the Grafana dashboard show the titles and actions of `KINDS`. This
module reads no clock and no network: a reading comes in, findings go out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specbranch.cli.console import State
from specbranch.cli.readings import StatsReading, count
from specbranch.service.client.gate import MARGIN

# Two standard errors of an acceptance rate are at most 1 / sqrt(400), 5 points, if each verification has one draft
# token, and less if it has several.
_MIN_VERIFICATIONS = 400
_MIN_STEPS = _MIN_VERIFICATIONS  # for a share of late steps
# Steps without drafts lose at most their own share of the gain. The gate takes a difference below its margin for none,
# and so does this. Of the recorded benchmark runs, one in 300 has any timeout.
_MAX_LATE_SHARE = MARGIN - 1
# "Few" is fewer than are rejected. If more are accepted and drafts do not help, they cost too much.
_MAX_FEW_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class FindingKind:
    """A possible answer: its title, what to do about it, and its state, as `specbranch doctor` marks it.

    The state "fail" means that something has to be repaired, and "skip" that there is no gain to report (yet).
    """

    title: str
    action: str
    state: State


NO_TOKENS = FindingKind(
    "No draft tokens yet",
    "Send a request for a long answer and look again; if there are still none, `specbranch doctor TARGET --draft "
    "DRAFT` checks the pair.",
    "skip",
)
UNREACHABLE = FindingKind(
    "The draft service is not reachable",
    "Run `specbranch ping ADDRESS` on the server's machine, and start the service with `specbranch draft` if it does "
    "not answer; both must run as one user, or use TCP with --keys.",
    "fail",
)
OTHER_VOCABULARY = FindingKind(
    "The draft model has another vocabulary",
    "Use a draft model of the target's family: `specbranch doctor TARGET` names drafts that fit, and `--draft DRAFT` "
    "compares the vocabularies.",
    "fail",
)
TOO_LATE = FindingKind(
    "Drafts come too late",
    "Give the draft model cores or a device of its own (--draft-cores, --draft-device) or use a smaller one; only then "
    "raise --deadline-ms.",
    "fail",
)
FEW_ACCEPTED = FindingKind(
    "Few draft tokens are accepted",
    "Use a draft model closer to the target; `specbranch plan TARGET --draft DRAFT --prompts FILE` forecasts its gain "
    "on your own prompts.",
    "fail",
)
DISABLED = FindingKind(
    "Drafting is disabled at this load",
    "This is expected where drafts cost more than they save; `specbranch plan TARGET --draft DRAFT` forecasts what "
    "would help, and --no-gate drafts anyway.",
    "skip",
)
HELPS = FindingKind(
    "Drafts help",
    "Nothing to do; `specbranch plan TARGET --draft DRAFT` forecasts whether another draft model or planner would "
    "help more.",
    "ok",
)
TOO_SHORT = FindingKind(
    "Too early to tell",
    "Let the vLLM server decode some long answers without --no-gate, then run `specbranch top http://HOST:PORT` again.",
    "skip",
)
KINDS = (NO_TOKENS, UNREACHABLE, OTHER_VOCABULARY, TOO_LATE, FEW_ACCEPTED, DISABLED, HELPS, TOO_SHORT)


@dataclass(frozen=True, slots=True)
class DraftingFinding:
    """One finding about a running server: its kind, and a sentence with the figures behind it."""

    kind: FindingKind
    detail: str

    def as_json(self) -> dict[str, str]:
        """Return the finding as a JSON dict."""
        kind = self.kind
        return {"title": kind.title, "detail": self.detail, "action": kind.action, "state": kind.state}


def diagnose(now: StatsReading) -> list[DraftingFinding]:
    """Return what a reading shows about the gain from drafts, faults first; at least one finding."""
    found = list(_faults(now))
    # What was measured before the service was lost says nothing about the present.
    if now.states and not set(now.states) - {"unreachable", "vocabulary"}:
        return found
    found += [*_drafting(now), *_gain(now)]
    return found or [DraftingFinding(TOO_SHORT, _why_unknown(now))]


def _faults(now: StatsReading) -> Iterator[DraftingFinding]:
    if "unreachable" in now.states:
        calls = f"; {count(now.unreachable_steps, 'step')} could not reach it" if now.unreachable_steps else ""
        yield DraftingFinding(
            UNREACHABLE, f"{_engines(now, 'unreachable')} without the draft model, as no service answers{calls}."
        )
    if "vocabulary" in now.states:
        yield DraftingFinding(
            OTHER_VOCABULARY,
            f"{_engines(now, 'vocabulary')} without the draft model, as its tokens are not those of the target; vLLM's "
            "log says where they differ.",
        )
    late_share = now.late_steps / now.target_steps if now.target_steps else 0.0
    is_late = now.target_steps >= _MIN_STEPS and late_share > _MAX_LATE_SHARE
    if is_late or "lagging" in now.states:
        last = "; the last one is still unanswered" if "lagging" in now.states else ""
        yield DraftingFinding(
            TOO_LATE,
            f"{now.late_steps:,} of {count(now.target_steps, 'step')} that asked for drafts ({_percent(late_share)}) "
            f"did not get them in time{last}.",
        )


def _drafting(now: StatsReading) -> Iterator[DraftingFinding]:
    if not now.speeds and not _has_tokens(now):
        yield DraftingFinding(NO_TOKENS, _why_no_tokens(now))
    elif (needed := _needed_rate(now)) is not None:
        stats = now.stats
        why = "by the speeds that the gate measured" if now.speeds else "even if they cost nothing"
        yield DraftingFinding(
            FEW_ACCEPTED,
            f"The target accepted {_percent(stats.accepted / stats.submitted)} of {stats.submitted:,} draft tokens; "
            f"drafts of this length help from {_percent(needed)} on, {why}.",
        )


def _gain(now: StatsReading) -> Iterator[DraftingFinding]:
    closed = [rows for rows in now.speeds if not now.gate.get(rows)]
    opened = [rows for rows in now.speeds if now.gate.get(rows)]
    for kind, loads in ((DISABLED, closed), (HELPS, opened)):
        if loads:
            yield DraftingFinding(kind, f"The gate measured {'; '.join(_speed(now, rows) for rows in loads)}.")


def _needed_rate(now: StatsReading) -> float | None:
    """Return the acceptance rate from which drafts would help, if the rate is too low for that; None if it is not.

    A step with drafts takes L / r times as long as one without, if it yields L tokens on average and the server decodes
    r times as fast with drafts as without: so drafts help if a step yields more than that. Without measurements, r = L:
    a step with drafts takes at least as long as one without. The most favourable load counts. None is also returned if
    drafts help at some load, if most tokens are accepted, or if drafts would not help even if all were: then they cost
    too much.
    """
    rounds, submitted = now.stats.rounds, now.stats.submitted
    if rounds < _MIN_VERIFICATIONS or not submitted or any(now.gate.values()):
        return None
    length = 1 + now.stats.accepted_per_round
    ratio = max((one.ratio for one in now.speeds.values()), default=length)
    needed_len = MARGIN * length / max(ratio, 1e-9)
    needed = (needed_len - 1) * rounds / submitted
    return needed if now.stats.accepted / submitted < min(needed, _MAX_FEW_SHARE) and needed <= 1 else None


def _has_tokens(now: StatsReading) -> bool:
    return bool(now.stats.submitted or (_has_only_text(now) and now.text_tokens))


def _has_only_text(now: StatsReading) -> bool:
    return set(now.states) == {"text"}


def _why_no_tokens(now: StatsReading) -> str:
    if set(now.states) == {"off"}:
        return "The planner is `none`, which drafts nothing."
    if not now.target_steps:
        return "No step has asked for drafts since the start; a server first measures its speed without drafts."
    skipped = f"; {count(now.undrafted, 'request')} could not be drafted for" if now.undrafted else ""
    return f"{count(now.target_steps, 'step')} asked for drafts and got no token{skipped}."


def _why_unknown(now: StatsReading) -> str:
    if _has_only_text(now):
        return (
            f"{count(now.text_tokens, 'token')} drafted from the text, with no draft model; no gate measures the gain."
        )
    rounds = now.stats.rounds
    if rounds < _MIN_VERIFICATIONS:
        return (
            f"{count(rounds, 'verification')} so far, fewer than {_MIN_VERIFICATIONS}, and the gate has not compared "
            "the speed with and without drafts."
        )
    length = f"{1 + now.stats.accepted_per_round:.2f}"
    return (
        f"A verification yields {length} tokens, so drafts help if it takes less than {length} times as long as a step "
        "without drafts; no gate has measured that."
    )


def _engines(now: StatsReading, state: str) -> str:
    number = now.states.count(state)
    return "vLLM decodes" if number == len(now.states) else f"{number} of {len(now.states)} engines decode"


def _speed(now: StatsReading, rows: str) -> str:
    one = now.speeds[rows]
    return (
        f"{one.drafts:.1f} tokens/s with drafts and {one.plain:.1f} without ({one.ratio:.2f} times) at "
        f"{rows} {'request' if rows == '1' else 'requests'} in a step"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def is_fault(found: Sequence[DraftingFinding]) -> bool:
    """Return whether one of the findings is something to repair."""
    return any(one.kind.state == "fail" for one in found)
