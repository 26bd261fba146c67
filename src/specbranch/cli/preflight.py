"""Checks before any model loads; every command that loads models begins with them.

There are checks of names, files, flags, extras, port, memory and vocabularies. A check that fails raises an error with
the cause and what to do about it. A check that could not be made returns the reason, so that it is not reported as
passed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer

from specbranch import machine
from specbranch.cli.commands.draft import draft as draft_command
from specbranch.cli.console import State
from specbranch.engines.models import check_model_exists, weight_bytes
from specbranch.engines.registry import check_device, check_engine, engine_for
from specbranch.engines.vocabulary import VocabFingerprint, check_same_fingerprint, check_same_vocabulary
from specbranch.errors import FlagError, SpecBranchError, UsageError
from specbranch.launch.draft_process import DraftServiceOptions, RemoteDraft
from specbranch.launch.placement import check_core_count
from specbranch.launch.vllm_flags import Flags, check_arguments, check_flags, known_arguments, layout_of
from specbranch.launch.vllm_install import install_command, target_on_cpu, vllm_flaw
from specbranch.launch.vllm_server import HttpEndpoint
from specbranch.plugins.vllm import compat, installed
from specbranch.plugins.vllm.settings import ParallelLayout

_GB = 1e9

Check = Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class PreflightFinding:
    """The result of one check; `cause` says why it failed or was skipped."""

    check: str
    state: State = "ok"
    cause: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the finding as a JSON dict; `holds` is None for a check that was skipped."""
        holds = None if self.state == "skip" else self.state == "ok"
        return {"check": self.check, "state": self.state, "holds": holds, "cause": self.cause}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """The checks before a target is started, and the options of this start that they read.

    `arguments` are for `vllm.LLM`, `flags` for `vllm serve`. The draft service of `draft` will be started, that of
    `remote` runs already; without either, vLLM runs bare unless `has_text_drafts`. `is_server` adds a check that the
    port is free. Without `target_cores`, cores are not checked.
    """

    target: str
    draft: DraftServiceOptions | None = None
    remote: RemoteDraft | None = None
    has_text_drafts: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    flags: Flags = field(default_factory=lambda: Flags([]))
    is_server: bool = False
    target_cores: Sequence[int] | None = None

    @property
    def has_proposer(self) -> bool:
        """Whether vLLM will run with our proposer."""
        return self.draft is not None or self.remote is not None or self.has_text_drafts

    def run(self) -> None:
        """Run the checks in order, and raise the error of the first one that fails."""
        for _, check in self._checks():
            check()

    def findings(self) -> list[PreflightFinding]:
        """Run all checks, also after one has failed, and return a finding for each."""
        return [self._finding(name, check) for name, check in self._checks()]

    def _finding(self, name: str, check: Check) -> PreflightFinding:
        try:
            skipped = check()
        except SpecBranchError as error:
            return PreflightFinding(name, "fail", str(error))
        return PreflightFinding(name, "skip", skipped) if skipped else PreflightFinding(name)

    def _checks(self) -> list[tuple[str, Check]]:
        """Return the checks to run, with their names: the quickest first, each after the checks that it relies on."""
        checks: list[tuple[str, Check]] = [("vLLM", self._check_vllm)]
        if self.flags.words or self.arguments or self.target_cores is not None:
            checks.append(("flags", self._check_flags))
        if self.is_server and not self.flags.has("--headless"):
            checks.append(("port", self._check_port))
        checks.append(("target", lambda: check_model_exists("TARGET", self.target)))
        if self.draft is not None:
            checks += [("draft", self._check_draft), ("vocabulary", self._check_vocabulary)]
        elif self.remote is not None:
            checks.append(("draft service", self._check_remote))
        return [*checks, ("memory", self._check_memory)]

    def _check_vllm(self) -> str | None:
        flaw = vllm_flaw()
        if flaw is not None:
            raise UsageError(flaw)
        if not self.has_proposer:
            return None
        version, oldest = installed.version(), compat.TESTED[0]
        series = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if len(series) < 2:
            return "vLLM's age was not checked: its version is unknown"
        if series < tuple(int(part) for part in oldest.split(".")):
            command = install_command(on_cpu=installed.runs_on_cpu())
            raise UsageError(f"vLLM {version} is too old: drafting needs {oldest} or later: {command}")
        return None

    def _check_flags(self) -> str | None:
        known = known_arguments()
        if known is not None:
            check_flags(self.flags, known)
            check_arguments(self.arguments, known)
        if self.has_proposer:
            if self.arguments.get("speculative_config") is not None:
                raise FlagError("speculative_config is set by this command; use its own options, or --bare")
            layout_of(self.flags).check_supported()
            ParallelLayout.of_arguments(self.arguments).check_supported()
        if self.target_cores is not None:
            check_core_count(self.target_cores, ParallelLayout.of_arguments(self.arguments).num_devices)
        return "flags were not checked: vLLM's own list of them cannot be read" if known is None else None

    def _check_port(self) -> None:
        HttpEndpoint.of(self.flags).check_free()

    def _check_draft(self) -> str | None:
        assert self.draft is not None, "only checked with a draft"
        unknown = check_model_exists("--draft", self.draft.model)
        engine = self.draft.engine or engine_for(self.draft.model)
        check_engine(engine)
        check_device(engine, self.draft.device)
        _check_draft_command(self.draft)
        return unknown

    def _check_remote(self) -> str | None:
        assert self.remote is not None, "only checked with one"
        skipped = [
            check_same_fingerprint(
                self.target, welcome.model, VocabFingerprint(welcome.vocab_len, welcome.vocab_fingerprint)
            )
            for welcome in self.remote.check()
        ]
        return next((f"the draft service answers, but {reason}" for reason in skipped if reason), None)

    def _check_vocabulary(self) -> str | None:
        assert self.draft is not None, "only checked with a draft"
        return check_same_vocabulary(self.target, self.draft.model)

    def _check_memory(self) -> str | None:
        """Raise `UsageError` if the weights do not fit into memory; return why this was not checked, None if they fit.

        Caches are not counted, because vLLM and the draft choose the sizes of their own caches.
        """
        free = machine.free_host_memory()
        if not target_on_cpu():
            return "memory was not checked: vLLM checks the memory of GPUs by itself"
        if free is None:
            return "memory was not checked: this system does not report how much is free"
        sizes = self._weight_sizes()
        if sum(size for _, size in sizes) > free:
            parts = " and ".join(f"{size / _GB:.1f} GB for {model}" for model, size in sizes if size)
            raise UsageError(
                f"the weights need {parts}, and {free / _GB:.1f} GB of memory are free; use smaller models, or a "
                "data type with fewer bytes"
            )
        unknown = " and ".join(model for model, size in sizes if not size)
        return f"memory was not checked: the size of {unknown} is not known" if unknown else None

    def _weight_sizes(self) -> list[tuple[str, int]]:
        """Return each model that will be in host memory, with the bytes of its weights; 0 if they are not known."""
        dtype = self.flags.value("--dtype") or self.arguments.get("dtype")
        sizes = [(self.target, weight_bytes(self.target, dtype if isinstance(dtype, str) else None))]
        if self.draft is not None and self.draft.device == "cpu":
            sizes.append((self.draft.model, weight_bytes(self.draft.model)))
        return sizes


def _check_draft_command(options: DraftServiceOptions) -> None:
    """Parse the options as `specbranch draft` does; raise `UsageError` with its message if it refuses an option."""
    app = typer.Typer()
    app.command("draft")(draft_command)
    command = typer.main.get_command(app)
    try:
        command.make_context("draft", options.arguments("ipc://unused")[1:], resilient_parsing=False)
    except Exception as error:
        # This is an error of click, of which newer releases of typer contain a renamed copy.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        raise UsageError(f"`specbranch draft` refuses its options: {message()}") from error
