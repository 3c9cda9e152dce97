"""The fused backend's launches in the interpreter: output and every gradient within the budget."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType, ModuleType

import pytest
import torch
from torch import Tensor

from samebits.backends import BACKENDS
from samebits.backends.call import DIFFERENTIABLE, Call
from samebits.backends.grouped import device
from samebits.backends.repetition import Watch
from samebits.ops.permute import kernel as permute
from samebits.ops.slot_gemm import kernel as slot_gemm
from samebits.problem import Problem, ProbPlacement
from samebits.routing import Permutation
from samebits.testing.cases import CASES
from samebits.testing.inputs import Inputs, judge_all, make_inputs
from samebits.testing.numerics import assert_bitwise_equal
from samebits.weight_gradients import Buffer

pytestmark = [
    pytest.mark.interpret,
    # Rows past the last expert's hold whatever memory held; they are multiplied, never stored.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul"),
]

FUSED = BACKENDS["fused"]
CASES_OF_PLACEMENT = {
    "gpt-oss-whole": ProbPlacement.FC2_OUTPUT,
    "interleave-16": ProbPlacement.FC1_INPUT,
    "biases": ProbPlacement.FC2_INPUT,
    "odd-sizes": ProbPlacement.FC2_INPUT,
    "tiny-sizes": ProbPlacement.FC1_INPUT,
    "local-experts": ProbPlacement.FC2_OUTPUT,
    "counted": ProbPlacement.FC1_INPUT,
    "relu2": ProbPlacement.FC2_OUTPUT,
}


def _call(inputs: Inputs) -> Call:
    w, r = inputs.weights, inputs.routing
    return Call(
        inputs.x, r.topk_ids, r.topk_probs, w.gate_up, w.down,
        w.gate_up_bias, w.down_bias, w.norm_scale, inputs.num_valid_tokens,
    )  # fmt: skip


def _results(
    problem: Problem,
    inputs: Inputs,
    wanted: frozenset[str],
    into: Mapping[str, Buffer] = MappingProxyType({}),
) -> dict[str, Tensor]:
    call = _call(inputs)
    out, z = FUSED.forward(problem, call, save=True)
    asked = tuple(name in wanted for name in DIFFERENTIABLE)
    grads = FUSED.backward(problem, call, z, inputs.dout, asked, into)._asdict()
    return {"out": out} | {f"d_{n}": g for n, g in grads.items() if g is not None}


def _wanted(inputs: Inputs) -> frozenset[str]:
    return frozenset({"x", "topk_probs"} | inputs.weights.named_tensors().keys())


@pytest.mark.parametrize(("name", "placement"), CASES_OF_PLACEMENT.items())
def test_every_gradient_is_within_the_budget(name: str, placement: ProbPlacement) -> None:
    problem = replace(CASES[name], placement=placement, grad=True)
    inputs = make_inputs(problem, 11, distribution="dropped", valid_tokens=9)

    judgements = judge_all(problem, inputs, _results(problem, inputs, _wanted(inputs)))

    assert all(j.passed for j in judgements.values()), {
        name: str(j) for name, j in judgements.items() if not j.passed
    }


@pytest.mark.parametrize("placement", ProbPlacement)
@pytest.mark.parametrize(("dtype", "small"), [("fp32", False), ("fp16", False), ("fp16", True)])
def test_every_gradient_around_a_norm_is_within_the_budget(
    dtype: str, small: bool, placement: ProbPlacement
) -> None:
    whole = replace(CASES["gpt-oss-whole"], H=24, F=20, dtype=dtype, norm_eps=1e-5, out_dtype=None)
    whole = replace(whole, gate_up_bias=dtype, down_bias=dtype)
    problem = replace(whole, placement=placement, grad=True)
    inputs = make_inputs(problem, 11, distribution="dropped")
    if small:
        # Too small for the norm to undo them: their gradients outweigh the others'.
        inputs.routing.topk_probs[::3] *= 1e-3
        inputs.routing.topk_probs[4] = 0.0

    judgements = judge_all(problem, inputs, _results(problem, inputs, _wanted(inputs)))

    assert judgements.keys() >= {"d_norm_scale", "d_topk_probs", "d_down_bias"}
    assert all(j.passed for j in judgements.values()), {
        name: str(j) for name, j in judgements.items() if not j.passed
    }


@pytest.mark.parametrize("placement", ProbPlacement)
def test_no_token_and_no_kept_slot_give_exact_zeros_around_a_norm(placement: ProbPlacement) -> None:
    whole = replace(CASES["biases"], H=12, F=8, E=3, K=2, norm_eps=1e-5, placement=placement)
    problem = replace(whole, grad=True)
    for tokens in (0, 2):
        inputs = make_inputs(problem, tokens)
        inputs.routing.topk_ids.fill_(-1)

        for name, value in _results(problem, inputs, _wanted(inputs)).items():
            given = {"out": inputs.x, "d_x": inputs.x, "d_topk_probs": inputs.routing.topk_probs}
            expected = given.get(name, inputs.weights.named_tensors().get(name[2:]))
            assert expected is not None
            assert_bitwise_equal(value, torch.zeros_like(expected), name)


def test_the_gradient_of_the_scale_is_added_to_its_buffer() -> None:
    problem = replace(CASES["norm"], H=24, F=20, E=3, grad=True)
    inputs = make_inputs(problem, 5)
    (once,) = (_results(problem, inputs, frozenset({"norm_scale"}))[k] for k in ("d_norm_scale",))
    buffer = Buffer(torch.full_like(once, 3.0), True)

    results = _results(problem, inputs, frozenset({"norm_scale"}), {"norm_scale": buffer})

    assert results.keys() == {"out"}
    assert_bitwise_equal(buffer.tensor, once + 3.0)


def test_the_first_projection_is_computed_again() -> None:
    problem = replace(CASES["local-experts"], placement=ProbPlacement.FC1_INPUT, grad=True)
    call = _call(make_inputs(problem, 5))
    _, z = FUSED.forward(problem, call, save=True)
    rows = Permutation.of(call.topk_ids, problem.E, expert_start=problem.expert_start).offsets[-1]

    assert_bitwise_equal(FUSED.recomputed(problem, call)[:rows], z[:rows], "z")


@pytest.mark.parametrize("name", ["gpt-oss-whole", "interleave-16", "local-experts", "counted"])
def test_a_few_tokens_need_no_sort(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permute, "launch_metadata", None)
    problem = replace(CASES[name], H=24, F=32, placement=CASES_OF_PLACEMENT[name], grad=False)
    inputs = make_inputs(problem, 1, valid_tokens=1)
    # In fp32, which the tiles of single slots are not for.
    kind = replace(problem, dtype="bf16", out_dtype="fp32", device="sm_90")

    out, z = FUSED.forward(kind, _call(inputs), save=False)

    judgements = judge_all(problem, inputs, {"out": out})
    assert judgements["out"].passed, str(judgements["out"])
    assert z.shape == (0, inputs.weights.gate_up.shape[1])


@pytest.mark.parametrize("placement", ProbPlacement)
@pytest.mark.parametrize("module", [FUSED, BACKENDS["grouped"]], ids=["fused", "grouped"])
def test_sorted_rows_are_neither_sorted_nor_copied_and_have_the_same_bits(
    module: ModuleType, placement: ProbPlacement, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = replace(CASES["gpt-oss-whole"], H=24, F=20, E=4, K=1, placement=placement, grad=True)
    problem = replace(whole, device="sm_80")
    inputs = make_inputs(problem, 9)
    offsets = torch.tensor([0, 3, 3, 7, 8])
    # The last row is no expert's, and holds anything.
    ids = torch.searchsorted(offsets[1:], torch.arange(9), right=True)[:, None]
    inputs.x[8] = inputs.routing.topk_probs[8] = inputs.dout[8] = torch.nan
    call = _call(inputs)._replace(topk_ids=ids)
    wanted = tuple(name in _wanted(inputs) for name in DIFFERENTIABLE)

    def results(call: Call) -> dict[str, Tensor]:
        out, z = module.forward(problem, call, save=True)
        grads = module.backward(problem, call, z, inputs.dout, wanted, {})._asdict()
        z = module.recomputed(problem, call)
        return {"out": out, "z": z[:8]} | {n: g for n, g in grads.items() if g is not None}

    expected = results(call)
    monkeypatch.setattr(permute, "launch_metadata", None)
    if placement != ProbPlacement.FC1_INPUT:
        monkeypatch.setattr(permute, "launch_permute", None)
    found = results(call._replace(offsets=offsets))

    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert_bitwise_equal(value, expected[name], name)


class _Noted:
    """Stands for a kernel: notes that it would be launched."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **__: self.seen.append(self.name)


