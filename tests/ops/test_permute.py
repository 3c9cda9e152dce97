"""Sort, permute and combine in every tier: CPU operator, kernels in the interpreter, on a GPU."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from permute_cases import (
    DTYPED_CASES,
    RUNNERS,
    Case,
    Launchers,
    Operands,
    Runner,
    choose,
    loop,
    make_operands,
    sort_loop,
)
from samebits.ops.permute import combine, permute, reference, sort_slots, tuning
from samebits.ops.permute.tuning import CHUNK, FEW_SLOTS, PROGRAMS, Config
from samebits.routing import Permutation
from samebits.testing.numerics import assert_bitwise_equal


@pytest.fixture(autouse=True)
def nan_memory() -> Iterator[None]:
    """Fill fresh memory with NaN (integers: their maximum), so that what is not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def of_ids(ids: Tensor, count: int | None = None) -> Operands:
    """Return operands that hold only a routing."""
    counted = None if count is None else torch.tensor([count], dtype=torch.int32)
    nothing = torch.empty(0)
    return Operands(ids, None, counted, nothing, nothing, nothing, nothing)


def assert_sorted(run: Runner, operands: Operands, experts: int, start: int, block_r: int) -> None:
    expected = sort_loop(operands, experts, start, block_r)
    for name, value in run.sort(operands, experts, start, block_r).items():
        assert_bitwise_equal(value, expected[name], name)


SORT_CASES = (
    Case(tokens=1, topk=1, experts=1),
    Case(tokens=1, topk=8, experts=33),
    Case(tokens=40, topk=3, experts=5, dropped=True),
    Case(tokens=33, topk=4, experts=1),
    Case(tokens=65, topk=6, experts=33, dropped=True),
    Case(tokens=0),
)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("case", SORT_CASES, ids=str)
@pytest.mark.parametrize("run", RUNNERS)
def test_sort_equals_the_loop(run: Runner, case: Case, dtype: torch.dtype) -> None:
    assert_sorted(run, of_ids(choose(case, dtype=dtype)), case.experts, 0, 16)


@pytest.mark.parametrize("count", [0, 1, 9, 12, 50])
@pytest.mark.parametrize("run", RUNNERS)
def test_sort_of_local_experts_and_valid_tokens(run: Runner, count: int) -> None:
    ids = choose(Case(tokens=12, topk=4, experts=11, dropped=True), seed=count)

    assert_sorted(run, of_ids(ids, count), 4, 3, 1)


