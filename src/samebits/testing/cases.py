"""The catalogue of named problems: tests, checks and benchmarks take their cases from here.

Small cases have pairwise different sizes (H 48, F 80, E 5, K 3) so that a transposed matrix or a
swapped dimension cannot pass. A new shape or option is one line here, not a new test.
"""

from dataclasses import replace

from samebits.activation import Activation
from samebits.formats.descriptor import FormatPair
from samebits.problem import Problem, ProbPlacement
from samebits.weights import Layout

_SMALL = Problem(H=48, F=80, E=5, K=3, dtype="fp32", grad=True)
_GPT_OSS = Activation(alpha=1.702, limit=2.0, linear_offset=1.0)
_BIASED = replace(_SMALL, gate_up_bias="fp32", down_bias="fp32")


def _activations() -> dict[str, Problem]:
    kinds = {
        "swiglu": Activation(),
        "swiglu-alpha": Activation(alpha=1.702),
        "swiglu-limit": Activation(limit=2.0),
        "swiglu-limit-post": Activation(limit=1.0, limit_position="post"),
        "swiglu-offset": Activation(linear_offset=0.25),
        "gpt-oss": _GPT_OSS,
        "geglu": Activation(kind="gelu"),
        "geglu-tanh": Activation(kind="gelu_tanh"),
        "geglu-tanh-limit": Activation(kind="gelu_tanh", limit=2.0),
        "reglu": Activation(kind="relu"),
        "relu2-glu": Activation(kind="relu2"),
        "situ": Activation(kind="situ", gate_softcap=4.0, up_softcap=5.0),
        "situ-gate": Activation(kind="situ", gate_softcap=4.0),
        "relu2": Activation(kind="relu2", gated=False),
        "gelu": Activation(kind="gelu", gated=False),
        "silu": Activation(kind="silu", gated=False),
    }
    return {name: replace(_SMALL, activation=activation) for name, activation in kinds.items()}


def _options() -> dict[str, Problem]:
    cases = {
        "interleave-1": replace(_SMALL, layout=Layout(interleave=1)),
        "interleave-16": replace(_SMALL, layout=Layout(interleave=16)),
        "up-first": replace(_SMALL, layout=Layout(up_first=True)),
        "interleave-1-up-first": replace(_SMALL, layout=Layout(interleave=1, up_first=True)),
        "biases": _BIASED,
        "gpt-oss-whole": replace(_BIASED, activation=_GPT_OSS, layout=Layout(interleave=1)),
        "norm": replace(_SMALL, norm_eps=1e-5),
        "norm-fc2-input": replace(_SMALL, norm_eps=1e-5, placement=ProbPlacement.FC2_INPUT),
        "local-experts": replace(_SMALL, N=9, expert_start=3),
        "counted": replace(_SMALL, counted=True),
        "one-expert": replace(_SMALL, E=1, K=1),
        "more-slots-than-experts": replace(_SMALL, E=2),
        "every-expert": replace(_SMALL, K=5),
        "odd-sizes": replace(_SMALL, H=63, F=100, E=7),
        "tiny-sizes": replace(_SMALL, H=7, F=1, E=3, K=2),
        "many-experts": replace(_SMALL, E=72, K=8),
    }
    for placement in ProbPlacement:
        cases[f"{placement}"] = replace(_BIASED, placement=placement)
        cases[f"{placement}-plain"] = replace(_SMALL, placement=placement)
    return cases


def _dtypes() -> dict[str, Problem]:
    whole = replace(_BIASED, activation=_GPT_OSS, layout=Layout(interleave=1))
    cases = {}
    for dtype in ("bf16", "fp16", "fp64"):
        probs = "fp64" if dtype == "fp64" else "fp32"
        same = replace(whole, dtype=dtype, gate_up_bias=dtype, down_bias=dtype, probs=probs)
        cases[f"{dtype}"] = replace(same, activation=Activation(), layout=Layout())
        cases[f"{dtype}-gpt-oss"] = same
    low = replace(whole, dtype="bf16")
    cases["bf16-fp32-biases"] = low
    cases["fp64-fp32-biases"] = replace(whole, dtype="fp64", probs="fp64")
    cases["bf16-probs"] = replace(low, probs="bf16", gate_up_bias="bf16", down_bias="bf16")
    cases["bf16-out-fp32"] = replace(_SMALL, dtype="bf16", out_dtype="fp32")
    return cases


# Small problems that every backend is held to.
CASES: dict[str, Problem] = _activations() | _options() | _dtypes()


def _quantized() -> dict[str, Problem]:
    whole = CASES["bf16-gpt-oss"]
    cases = {}
    for key in ("fp8_128x128", "fp8_16x32/fp8_32x16", "mxfp8", "mxfp4", "nvfp4"):
        name = key.replace("/", "-")
        cases[f"{name}-gpt-oss"] = replace(whole, format=FormatPair.parse(key))
    shuffled = FormatPair.parse("mxfp4_shuffled")
    cases["mxfp4_shuffled-gpt-oss"] = replace(whole, H=192, F=64, format=shuffled)
    cases["mxfp4-odd-sizes"] = replace(
        _SMALL, H=63, F=33, E=7, dtype="fp16", format=FormatPair.parse("mxfp4")
    )
    cases["nvfp4-norm-fc2-input"] = replace(
        cases["nvfp4-gpt-oss"], norm_eps=1e-5, placement=ProbPlacement.FC2_INPUT
    )
    return cases


# The same for weights in formats, which functions of others do not take.
QUANTIZED: dict[str, Problem] = _quantized()

# The shapes of real models, one GPU's share; bf16, plain SwiGLU unless the model says otherwise.
MODELS: dict[str, Problem] = {
    "qwen3-30b": Problem(H=2048, F=768, E=128, K=8, dtype="bf16"),
    "mixtral": Problem(H=4096, F=14336, E=8, K=2, dtype="bf16"),
    "gpt-oss-120b": Problem(H=2880, F=2880, E=128, K=4, dtype="bf16"),
    "deepseek-v3": Problem(H=7168, F=2048, E=64, K=8, dtype="bf16"),
    "llama4-scout": Problem(H=5120, F=8192, E=16, K=1, dtype="bf16"),
}
