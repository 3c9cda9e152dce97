"""What each rank of a group runs: the layer over ranks, beside the one-rank run.

Every rank draws the same numbers, takes its part of them, and compares with its part of the
one-rank run. A program returns what differs. The same programs run on CPU (gloo) and on GPUs
(NCCL).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from samebits import (
    Activation,
    ExpertWeights,
    Layout,
    ProbPlacement,
    Routing,
    experts,
    grouped_experts,
)
from samebits.formats import Parameters, WeightFormat, quantize
from samebits.parallel import Capacity, Ranks, combine, departure, dispatch, parallel_experts, route

PARAMETERS = ("gate_up", "down", "gate_up_bias", "down_bias")
_PLAIN = Activation()
_HALVES = Layout()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layer and the tokens of each rank."""

    tokens: tuple[int, ...]
    bounds: tuple[int, ...]
    topk: int = 3
    hidden: int = 48
    columns: int = 40
    dtype: torch.dtype = torch.float32
    probs: torch.dtype = torch.float32
    placement: ProbPlacement = ProbPlacement.FC2_OUTPUT
    backend: str = "grouped"
    activation: Activation = _PLAIN
    out_dtype: torch.dtype | None = None
    # Rows of a buffer; None exchanges counts.
    capacity: int | None = None
    transport: str = "torch"
    # "random" (a tenth of the slots dropped), or the id of the expert that gets every slot.
    ids: str | int = "random"
    # Tokens of each rank that are valid; None means all, and gives no count.
    valid: tuple[int, ...] | None = None
    # How the matrices are packed; they have no gradient then.
    weight_format: WeightFormat | None = None
    # What has a gradient, on each rank; None means everything.
    wanted: tuple[tuple[str, ...], ...] | None = None

    @property
    def num_experts(self) -> int:
        return self.bounds[-1]

    @property
    def total(self) -> int:
        return sum(self.tokens)


Tensors = dict[str, Tensor]


def draw(case: Case, device: torch.device) -> Tensors:
    """Return the tensors of the one-rank run; equal on every rank."""
    generator = torch.Generator().manual_seed(case.total * 31 + case.num_experts)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, case.dtype)

    n, h, f, t, k = case.num_experts, case.hidden, case.columns, case.total, case.topk
    keys = torch.rand(t, n, generator=generator)
    ids = keys.argsort(1)[:, :k].contiguous()
    if case.ids == "random":
        ids[torch.rand(t, k, generator=generator) < 0.1] = -1
    else:
        ids.fill_(int(case.ids))
    if case.valid is not None:
        # On one rank, which has no count, slots of the others are dropped.
        counts = zip(case.tokens, case.valid, strict=True)
        ids[torch.cat([torch.arange(all_) >= valid for all_, valid in counts])] = -1
    rows = case.activation.columns * f
    return {
        "x": normal(t, h),
        "topk_ids": ids.to(device),
        "topk_probs": torch.rand(t, k, generator=generator).to(device, case.probs),
        "gate_up": normal(n, rows, h, scale=h**-0.5),
        "down": normal(n, h, f, scale=f**-0.5),
        "gate_up_bias": normal(n, rows),
        "down_bias": normal(n, h),
        "dout": normal(t, h).to(case.out_dtype or case.dtype),
    }


def part(case: Case, given: Tensors, rank: int) -> Tensors:
    """Return what ``rank`` has of the tensors of the one-rank run."""
    start = sum(case.tokens[:rank])
    tokens = slice(start, start + case.tokens[rank])
    held = slice(case.bounds[rank], case.bounds[rank + 1])
    return {n: t[held if n in PARAMETERS else tokens] for n, t in given.items()}


def leaves(given: Tensors, wanted: tuple[str, ...] | None) -> Tensors:
    """Return copies that take gradients."""
    names = ("x", "topk_probs", *PARAMETERS) if wanted is None else wanted
    return {n: t.clone().requires_grad_(n in names) for n, t in given.items()}


def weights_of(tensors: Tensors, layout: Layout = _HALVES) -> ExpertWeights:
    return ExpertWeights(**{n: tensors[n] for n in PARAMETERS}, layout=layout)


