"""Cases, operands, a loop to compare with, and runners of the permute tests."""

from typing import NamedTuple, Protocol

import pytest
import torch
from torch import Tensor

from samebits.ops.permute import Metadata, combine, permute, sort_slots
from samebits.ops.permute.tuning import Config


class Case(NamedTuple):
    """A call: sizes, and which optional operands there are."""

    tokens: int = 7
    topk: int = 3
    experts: int = 5
    hidden: int = 150
    # "fp32", "D" or "" (no probabilities).
    probs: str = "fp32"
    # Some slots are -1, the number of experts, or far outside.
    dropped: bool = False
    # Only tokens before the last two are valid.
    count: bool = False
    out_fp32: bool = False

    def __str__(self) -> str:
        parts = [f"T{self.tokens}", f"K{self.topk}", f"E{self.experts}", f"H{self.hidden}"]
        parts += [self.probs and f"p-{self.probs}", "dropped" * self.dropped]
        parts += ["count" * self.count, "out-fp32" * self.out_fp32]
        return "-".join(part for part in parts if part)


CASES = (
    Case(),
    Case(dropped=True),
    Case(dropped=True, count=True, probs="D"),
    Case(probs="", dropped=True, out_fp32=True),
    Case(probs="", topk=1, hidden=64),
    Case(topk=1, experts=1, hidden=1),
    Case(tokens=3, topk=8, experts=3, hidden=65),
    Case(tokens=1, topk=6, hidden=63, out_fp32=True),
    Case(tokens=3, topk=5, count=True, hidden=200),
    Case(tokens=0),
)


class Operands(NamedTuple):
    ids: Tensor
    probs: Tensor | None
    count: Tensor | None
    x: Tensor
    # Rows after the experts; NaN in the rows of no slot.
    y: Tensor
    dout: Tensor
    # Gradient of the permuted rows; NaN in the rows of no slot.
    drows: Tensor


def choose(case: Case, seed: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return ids: any experts, duplicates within a token among them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case.tokens, case.topk)
    ids = torch.randint(0, case.experts, shape, generator=generator)
    if case.dropped:
        strange = torch.tensor([-1, case.experts, case.experts + 7, -(1 << 30), (1 << 31) - 1])
        which = torch.randint(0, len(strange), shape, generator=generator)
        ids = torch.where(torch.rand(shape, generator=generator) < 0.4, strange[which], ids)
        if case.tokens > 1:
            ids[1] = -1
    return ids.to(dtype)


def make_operands(case: Case, dtype: torch.dtype, seed: int = 0) -> Operands:
    """Return operands with NaN wherever nothing may be read."""
    generator = torch.Generator().manual_seed(seed)
    ids = choose(case, seed)
    total = case.tokens * case.topk

    def draw(*shape: int) -> Tensor:
        # Very different sizes, so that another order of addition shows.
        size = torch.randint(-6, 7, shape, generator=generator).float().exp2()
        return (torch.randn(shape, generator=generator) * size).to(dtype)

    valid = max(0, case.tokens - 2) if case.count else case.tokens
    live = (ids >= 0) & (ids < case.experts) & (torch.arange(case.tokens) < valid)[:, None]
    kept = int(live.sum())
    probs = None
    if case.probs:
        probs = torch.rand(ids.shape, generator=generator) + 0.05
        probs = torch.where(live, probs, float("nan")).to(
            dtype if case.probs == "D" else probs.dtype
        )
    x, y, drows = draw(case.tokens, case.hidden), draw(total, case.hidden), draw(total, case.hidden)
    x[valid:] = y[kept:] = drows[kept:] = float("nan")
    dout = draw(case.tokens, case.hidden)
    dout[valid:] = float("nan")
    dout = dout.float() if case.out_fp32 and dtype != torch.float64 else dout
    count = torch.tensor([valid], dtype=torch.int32) if case.count else None
    return Operands(ids, probs, count, x, y, dout, drows)


Results = dict[str, Tensor]


