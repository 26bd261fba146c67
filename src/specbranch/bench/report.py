"""Write reports on benchmark result files, as Markdown and as one HTML page: facts, tables, figures, and losses.

A loss is a case where another method is faster than the one that the report is about.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from specbranch.bench.figures import draw_figures
from specbranch.bench.results import NO_RANGE, Line, Ratio, Results, losses, mean_speeds, summarize
from specbranch.bench.scenario import BARE, Scenario
from specbranch.core.tree import CAUSES
from specbranch.machine import commit_note

_HEADS = (
    "method", "cores", "tokens/s", "over bare", "95 % of resamples", "per core", "emitted/round", "accepted", "hits",
    "rejected", "unused", "cut", "ms/round", "hook ms", "same",
)  # fmt: skip
_LOAD_HEADS = (
    "method", "cores", "requests/s", "runs", "tokens/s", "first token p50", "p99", "per token p50", "p99",
    "between pieces p99", "whole answer p50",
)  # fmt: skip
SAME = (
    "Same: share of answers equal to bare vLLM's, token by token. Less than 100 % is expected in bfloat16: two nearly "
    "equally likely tokens may swap when the batch has another shape, with any speculative method. The output "
    "distribution does not change. In float32 this is very rare; `specbranch check` tests it for your models."
)
NOTE = (
    "Over bare: tokens per second from request to last token, relative to bare vLLM in the same run. The range holds "
    f"95 % of resamples of the prompts; {NO_RANGE} means fewer than three trials, too few for a range. Per core: the "
    "same speed, divided by the cores that a method uses. Accepted: share of the verified draft tokens that vLLM "
    "accepted. Rejected, unused, cut: drafted tokens rolled back per emitted token, by cause. Hook: time of the "
    f"proposer's call in a step, waits included. {SAME}"
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2b2a; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 3rem; border-top: 1px solid #d7dedd; padding-top: 1.5rem; }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; }
th, td { padding: .25rem .375rem; text-align: right; border-bottom: 1px solid #e6ebea; white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; } figure { margin: 1.5rem 0; } svg { max-width: 100%; height: auto; }
figcaption, .note { color: #5b6b69; font-size: 13px; }
"""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a report: its title, its column heads, and its cells as strings, row by row."""

    title: str
    rows: Sequence[Sequence[str]]
    heads: Sequence[str] = _HEADS


@dataclass(slots=True)
class Section:
    """The section of a report that describes one result file. `lost` has a sentence for each loss."""

    title: str
    facts: list[str]
    notes: list[str] = field(default_factory=list)  # remarks that explain the tables
    tables: list[Table] = field(default_factory=list)
    can_lose: bool = True  # False if nothing is compared
    lost: list[str] = field(default_factory=list)
    figures: list[tuple[str, Path]] = field(default_factory=list)  # caption, path of the SVG


def write_report(all_results: Sequence[Results], directory: Path, subject: str, title: str) -> Path:
    """Write `report.md`, `report.html` and the figures to a directory, and return the path of the HTML page.

    `subject` is the name of the method whose losses are listed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    sections = []
    for results in all_results:
        section = section_of(results, subject)
        section.figures = draw_figures(results, directory, Path(results.name).stem)
        sections.append(section)
    (directory / "report.md").write_text(as_markdown(title, sections))
    page = directory / "report.html"
    page.write_text(as_html(title, sections))
    return page


def section_of(results: Results, subject: str) -> Section:
    """Return the section on one result file, without its figures; `subject` is the method whose losses are listed."""
    note = commit_note(results.provenance)
    section = Section(results.scenario.name, _facts(results), [note] if note else [])
    if results.scenario.served is not None:
        section.tables.append(load_table(results))
        section.can_lose = False
        return section
    lines = summarize(results)
    if same := same_note(results.scenario, lines):
        section.notes.append(same)
    for task, concurrency in dict.fromkeys((line.task, line.concurrency) for line in lines):
        chosen = [line for line in lines if (line.task, line.concurrency) == (task, concurrency)]
        title = task if len(results.scenario.concurrency) == 1 else f"{task}, {concurrency} at once"
        section.tables.append(Table(f"{title} ({_count(chosen[0].trials)})", [_row(line) for line in chosen]))
    if len({line.task for line in lines}) > 1:
        section.tables += [
            Table(
                "mean of the tasks" if len(results.scenario.concurrency) == 1 else f"mean, {concurrency} at once",
                [[name, f"{ratio.value:.2f}", _range(name, ratio)] for name, ratio in speeds.items()],
                ("method", "over bare", "95 % of resamples"),
            )
            for concurrency, speeds in mean_speeds(results).items()
        ]
    section.lost = lost_lines(results, subject)
    return section


def same_note(scenario: Scenario, lines: Sequence[Line]) -> str | None:
    """Return a sentence on why some answers differ from bare vLLM's; None if all answers are equal."""
    if all(line.same_as_bare == 1 for line in lines):
        return None
    if scenario.temperature > 0:
        return "Same below 100 %: these answers are sampled, and methods use random numbers in different ways."
    if scenario.dtype == "float32":
        return "Same below 100 %: very rare in float32. `specbranch check` tells whether only near-ties differ."
    return (
        f"Same below 100 %: near-ties in {scenario.dtype} swap when the batch has another shape, with every method "
        "alike, vLLM's own included. The output distribution does not change."
    )