def test_nothing_runs_between_the_launches_of_a_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    # The second starts early and reads ids at once: a copy of them might not be visible yet.
    problem = replace(CASES["gpt-oss-whole"], E=64, K=3, grad=False)
    call = _call(make_inputs(problem, 2))
    assert call.down_bias is not None
    ids, bias = call.topk_ids.T.contiguous().T, call.down_bias.T.contiguous().T
    kind = replace(problem, dtype="bf16", out_dtype="fp32", device="sm_90")

    with Watch() as watch:
        for name in ("_slot_hidden_kernel", "_token_output_kernel"):
            monkeypatch.setattr(slot_gemm, name, _Noted(name, watch.others))
        FUSED.forward(kind, call._replace(topk_ids=ids, down_bias=bias), save=False)

    done = watch.others
    assert "clone" in done
    assert done.index("_token_output_kernel") == done.index("_slot_hidden_kernel") + 1


@pytest.mark.parametrize("name", ["norm", "norm-fc2-input"])
@pytest.mark.parametrize("module", [FUSED, device], ids=["fused", "grouped"])
def test_a_norm_of_each_expert_is_within_the_budget(module: ModuleType, name: str) -> None:
    problem = replace(CASES[name], H=24, F=32, grad=False)
    inputs = make_inputs(problem, 5, distribution="dropped")

    out, _ = module.forward(problem, _call(inputs), save=False)

    judgements = judge_all(problem, inputs, {"out": out})
    assert judgements["out"].passed, str(judgements["out"])