def sort_loop(operands: Operands, experts: int, start: int, block_r: int) -> Results:
    """Return the metadata as the contract words it, by a loop; tiles cut to their count."""
    tokens, topk = operands.ids.shape
    total = tokens * topk
    valid = tokens if operands.count is None else int(operands.count)
    local = [int(i) - start for i in operands.ids[:valid].flatten()]
    by_expert = [[s for s, e in enumerate(local) if e == expert] for expert in range(experts)]
    slots = [s for group in by_expert for s in group]
    offsets = [sum(len(g) for g in by_expert[:e]) for e in range(experts + 1)]
    inverse = [total] * total
    for row, slot in enumerate(slots):
        inverse[slot] = row
    tiles = []
    for expert in sorted(range(experts), key=lambda e: (-len(by_expert[e]), e)):
        first, end = offsets[expert], offsets[expert + 1]
        tiles += [(expert, row, end) for row in range(first, end, block_r)]
    columns = list(zip(*tiles, strict=True)) or [(), (), ()]
    lists = {
        "slots": slots + [total] * (total - len(slots)),
        "offsets": offsets,
        "inverse": inverse,
        "tile_expert": columns[0],
        "tile_row": columns[1],
        "tile_end": columns[2],
        "tile_count": [len(tiles)],
    }
    return {name: torch.tensor(value, dtype=torch.int32) for name, value in lists.items()}


def flatten(metadata: Metadata) -> Results:
    """Return the metadata by name, tiles cut to their count."""
    tiles = metadata.tiles
    count = int(tiles.count)
    named = {name: getattr(metadata, name) for name in ("slots", "offsets", "inverse")}
    named |= {f"tile_{name}": getattr(tiles, name)[:count] for name in ("expert", "row", "end")}
    return {name: value.cpu() for name, value in (named | {"tile_count": tiles.count}).items()}


def sum_of_columns(product: Tensor) -> Tensor:
    """Add 64 neighbours in pairs, six times, then the sums of 64 in ascending order."""
    total = torch.zeros((), dtype=product.dtype)
    for start in range(0, product.shape[0], 64):
        part = torch.zeros(64, dtype=product.dtype)
        chunk = product[start : start + 64]
        part[: chunk.shape[0]] = chunk
        for _ in range(6):
            part = part[::2] + part[1::2]
        total = total + part[0]
    return total


def loop(operands: Operands, case: Case) -> Results:
    """Return rows, sums and every gradient, slot by slot, with the contract's rounding points."""
    _, probs, _, x, y, dout, drows = operands
    dtype, topk = x.dtype, case.topk
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inverse = sort_loop(operands, case.experts, 0, 16)["inverse"].tolist()
    total, hidden = len(inverse), case.hidden
    out_dtype = torch.float32 if case.out_fp32 and wide == torch.float32 else dtype
    out, dx = (torch.zeros(case.tokens, hidden, dtype=wide) for _ in range(2))
    rows, grad_rows = (torch.zeros(total, hidden, dtype=dtype) for _ in range(2))
    dp_in, dp_out = (torch.zeros(total, dtype=wide) for _ in range(2))
    for token in range(case.tokens):
        slots = range(token * topk, (token + 1) * topk)
        for slot in sorted(slots, key=lambda s: inverse[s]):
            row = inverse[slot]
            if row == total:
                continue
            p = None if probs is None else probs.flatten()[slot].to(wide)

            def scaled(value: Tensor, p: Tensor | None = p) -> Tensor:
                return value.to(wide) if p is None else value.to(wide) * p

            rows[row] = scaled(x[token]).to(dtype)
            out[token] += scaled(y[row])
            dx[token] += scaled(drows[row])
            grad_rows[row] = scaled(dout[token]).to(dtype)
            dp_in[slot] = sum_of_columns(x[token].to(wide) * drows[row].to(wide))
            dp_out[slot] = sum_of_columns(dout[token].to(wide) * y[row].to(wide))
    results = {"rows": rows, "out": out.to(out_dtype), "dx": dx.to(dtype), "drows": grad_rows}
    if probs is not None:
        results |= {"dp_in": dp_in.view(probs.shape), "dp_out": dp_out.view(probs.shape)}
    return results


class Runner(Protocol):
    """One way to run everything."""

    def sort(self, operands: Operands, experts: int, start: int, block_r: int) -> Results: ...

    def results(self, operands: Operands, case: Case) -> Results: ...


def _move(operands: Operands, device: str) -> Operands:
    return Operands(*(None if t is None else t.to(device) for t in operands))


