"""`specbranch check --endpoint`: does one server emit what another one emits?"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

import typer

from specbranch.cli.console import warn
from specbranch.cli.findings import Page
from specbranch.cli.options import suspect
from specbranch.cli.progress import Progress
from specbranch.errors import UsageError
from specbranch.exactness.openai_server import Address, Server
from specbranch.exactness.server_check import CompareOptions, Comparison, compare
from specbranch.version import __version__

_PANEL = "Two servers"
_OWN = ("endpoint", "reference", "model", "reference_model", "tie", "concurrency", "timeout_s", "api_key_env")
_SHARED = ("quick", "num_prompts", "num_tokens", "num_samples", "alpha", "seed", "report", "as_json")

Endpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Instead of TARGET: an OpenAI-compatible server with speculative decoding, such as vLLM, SGLang or "
        "llama.cpp.",
        rich_help_panel=_PANEL,
    ),
]
Reference = Annotated[
    str | None,
    typer.Option(metavar="URL", help="The same server without speculative decoding.", rich_help_panel=_PANEL),
]
EndpointModel = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="Model of --endpoint. Default: its only one.", rich_help_panel=_PANEL),
]
ReferenceModel = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Model of --reference. Default: its only one.", rich_help_panel=_PANEL),
]
Tie = Annotated[
    float,
    typer.Option(
        metavar="GAP",
        help="Greedy answers may differ where the reference preferred its token by at most this, in log-probability: "
        "in bfloat16 rounding decides there. For float32: 1e-5.",
        min=0,
        rich_help_panel=_PANEL,
    ),
]
Concurrency = Annotated[
    int, typer.Option(metavar="N", help="Most requests at a time to a server.", min=1, rich_help_panel=_PANEL)
]
TimeoutS = Annotated[
    float, typer.Option(metavar="S", help="Longest time for one answer.", min=0.1, rich_help_panel=_PANEL)
]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Environment variable that holds the API key of both servers.",
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two servers, as they were named."""

    endpoint: str | None
    reference: str | None
    model: str | None = None
    reference_model: str | None = None
    timeout_s: float = 300.0
    api_key_env: str | None = None

    def opened(self) -> tuple[Server, Server]:
        """Both servers, once they have answered."""
        if self.endpoint is None or self.reference is None:
            raise UsageError("give both: --endpoint, the server to check, and --reference, the one without drafts")
        key = self._key()
        endpoint = Address("--endpoint", self.endpoint, key, self.timeout_s)
        reference = Address("--reference", self.reference, key, self.timeout_s)
        if endpoint.base == reference.base and self.model == self.reference_model:
            warn("--endpoint and --reference are the same server, which is compared with itself")
        return Server(endpoint, self.model), Server(reference, self.reference_model)

    def _key(self) -> str | None:
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key:
            raise UsageError(f"--api-key-env is {self.api_key_env}, but no such environment variable is set")
        return key


def names_servers(context: typer.Context) -> bool:
    """Whether the command was given servers, and not a pair of models; raises if it was given both."""
    given = [name for name in context.params if _is_given(context, name)]
    own = [name for name in given if name in _OWN]
    if "endpoint" not in given and "reference" not in given:
        if own:
            raise UsageError(f"{_shown(context, own[0])} belongs to --endpoint and --reference, which are missing")
        return False
    words = [context.params["target"], *context.args] if "target" in given else context.args
    suspect(context, [word for word in words if word.startswith("-")])
    wrong = [_shown(context, name) for name in given if name not in (*_OWN, *_SHARED, "target")]
    if words or wrong:
        raise UsageError(f"{[*words, *wrong][0]} does not go with --endpoint and --reference; leave it out")
    return True


def compare_servers(pair: Pair, options: CompareOptions) -> Comparison:
    """Ask both servers and judge their answers, with progress."""
    with Progress() as progress:
        progress.show("connecting")
        return compare(*pair.opened(), options, progress.show)


def servers_page(found: Comparison) -> Page:
    """The findings for people."""
    names = " and ".join(dict.fromkeys((found.endpoint["model"], found.reference["model"])))
    return Page(
        title=f"{found.endpoint['url']} against {found.reference['url']}",
        facts=f"specbranch {__version__}; {names}.",
        findings=found.findings,
        size=found.options.size,
        alpha=found.options.alpha,
    )


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _shown(context: typer.Context, name: str) -> str:
    return next(parameter.opts[0] for parameter in context.command.params if parameter.name == name)