def parameters_of(case: Case, tensors: Tensors, layout: Layout = _HALVES) -> Parameters:
    """Return the weights, packed where the case says so: each expert is packed alone."""
    weights = weights_of(tensors, layout)
    return weights if case.weight_format is None else quantize(weights, case.weight_format)


def found(tensors: Tensors, out: Tensor) -> Tensors:
    """Return the output and the gradients that there are."""
    grads = {n: t.grad for n, t in tensors.items() if t.grad is not None}
    return {"out": out.detach(), **grads}


def one_rank(case: Case, given: Tensors, layout: Layout = _HALVES) -> Tensors:
    tensors = leaves(given, None)
    out = experts(
        tensors["x"],
        Routing(tensors["topk_ids"], tensors["topk_probs"]),
        parameters_of(case, tensors, layout),
        case.activation,
        placement=case.placement,
        backend=case.backend,
        out_dtype=case.out_dtype,
    )
    out.backward(given["dout"])
    return found(tensors, out)


def ranks_of(case: Case, group: dist.ProcessGroup, device: torch.device) -> Ranks:
    capacity = None if case.capacity is None else Capacity(case.capacity, device)
    return Ranks(group, case.bounds, capacity, case.transport)


def over_ranks(case: Case, given: Tensors, ranks: Ranks) -> Tensors:
    mine = part(case, given, ranks.rank)
    tensors = leaves(mine, None if case.wanted is None else case.wanted[ranks.rank])
    count = None
    if case.valid is not None:
        # What is not valid is not read: neither tokens nor ids.
        count = torch.tensor([case.valid[ranks.rank]], dtype=torch.int32, device=mine["x"].device)
        with torch.no_grad():
            tensors["x"][case.valid[ranks.rank] :] = float("nan")
            tensors["topk_ids"][case.valid[ranks.rank] :] = 0
    out = parallel_experts(
        tensors["x"],
        Routing(tensors["topk_ids"], tensors["topk_probs"]),
        parameters_of(case, tensors),
        case.activation,
        ranks=ranks,
        placement=case.placement,
        backend=case.backend,
        out_dtype=case.out_dtype,
        num_valid_tokens=count,
    )
    if out.requires_grad:
        out.backward(mine["dout"])
    return found(tensors, out)


def composed(case: Case, given: Tensors, ranks: Ranks) -> Tensors:
    """Return the same of ``dispatch``, ``grouped_experts`` and ``combine``."""
    mine = part(case, given, ranks.rank)
    tensors = leaves(mine, None)
    routing = Routing(tensors["topk_ids"], tensors["topk_probs"])
    sent = dispatch(tensors["x"], routing, ranks, placement=case.placement)
    on_input = case.placement == ProbPlacement.FC1_INPUT
    on_output = case.placement == ProbPlacement.FC2_OUTPUT
    rows = grouped_experts(
        sent.rows,
        sent.offsets,
        weights_of(tensors),
        case.activation,
        row_probs=sent.row_probs,
        placement=ProbPlacement.FC2_OUTPUT if on_input else case.placement,
        backend=case.backend,
        out_dtype=torch.float32 if on_output else None,
    )
    out = combine(rows, sent, out_dtype=case.dtype)
    out.backward(mine["dout"])
    return found(tensors, out)


def differences(case: Case, mine: Tensors, whole: Tensors, rank: int) -> list[str]:
    """Return the names of the tensors of ``mine`` that lack the bits of ``whole``."""
    expected = part(case, whole, rank)
    # torch's reference adds the terms of dx in autograd's order (docs of parallel_experts).
    skipped = {"x"} if case.backend == "reference" else set()
    return [
        f"{case}: {name} on rank {rank}"
        for name, tensor in mine.items()
        if name not in skipped and not same(tensor, expected[name])
    ]


