"""Small programs with one Python float: the ones that go stale on some torch, and some that do not.

``python battery.py OUT.json [NAME …]`` audits them all and writes what was found; the tests compare
that file with ``STALE``.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F


def clamped_swiglu(x, s):
    gate, up = torch.chunk(x, 2, -1)
    return F.silu(gate).clamp(max=s) * up.clamp(min=-s, max=s)


def clamped_interleaved_swiglu(x, s):
    gate, up = x[..., ::2].clamp(max=s), x[..., 1::2].clamp(-s, s)
    return gate * torch.sigmoid(gate * 1.702) * (up + 1)


def rms_norm_scaled(x, s):
    return F.rms_norm(x * s, (8,), eps=s + 1e-3)


def rms_norm(x, s):
    return F.rms_norm(x, (8,), eps=s)


def huber_scaled(x, s):
    return F.huber_loss(x * s, torch.ones_like(x), delta=s + 1)


def attention_scale(x, s):
    rows = x.view(1, 1, -1, 8)
    return F.scaled_dot_product_attention(rows * s, rows, rows, scale=s + 0.1)


def multiply(x, s):
    return x * s


def leaky_relu(x, s):
    return F.leaky_relu(x, s) * s


def power(x, s):
    return x.abs() ** s * s


def add_alpha(x, s):
    return torch.add(x, x, alpha=s) * s


def full(x, s):
    return x + torch.full((8,), s)


def where(x, s):
    return torch.where(x > s, x, s)


def softplus(x, s):
    return F.softplus(x, beta=s) * s


def addcmul(x, s):
    return torch.addcmul(x, x, x, value=s) * s


def masked_fill(x, s):
    return x.masked_fill(x > 0, s) * s


def hardtanh(x, s):
    return F.hardtanh(x, -s, s) * s


PROGRAMS = (
    clamped_swiglu,
    clamped_interleaved_swiglu,
    rms_norm_scaled,
    rms_norm,
    huber_scaled,
    attention_scale,
    multiply,
    leaky_relu,
    power,
    add_alpha,
    full,
    where,
    softplus,
    addcmul,
    masked_fill,
    hardtanh,
)


def make_inputs():
    return (torch.randn(4, 8), 0.5), {}


def measure(names):
    """Return what the audit says of each program, with and without a gradient."""
    from samebits.checks.compile.audit import audit
    from samebits.checks.compile.target import Target

    rows = []
    for name in names:
        start = time.time()
        found = audit(Target(f"battery:{name}"), remedies=False)
        for gradient in (False, True):
            chosen = {s.name for s in found.scenarios if s.gradient is gradient}
            steps = [s for s in found.steps if s.scenario in chosen]
            rows.append(
                {
                    "program": name,
                    "gradient": gradient,
                    "stale": any(s.wrong for s in steps),
                    "stale_automatic": any(
                        s.wrong
                        for s in steps
                        if "dynamic=None" in s.scenario and s.phase == "fresh"
                    ),
                    "guard_dropped": any(s.dropped for s in steps),
                    "code_reused": any(s.reused for s in steps if s.phase == "fresh"),
                    "complete": not found.unfinished and not any(s.error for s in steps),
                    "calls": len(steps),
                    "worst_right": max((s.distance for s in steps if not s.wrong), default=0.0),
                    "least_wrong": min((s.distance for s in steps if s.wrong), default=None),
                    "seconds_both": round(time.time() - start, 1),
                }
            )
            sys.stderr.write(f"{rows[-1]}\n")
    return rows


if __name__ == "__main__":
    chosen_names = sys.argv[2:] or [program.__name__ for program in PROGRAMS]
    found_rows = measure(chosen_names)
    Path(sys.argv[1]).write_text(
        json.dumps({"torch": torch.__version__, "rows": found_rows}, indent=1) + "\n"
    )