def test_a_gradient_that_is_not_wanted_is_not_computed_and_changes_no_other() -> None:
    problem = replace(CASES["gpt-oss-whole"], H=24, F=20, E=3, grad=True)
    inputs = make_inputs(problem, 5)
    whole = _results(problem, inputs, _wanted(inputs))

    for wanted in ({"x"}, {"topk_probs"}, {"gate_up"}, {"down", "gate_up_bias"}, {"down_bias"}):
        some = _results(problem, inputs, frozenset(wanted))

        assert some.keys() == {"out"} | {f"d_{name}" for name in wanted}
        for name, value in some.items():
            assert_bitwise_equal(value, whole[name], name)


def test_transposed_parameters_get_gradients_in_their_storage() -> None:
    problem = replace(CASES["interleave-1"], H=24, F=20, E=3, grad=True)
    inputs = make_inputs(problem, 5)
    stored = replace(inputs, weights=inputs.weights.to_storage("in_out"))

    expected = _results(problem, inputs, _wanted(inputs))
    results = _results(problem, stored, _wanted(inputs))

    for name, tensor in stored.weights.named_tensors().items():
        assert results[f"d_{name}"].stride() == tensor.stride()
    for name, value in results.items():
        assert_bitwise_equal(value, expected[name], name)


def test_an_expert_without_rows_and_no_token_at_all_give_exact_zeros() -> None:
    problem = replace(CASES["biases"], H=24, F=20, E=5, K=1, grad=True)
    for tokens in (0, 2):
        inputs = make_inputs(problem, tokens)
        results = _results(problem, inputs, _wanted(inputs))
        idle = sorted(set(range(5)) - set(inputs.routing.topk_ids.flatten().tolist()))
        assert idle

        for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
            grad = results[f"d_{name}"][idle]
            assert_bitwise_equal(grad, torch.zeros_like(grad), name)


@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_are_written_or_added_to_buffers_in_any_storage(accumulate: bool) -> None:
    problem = replace(CASES["gpt-oss-whole"], H=24, F=20, E=3, dtype="fp16", grad=True)
    problem = replace(problem, gate_up_bias="fp16", down_bias="fp16", out_dtype=None)
    inputs = make_inputs(problem, 5)
    whole = _results(problem, inputs, _wanted(inputs))
    into = {}
    for name, tensor in inputs.weights.named_tensors().items():
        # Parts of a larger buffer, from an odd address on; matrices transposed.
        size = tensor[0].numel() + 3
        memory = torch.full((tensor.shape[0] * size + 1,), 0.0 if accumulate else torch.nan)
        parts = memory[1:].view(-1, size)[:, : tensor[0].numel()]
        shape = tensor.shape[1:]
        view = parts.unflatten(1, shape[::-1])
        into[name] = Buffer(view.transpose(1, 2) if len(shape) == 2 else view, accumulate)

    results = [_results(problem, inputs, _wanted(inputs), into) for _ in range(2)]

    for each in results:
        assert each.keys() == {"out", "d_x", "d_topk_probs"}
        assert_bitwise_equal(each["d_x"], whole["d_x"])
    for name, buffer in into.items():
        # Twice a sum is exact; rounded, it is what comes without a buffer.
        once = buffer.tensor / 2 if accumulate else buffer.tensor
        assert_bitwise_equal(once.half() + 0.0, whole[f"d_{name}"] + 0.0, name)
        assert (once != once.half()).any(), name