def same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.numel() == 0 or torch.equal(bits(one), bits(other))


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(cases: list[Case], place: str = "cpu") -> list[str]:
    """Return what differs from the one-rank run."""
    device, group, wrong = torch.device(place), _world(), []
    for case in cases:
        given = draw(case, device)
        mine = over_ranks(case, given, ranks_of(case, group, device))
        wrong += differences(case, mine, one_rank(case, given), dist.get_rank(group))
    return wrong


def same_bits_with_room(cases: list[Case]) -> list[str]:
    """Return the same where more rows arrive than were sent: NaN, as all that nobody wrote."""
    torch.use_deterministic_algorithms(True)
    try:
        with patch.object(departure, "room_for", lambda rows: rows + 5):
            return same_bits(cases)
    finally:
        torch.use_deterministic_algorithms(False)


def repeated_calls(cases: list[Case], place: str = "cpu") -> list[str]:
    """Return what differs where a layer is called again and again, with other tokens of a shape."""
    device, group, wrong = torch.device(place), _world(), []
    for case in cases:
        given, ranks = draw(case, device), ranks_of(case, group, device)
        for turn in range(4):
            names = ("x", "topk_ids", "topk_probs", "dout")
            turned = {n: t.roll(turn, 0) if n in names else t for n, t in given.items()}
            mine = over_ranks(case, turned, ranks)
            wrong += [
                f"call {turn}: {line}"
                for line in differences(case, mine, one_rank(case, turned), ranks.rank)
            ]
    return wrong


def same_bits_composed(cases: list[Case], place: str = "cpu") -> list[str]:
    """Return what differs from the one-rank run where the parts are called one by one."""
    device, group, wrong = torch.device(place), _world(), []
    for case in cases:
        given = draw(case, device)
        mine = composed(case, given, ranks_of(case, group, device))
        if case.placement == ProbPlacement.FC1_INPUT and place == "cpu":
            # Sums of 64 columns, as in kernels; torch's own sum in ``grouped`` on a CPU.
            del mine["topk_probs"]
        wrong += differences(case, mine, one_rank(case, given), dist.get_rank(group))
    return wrong


def without_experts(case: Case, place: str = "cpu") -> list[str]:
    """Return what differs between one group of all ranks and groups of one rank (degree 1)."""
    device, group = torch.device(place), _world()
    given = draw(case, device)
    rank = dist.get_rank(group)
    mine = over_ranks(case, given, ranks_of(case, group, device))
    # Every rank makes every group.
    alone = [dist.new_group([r]) for r in range(dist.get_world_size(group))][rank]
    single = replace(case, tokens=(case.total,), bounds=(0, case.num_experts), wanted=None)
    whole = over_ranks(single, given, ranks_of(single, alone, device))
    expected = part(case, whole, rank)
    return [f"{case}: {n} on rank {rank}" for n, t in mine.items() if not same(t, expected[n])]


def gradients_that_exist(case: Case) -> list[str]:
    """Return which gradients this rank got."""
    device = torch.device("cpu")
    given = draw(case, device)
    return sorted(over_ranks(case, given, ranks_of(case, _world(), device)).keys() - {"out"})


def soak(seed: int, count: int, place: str = "cpu", backend: str = "grouped") -> list[str]:
    """Return what differs from the one-rank run in random cases."""
    size = dist.get_world_size()
    chooser = random.Random(seed)
    cases = []
    for _ in range(count):
        counts = [chooser.randrange(0, 4) for _ in range(size)]
        counts[chooser.randrange(size)] += 2
        bounds = tuple(sum(counts[:i]) for i in range(size + 1))
        tokens = tuple(chooser.choice([0, 1, 2, 5, 13]) for _ in range(size))
        topk = chooser.randint(1, min(bounds[-1], 4))
        cases.append(
            Case(
                tokens=tokens,
                bounds=bounds,
                topk=topk,
                hidden=chooser.choice([8, 24]),
                columns=chooser.choice([8, 20]),
                dtype=chooser.choice([torch.float32, torch.bfloat16]),
                placement=chooser.choice(list(ProbPlacement)),
                capacity=chooser.choice([None, max(1, max(tokens) * topk)]),
                ids=chooser.choice(["random", "random", chooser.randrange(bounds[-1])]),
                backend=backend,
            )
        )
    return same_bits(cases, place)


