"""One noun for a call: everything that decides what is computed and by which backend, except T."""

import re
from dataclasses import dataclass, fields
from enum import Enum
from functools import lru_cache

import torch

from samebits.activation import Activation
from samebits.arguments import (
    Reader,
    read_bool,
    read_options,
    require_bool,
    require_int,
    require_name,
    require_number,
    require_type,
)
from samebits.errors import must
from samebits.formats.descriptor import FormatPair, WeightFormat, check_row_format
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

    @classmethod
    def _missing_(cls, value: object) -> None:
        require_name("placement", value, [placement.value for placement in cls])


# How the architecture of an NVIDIA GPU is spelled.
_ARCHITECTURE = re.compile(r"sm_[1-9][0-9]+")

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
    # Formats of the projections; None means that they are stored in dtype.
    format: FormatPair | None = None
    # Format of the rows that are multiplied with quantised weights; None means that they stay in
    # dtype.
    row_format: WeightFormat | None = None
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
            require_int(name, getattr(self, name), minimum=1)
        if self.N is not None:
            require_int("N", self.N)
        require_int("expert_start", self.expert_start)
        require_type("activation", self.activation, Activation)
        require_type("placement", self.placement, ProbPlacement)
        require_type("layout", self.layout, Layout)
        _check_formats(self)
        for name in ("dtype", "gate_up_bias", "down_bias", "probs", "out_dtype"):
            value = getattr(self, name)
            if value is not None or name in ("dtype", "probs"):
                require_name(name, value, DTYPES)
        if self.norm_eps is not None:
            eps = require_number("norm_eps", self.norm_eps, above=0.0)
            object.__setattr__(self, "norm_eps", eps)
        require_bool("counted", self.counted)
        require_bool("grad", self.grad)
        require_type("device", self.device, str)
        _check_device(self.device)
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
        readers: dict[str, Reader] = {f.name: str for f in fields(Problem)}
        readers |= dict.fromkeys(("H", "F", "E", "K", "N", "expert_start"), int)
        readers |= {
            "activation": Activation.parse,
            "placement": ProbPlacement,
            "layout": Layout.parse,
            "format": FormatPair.parse,
            "row_format": WeightFormat.parse,
            "norm_eps": float,
            "counted": read_bool,
            "grad": read_bool,
        }
        values = read_options("problem field", text.split(), readers)
        missing = [name for name in ("H", "F", "E", "K", "dtype") if name not in values]
        if missing:
            raise ValueError(must("the problem", f"state {', '.join(missing)}", repr(text)))
        return Problem(**values)


def _check_formats(problem: Problem) -> None:
    weights = problem.format
    if weights is not None:
        require_type("format", weights, FormatPair)
        weights.gate_up.check_columns(problem.H)
        weights.down.check_columns(problem.F)
    if problem.row_format is not None:
        check_row_format(problem.row_format, weights)


@lru_cache(maxsize=64)
def _check_device(device: str) -> None:
    if _ARCHITECTURE.fullmatch(device):
        return
    rule = "be 'cpu', the architecture of an NVIDIA GPU, such as 'sm_90', or a device type of torch"
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ValueError(must("device", rule, repr(device))) from None
    if place.type == "cuda" or place.index is not None:
        raise ValueError(must("device", rule, repr(device)))


@lru_cache(maxsize=4096)
def _spell(problem: Problem) -> str:
    values = ((f, getattr(problem, f.name)) for f in fields(problem))
    return " ".join(f"{f.name}={value}" for f, value in values if value != f.default)
