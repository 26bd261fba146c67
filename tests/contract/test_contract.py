"""The contract with vLLM: kept by the installed release and by given wheels, and it notices what is gone."""

from __future__ import annotations

import ast
import importlib.util
import os
import zipfile
from pathlib import Path

import pytest

from tests.contract.names import CONTRACT, V2_CONTRACT, missing
from tests.contract.source import Source
from tests.contract.terms import Arguments, Call, Members, Names, Strings, Term
from tests.root import ROOT

MODULE = '''
import typing
from elsewhere import borrowed as lent

if typing.TYPE_CHECKING:
    from elsewhere import hinted

LIMIT = 3


class Owner:
    """A class."""

    field: int
    shared = "--flag"

    def __init__(self) -> None:
        self.made, (self.one, self.other) = 1, (2, 3)

    @property
    def seen(self) -> int:
        return self.made

    def act(self, tokens: list[int], *, slot: int = 0) -> None:
        self.made.propose(tokens, self.field, slot=slot)
        if slot == "ours":
            self.made.close(slot)
        elif slot == "theirs":
            self.made.close(tokens)
        print(f"server_{slot}")
'''


def installed() -> Path:
    """The directory that the installed vLLM lies in; it is not imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vllm is not installed")
    return Path(spec.origin).parents[1]


def of_text(text: str) -> Source:
    return Source({"vllm/part.py": text}.get)


KEPT = (
    Names("vllm.part", ("lent", "hinted", "LIMIT", "Owner")),
    Members("vllm.part", "Owner", ("field", "shared", "made", "one", "other", "seen", "act")),
    Arguments("vllm.part", "Owner.act", ("tokens", "slot")),
    Strings("vllm.part", ("--flag", "server_")),
    Call("vllm.part", "Owner.act", "propose", ("tokens", "self.field", "slot=slot")),
    Call("vllm.part", "Owner.act", "close", ("slot",), branch="ours"),
)
BROKEN = (
    Names("vllm.part", ("borrowed",)),
    Names("vllm.absent", ("lent",)),
    Members("vllm.part", "Owner", ("tokens",)),
    Members("vllm.part", "Nobody", ("field",)),
    Arguments("vllm.part", "Owner.act", ("tokens_ids",)),
    Arguments("vllm.part", "act", ("tokens",)),
    Strings("vllm.part", ("--fla",)),
    Call("vllm.part", "Owner.act", "propose", ("tokens", "self.field")),
    Call("vllm.part", "Owner.act", "close", ("tokens",), branch="ours"),
    Call("vllm.part", "Owner.seen", "propose", ("tokens", "self.field", "slot=slot")),
)


@pytest.mark.parametrize("term", KEPT, ids=repr)
def test_what_is_there_is_found(term: Term) -> None:
    assert list(term.missing(of_text(MODULE))) == []


@pytest.mark.parametrize("term", BROKEN, ids=repr)
def test_what_is_not_there_is_missing(term: Term) -> None:
    assert len(list(term.missing(of_text(MODULE)))) == 1


def test_a_wheel_is_read_like_a_directory(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("LIMIT = 3\n")
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as wheel:
        wheel.write(tmp_path / "vllm" / "__init__.py", "vllm/__init__.py")

    for path in (tmp_path, tmp_path / "vllm.whl"):
        term = Names("vllm", ("LIMIT", "MORE"))
        assert list(term.missing(Source.of(path))) == ["vllm.MORE"]


def test_the_installed_vllm_has_all_names() -> None:
    assert missing(Source.of(installed())) == []


def test_given_wheels_have_all_names() -> None:
    """scripts/contract does the same for releases that it downloads."""
    directory = os.environ.get("SPECBRANCH_WHEELS")
    if directory is None:
        pytest.skip("SPECBRANCH_WHEELS names no directory of wheels")

    for wheel in sorted(Path(directory).glob("vllm*.whl")):
        assert missing(Source.of(wheel)) == [], wheel.name


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("v1/core/sched/output.py", "scheduled_new_reqs", "new_reqs", "SchedulerOutput.scheduled_new_reqs"),
        ("v1/worker/gpu_model_runner.py", "slot_mappings=slot_mappings", "slots=slot_mappings", "calls .propose("),
        ("v1/spec_decode/metrics.py", "num_accepted_tokens", "accepted", "vllm:spec_decode_num_accepted_tokens"),
        ("config/parallel.py", "data_parallel_index", "dp_index", "ParallelConfig.data_parallel_index"),
        ("v1/sample/rejection_sampler.py", "replace_from", "replaced", "expand_batch_to_tokens(replace_from)"),
    ],
)
def test_a_renamed_thing_in_the_installed_vllm_is_noticed(file: str, old: str, new: str, says: str) -> None:
    """The same module, but for one name."""
    path, module = installed() / "vllm" / file, f"vllm.{file.removesuffix('.py').replace('/', '.')}"
    terms = [term for term in CONTRACT if term.module == module]
    text = path.read_text()
    same, changed = (Source({f"vllm/{file}": one}.get) for one in (text, text.replace(old, new)))

    assert [name for term in terms for name in term.missing(same)] == []
    (found,) = (name for term in terms for name in term.missing(changed))
    assert says in found


def test_all_that_we_import_from_vllm_is_in_the_contract() -> None:
    terms = CONTRACT + V2_CONTRACT
    named = {(term.module, name) for term in terms if isinstance(term, Names) for name in term.names}
    named |= {(term.module, term.owner) for term in terms if isinstance(term, Members)}
    named |= {("vllm", text) for term in terms if isinstance(term, Strings) for text in term.strings}
    imported = {
        (str(node.module), alias.name)
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "vllm"
        for alias in node.names
    }

    assert imported - named == {("vllm.v1.sample", "rejection_sampler")}  # a module