def overflow(place: str = "cpu", backend: str = "grouped") -> list[str]:
    """Return what is wrong where slots do not fit: NaN in their tokens, an error on every rank."""
    size = dist.get_world_size()
    tokens = (6,) + (1,) * (size - 1)
    case = Case(
        tokens=tokens, bounds=(0,) + (4,) * size, topk=1, ids=0, capacity=3, backend=backend
    )
    device = torch.device(place)
    given, wrong = draw(case, device), []
    ranks = ranks_of(case, _world(), device)
    mine = over_ranks(case, given, ranks)
    expected = part(case, one_rank(case, given), ranks.rank)
    for name in ("out", "x", "topk_probs"):
        kept, lost = mine[name][:3], mine[name][3:]
        if not same(kept, expected[name][:3]) or not lost.isnan().all():
            wrong.append(name)
    try:
        ranks.check()
    except RuntimeError as error:
        if "3 of rank 0" not in str(error):
            wrong.append(str(error))
    else:
        wrong.append("no error")
    assert ranks.capacity is not None
    ranks.capacity.reset()
    ranks.check()
    return wrong


def disagree() -> str:
    """Return the error of ranks whose layers differ."""
    rank = dist.get_rank()
    placement = ProbPlacement.FC2_INPUT if rank else ProbPlacement.FC2_OUTPUT
    case = Case(tokens=(2,) * dist.get_world_size(), bounds=(0, 2, 4), placement=placement)
    device = torch.device("cpu")
    try:
        over_ranks(case, draw(case, device), ranks_of(case, _world(), device))
    except ValueError as error:
        return str(error)
    return ""


def ranks_that_are_refused() -> list[str]:
    """Return the messages for what ranks cannot be, and for weights of too many experts."""
    case = Case(tokens=(1, 1), bounds=(0, 4))
    whole = draw(case, torch.device("cpu"))

    def all_of_them() -> None:
        parallel_experts(
            whole["x"],
            Routing(whole["topk_ids"], whole["topk_probs"]),
            weights_of(whole),
            ranks=Ranks(_world(), (0, 2, 4)),
        )

    attempts: list[Callable[[], object]] = [
        lambda: Ranks(_world(), (0, 4)),
        lambda: Ranks(_world(), (0, 5, 4)),
        lambda: Ranks(_world(), (0, 2, 4), transport="nvshmem"),
        lambda: Ranks(_world(), (0, 2, 4), transport="deep_ep"),
        all_of_them,
    ]
    messages = []
    for attempt in attempts:
        try:
            attempt()
        except (ValueError, NotImplementedError) as error:
            messages.append(str(error))
    return messages


def ids_out_of_range() -> str:
    """Return the error where the ids of rank 1 are."""
    case = Case(tokens=(2,) * dist.get_world_size(), bounds=(0, 2, 4))
    given = draw(case, torch.device("cpu"))
    given["topk_ids"][-1, -1] = 9
    try:
        over_ranks(case, given, ranks_of(case, _world(), torch.device("cpu")))
    except ValueError as error:
        return str(error)
    return ""


def leave(rank: int) -> None:
    """End ``rank`` without a word, and use the group on the others."""
    import os

    if dist.get_rank() == rank:
        os._exit(1)
    case = Case(tokens=(2,) * dist.get_world_size(), bounds=(0, 2, 4))
    device = torch.device("cpu")
    for _ in range(100):
        over_ranks(case, draw(case, device), ranks_of(case, _world(), device))


def leave_before_rows(rank: int) -> None:
    """End ``rank`` after the counts were told and before its rows leave."""
    go = route.Route.go

    def gone(self: route.Route, rows: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if dist.get_rank() == rank:
            import os

            os._exit(1)
        return go(self, rows, *arguments, **options)

    case = Case(tokens=(2,) * dist.get_world_size(), bounds=(0, 2, 4))
    device = torch.device("cpu")
    with patch.object(route.Route, "go", gone):
        over_ranks(case, draw(case, device), ranks_of(case, _world(), device))


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
