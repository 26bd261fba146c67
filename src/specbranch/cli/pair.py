"""A draft service and a target in this process, loaded together and stopped together."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from specbranch.cli.console import UsageError
from specbranch.cli.cores import divide_cores
from specbranch.cli.options import check_directory
from specbranch.cli.placement import Cores
from specbranch.cli.quiet import quiet
from specbranch.errors import SpecBranchError
from specbranch.plugins.vllm.compat import launch
from specbranch.plugins.vllm.settings import ProposerSettings, read_settings
from specbranch.plugins.vllm.target import Target, TargetOptions
from specbranch.service.process import DraftOptions, DraftProcess


class LoadError(SpecBranchError, RuntimeError):
    """A model could not be loaded; the message names the log file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """What to load. `section` holds the proposer's settings without the address. No draft means bare vLLM.

    `arguments` are passed to `vllm.LLM`.
    """

    target: str
    draft: str | None
    section: Mapping[str, Any] = field(default_factory=dict)
    gamma: int = 8
    draft_engine: str | None = None
    draft_device: str = "cpu"
    draft_dtype: str = "auto"
    target_cores: str | None = None
    draft_cores: str | None = None
    timeline: Path | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise now what would otherwise be raised after both models are loaded."""
        if not launch.is_installed():
            raise UsageError("vLLM is not installed: pip install 'specbranch[vllm]'")
        check_directory("--timeline", self.timeline)
        if self.draft is not None:
            read_settings(self.section).client_options(self.gamma)


class Pair:
    """A context manager that loads both models; what they print while loading goes to a log file."""

    target: Target

    def __init__(self, options: PairOptions) -> None:
        self._options = options
        self._exit = ExitStack()
        self._address: str | None = None

    def use_planner(self, planner: str) -> None:
        """Use another planner from the next request on; `none` is plain decoding."""
        self.target.use(self._settings(planner=planner, settings={}))

    def use_own_planner(self) -> None:
        """Go back to the planner and settings of the options."""
        self.target.use(self._settings())

    def wait_s(self) -> float:
        """How long the target has waited for drafts so far."""
        return self.target.proposer_counts().get("wait_s", 0.0) if self._address else 0.0

    def __enter__(self) -> Pair:
        directory = Path(tempfile.mkdtemp(prefix="specbranch-log-"))
        cores = os.sched_getaffinity(0)
        try:
            self._load(directory / "load.log")
        except BaseException:
            self._exit.close()
            os.sched_setaffinity(0, cores)
            raise
        self._exit.callback(shutil.rmtree, directory, ignore_errors=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def _load(self, log_file: Path) -> None:
        options = self._options
        cores = self._cores()
        draft = self._draft_process(cores.draft, log_file)
        if cores.target:
            os.sched_setaffinity(0, cores.target)
        with quiet(log_file, f"loading {options.target}" + (f" and {options.draft}" if draft else "")):
            if draft is not None:
                self._exit.callback(draft.stop)
                draft.start()
                self._address = draft.address
            settings = self._settings() if draft else None
            arguments = {**_usual_arguments(), **options.arguments}
            how = TargetOptions(
                model=options.target, settings=settings, num_speculative_tokens=options.gamma, arguments=arguments
            )
            try:
                self.target = Target(how)
            except Exception as error:
                raise LoadError(f"vLLM cannot load {options.target}: {error}; see {log_file}") from error
            if draft is not None:
                draft.wait_until_up()

    def _cores(self) -> Cores:
        options = self._options
        if options.draft is None and options.target_cores is None:
            return Cores(None, None)
        device = "none" if options.draft is None else options.draft_device
        return divide_cores(device, options.target_cores, options.draft_cores)

    def _draft_process(self, cores: Sequence[int] | None, log_file: Path) -> DraftProcess | None:
        options = self._options
        if options.draft is None:
            return None
        how = DraftOptions(
            model=options.draft,
            engine=options.draft_engine,
            device=options.draft_device,
            dtype=options.draft_dtype,
            cores=cores,
            timeline=options.timeline,
        )
        return DraftProcess(how, log_file)

    def _settings(self, **changes: Any) -> ProposerSettings:
        where = {"address": self._address} if self._address else {}
        return read_settings({**self._options.section, **where, **changes})


def _usual_arguments() -> dict[str, Any]:
    """One executor in this process; on a CPU there are no CUDA graphs to capture."""
    return {"distributed_executor_backend": "uni", "enforce_eager": launch.runs_on_cpu()}
