"""The findings of a check as people read them: a table with explanations, in the terminal or as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specbranch.exactness.vllm_check import Size
from specbranch.exactness.vllm_findings import FAILED, HOLDS, SKIPPED, Finding

_COLOURS = {HOLDS: "green", FAILED: "bold red"}
_COLUMNS = ("check", "compared", "n", "result", "p", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The findings, what was compared, and how much of it."""

    title: str
    facts: str
    findings: Sequence[Finding]
    size: Size
    alpha: float

    @property
    def verdict(self) -> str:
        """All findings in a few words."""
        results = [finding.result for finding in self.findings]
        failed, skipped = results.count(FAILED), results.count(SKIPPED)
        says = f"{failed} of {len(results)} checks FAILED" if failed else "all checks hold"
        return f"{says}, {skipped} skipped" if skipped else says

    def show(self, console: Console, quick: bool, file: Path | None) -> None:
        """Print it, and write it to the file if there is one."""
        console.print(self._table())
        for line in (*self._details(), *self._notes()):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if quick:
            console.print("--quick misses small errors; run without it before you rely on this pair.")
        console.print(self.verdict, style="bold")
        if file is not None:
            file.write_text(self.markdown())
            console.print(f"wrote {file}", markup=False, highlight=False, soft_wrap=True)

    def markdown(self) -> str:
        """The same for a file."""
        details = [f"- {line}" for line in self._details()]
        return "\n".join(
            [
                f"# {self.title}: {self.verdict}",
                "",
                self.facts,
                "",
                f"| {' | '.join(_COLUMNS)} |",
                "|---" * len(_COLUMNS) + "|",
                *(f"| {' | '.join(_cells(finding))} |" for finding in self.findings),
                "",
                *self._notes(),
                *(["", *details] if details else []),
                "",
            ]
        )

    def _table(self) -> Table:
        shown = Table(title=escape(f"{self.title}: {self.verdict}"), box=None, padding=(0, 1, 0, 0))
        for column in _COLUMNS:
            shown.add_column(column, justify="right" if column in ("n", "p") else "left")
        for finding in self.findings:
            cells = [escape(cell) for cell in _cells(finding)]
            cells[_COLUMNS.index("result")] = f"[{_COLOURS.get(finding.result, 'dim')}]{finding.result}[/]"
            shown.add_row(*cells)
        return shown

    def _details(self) -> list[str]:
        return [f"{finding.name}: {line}" for finding in self.findings for line in finding.details]

    def _notes(self) -> list[str]:
        size = self.size
        return [
            f"{size.num_prompts} greedy prompts of {size.num_tokens} tokens, "
            f"{size.num_samples} samples of each feature.",
            f"p: p-value, corrected for all tests; a correct pair fails with probability {self.alpha:g} or less.",
            "shift: the total-variation distance between two distributions that is found with probability 0.9, in the",
            "direction that is hardest to see.",
        ]


def _cells(finding: Finding) -> list[str]:
    p_value = "" if finding.p_value is None else f"{finding.p_value:.3g}"
    return [finding.name, finding.compared, str(finding.n), finding.result, p_value, finding.says]