@pytest.mark.parametrize("run", RUNNERS)
def test_sort_when_one_expert_gets_all_or_none(run: Runner) -> None:
    for expert in (0, 2, 4, -1):
        assert_sorted(run, of_ids(torch.full((9, 2), expert)), 5, 0, 4)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the two launches for many slots serve few: the interpreter runs a program at a time."""
    monkeypatch.setattr(tuning, "FEW_SLOTS", 64)
    monkeypatch.setattr(tuning, "CHUNK", 32)
    monkeypatch.setattr(tuning, "PROGRAMS", 4)


# A partly filled last block; fewer programs than experts and more; one chunk a program and several.
LARGE_CASES = (
    Case(tokens=33, topk=3, experts=5),
    Case(tokens=50, topk=2, experts=20, dropped=True),
    Case(tokens=131, topk=2, experts=3, dropped=True),
)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("case", LARGE_CASES, ids=str)
@pytest.mark.interpret
def test_sort_of_many_slots(case: Case) -> None:
    ids = choose(case, dtype=torch.int32)
    chunks = tuning.chunks_per_program(ids.numel())
    assert chunks == (3 if case.tokens == 131 else 1)

    assert_sorted(Launchers(None), of_ids(ids, case.tokens - 5), case.experts, 0, 4)


@pytest.mark.parametrize("run", RUNNERS)
def test_ids_past_32_bits_are_dropped(run: Runner) -> None:
    ids = torch.tensor([[(1 << 32) + 3, 3], [-(1 << 32), 0], [(1 << 33) + 1, 1]])

    kept = run.sort(of_ids(ids), 5, 0, 16)["slots"][:4].tolist()

    assert kept == [3, 5, 1, 6]


@pytest.mark.reference
def test_sort_equals_the_permutation_of_routing() -> None:
    ids = choose(Case(tokens=50, topk=4, experts=7, dropped=True))
    count = torch.tensor([41], dtype=torch.int32)

    ours = sort_slots(ids, 5, expert_start=1, num_valid_tokens=count)
    theirs = Permutation.of(ids, 5, expert_start=1, num_valid_tokens=count)

    for name in ("slots", "offsets", "inverse"):
        assert_bitwise_equal(getattr(ours, name).long(), getattr(theirs, name), name)


@pytest.mark.reference
def test_tiles_fit_their_capacity() -> None:
    for block_r in (1, 2, 16, 64):
        for experts in (1, 3, 40):
            for seed in range(4):
                ids = choose(Case(tokens=21, topk=3, experts=experts), seed)
                tiles = sort_slots(ids, experts, block_r=block_r).tiles

                assert int(tiles.count) <= tiles.expert.shape[0]


@pytest.mark.parametrize(("run", "dtype", "case"), DTYPED_CASES)
def test_rows_sums_and_every_gradient_have_the_bits_of_the_loop(
    run: Runner, dtype: torch.dtype, case: Case
) -> None:
    operands = make_operands(case, dtype)

    results = run.results(operands, case)

    expected = loop(operands, case)
    assert results.keys() == expected.keys()
    for name, value in results.items():
        # Autograd returns dp in the dtype of the probabilities.
        assert_bitwise_equal(value, expected[name].to(value.dtype), f"{case} {name}")


@pytest.mark.interpret
def test_tiles_of_columns_do_not_change_bits() -> None:
    case = Case(tokens=3, hidden=300, topk=2)
    operands = make_operands(case, torch.float32)
    expected = loop(operands, case)

    for config in (
        None,
        Config(block_h=128, num_warps=2, ahead=2),
        Config(block_h=512, num_warps=8, ahead=1),
    ):
        for name, value in Launchers(config).results(operands, case).items():
            assert_bitwise_equal(value, expected[name], f"{name} {config}")


@pytest.mark.interpret
def test_keys_of_64_bits_order_rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tokens=5, hidden=70, topk=3, dropped=True)
    operands = make_operands(case, torch.float32)
    monkeypatch.setattr(tuning, "MOST_NARROW_KEY", 0)

    results = Launchers(None).results(operands, case)

    for name, value in loop(operands, case).items():
        assert_bitwise_equal(results[name], value, name)


@pytest.mark.parametrize("run", RUNNERS)
def test_a_token_has_the_same_bits_alone_and_among_others(run: Runner) -> None:
    case = Case(tokens=9, topk=4, experts=6)
    operands = make_operands(case, torch.float32)
    together = run.results(operands, case)
    inverse = sort_loop(operands, case.experts, 0, 16)["inverse"]
    assert operands.probs is not None

    for token in (0, 4, 8):
        mine = slice(token, token + 1)
        rows = inverse[token * case.topk : (token + 1) * case.topk].long().sort().values
        alone = Operands(
            operands.ids[mine], operands.probs[mine], None, operands.x[mine],
            operands.y[rows], operands.dout[mine], operands.drows[rows],
        )  # fmt: skip
        for name, value in run.results(alone, case._replace(tokens=1)).items():
            where = rows if name in ("rows", "drows") else mine
            assert_bitwise_equal(value, together[name][where], f"{name} of token {token}")


@pytest.mark.parametrize("run", RUNNERS)
def test_order_of_the_slots_of_a_token_does_not_change_its_sum(run: Runner) -> None:
    case = Case(tokens=4, topk=5, experts=6, hidden=66)
    operands = make_operands(case, torch.float32)
    order = torch.tensor([3, 0, 4, 1, 2])
    assert operands.probs is not None
    ids = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :5]
    operands = operands._replace(ids=ids)

    other = operands._replace(ids=operands.ids[:, order], probs=operands.probs[:, order])

    ours, theirs = run.results(operands, case), run.results(other, case)
    for name in ("rows", "out", "dx", "drows"):
        assert_bitwise_equal(theirs[name], ours[name], name)


@pytest.mark.parametrize("run", RUNNERS)
def test_nothing_but_negative_zeros_adds_up_to_positive_zero(run: Runner) -> None:
    case = Case(tokens=2, topk=1, experts=1, hidden=8, probs="")
    operands = make_operands(case, torch.float32)
    negative = torch.full_like(operands.y, -0.0)

    results = run.results(operands._replace(y=negative, drows=negative), case)

    for name in ("out", "dx"):
        assert_bitwise_equal(results[name], torch.zeros(2, 8), name)


@pytest.mark.parametrize("run", RUNNERS)
def test_nan_stays_in_its_token(run: Runner) -> None:
    case = Case(tokens=5, topk=2, experts=3)
    operands = make_operands(case, torch.float32)
    clean = run.results(operands, case)
    poisoned = operands._replace(x=operands.x.clone(), dout=operands.dout.clone())
    poisoned.x[2] = poisoned.dout[2] = float("nan")

    dirty = run.results(poisoned, case)

    inverse = sort_loop(operands, case.experts, 0, 16)["inverse"].view(5, 2)
    mine = inverse[2].tolist()
    others = [row for row in range(10) if row not in mine]
    assert dirty["rows"][mine].isnan().all()
    for name in ("rows", "drows"):
        assert_bitwise_equal(dirty[name][others], clean[name][others], name)
    for name in ("dp_in", "dp_out"):
        assert dirty[name][2].isnan().all()
        assert_bitwise_equal(dirty[name][[0, 1, 3, 4]], clean[name][[0, 1, 3, 4]], name)


@pytest.mark.parametrize("run", RUNNERS)
def test_any_row_stride(run: Runner) -> None:
    case = Case(dropped=True)
    operands = make_operands(case, torch.float32)
    expected = run.results(operands, case)

    def strided(value: Tensor) -> Tensor:
        wide = torch.full((value.shape[0], value.shape[1] + 9), float("nan"))
        wide[:, 4:-5] = value
        return wide[:, 4:-5]

    names = ("x", "y", "dout", "drows")
    apart = operands._replace(**{name: strided(getattr(operands, name)) for name in names})

    for name, value in run.results(apart, case).items():
        assert_bitwise_equal(value, expected[name], name)


@pytest.mark.parametrize("run", RUNNERS)
def test_inputs_stay_as_they_were(run: Runner) -> None:
    case = Case(dropped=True, count=True)
    operands = make_operands(case, torch.float32)
    before = [None if t is None else t.clone() for t in operands]

    run.results(operands, case)

    for name, now, then in zip(Operands._fields, operands, before, strict=True):
        if then is not None:
            assert_bitwise_equal(now, then, name)


@pytest.mark.reference
def test_columns_apart_and_expanded_gradients() -> None:
    case = Case(probs="")
    x = make_operands(case, torch.float32).x
    inverse = sort_slots(choose(case), case.experts).inverse
    apart = x.t().contiguous().t().requires_grad_()

    rows = permute(apart, inverse, case.topk)
    (dx,) = torch.autograd.grad(rows.sum(), apart)

    assert_bitwise_equal(rows, permute(x, inverse, case.topk), "rows")
    assert_bitwise_equal(dx, torch.full_like(dx, case.topk), "dx")


@pytest.mark.reference
def test_differentiable_once_not_twice() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    inverse = torch.arange(8)
    rows = permute(x, inverse, 2)

    with pytest.raises(NotImplementedError, match="once, not twice"):
        torch.autograd.grad(rows.sum(), x, create_graph=True)


REFUSED = {
    "ids of one dimension": (lambda: sort_slots(torch.zeros(3, dtype=torch.int64), 2), "topk_ids"),
    "ids without choices": (
        lambda: sort_slots(torch.zeros(3, 0, dtype=torch.int64), 2),
        "K >= 1",
    ),
    "ids of floats": (lambda: sort_slots(torch.zeros(3, 2), 2), "int32 or int64"),
    "no experts": (lambda: sort_slots(torch.zeros(3, 2, dtype=torch.int64), 0), "num_local"),
    "empty tiles": (
        lambda: sort_slots(torch.zeros(3, 2, dtype=torch.int64), 2, block_r=0),
        "block_r",
    ),
    "too many slots": (
        lambda: sort_slots(torch.zeros(1, dtype=torch.int32).expand(1 << 30, 2), 2),
        "at most",
    ),
    "count of floats": (
        lambda: sort_slots(
            torch.zeros(3, 2, dtype=torch.int64), 2, num_valid_tokens=torch.zeros(1)
        ),
        "num_valid_tokens",
    ),
    "count of two": (
        lambda: sort_slots(
            torch.zeros(3, 2, dtype=torch.int64), 2, num_valid_tokens=torch.zeros(2).int()
        ),
        "num_valid_tokens",
    ),
    "x of three dimensions": (lambda: permute(torch.zeros(2, 2, 2), torch.arange(4), 2), "x must"),
    "x of integers": (lambda: permute(torch.zeros(2, 2).int(), torch.arange(4), 2), "x must"),
    "short inverse": (lambda: permute(torch.zeros(2, 2), torch.arange(3), 2), "T \\* K = 4"),
    "float inverse": (lambda: permute(torch.zeros(2, 2), torch.zeros(4), 2), "inverse"),
    "inverse of two dimensions": (
        lambda: permute(torch.zeros(2, 2), torch.zeros(2, 2).int(), 2),
        "inverse",
    ),
    "inverse apart": (lambda: permute(torch.zeros(2, 2), torch.arange(8)[::2], 2), "contiguous"),
    "no choices": (lambda: permute(torch.zeros(2, 2), torch.arange(4), 0), "topk"),
    "probabilities of other shape": (
        lambda: permute(torch.zeros(2, 2), torch.arange(4), 2, torch.zeros(4)),
        "topk_probs",
    ),
    "probabilities of integers": (
        lambda: permute(torch.zeros(2, 2), torch.arange(4), 2, torch.zeros(2, 2).int()),
        "topk_probs",
    ),
    "other device": (
        lambda: permute(torch.zeros(2, 2), torch.arange(4, device="meta"), 2),
        "where x is",
    ),
    "too few rows": (lambda: combine(torch.zeros(3, 2), torch.arange(4), 2), "rows must"),
    "rows that are not T * K": (lambda: combine(torch.zeros(3, 2), torch.arange(3), 2), "K = 2"),
    "narrower output": (
        lambda: combine(torch.zeros(4, 2), torch.arange(4), 2, out_dtype=torch.float16),
        "out_dtype",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.reference
def test_bad_arguments_name_the_rule(name: str) -> None:
    call, message = REFUSED[name]

    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.reference
def test_sizes_of_launches() -> None:
    assert tuning.chunks_per_program(1) == 1
    assert tuning.chunks_per_program(CHUNK * PROGRAMS) == 1
    assert tuning.chunks_per_program(CHUNK * PROGRAMS + 1) == 2
    assert tuning.slots_of_few(65) == 256
    assert tuning.slots_of_few(FEW_SLOTS) == FEW_SLOTS
    assert tuning.heuristic(4096, 2880, 4, 2).block_h == 512
    assert tuning.heuristic(4096, 2048, 8, 2).block_h == 1024
    assert tuning.heuristic(1, 2048, 8, 2).block_h == 256
    for total in (1, 1000, 4096, 131072):
        size = tuning.buffer_size(total, 128, 64)
        parts = tuning.unpack(torch.zeros(size, dtype=torch.int32), total, 128, 64)
        assert all(part.data_ptr() % 16 == 0 for part in (*parts[:3], *parts.tiles))


@pytest.mark.reference
def test_reference_is_the_operator_on_a_cpu() -> None:
    ids = choose(Case(tokens=20, dropped=True))

    m, expected = sort_slots(ids, 5, block_r=4), reference.metadata(ids, 5, 4)

    assert_bitwise_equal(m.slots, expected.slots, "slots")
    assert_bitwise_equal(m.tiles.row, expected.tiles.row, "tiles, also past their count")
