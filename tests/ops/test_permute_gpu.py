"""What only a GPU shows of sort, permute and combine: large sorts, big offsets, graphs, syncs."""

import pytest
import torch
from torch import Tensor

from permute_cases import Case, Launchers, choose, flatten, make_operands
from samebits.ops.permute import combine, permute, reference, sort_slots
from samebits.ops.permute.tuning import FEW_SLOTS, candidates
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.gpu

# Both sides of every boundary of the launches; one chunk a program and several.
SORTS = (
    (4096 // 8, 8, 128),
    (FEW_SLOTS // 4, 4, 384),
    (FEW_SLOTS // 4 + 1, 4, 384),
    (131072 // 8, 8, 128),
    (65536, 6, 160),
)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize(("tokens", "topk", "experts"), SORTS)
def test_large_sorts_equal_the_reference(
    tokens: int, topk: int, experts: int, dropped: bool
) -> None:
    case = Case(tokens=tokens, topk=topk, experts=experts, dropped=dropped)
    ids = choose(case).cuda()
    count = torch.tensor([tokens - 3], dtype=torch.int32, device="cuda")

    ours = flatten(sort_slots(ids, experts, num_valid_tokens=count))

    for name, value in flatten(
        reference.metadata(ids, experts, 128, num_valid_tokens=count)
    ).items():
        assert_bitwise_equal(ours[name], value, name)


@pytest.mark.parametrize("hidden", [2880, 96])
def test_tiles_of_columns_do_not_change_bits_on_a_gpu(hidden: int) -> None:
    case = Case(tokens=300, topk=4, experts=9, hidden=hidden, dropped=True)
    operands = make_operands(case, torch.bfloat16)
    expected = Launchers(None, "cuda").results(operands, case)

    for config in candidates(hidden)[::5]:
        for name, value in Launchers(config, "cuda").results(operands, case).items():
            assert_bitwise_equal(value, expected[name], f"{name} {config}")


@pytest.mark.parametrize("case", [Case(300, 8, 40, 2048), Case(1, 8, 128, 2048)], ids=str)
def test_a_gpu_has_the_bits_of_a_cpu(case: Case) -> None:
    operands = make_operands(case._replace(dropped=True), torch.bfloat16)
    ids, probs, _, x, y, dout, drows = operands
    m = reference.metadata(ids, case.experts, 16)

    ours = Launchers(None, "cuda").results(operands, case)

    expected = {
        "rows": reference.permute(x, m.inverse, case.topk, probs),
        "out": reference.combine(y, m.inverse, case.topk, probs, y.dtype),
    }
    grads = {
        ("dx", "dp_in"): reference.permute_backward(drows, m.inverse, case.topk, probs, x),
        ("drows", "dp_out"): reference.combine_backward(
            dout, m.inverse, case.topk, probs, y, y.dtype
        ),
    }
    for names, values in grads.items():
        for name, value in zip(names, values, strict=True):
            assert value is not None
            expected[name] = value
    for name, value in expected.items():
        assert_bitwise_equal(ours[name], value, name)


def test_offsets_past_two_to_the_31() -> None:
    tokens, topk, hidden = 33000, 2, 1 << 15
    ids = torch.arange(tokens * topk, device="cuda").view(tokens, topk) % 3
    m = sort_slots(ids, 3)
    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    marks = torch.arange(tokens, device="cuda").remainder(251).to(x.dtype) + 1
    x[:, -1] = marks

    rows = permute(x, m.inverse, topk)
    out = combine(rows, m.inverse, topk)

    token = m.slots.long() // topk
    assert rows.numel() > 1 << 31
    assert torch.equal(rows[:, -1], marks[token])
    assert torch.equal(out[:, -1], 2 * marks)
    assert not rows[-1, :-1].any()


def _layer(x: Tensor, y: Tensor, probs: Tensor, ids: Tensor, count: Tensor) -> list[Tensor]:
    m = sort_slots(ids, 9, num_valid_tokens=count)
    rows = permute(x, m.inverse, 4, probs, offsets=m.offsets)
    out = combine(y, m.inverse, 4, probs)
    dx, dp = torch.autograd.grad(rows, [x, probs], y.detach())
    dy = torch.autograd.grad(out, y, x.detach())[0]
    return [rows.detach(), out.detach(), dx, dp, dy[:1]]


def _leaves(seed: int, tokens: int) -> list[Tensor]:
    case = Case(tokens=tokens, topk=4, experts=9, hidden=200)
    ids, probs, _, x, y, *_ = make_operands(case, torch.bfloat16, seed)
    assert probs is not None
    count = torch.tensor([tokens - 1 - seed], dtype=torch.int32)
    leaves = [t.cuda() for t in (x, y, probs)]
    return [*(leaf.requires_grad_() for leaf in leaves), ids.cuda(), count.cuda()]


@pytest.mark.parametrize("tokens", [20, FEW_SLOTS])
def test_cuda_graph_replays_with_new_tokens_and_routing(tokens: int) -> None:
    static, other = _leaves(0, tokens), _leaves(5, tokens)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        _layer(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = _layer(*static)

    with torch.no_grad():
        for mine, theirs in zip(static, other, strict=True):
            mine.copy_(theirs)
    graph.replay()
    torch.cuda.synchronize()

    for ours, expected in zip(results, _layer(*other), strict=True):
        assert_bitwise_equal(ours, expected)


def test_no_host_synchronisation() -> None:
    leaves = _leaves(0, FEW_SLOTS)
    _layer(*leaves)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _layer(*leaves)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_repeats_bit_for_bit() -> None:
    leaves = _leaves(0, FEW_SLOTS)
    first = _layer(*leaves)

    for _ in range(5):
        for ours, expected in zip(_layer(*leaves), first, strict=True):
            assert_bitwise_equal(ours, expected)


def test_one_binary_for_every_token_count() -> None:
    from samebits.ops.permute import kernel

    kernels = (kernel._few_metadata_kernel, kernel._gather_kernel, kernel._sum_kernel)

    def binaries() -> list[int]:
        return [len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels]

    def run(tokens: int) -> None:
        ids = torch.zeros(tokens, 3, dtype=torch.int64, device="cuda")
        m = sort_slots(ids, 7)
        x = torch.zeros(tokens, 72, dtype=torch.bfloat16, device="cuda")
        combine(permute(x, m.inverse, 3), m.inverse, 3)

    run(300)
    before = binaries()
    for tokens in (301, 302, 320, 333):
        run(tokens)

    assert binaries() == before


def test_compiled_whole_on_a_gpu() -> None:
    def layer(x: Tensor, probs: Tensor, ids: Tensor) -> Tensor:
        m = sort_slots(ids, 9)
        rows = permute(x, m.inverse, 4, probs, offsets=m.offsets)
        return combine(rows * 1.5, m.inverse, 4, probs, out_dtype=torch.float32)

    whole = torch.compile(layer, fullgraph=True)
    for tokens in (20, 33, 64):
        x, _, probs, ids, _ = _leaves(0, tokens)
        results = []
        for function in (layer, whole):
            out = function(x, probs, ids)
            results.append([out.detach(), *torch.autograd.grad(out.sum(), [x, probs])])
        for ours, expected in zip(results[1], results[0], strict=True):
            assert_bitwise_equal(ours, expected)


def test_fp64_on_a_gpu_is_refused() -> None:
    x = torch.zeros(2, 4, dtype=torch.float64, device="cuda")

    with pytest.raises(NotImplementedError, match="no fp64"):
        permute(x, torch.arange(4, device="cuda"), 2)
