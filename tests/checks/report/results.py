"""Results of every kind of check, names that try to be markup among them."""

import json
from typing import Any

EVIL = "<script>alert('x')</script>"

ENVIRONMENT = {
    "versions": {"samebits": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "rich": None},
    "system": "Linux x86_64",
    "devices": ["cpu: x86_64, AVX2 2-threads"],
    "variables": {},
    "bits_key": "samebits=0.1.0 torch=2.13.0 triton=none device=cpu",
}


def result(**values: Any) -> dict[str, Any]:
    plain = {
        "check": "parity",
        "case": "swiglu",
        "problem": "H=48 F=80 E=5 K=3 dtype=fp32",
        "backend": "grouped",
        "verdict": "pass",
        "measured": 0.001,
        "allowed": 0.004,
        "note": "d_x, row 3, uniform",
    }
    return plain | values


def finding(**values: Any) -> dict[str, Any]:
    plain = {
        "check": "models",
        "model": "gpt_oss.GptOssExperts",
        "case": "default",
        "implementation": "sonicmoe",
        "dtype": "bf16",
        "quantity": "out",
        "verdict": "fail",
        "measured": 0.5,
        "allowed": 0.01,
        "worst_row": 2,
        "evidence": "arguments",
        "note": "",
        "figures": {},
        "versions": {"torch": "2.13.0"},
    }
    return plain | values


AUDIT = {
    "target": "pkg:clamped",
    "versions": {"torch": "2.13.0", "triton": None},
    "numbers": [],
    "results": [
        {
            "case": "limit, grad",
            "verdict": "fail",
            "measured": 0.2,
            "allowed": 1e-5,
            "note": "stale",
        },
        {
            "case": "alpha",
            "verdict": "not_run",
            "measured": None,
            "allowed": None,
            "note": "no time",
        },
    ],
    "faults": [],
}

EVERYTHING = [
    ENVIRONMENT,
    {"command": "samebits check parity --json"},
    result(),
    result(case="gpt-oss", measured=0.0039),
    result(case="gpt-oss", backend="fused", verdict="unsupported", measured=None, allowed=None,
           note="it needs an NVIDIA GPU"),
    result(case=EVIL, verdict="not_run", measured=None, allowed=None, note=f"no | pipe {EVIL}"),
    finding(),
    finding(model=f"evil.{EVIL}", verdict="pass", measured=0.001, note="line\nbreak\x1b[31m"),
    finding(implementation="eager" + "-very-long-name" * 12, verdict="fail", measured=None),
    AUDIT,
]  # fmt: skip


def lines(values: list[dict[str, Any]] = EVERYTHING) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)