def load_table(results: Results) -> Table:
    """Return the table of a load test, a row for each request rate and method; times are means over the runs in ms."""
    rows = []
    for rate in sorted({record["rate"] for record in results.records}):
        for method in results.scenario.methods:
            own = [one for one in results.records if one["rate"] == rate and one["method"] == method.name]
            if not own:
                continue
            times = [
                fmean(record["times_ms"][name][quantile] for record in own)
                for name, quantile in (
                    ("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"), ("itl", "p99"), ("e2el", "p50")
                )
            ]  # fmt: skip
            speed = sum(record["tokens"] for record in own) / sum(record["duration_s"] for record in own)
            cores = str(results.scenario.num_cores(method))
            rows.append(
                [method.name, cores, f"{rate:g}", str(len(own)), f"{speed:.1f}", *(f"{ms:.0f}" for ms in times)]
            )
    return Table("Servers under load, times in ms", rows, _LOAD_HEADS)


def lost_lines(results: Results, subject: str) -> list[str]:
    """Return one sentence for every case where another method is faster than `subject`, in total or per core.

    The list is empty for a load test.
    """
    if results.scenario.served is not None:
        return []
    lines = []
    for loss in losses(results, subject):
        other = "bare vLLM" if loss.other == BARE else loss.other
        what = " per core" if loss.is_per_core else ""
        low = loss.ahead.low
        if low is None:
            spread = f"{_count(loss.ahead.num_trials)}, too few for a range"
        else:
            spread = loss.ahead.range if low > 1 else f"{loss.ahead.range}, within the noise"
        at = f", {loss.concurrency} at once" if len(results.scenario.concurrency) > 1 else ""
        lines.append(f"{loss.task}{at}: {other} is {loss.ahead.value:.2f} times as fast as {subject}{what} ({spread})")
    return lines


def as_markdown(title: str, sections: Sequence[Section]) -> str:
    """Return the report as Markdown with links to the figures, which must be in the directory of its file."""
    return "\n\n".join([f"# {title}", NOTE, *(section_markdown(section) for section in sections)]) + "\n"


def section_markdown(section: Section, figures: str = "") -> str:
    """Return one section as Markdown.

    `figures` is the path from the Markdown file to the directory of the figures, with a slash at its end; it is empty
    if both are in the same directory.
    """
    parts = [f"## {section.title}", "\n".join(f"- {fact}" for fact in section.facts), *section.notes]
    for table in section.tables:
        parts += [f"### {table.title}", _markdown_table(table)]
    parts += [f"![{caption}]({figures}{path.name})" for caption, path in section.figures]
    if section.can_lose:
        parts += ["### Where we lose", _bullets(section.lost)]
    return "\n\n".join(parts)


def as_html(title: str, sections: Sequence[Section]) -> str:
    """Return the report as one HTML page that contains its figures."""
    escape = html.escape
    body = [f"<h1>{escape(title)}</h1>", f'<p class="note">{escape(NOTE)}</p>']
    for section in sections:
        body += [f"<h2>{escape(section.title)}</h2>", _html_list(section.facts)]
        for caption, path in section.figures:
            picture = path.read_text()
            drawing = picture[picture.index("<svg") :]
            body.append(f"<figure>{drawing}<figcaption>{escape(caption)}</figcaption></figure>")
        body += [f'<p class="note">{escape(note)}</p>' for note in section.notes]
        for table in section.tables:
            head = "".join(f"<th>{escape(name)}</th>" for name in table.heads)
            rows = "".join(
                "<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row) + "</tr>" for row in table.rows
            )
            body.append(f"<h3>{escape(table.title)}</h3><table><tr>{head}</tr>{rows}</table>")
        if section.can_lose:
            lost = _html_list(section.lost) if section.lost else "<p>Nowhere in this run.</p>"
            body += ["<h3>Where we lose</h3>", lost]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _facts(results: Results) -> list[str]:
    scenario, source = results.scenario, results.provenance
    draft = f"{scenario.draft} as draft" if any(method.planner for method in scenario.methods) else "no draft"
    versions = ", ".join(f"{name} {source[name]}" for name in ("vllm", "torch", "transformers") if name in source)
    top_p = f" with top-p {scenario.top_p:g}" if scenario.top_p < 1 else ""
    facts = [
        f"{scenario.target} ({scenario.dtype}) as target, {draft}",
        f"target on cores {_list(scenario.target_cores)}, draft on {_list(scenario.draft_cores)} of: "
        f"{source.get('cpu') or 'unknown processor'}",
        f"temperature {scenario.temperature:g}{top_p}, at most {scenario.max_tokens} tokens, natural end",
        f"result file {results.name}; specbranch {source.get('commit') or source.get('version')}, {versions}",
    ]
    if len(results.records) < scenario.num_trials:
        facts.append(f"interrupted: {len(results.records)} of {scenario.num_trials} trials")
    return facts


def _row(line: Line) -> list[str]:
    lost = line.rolled_back or {}
    return [
        line.method,
        str(line.cores),
        f"{line.tokens_per_s:.2f}",
        f"{line.speed.value:.2f}",
        _range(line.method, line.speed),
        f"{line.speed_per_core:.2f}",
        f"{line.emitted_per_round:.2f}",
        _optional(line.accepted_share, ".2f"),
        _optional(line.hit_rate, ".2f"),
        *(_optional(lost.get(cause), ".2f") for cause in CAUSES),
        f"{line.round_ms:.0f}",
        _optional(line.hook_ms, ".1f"),
        f"{line.same_as_bare:.0%}",
    ]


def _markdown_table(table: Table) -> str:
    lines = [table.heads, ["---"] * len(table.heads), *table.rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines) if lines else "Nowhere in this run."


def _html_list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


def _range(method: str, speed: Ratio) -> str:
    return "" if method == BARE else speed.range


def _count(trials: int) -> str:
    return "1 trial" if trials == 1 else f"{trials} trials"


def _list(cores: Sequence[int]) -> str:
    return ", ".join(str(core) for core in cores)


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
