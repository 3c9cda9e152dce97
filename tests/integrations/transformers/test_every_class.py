"""Every decorated class of the installed transformers is computed right by ours, or refused."""

import pytest
import torch

from samebits.checks.models.experts import judge_case, judge_class
from samebits.integrations.transformers import tiny, zoo
from samebits.integrations.transformers.experts_case import TinyExperts
from samebits.integrations.transformers.implementations import SAMEBITS
from samebits.integrations.transformers.provider import Transformers

pytestmark = pytest.mark.reference

PROVIDER = Transformers()
CLASSES = [c for c in zoo.discover() if isinstance(c, zoo.ExpertsClass)]
IDS = [c.name for c in CLASSES]


def wrong(findings):
    return [f"{f.case} {f.quantity}: {f.note}" for f in findings if f.verdict == "fail"]


@pytest.mark.parametrize("found", CLASSES, ids=IDS)
def test_the_class_itself_is_one_function(found):
    case = TinyExperts(found, tiny.DEFAULT_SIZES)
    assert wrong(judge_class(case, torch.float32)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("found", CLASSES, ids=IDS)
def test_ours_is_right_or_refused(found, dtype):
    findings = list(judge_case(TinyExperts(found, tiny.DEFAULT_SIZES), PROVIDER, [SAMEBITS], dtype))
    assert wrong(findings) == []
    ours = {f.verdict for f in findings if f.implementation == SAMEBITS}
    assert ours in ({"pass"}, {"unsupported"})
