"""Every decorated class of the installed transformers is computed right by ours, or refused.

A refusal has a row in docs/refused.md: the JSON of the check and the page say the same.
"""

import json

import pytest
import torch
from refusals import documented

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
    ours = [json.loads(f.to_json()) for f in findings if f.implementation == SAMEBITS]
    assert {line["verdict"] for line in ours} in ({"pass"}, {"unsupported"})
    assert undocumented(ours) == []


def undocumented(lines):
    """Return the notes of refusals for which the page has no row."""
    rows = documented()
    refused = [line for line in lines if line["verdict"] == "unsupported"]
    return [
        line["note"]
        for line in refused
        if not any(
            row.cls == line["model"].rpartition(".")[2] and row.reason in line["note"]
            for row in rows
        )
    ]


def test_a_refusal_without_a_row_is_noticed():
    about = {"verdict": "unsupported", "model": "fp8_blocks.FP8Experts"}
    known, other = (
        about | {"note": "its activation_scheme is 'static'"},
        about | {"note": "no such reason"},
    )
    assert undocumented([known, other, other | {"verdict": "pass"}]) == ["no such reason"]