class Operator:
    """The public functions, with gradients by autograd."""

    def __init__(self, device: str) -> None:
        self.device = device

    def sort(self, operands: Operands, experts: int, start: int, block_r: int) -> Results:
        ids, count = _move(operands, self.device)[0:3:2]
        metadata = sort_slots(
            ids, experts, block_r=block_r, expert_start=start, num_valid_tokens=count
        )
        return flatten(metadata)

    def results(self, operands: Operands, case: Case) -> Results:
        ids, probs, count, x, y, dout, drows = _move(operands, self.device)
        m = sort_slots(ids, case.experts, block_r=16, num_valid_tokens=count)
        leaves = [t.detach().requires_grad_() for t in (x, y)]
        both = [None if probs is None else probs.detach().requires_grad_() for _ in range(2)]
        options = {"offsets": m.offsets}
        rows = permute(leaves[0], m.inverse, case.topk, both[0], **options)
        out = combine(leaves[1], m.inverse, case.topk, both[1], out_dtype=dout.dtype, **options)
        results = {"rows": rows.detach(), "out": out.detach()}
        for name, value, grad, leaf, p in (
            ("dx", rows, drows, leaves[0], both[0]),
            ("drows", out, dout, leaves[1], both[1]),
        ):
            wanted = [leaf] if p is None else [leaf, p]
            grads = torch.autograd.grad(value, wanted, grad)
            results[name] = grads[0]
            if p is not None:
                results["dp_in" if name == "dx" else "dp_out"] = grads[1]
        return {name: value.cpu() for name, value in results.items()}


class Launchers:
    """The kernels, in the interpreter or on a GPU, with one configuration."""

    def __init__(self, config: Config | None, device: str = "cpu") -> None:
        self.config, self.device = config, device

    def sort(self, operands: Operands, experts: int, start: int, block_r: int) -> Results:
        from samebits.ops.permute import kernel

        ids, count = _move(operands, self.device)[0:3:2]
        metadata = kernel.launch_metadata(
            ids, experts, block_r, expert_start=start, num_valid_tokens=count
        )
        again = kernel.launch_tiles(metadata.offsets, ids.numel(), block_r)
        results = flatten(metadata)
        for name, value in flatten(metadata._replace(tiles=again)).items():
            assert torch.equal(value, results[name]), f"launch_tiles: {name}"
        return results

    def results(self, operands: Operands, case: Case) -> Results:
        from samebits.ops.permute import kernel

        ids, probs, count, x, y, dout, drows = _move(operands, self.device)
        m = kernel.launch_metadata(ids, case.experts, 16, num_valid_tokens=count)
        shared = (m.inverse, case.topk, probs)
        tail = {"offsets": m.offsets, "config": self.config}
        with_dp = probs is not None
        dx, dp_in = kernel.launch_permute_backward(
            drows, *shared, x if with_dp else None, config=self.config
        )
        grad_rows, dp_out = kernel.launch_combine_backward(
            dout, *shared, y if with_dp else None, y.dtype, **tail
        )
        results = {
            "rows": kernel.launch_permute(x, *shared, **tail),
            "out": kernel.launch_combine(y, *shared, dout.dtype, config=self.config),
            "dx": dx,
            "drows": grad_rows,
            "dp_in": dp_in,
            "dp_out": dp_out,
        }
        return {name: value.cpu() for name, value in results.items() if value is not None}


SMALL = Config(block_h=64, num_warps=1)
_IDS = {"reference": "cpu", "interpret": "interpreter", "gpu": "cuda"}
_MARKS = (
    ("reference", Operator("cpu")),
    ("interpret", Launchers(SMALL)),
    ("gpu", Operator("cuda")),
)
RUNNERS = tuple(
    pytest.param(runner, id=_IDS[mark], marks=getattr(pytest.mark, mark)) for mark, runner in _MARKS
)
# bf16 is not trusted in the interpreter.
_DTYPES = {
    "reference": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
    "interpret": (torch.float16, torch.float32),
    "gpu": (torch.bfloat16, torch.float16, torch.float32),
}


def _cases(mark: str, dtype: torch.dtype) -> tuple[Case, ...]:
    # A binary per dtype is a second per binary: on a GPU the first case stands for the rare dtypes.
    return CASES[:1] if mark == "gpu" and dtype != torch.bfloat16 else CASES


DTYPED_CASES = tuple(
    pytest.param(
        runner, dtype, case, id=f"{_IDS[mark]}-{dtype}-{case}", marks=getattr(pytest.mark, mark)
    )
    for mark, runner in _MARKS
    for dtype in _DTYPES[mark]
    for case in _cases(mark, dtype)
)
