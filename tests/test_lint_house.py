"""Each house rule finds its planted fault and nothing in sound code; the project keeps them all."""

from pathlib import Path

import pytest

import lint_house
from lint_house import File, lint, project_files

pytestmark = pytest.mark.reference

OPS = "src/samebits/ops"
HOME = "/" + "home/someone/x"
FAULTS = {
    "length": File("src/samebits/long.py", "x = 1\n" * 301),
    "drawers": File("src/samebits/utils.py", ""),
    "synonyms": File("src/samebits/layer.py", "def f(topk_weights): pass\n"),
    "determinism": File(f"{OPS}/_a.py", 'def f(x: Tensor) -> Tensor:\n    """Square x."""\n'),
    "environment": File("src/samebits/layer.py", "import os\nos.environ['A']\n"),
    "tolerances": File("tests/test_layer.py", "close(a, b, rtol=1)\n"),
    "comments": File("src/samebits/layer.py", "# " + "-" * 9 + "\n"),
    "machine_paths": File("docs/start.md", f"cd {HOME}\n"),
    "operations": File(f"{OPS}/square/__init__.py", ""),
}


def _rules(*files: File) -> set[str]:
    return {line.split(": ")[1] for line in lint(files)}


@pytest.mark.parametrize("rule", FAULTS)
def test_a_fault_is_found_by_its_rule_alone(rule: str) -> None:
    assert _rules(FAULTS[rule]) == {rule}


def test_every_rule_has_a_planted_fault() -> None:
    rules = [*lint_house.RULES, *lint_house.TREE_RULES]

    assert {rule.__name__ for rule in rules} == FAULTS.keys()


MORE_FAULTS = {
    "a drawer in a function": ("src/samebits/a.py", "def compute_fast(): pass"),
    "a drawer in a class": ("src/samebits/a.py", "class ExpertsBase: pass"),
    "a synonym in a field": ("src/samebits/a.py", "class A:\n    quant: str"),
    "a synonym in a public name": ("src/samebits/a.py", "def naive_experts(): pass"),
    "an imported reader": ("src/samebits/a.py", "from os import environ"),
    "a tolerance helper": ("tests/test_a.py", "torch.testing.assert_close(a, b)"),
    "a task without a condition": ("src/samebits/a.py", "x = 1  # TODO: later"),
    "a folder beside the checkout": ("docs/a.md", "see ../" + "sha" + "red/design"),
}


@pytest.mark.parametrize(("path", "text"), MORE_FAULTS.values(), ids=MORE_FAULTS)
def test_other_spellings_of_a_fault_are_found(path: str, text: str) -> None:
    assert len(lint([File(path, text)])) == 1


SOUND = {
    "a long kernel": ("src/samebits/ops/_triton/kernel.py", "x = 1\n" * 500),
    "a word inside a word": ("src/samebits/a.py", "def renew_breakfast(database): pass"),
    "a test that is a sentence": ("tests/test_a.py", "def test_new_values_are_seen(): pass"),
    "a foreign interface": ("src/samebits/integrations/a.py", "def f(topk_weights): pass"),
    "a private synonym": ("src/samebits/a.py", "def _f(impl): pass"),
    "bits that are stated": (
        f"{OPS}/_a.py",
        'def f(x: Tensor):\n    """A.\n\n    Determinism: b."""',
    ),
    "a web address": ("docs/a.md", "https://example.org/home/page"),
    "a rule in a string": ("src/samebits/a.py", "x = '# TODO'"),
}


@pytest.mark.parametrize(("path", "text"), SOUND.values(), ids=SOUND)
def test_sound_code_passes(path: str, text: str) -> None:
    assert lint([File(path, text)]) == []


def test_an_operation_with_reference_and_test_passes() -> None:
    paths = [f"{OPS}/square/{name}.py" for name in ("__init__", "reference", "kernel")]

    assert lint([File(path, "") for path in [*paths, "tests/ops/test_square.py"]]) == []


def test_a_finding_names_its_place() -> None:
    found = lint([File("src/samebits/a.py", "\n\ndef f(impl): pass\n")])

    assert found == [
        "src/samebits/a.py:3: synonyms: 'impl' is spelled with 'backend' here, not 'impl'"
    ]


def test_files_of_the_project_are_what_git_knows() -> None:
    root = Path(lint_house.__file__).parent.parent

    paths = {file.path for file in project_files(root)}

    assert "scripts/lint_house.py" in paths
    assert not any("__pycache__" in path for path in paths)
