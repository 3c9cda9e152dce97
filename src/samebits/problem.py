"""One noun for a call: everything that decides what is computed and by which backend, except T."""

from dataclasses import dataclass, fields
from enum import Enum
from functools import lru_cache
from typing import Any

import torch

from samebits.activation import Activation
from samebits.errors import must, unknown
from samebits.weights import Layout


class ProbPlacement(str, Enum):
    """Where the routing probability of a slot is multiplied in (CONTRACT section 3).

    The three agree only in exact arithmetic, so the placement is part of the problem.
    """

    # On the expert's input: Llama-4, Megatron's probs-on-input.
    FC1_INPUT = "fc1_input"
    # On the activation, before the second projection: Megatron, DeepSeek-V4's own code.
    FC2_INPUT = "fc2_input"
    # On the expert's output: transformers, vLLM, gpt-oss.
    FC2_OUTPUT = "fc2_output"

    def __str__(self) -> str:
        return self.value


DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Describe one kind of call: sizes, dtypes, options and device; hashable, without tensors.

    ``str(problem)`` is canonical and ``Problem.parse`` its inverse: it names tests, bench rows,
    checker results and errors.
    """

    # Hidden size.
    H: int
    # Expert (intermediate) size.
    F: int
    # Experts held here.
    E: int
    # Experts per token.
    K: int
    # Working dtype: bf16, fp16, fp32 or fp64.
    dtype: str
    # The model's experts; None means E.
    N: int | None = None
    # First of the experts held here.
    expert_start: int = 0
    activation: Activation = Activation()
    placement: ProbPlacement = ProbPlacement.FC2_OUTPUT
    layout: Layout = Layout()
    # Dtype of each bias; None where there is none.
    gate_up_bias: str | None = None
    down_bias: str | None = None
    # Dtype of topk_probs.
    probs: str = "fp32"
    # eps of the post-expert norm; None where there is none.
    norm_eps: float | None = None
    # Dtype of the output; None means dtype.
    out_dtype: str | None = None
    # A device-side count of live tokens is given.
    counted: bool = False
    # Some gradient is wanted.
    grad: bool = False
    # "cpu", or "sm_90" and so on; other device types by their name.
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("H", "F", "E", "K"):
            size = getattr(self, name)
            if size < 1:
                raise ValueError(must(name, "be >= 1", size))
        for name in ("dtype", "gate_up_bias", "down_bias", "probs", "out_dtype"):
            value = getattr(self, name)
            if value is not None and value not in DTYPES:
                raise ValueError(unknown(name, value, DTYPES))
        if self.out_dtype not in (None, self.dtype, "fp32"):
            raise ValueError(must("out_dtype", f"be {self.dtype} or fp32", self.out_dtype))
        if self.activation.gated:
            self.layout.block(self.F)
        if not 0 <= self.expert_start <= self.experts - self.E:
            last = f"expert_start + E = {self.expert_start} + {self.E}"
            rule = f"keep {last} within N = {self.experts}"
            raise ValueError(must("expert_start", rule, self.expert_start))

    @property
    def experts(self) -> int:
        """N: the number of the model's experts."""
        return self.E if self.N is None else self.N

    @property
    def result_dtype(self) -> str:
        """Dtype of the output."""
        return self.dtype if self.out_dtype is None else self.out_dtype

    def __str__(self) -> str:
        return _spell(self)

    @staticmethod
    def parse(text: str) -> "Problem":
        """Return the problem that ``text`` spells; the inverse of ``str(problem)``.

        Raises:
            ValueError: ``text`` holds an unknown field or a value of the wrong form.
        """
        readers: dict[str, Any] = dict.fromkeys(("H", "F", "E", "K", "N", "expert_start"), int)
        readers |= {
            "activation": Activation.parse,
            "placement": ProbPlacement,
            "layout": Layout.parse,
            "norm_eps": float,
            "counted": lambda value: value == "True",
            "grad": lambda value: value == "True",
        }
        known = [f.name for f in fields(Problem)]
        values: dict[str, Any] = {}
        for item in text.split():
            name, _, value = item.partition("=")
            if name not in known:
                raise ValueError(unknown("problem field", name, known))
            values[name] = readers.get(name, str)(value)
        return Problem(**values)


@lru_cache(maxsize=4096)
def _spell(problem: Problem) -> str:
    values = ((f, getattr(problem, f.name)) for f in fields(problem))
    return " ".join(f"{f.name}={value}" for f, value in values if value != f.default)
