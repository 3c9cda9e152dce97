"""What ``parallel.py`` times: one shape and number of tokens per rank, in every part."""

import statistics
import time

import torch
import torch.distributed as dist

from samebits import ExpertWeights, Routing, experts
from samebits.ops.permute import combine, permute
from samebits.parallel import Capacity, Ranks, parallel_experts
from samebits.parallel.departure import depart
from samebits.testing.cases import MODELS

BF16 = torch.bfloat16
# Rounds, and ms that the calls of one take in all: 3 calls at least, 30 at most.
ROUNDS, SPAN = 11, 20.0
_STREAMS = []


def sync(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def clock(function, device):
    """Return the median time of ``function`` in ms, of the slowest rank.

    Calls follow one another, as in training: a device that waits for the host at the start of the
    first one shall not count as if it did so each time.
    """
    function()
    calls = round(min(max(SPAN / _worst(_timed(function, device, 1), device), 3), 30))
    times = [_timed(function, device, calls) for _ in range(ROUNDS)]
    return _worst(statistics.median(times), device)


def _timed(function, device, calls):
    dist.barrier()
    sync(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    sync(device)
    return (time.perf_counter() - start) / calls * 1e3


def _worst(value, device):
    """Return the largest value of all ranks; the same on each."""
    found = torch.tensor([value], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def find_route(ranks, ids):
    leaving = depart(ranks, ids, num_valid_tokens=None, wishes=0, agreement="bench", wrong=None)
    return leaving.route()


class Cell:
    """One shape and number of tokens per rank, with everything that is timed."""

    def __init__(self, shape, tokens, device, group, transport):
        problem = MODELS[shape]
        self.size, self.device = dist.get_world_size(group), device
        rank = dist.get_rank(group)
        hidden, columns, topk = problem.H, problem.F, problem.K
        number = problem.E
        if device.type == "cpu":
            hidden, columns, number, tokens = 64, 32, 8, 16
        if shape == "deepseek-v3" and device.type == "cuda":
            number *= self.size
        self.ranks = Ranks.of(group, number, transport=transport)
        generator = torch.Generator(device=device).manual_seed(rank)

        def normal(*sizes, scale=1.0):
            made = torch.empty(sizes, device=device, dtype=BF16)
            return made.normal_(0, scale, generator=generator)

        held = len(self.ranks.held)
        self.leaves = {
            "gate_up": normal(held, 2 * columns, hidden, scale=hidden**-0.5),
            "down": normal(held, hidden, columns, scale=columns**-0.5),
        }
        self.x, self.dout = normal(tokens, hidden), normal(tokens, hidden)
        scores = torch.rand(tokens, number, device=device, generator=generator)
        self.ids = scores.topk(topk).indices
        self.probs = torch.rand(tokens, topk, device=device, generator=generator)
        self.shared = {
            "gate_up": normal(1, 2 * columns, hidden, scale=hidden**-0.5),
            "down": normal(1, hidden, columns, scale=columns**-0.5),
        }
        # Other routings of as many tokens, hence other numbers of arrivals.
        self.others = [self.ids] + [
            torch.rand(scores.shape, device=device, generator=generator).topk(topk).indices
            for _ in range(7)
        ]
        self.turn = 0
        self.one = torch.zeros(tokens, 1, dtype=torch.int64, device=device)
        self.route = find_route(self.ranks, self.ids)
        self.arrivals = normal(self.route.ids.shape[0], hidden)

    def grad(self, on):
        for tensor in (self.x, self.probs, self.arrivals, *self.leaves.values()):
            tensor.requires_grad_(on).grad = None
        for tensor in self.shared.values():
            tensor.requires_grad_(on).grad = None

    def layer(self):
        routing = Routing(self.ids, self.probs)
        weights = ExpertWeights(**self.leaves)
        return parallel_experts(self.x, routing, weights, ranks=self.ranks)

    def varied(self):
        self.turn += 1
        routing = Routing(self.others[self.turn % len(self.others)], self.probs)
        return parallel_experts(self.x, routing, ExpertWeights(**self.leaves), ranks=self.ranks)

    def compute(self):
        ids = self.route.ids[:, None]
        probs = torch.ones(ids.shape, device=self.device)
        return experts(self.arrivals, Routing(ids, probs), ExpertWeights(**self.leaves))

    def exchange(self, ways):
        """Send as many rows as the layer does, there and back: the group's own all-to-all."""
        rows = self.dout.new_empty(self.route.inverse.shape[0], self.dout.shape[1])
        there = self.dout.new_empty(sum(self.route.received), rows.shape[1])
        sent, received = self.route.sent, self.route.received
        for _ in range(ways):
            dist.all_to_all_single(there, rows[: sum(sent)], received, sent)
            dist.all_to_all_single(rows[: sum(sent)], there, sent, received)

    def shared_expert(self):
        ones = torch.ones(self.one.shape, device=self.device)
        return experts(self.x, Routing(self.one, ones), ExpertWeights(**self.shared))

    def in_turn(self):
        return self.layer() + self.shared_expert()

    def beside(self):
        """Return the same with the shared expert on a second stream."""
        here = torch.cuda.current_stream()
        other = _side_stream()
        other.wait_stream(here)
        with torch.cuda.stream(other):
            shared = self.shared_expert()
        routed = self.layer()
        here.wait_stream(other)
        shared.record_stream(here)
        return routed + shared


def _side_stream():
    if not _STREAMS:
        _STREAMS.append(torch.cuda.Stream())
    return _STREAMS[0]


def time_cell(shape, tokens, device, group, transport, *, brief):
    cell = Cell(shape, tokens, device, group, transport)
    others = sum(n for r, n in enumerate(cell.route.sent) if r != cell.ranks.rank)
    row = {
        "shape": shape,
        "tokens": tokens,
        "ranks": cell.size,
        "transport": transport,
        "rows": cell.arrivals.shape[0],
        "sent_MB": round(others * cell.x.shape[1] * 2 / 1e6, 1),
        "forward": time_pass(cell, False, brief),
        "step": time_pass(cell, True, brief),
    }
    if brief:
        return row
    exact = cell.ranks
    cell.ranks = Ranks(group, exact.bounds, Capacity(_rows(cell), device))
    with torch.no_grad():
        row["forward"]["fixed"] = clock(cell.layer, device)
    cell.ranks = exact
    return row | {"forward_parts": parts(cell)}


def time_pass(cell, training, brief):
    """Return the times of a forward, or of a forward and its backward."""
    cell.grad(training)
    ways, dy = 2 if training else 1, cell.arrivals.detach()

    def run(function, given):
        if not training:
            with torch.no_grad():
                return function()
        cell.grad(True)
        return function().backward(given)

    device, dout = cell.device, cell.dout
    found = {
        "layer": clock(lambda: run(cell.layer, dout), device),
        "compute": clock(lambda: run(cell.compute, dy), device),
        "exchange": clock(lambda: cell.exchange(ways), device),
        "varied": clock(lambda: run(cell.varied, dout), device),
    }
    found["ratio"] = found["layer"] / (found["compute"] + found["exchange"])
    if not brief:
        found["in_turn"] = clock(lambda: run(cell.in_turn, dout), device)
    if not brief and device.type == "cuda":
        found["beside"] = clock(lambda: run(cell.beside, dout), device)
    cell.grad(False)
    return found


def _rows(cell):
    """Return a capacity a quarter above the most that a rank sends here."""
    most = torch.tensor([max(cell.route.sent)], device=cell.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most) * 5 // 4


def parts(cell):
    """Return the time of each part of a forward, alone."""
    route, topk = cell.route, cell.ids.shape[1]
    rows = permute(cell.x, route.inverse, topk)

    def find():
        find_route(cell.ranks, cell.ids)

    with torch.no_grad():
        return {
            "route": clock(find, cell.device),
            "permute": clock(lambda: permute(cell.x, route.inverse, topk), cell.device),
            "go": clock(lambda: route.go(rows, keep=False), cell.device),
            "combine": clock(lambda: combine(rows, route.inverse, topk, cell.probs), cell.device),
        }


def warm_cell(shape, tokens, device):
    problem = MODELS[shape]
    held = problem.E if shape == "deepseek-v3" else problem.E // 2
    rows = tokens * problem.K

    def zeros(*sizes):
        return torch.zeros(sizes, device=device, dtype=BF16, requires_grad=True)

    x = zeros(rows, problem.H)
    ids = torch.arange(rows, device=device)[:, None] % held
    probs = torch.ones(rows, 1, device=device, requires_grad=True)
    weights = ExpertWeights(
        gate_up=zeros(held, 2 * problem.F, problem.H), down=zeros(held, problem.H, problem.F)
    )
    with torch.no_grad():
        experts(x, Routing(ids, probs), weights)
    experts(x, Routing(ids, probs), weights).backward(x.detach())
    one = ExpertWeights(
        gate_up=zeros(1, 2 * problem.F, problem.H), down=zeros(1, problem.H, problem.F)
    )
    some = x[:tokens]
    first = torch.zeros(tokens, 1, dtype=torch.int64, device=device)
    experts(some, Routing(first, probs[:tokens]), one).backward(some.detach())
