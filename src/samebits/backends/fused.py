"""Triton on a GPU: metadata, first projection with the activation in its epilogue, second, combine.

Four launches (five for many tokens, two for very few) forward and no host sync; every shape is a
function of T, so a call can be captured in a CUDA graph. Tiles follow T, bits do not: every tile of
the table computes the same. The table is evidence for sm_90; another architecture has one tile for
every T.
"""

from collections.abc import Mapping

from torch import Tensor

from samebits.backends import device_gradients
from samebits.backends.call import Call, Gradients, why_no_kernels
from samebits.backends.matrices import matrix_of, tiles_of
from samebits.backends.stages import combined, factors, metadata_of, second_dtype
from samebits.ops.indirect_gemm.tuning import Config
from samebits.ops.permute.tuning import Metadata
from samebits.ops.slot_gemm import tuning as slot_tuning
from samebits.problem import DTYPES, Problem, ProbPlacement
from samebits.weight_gradients import Buffer
from samebits.weights import ExpertWeights

NAME = "fused"


def why_not(problem: Problem) -> str | None:
    """Return why this backend cannot run ``problem``, or None.

    Determinism: pure function of the problem.
    """
    if not problem.device.startswith("sm_"):
        return f"it needs an NVIDIA GPU, not {problem.device}"
    if problem.row_format is not None:
        return "it has no activations in 8 bits"
    return why_no_kernels(problem)


def notes(problem: Problem) -> str | None:
    """Return None: all promises of the contract hold."""
    return None


def forward(problem: Problem, call: Call, *, save: bool) -> tuple[Tensor, Tensor]:
    """Return ``(out, z)``; see ``samebits.experts``. ``z`` is (R, 2F or F) by row, if ``save``.

    Determinism: repeatable; each row independent of T and of the other rows.
    """
    # Imported here: naming the backend must not need Triton.
    from samebits.ops.indirect_gemm.kernel import launch_second_projection

    tokens = call.topk_ids.shape[0]
    tiles = slot_tuning.heuristic(tokens, problem.K, problem.E, problem.device, problem.dtype)
    plain = problem.format is None and problem.norm_eps is None
    if tiles is not None and tokens and not save and plain:
        return _by_slot(problem, call, tiles), call.x.new_empty(0, call.gate_up.shape[1])
    h, z, metadata, second, upcast = _first_projection(problem, call, save=save)
    y = launch_second_projection(
        h,
        metadata.slots,
        metadata.tiles,
        matrix_of(problem, call, "down", metadata.offsets, upcast=upcast),
        call.down_bias,
        factors(problem, call)[ProbPlacement.FC2_INPUT],
        second,
        dtype=second_dtype(problem),
    )
    out = combined(problem, call, y, metadata)
    return out, call.x.new_empty(0, call.gate_up.shape[1]) if z is None else z


def recomputed(problem: Problem, call: Call) -> Tensor:
    """Return z alone, as ``forward`` saves it.

    Determinism: that of ``forward``.
    """
    z = _first_projection(problem, call, save=True)[1]
    assert z is not None
    return z


def _first_projection(
    problem: Problem, call: Call, *, save: bool
) -> tuple[Tensor, Tensor | None, Metadata, Config, bool]:
    """Return h and, if ``save``, z by row; the metadata; the second tile, and if it upcasts."""
    from samebits.ops.indirect_gemm.kernel import First, launch_first_projection
    from samebits.ops.permute.kernel import launch_permute

    first, second, upcast = tiles_of(problem, call)
    metadata = metadata_of(problem, call, first.block_r)
    placed = factors(problem, call)
    # Sorted rows lie where they are multiplied.
    x, gather = call.x, call.offsets is None
    if problem.placement == ProbPlacement.FC1_INPUT:
        x = launch_permute(call.x, metadata.inverse, problem.K, placed[ProbPlacement.FC1_INPUT])
        gather = False
    h, z = launch_first_projection(
        x,
        metadata.slots,
        metadata.tiles,
        First(
            matrix_of(problem, call, "gate_up", metadata.offsets, upcast=upcast),
            call.gate_up_bias,
            problem.layout,
        ),
        problem.activation,
        placed[ProbPlacement.FC2_INPUT],
        first,
        topk=problem.K,
        gather=gather,
        save=save,
    )
    return h, z, metadata, second, upcast


def _weights(problem: Problem, call: Call) -> ExpertWeights:
    return ExpertWeights(
        gate_up=call.gate_up,
        down=call.down,
        gate_up_bias=call.gate_up_bias,
        down_bias=call.down_bias,
        layout=problem.layout,
    )


def _by_slot(problem: Problem, call: Call, tiles: slot_tuning.Tiles) -> Tensor:
    """Return the output of few tokens: two launches, nothing is sorted."""
    from samebits.ops.slot_gemm.kernel import launch_slot_hidden, launch_token_output

    # Before the first launch: nothing may run between the two, see launch_token_output.
    probs, ids = call.topk_probs.contiguous(), call.topk_ids.contiguous()
    bias = None if call.down_bias is None else call.down_bias.contiguous()
    placement, out = problem.placement, call.out
    if out is None:
        out = call.x.new_empty(call.x.shape, dtype=DTYPES[problem.result_dtype])
    h = launch_slot_hidden(
        call.x,
        ids,
        _weights(problem, call),
        problem.activation,
        probs,
        placement,
        tiles.hidden,
        expert_start=problem.expert_start,
        num_valid_tokens=call.num_valid_tokens,
        early=tiles.early,
    )
    return launch_token_output(
        h,
        ids,
        call.down,
        bias,
        probs,
        placement,
        out,
        tiles,
        expert_start=problem.expert_start,
        num_valid_tokens=call.num_valid_tokens,
    )


def backward(
    problem: Problem,
    call: Call,
    z: Tensor,
    dout: Tensor,
    wanted: tuple[bool, ...],
    into: Mapping[str, Buffer],
    *,
    spend: bool = False,
) -> Gradients:
    """Return the wanted gradients from ``z``; recomputes h.

    ``spend``: z is not needed again, its memory may be given back before the end.

    Determinism: repeatable; rows ascend in every sum over rows; dx is independent of T and of the
    other rows.
    """
    return device_gradients.backward(problem, call, z, dout, wanted, into, spend=spend)
