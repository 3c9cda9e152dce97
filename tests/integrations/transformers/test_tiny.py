import pytest
import torch

from samebits.checks.models.experts import BINDING_SHARE
from samebits.integrations.transformers import tiny, zoo
from samebits.integrations.transformers.experts_case import TinyExperts

pytestmark = pytest.mark.reference

CLASSES = [found for found in zoo.discover() if isinstance(found, zoo.ExpertsClass)]
# One of each storage: halves, interleaved and transposed with biases, no gate, post norm, own norm.
KINDS = ("qwen3_moe", "gpt_oss", "nemotron_h", "muse_spark", "deepseek_v4", "aria")
BY_MODEL = {c.name.partition(".")[0]: c for c in CLASSES}
CHOSEN = [BY_MODEL[model] for model in KINDS if model in BY_MODEL]


def ids(classes):
    return [c.name for c in classes]


@pytest.mark.parametrize("sizes", [tiny.DEFAULT_SIZES, tiny.ODD_SIZES], ids=["default", "odd"])
def test_sizes_are_pairwise_different(sizes):
    assert len({*sizes, 2 * sizes.F, 2 * sizes.H}) == len(sizes) + 2


@pytest.mark.parametrize("found", CLASSES, ids=ids(CLASSES))
def test_every_class_is_built_with_exactly_the_sizes_asked_for(found):
    for sizes in (tiny.DEFAULT_SIZES, tiny.ODD_SIZES):
        module = tiny.build(found, sizes)
        assert tiny.dimensions(module) == (sizes.E, sizes.H, sizes.F)


@pytest.mark.parametrize("found", CHOSEN, ids=ids(CHOSEN))
def test_parameters_are_the_same_each_time(found):
    first, second = (tiny.build(found, tiny.DEFAULT_SIZES).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_limits_bind_on_both_sides_in_every_class_that_has_one():
    shares = {}
    for found in CLASSES:
        case = TinyExperts(found, tiny.DEFAULT_SIZES)
        shares |= {f"{found.name}.{n}": both for n, both in case.binding().items()}
    assert "gpt_oss.GptOssExperts.limit" in shares
    assert {n: s for n, s in shares.items() if min(s) < BINDING_SHARE} == {}


def test_scalars_are_read_from_the_module_and_its_parts():
    module = tiny.build(BY_MODEL["gpt_oss"], tiny.DEFAULT_SIZES)
    assert tiny.scalars(module) == {"alpha": 1.702, "limit": 7.0}
    assert tiny.limits(module) == {"limit": 7.0}
    tiny.set_scalar(module, "limit", 2.5)
    assert module.limit == 2.5


@pytest.mark.parametrize("found", CHOSEN, ids=ids(CHOSEN))
def test_every_expert_but_one_is_used_the_last_included(found):
    case = TinyExperts(found, tiny.DEFAULT_SIZES)
    exact = case.oracle("eager", torch.float32)
    (name,) = [n for n in exact if n.startswith("d_down_proj") and exact[n].dim() == 3]
    used = exact[name].flatten(1).abs().amax(1) > 0
    assert used.tolist() == [True, True, False, True, True]


@pytest.mark.parametrize("found", CHOSEN, ids=ids(CHOSEN))
def test_dropping_slots_changes_the_output_and_zeroes_one_token(found):
    case = TinyExperts(found, tiny.DEFAULT_SIZES)
    whole, dropped = (case.oracle("eager", torch.float32, dropped=d)["out"] for d in (False, True))
    assert not torch.equal(whole, dropped)
    assert not dropped[1].any()
