"""A rollout's routing, recorded, kept in a file, and replayed in training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samebits import RoutingRule
from samebits.nn import Experts, MoE, Router
from samebits.replay import LayerRecord, RecordError, RoutingRecord, recording, replaying
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.reference

HIDDEN, TOKENS = 24, 13


class Model(nn.Module):
    """Two layers whose routers see what the layer before computed."""

    def __init__(self, num_experts: int = 6, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        rule = RoutingRule(topk=2, score="sigmoid", renormalize=True, scaling_factor=2.5)
        self.layers = nn.ModuleList(
            MoE(
                router=Router(hidden_size=HIDDEN, num_experts=num_experts, rule=rule, dtype=dtype),
                experts=Experts(
                    num_experts=num_experts, hidden_size=HIDDEN, intermediate_size=16, dtype=dtype
                ),
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


NAMES = ["layers.0.router", "layers.1.router"]


def _recorded(model: nn.Module, x: Tensor) -> tuple[Tensor, RoutingRecord]:
    with torch.inference_mode(), recording(model) as recorder:
        out = model(x)
    return out, recorder.record()


def _nudge(model: Model, by: float = 0.5) -> None:
    """Move the routers so far that they choose otherwise."""
    with torch.no_grad():
        for layer in model.layers:
            layer.router.weight.add_(torch.randn_like(layer.router.weight) * by)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replayed_forward_has_the_bits_of_the_rollout(dtype: torch.dtype) -> None:
    model, x = Model(dtype=dtype), torch.randn(TOKENS, HIDDEN).to(dtype)

    out, record = _recorded(model, x)
    with replaying(model, record, "same"):
        again = model(x)

    assert_bitwise_equal(again.detach(), out.clone())
    assert record.layers[NAMES[0]].topk_ids.dtype == torch.uint8
    assert sorted(record.layers) == NAMES


def test_tokens_that_came_one_by_one_are_replayed_together() -> None:
    # One layer: on CPU the experts' own bits may depend on the number of tokens.
    layer, x = Model().layers[0], torch.randn(TOKENS, HIDDEN)
    with torch.inference_mode(), recording(layer) as recorder:
        for start, end in [(0, 5), *((t, t + 1) for t in range(5, TOKENS))]:
            layer(x[start:end])

    record = recorder.record()

    assert record.tokens == TOKENS
    with replaying(layer, record, "same"):
        layer(x)


def test_the_gradient_reaches_the_router() -> None:
    model, x = Model(), torch.randn(TOKENS, HIDDEN)
    model(x).square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()

    _, record = _recorded(model, x)
    with replaying(model, record):
        model(x).square().sum().backward()

    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.any(), name
        assert_bitwise_equal(parameter.grad, expected[name], name)


def test_the_choice_is_the_recorded_one_where_the_router_has_moved() -> None:
    model, x = Model(), torch.randn(TOKENS, HIDDEN)
    _, record = _recorded(model, x)
    _nudge(model)

    with replaying(model, record), recording(model) as recorder:
        model(x).sum().backward()

    replayed = recorder.record()
    _, own = _recorded(model, x)
    for name in NAMES:
        assert_bitwise_equal(replayed.layers[name].topk_ids, record.layers[name].topk_ids)
    assert not torch.equal(own.layers[NAMES[0]].topk_ids, record.layers[NAMES[0]].topk_ids)
    assert model.layers[0].router.weight.grad.any()


def test_recorded_probabilities_have_their_bits_and_the_logits_gradient() -> None:
    model, x = Model(), torch.randn(TOKENS, HIDDEN)
    _, record = _recorded(model, x)
    _nudge(model)

    with replaying(model, record, "recorded"), recording(model) as recorder:
        model(x).square().sum().backward()

    for name in NAMES:
        probs = recorder.record().layers[name].topk_probs
        assert_bitwise_equal(probs, record.layers[name].topk_probs)
    assert all(layer.router.weight.grad.any() for layer in model.layers)


def test_probabilities_of_another_router_are_an_error() -> None:
    model, x = Model(), torch.randn(TOKENS, HIDDEN)
    _, record = _recorded(model, x)
    _nudge(model)

    with (
        pytest.raises(RecordError, match=r"layers\.0\.router computes other .* first: token 0"),
        replaying(model, record, "same"),
    ):
        model(x)
    assert not model.layers[0].router._forward_hooks


def test_recomputed_activations_are_replayed_too() -> None:
    model, x = Model(), torch.randn(TOKENS, HIDDEN, requires_grad=True)
    _, record = _recorded(model, x.detach())
    _nudge(model)
    with replaying(model, record):
        model(x).square().sum().backward()
    expected = x.grad.clone()
    x.grad = None

    with replaying(model, record):
        checkpoint(model, x, use_reentrant=False).square().sum().backward()

    assert_bitwise_equal(x.grad, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_tokens_are_recorded_once(reentrant: bool) -> None:
    model, x = Model(), torch.randn(TOKENS, HIDDEN, requires_grad=True)
    _, expected = _recorded(model, x.detach())

    with recording(model) as recorder:
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()

    record = recorder.record()
    assert record.tokens == TOKENS
    for name in NAMES:
        assert_bitwise_equal(record.layers[name].topk_ids, expected.layers[name].topk_ids)


def test_a_part_of_the_tokens_in_another_order() -> None:
    layer, x = Model().layers[0], torch.randn(TOKENS, HIDDEN)
    _, record = _recorded(layer, x)
    rows = torch.tensor([7, 2, 11])

    with replaying(layer, record.select(rows), "same"):
        layer(x[rows])
    with (
        pytest.raises(RecordError, match="computes other probabilities"),
        replaying(layer, record.select(slice(3)), "same"),
    ):
        layer(x[rows])


def test_a_file_holds_the_record(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="needs safetensors")
    _, record = _recorded(Model(num_experts=300), torch.randn(TOKENS, HIDDEN))

    record.save(tmp_path / "a")
    record.save(tmp_path / "b")
    loaded = RoutingRecord.load(tmp_path / "a")

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert loaded.tokens == TOKENS
    for name in NAMES:
        assert loaded.layers[name].num_experts == 300
        assert loaded.layers[name].topk_ids.dtype == torch.int16
        for part in ("topk_ids", "topk_probs"):
            expected = getattr(record.layers[name], part)
            assert_bitwise_equal(getattr(loaded.layers[name], part), expected)


def test_every_byte_of_the_tensors_is_guarded(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="needs safetensors")
    _, record = _recorded(Model(), torch.randn(3, HIDDEN))
    record.save(tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")

    for position in range(start, len(content)):
        changed = bytearray(content)
        changed[position] ^= 1
        (tmp_path / "b").write_bytes(changed)
        with pytest.raises(RecordError, match=r"is not what was recorded|is damaged"):
            RoutingRecord.load(tmp_path / "b")


@pytest.mark.parametrize("content", ["truncated", "no record", "nothing", "no layers"])
def test_a_file_that_is_no_record(tmp_path: Path, content: str) -> None:
    torch_files = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    path = tmp_path / "a"
    _, record = _recorded(Model(), torch.randn(3, HIDDEN))
    record.save(path)
    if content == "truncated":
        path.write_bytes(path.read_bytes()[:-9])
    elif content == "nothing":
        path.write_bytes(b"")
    elif content == "no layers":
        torch_files.save_file({"x": torch.zeros(1)}, path, {"samebits_routing": "[]"})
    else:
        torch_files.save_file({"x": torch.zeros(1)}, path)

    with pytest.raises(RecordError, match=r"is damaged|is no record of routings"):
        RoutingRecord.load(path)


def test_what_does_not_fit_is_named() -> None:
    model, x = Model(), torch.randn(TOKENS, HIDDEN)
    _, record = _recorded(model, x)

    with (
        pytest.raises(ValueError, match=r"be called with the record's T = 13 tokens, got 12"),
        replaying(model, record),
    ):
        model(x[:12])
    with (
        pytest.raises(ValueError, match="have num_experts = 7 in layers"),
        replaying(Model(num_experts=7), record),
    ):
        pass
    with (
        pytest.raises(ValueError, match="record must have the model's routers"),
        replaying(model.layers[0], record),
    ):
        pass
    with (
        pytest.raises(ValueError, match="unknown probs 'exact'"),
        replaying(model, record, "exact"),  # type: ignore[arg-type]
    ):
        pass
    with pytest.raises(ValueError, match=r"must hold a samebits\.nn\.Router"), recording(nn.ReLU()):
        pass


def test_a_choice_beside_the_recorded_one_is_an_error() -> None:
    model, x = Model(), torch.randn(TOKENS, HIDDEN)
    _, record = _recorded(model, x)
    ids = record.layers[NAMES[0]].routing().topk_ids

    message = "layers.0.router must be called without topk_ids"
    with pytest.raises(ValueError, match=message), replaying(model, record):
        model.layers[0](x, topk_ids=ids)


def test_a_router_that_was_not_called_is_an_error() -> None:
    model, x = Model(), torch.randn(TOKENS, HIDDEN)
    _, record = _recorded(model, x)

    with recording(model) as recorder:
        model.layers[0](x)
    with pytest.raises(RecordError, match=r"not called: layers\.1\.router"):
        recorder.record()
    with pytest.raises(RecordError, match=r"not called: layers\.1"), replaying(model, record):
        model.layers[0](x)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"topk_ids": torch.zeros(3, 2)}, TypeError, "topk_ids must be torch.uint8"),
        ({"topk_probs": torch.zeros(3, 2).half()}, TypeError, "topk_probs must be float32"),
        ({"topk_probs": torch.zeros(3, 1)}, ValueError, "have one shape"),
        ({"num_experts": 0}, ValueError, "num_experts must be >= 1"),
        ({"num_experts": "4"}, TypeError, "num_experts must be an int"),
    ],
)
def test_a_layer_record_is_checked(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    parts = {"topk_ids": torch.zeros(3, 2, dtype=torch.uint8), "topk_probs": torch.zeros(3, 2)}

    with pytest.raises(error, match=message):
        LayerRecord(**({"num_experts": 4} | parts | options))


def test_layers_of_one_record_have_the_same_tokens() -> None:
    layers = {
        str(tokens): LayerRecord(
            torch.zeros(tokens, 2, dtype=torch.uint8), torch.zeros(tokens, 2), 4
        )
        for tokens in (3, 4)
    }

    with pytest.raises(ValueError, match="layers must hold one number of tokens"):
        RoutingRecord(layers)


def test_dropped_slots_stay_dropped() -> None:
    layer, x = Model().layers[0], torch.randn(TOKENS, HIDDEN)
    _, record = _recorded(layer, x)
    held = record.layers["router"]
    ids = held.topk_ids.clone()
    ids[4] = 6
    dropped = RoutingRecord({"router": LayerRecord(ids, held.topk_probs, 6)})

    with replaying(layer, dropped):
        out = layer(x)

    assert not out[4].any()
    assert out[3].all()
