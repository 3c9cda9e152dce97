"""The floors and peers of the layer benchmark, and its refusals; nothing is timed."""

import math
from pathlib import Path

import pytest
import torch

from samebits.testing.cases import MODELS

pytestmark = pytest.mark.reference

BENCH = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def bench_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def _sets(problem, tokens):
    ids = torch.arange(tokens * problem.K).view(tokens, problem.K) % problem.E
    return [(None, ids, None)]


def test_floor_is_arithmetic_or_bytes() -> None:
    from layer_cases import floor_ms

    mixtral, scout = MODELS["mixtral"], MODELS["llama4-scout"]

    # As the recorded peers were judged: 14.6 ms of arithmetic, 0.0585 ms of one expert's weights.
    assert round(floor_ms(mixtral, 16384, _sets(mixtral, 16384)), 1) == 14.6
    assert round(floor_ms(scout, 1, _sets(scout, 1)), 4) == 0.0585


def test_staged_counts_tiles_and_launches() -> None:
    from layer_cases import LAUNCH_MS, Rates, staged_ms

    problem = MODELS["qwen3-30b"]
    cheap = Rates(flop_per_ms=math.inf, byte_per_ms=math.inf)
    arithmetic = Rates(flop_per_ms=1e12, byte_per_ms=math.inf)
    one = [(None, torch.zeros(1, problem.K, dtype=torch.int64), None)]

    assert staged_ms(problem, 1, one, cheap) == 4 * LAUNCH_MS
    # Eight slots of one expert are a tile of 64 rows.
    flop = 6 * 64 * problem.H * problem.F
    found = staged_ms(problem, 1, one, arithmetic)
    assert round(found, 9) == round(4 * LAUNCH_MS + flop / 1e12, 9)


def test_the_fastest_peer_is_of_the_run_or_recorded_and_scaled() -> None:
    from layer_peers import best_peer, recorded, speed_of_this_machine

    record = recorded("qwen3-30b", 1024)
    row = {
        "shape": "qwen3-30b", "T": 1024, "routing": "uniform", "variant": "plain",
        "ms": {"fused": 0.3, "torch grouped_mm": 2 * record["torch_gmm"]},
    }  # fmt: skip

    speed = speed_of_this_machine([row])
    name, ms = best_peer(row, speed)

    assert speed == 2.0
    assert (name, ms) == ("vllm (recorded)", 2 * min(record.values()))
    assert best_peer(row | {"routing": "zipf"}, speed)[0] == "torch grouped_mm"
    assert math.isnan(best_peer(row | {"routing": "zipf", "ms": {"fused": 0.3}}, speed)[1])
    assert math.isnan(speed_of_this_machine([]))


def test_every_cell_has_recorded_peers() -> None:
    from layer_cases import QUICK, TOKENS
    from layer_peers import recorded

    assert all(recorded(shape, tokens) for shape in MODELS for tokens in TOKENS)
    assert all(shape in MODELS and tokens in TOKENS for shape, tokens in QUICK)


def test_cells_are_read_strictly() -> None:
    from layer_cases import cells_of

    assert cells_of("qwen3-30b:1,mixtral:64") == [("qwen3-30b", 1), ("mixtral", 64)]
    for text in ("qwen3", "qwen3-30b", "qwen3-30b:x", "gpt:1"):
        with pytest.raises(SystemExit, match="a cell looks like"):
            cells_of(text)


def test_a_full_run_has_every_cell_its_options_and_some_other_routings() -> None:
    import layer
    import layer_cases

    whole = layer_cases.jobs_of(layer.parser().parse_args(["--full"]))
    quick = layer_cases.jobs_of(layer.parser().parse_args(["--quick"]))

    plain = [(shape, cells) for shape, variant, cells in whole[: len(MODELS)]]
    assert [shape for shape, _ in plain] == list(MODELS)
    assert all([r for r, _ in cells] == ["uniform"] * 7 for _, cells in plain)
    options = [(shape, variant) for shape, variant, _ in whole if variant != "plain"]
    assert options == [("gpt-oss-120b", "gpt-oss"), ("llama4-scout", "fc1_input")]
    assert all(("one", 1024) in cells for _, _, cells in whole[-len(MODELS) :])
    assert sum(len(cells) for _, _, cells in quick) == 10


def test_what_options_cost_is_taken_from_the_plain_row() -> None:
    import stored_rows

    def row(variant: str, ms: float) -> dict[str, object]:
        return {
            "shape": "llama4-scout", "T": 64, "routing": "uniform", "variant": variant,
            "ms": {"fused": ms}, "floor_ms": 1.0, "staged_ms": 1.0, "error": {}, "wrong": [],
        }  # fmt: skip

    whole = {"rows": [row("plain", 2.0), row("fc1_input", 2.5)], "speed": 1.0}
    cells = [cell for cell in stored_rows.cells(whole) if cell["candidate"] == "samebits"]

    assert "over_plain" not in cells[0]
    assert (cells[1]["over_plain"], cells[1]["beyond_plain_ms"]) == (1.25, 0.5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_says_that_it_needs_a_gpu() -> None:
    import layer

    with pytest.raises(SystemExit, match="no CUDA device here"):
        layer.main(["--quick"])
