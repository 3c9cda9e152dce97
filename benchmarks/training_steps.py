"""Steps of training.py: their floor, peak memory, host time and errors."""

import statistics
import time
from dataclasses import replace

import torch
from layer_cases import BYTES, FLOPS

from samebits.backends import BACKENDS
from samebits.backends.call import DIFFERENTIABLE
from samebits.env import architecture
from samebits.ops._triton.launch import nothing_launched
from samebits.warmup import _call as call_of_meta

# Calls until a kind of step is repeated by its launches alone.
_WARM = 3


def compile_pass(problem, tokens, *, backward):
    """Compile and load the kernels of one pass; nothing runs."""
    device = torch.device("cuda", torch.cuda.current_device())
    problem = replace(problem, device=architecture(device))
    call, module = call_of_meta(problem, tokens, torch.int64), BACKENDS["fused"]
    wanted = tuple(getattr(call, name) is not None for name in DIFFERENTIABLE)
    rows = tokens * problem.K, problem.activation.columns * problem.F
    with torch.no_grad(), nothing_launched():
        if backward:
            z, dout = torch.empty(rows, dtype=call.x.dtype, device="meta"), call.x
            module.backward(problem, call, z, dout, wanted, {})
        else:
            module.forward(problem, call, save=True)


def floor_ms(problem, tokens, sets):
    touched = statistics.mean(int(ids.unique().numel()) for _, ids, _ in sets)
    flop = 18 * tokens * problem.K * problem.H * problem.F
    byte = 2 * (9 * touched * problem.H * problem.F + 4 * tokens * problem.H)
    return max(flop / FLOPS, byte / BYTES) * 1e3


def half_on_one(problem, sets):
    """Return the sets with half of all slots on the last expert."""
    found = []
    for x, ids, probs in sets:
        moved = ids.clone()
        moved[: ids.shape[0] // 2] = problem.E - 1
        found.append((x, moved, probs))
    return found


def step_of(layer, leaves, dout):
    """Return a function of (x, ids, probs) that returns the output and every gradient."""

    def step(x, ids, probs):
        x, probs = x.detach().requires_grad_(), probs.detach().requires_grad_()
        out = layer(x, ids, probs)
        return (out, *torch.autograd.grad(out, [x, probs, *leaves], dout))

    return step


def memory_of(step, values):
    """Return the bytes that a step needs at its peak beyond its inputs and results."""
    for _ in range(_WARM):
        step(*values)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = step(*values)
    held = sum(r.numel() * r.element_size() for r in results)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - held


def host_ms(step, values, steps):
    """Return the median time until a step returns, while the device has others to do."""
    times = []
    torch.cuda.synchronize()
    for _ in range(steps):
        start = time.perf_counter()
        results = step(*values)
        times.append(time.perf_counter() - start)
        del results
    torch.cuda.synchronize()
    return statistics.median(times) * 1e3


def host_parts(layer, leaves, values, dout, rounds=9):
    """Return ms of the host in the forward and in the backward of a step, medians.

    The device is waited for between steps, so that its queue is never full.
    """
    forward, backward = [], []
    x, ids, probs = values
    for _ in range(rounds):
        x, probs = x.detach().requires_grad_(), probs.detach().requires_grad_()
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = layer(x, ids, probs)
        middle = time.perf_counter()
        results = torch.autograd.grad(out, [x, probs, *leaves], dout)
        forward.append(middle - start)
        backward.append(time.perf_counter() - middle)
        del out, results
    torch.cuda.synchronize()
    found = {"forward": forward, "backward": backward}
    return {name: statistics.median(times) * 1e3 for name, times in found.items()}


def kernels_of(step, values, steps=3):
    """Return {kernel: [ms in a step, launches in a step]}, longest first, and ms between them.

    From the device's own record, so that repeated launches are seen too. A step more comes first
    and does not count: the device catches up with the host there. "(idle)" is the time from the
    others' first start to their last end in which no kernel ran.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    step(*values)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps + 1):
            step(*values)
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    events = events[len(events) // (steps + 1) :]
    found = {}
    for event in events:
        spent = found.setdefault(event.name, [0.0, 0.0])
        spent[0] += (event.time_range.end - event.time_range.start) / 1e3 / steps
        spent[1] += 1 / steps
    busy = sum(ms for ms, _ in found.values())
    if events:
        end = max(event.time_range.end for event in events)
        whole = (end - events[0].time_range.start) / 1e3 / steps
        found["(idle)"] = [whole - busy, 0.0]
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def check(weights, values, results, dout):
    """Return the errors of gradients of the first token and of its first expert, against fp64."""
    x, ids, probs = values
    _, dx, dprobs, dgate_up, ddown = results[:5]
    expert = int(ids[0, 0])
    token, _ = (ids == expert).nonzero(as_tuple=True)
    rows, p = x[token].double(), probs[ids == expert].double()
    gate_up, down = (w[expert].double() for w in (weights.gate_up, weights.down))
    z = (rows @ gate_up.T).requires_grad_()
    gate, up = z.chunk(2, -1)
    h = torch.nn.functional.silu(gate) * up
    dh = dout[token].double() @ down
    (dz,) = torch.autograd.grad(h, z, dh * p[:, None])
    h = h.detach()
    exact = {
        "down": (dout[token].double().T @ (h * p[:, None]), ddown[expert]),
        "gate_up": (dz.T @ rows, dgate_up[expert]),
        "probs": ((dh * h).sum(-1), dprobs[ids == expert]),
    }
    whole = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    for k in range(ids.shape[1]):
        g, d = (w[ids[0, k]].double() for w in (weights.gate_up, weights.down))
        z = (x[0].double() @ g.T).requires_grad_()
        a, b = z.chunk(2, -1)
        (dz,) = torch.autograd.grad(
            torch.nn.functional.silu(a) * b, z, (dout[0].double() @ d) * probs[0, k].double()
        )
        whole += dz @ g
    exact["x"] = whole, dx[0]
    return {
        name: float((value.detach().double() - wanted).norm() / wanted.norm())
        for name, (wanted, value) in exact.items()
    }
