import sys

import pytest
import torch
import transformers.models
from planted import write_model
from torch import nn

from samebits.integrations.transformers import zoo
from samebits.integrations.transformers.interface import load

pytestmark = pytest.mark.reference


@pytest.fixture
def models_folder(tmp_path, monkeypatch):
    """A folder that transformers' own discovery would look into, forgotten afterwards."""
    monkeypatch.setattr(
        transformers.models, "__path__", [*transformers.models.__path__, str(tmp_path)]
    )
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def names():
    return [found.name for found in zoo.discover()]


def test_known_families_are_found_under_unique_names():
    found = names()
    assert len(found) == len(set(found)) > 50
    assert {"gpt_oss.GptOssExperts", "qwen3_moe.Qwen3MoeExperts"} <= set(found)
    assert found == sorted(found)


def test_every_module_that_mentions_the_decorator_gives_a_class():
    found = {name.partition(".")[0] for name in names()}
    assert {module.split(".")[2] for module in zoo._model_modules()} <= found


def test_a_class_that_nobody_listed_is_found(models_folder):
    write_model(models_folder, "brandnew")
    assert "brandnew.BrandNewExperts" in names()


def test_a_module_that_cannot_be_imported_is_named_with_the_reason(models_folder):
    write_model(models_folder, "brandnew")
    file = models_folder / "brandnew" / "modeling_brandnew.py"
    file.write_text("import no_such_package\n" + file.read_text())
    broken = [f for f in zoo.discover() if isinstance(f, zoo.BrokenModule)]
    assert [b.name for b in broken] == ["brandnew"]
    assert "no_such_package" in broken[0].reason


def test_a_class_of_a_module_that_is_already_imported_is_found(models_folder, monkeypatch):
    write_model(models_folder, "mine")
    monkeypatch.syspath_prepend(str(models_folder / "mine"))
    import modeling_mine  # noqa: F401

    assert "mine.BrandNewExperts" in names()


def test_only_the_class_itself_counts_as_decorated():
    decorate = load().moe.use_experts_implementation

    @decorate
    class Decorated(nn.Module):
        def __init__(self, config):
            super().__init__()

        def forward(self, x):
            return x

    class Child(Decorated):
        pass

    class Overriding(Decorated):
        def forward(self, x):
            return x

    assert zoo.is_decorated(Decorated)
    assert not zoo.is_decorated(Child)
    assert not zoo.is_decorated(Overriding)
    assert not zoo.is_decorated(nn.Linear)


def test_the_fp8_twin_is_no_model():
    fp8 = load().fp8
    decorated = [c for c in vars(fp8).values() if isinstance(c, type) and "Experts" in c.__name__]
    assert decorated
    assert not any(zoo.is_decorated(c) for c in decorated)
    assert torch.nn.Module not in decorated
