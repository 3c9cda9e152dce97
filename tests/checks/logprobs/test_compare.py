"""Two recordings side by side: every figure, every planted mistake, nothing that is not there."""

import json
import math

import pytest
import torch
from torch import Tensor

from samebits.checks.logprobs import Recording, compare, compare_models, record
from samebits.checks.logprobs.compare import Row
from samebits.checks.logprobs.figures import figures

pytestmark = pytest.mark.reference

SEQUENCES, LENGTH, VOCABULARY = 12, 60, 64


def _logits(seed: int = 0) -> Tensor:
    """Some positions are sure of themselves, some are not, as in a language model."""
    generator = torch.Generator().manual_seed(seed)
    sure = torch.rand(SEQUENCES, LENGTH, 1, generator=generator) * 4 + 0.5
    return torch.randn(SEQUENCES, LENGTH, VOCABULARY, generator=generator) * sure


LOGITS = _logits()
TOKENS = (LOGITS + torch.rand_like(LOGITS).log().neg().log().neg()).argmax(-1)


def _log_probs(logits: Tensor = LOGITS) -> Tensor:
    return logits.double().log_softmax(-1).gather(-1, TOKENS[..., None])[..., 0]


def _noisy(values: Tensor, size: float = 0.003, seed: int = 1) -> Tensor:
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed)).double()
    return (values + size * noise).clamp(max=-1e-9)


def _recording(values: Tensor, name: str = "b", **more: object) -> Recording:
    return Recording(name=name, log_probs=list(values), **more)  # type: ignore[arg-type]


A = _recording(_log_probs(), "a")


def _verdicts(rows: list[Row]) -> dict[str, str]:
    return {row.case: row.verdict for row in rows}


def _row(rows: list[Row], case: str) -> Row:
    return next(row for row in rows if row.case == case)


def test_figures_are_what_they_say() -> None:
    change = torch.tensor([0.0, 0.2, -0.2, 0.0, 0.4])

    found = figures([change[:2], change[2:]])

    assert set(found) == {"mean", "p95", "p99", "max", "outside_share", "k3"}
    assert found["mean"] == change.double().abs().mean()
    assert found["max"] == float(change[4])
    assert abs(found["p95"] - float(change.double().abs().quantile(0.95))) < 1e-12
    assert abs(found["outside_share"] - 3 / 5) < 1e-12
    k3 = [math.exp(d) - 1 - d for d in change.tolist()]
    assert abs(found["k3"] - sum(k3) / 5) < 1e-12


def test_bias_shows_in_the_sum_and_noise_does_not() -> None:
    noise = 0.01 * torch.sign(torch.randn(64, 200, generator=torch.Generator().manual_seed(0)))

    biased = figures(list(torch.full((64, 200), 0.01)))
    fair = figures(list(noise))

    assert abs(biased["mean"] - fair["mean"]) < 1e-6
    assert abs(biased["sum_100"] - 1.0) < 1e-6
    # √(2/π) · 0.01 · √100 for the sum of 100 fair signs.
    assert 0.06 < fair["sum_100"] < 0.1


def test_the_same_recording_passes_with_no_gap() -> None:
    rows = compare(A, _recording(_log_probs()), control=A, allowed=0.0)

    assert set(_verdicts(rows).values()) == {"pass"}
    assert _row(rows, "gap").measured == 0.0


def test_noise_alone_has_no_cause() -> None:
    rows = compare(A, _recording(_noisy(_log_probs(), 0.3)))

    expected = {"gap": "fail", "masking": "pass", "shift": "pass", "temperature": "pass"}
    assert _verdicts(rows) == expected


def test_another_model_has_no_cause() -> None:
    other = LOGITS + 0.8 * torch.randn(LOGITS.shape, generator=torch.Generator().manual_seed(2))

    rows = compare(A, _recording(_log_probs(other)))

    expected = {"gap": "fail", "masking": "pass", "shift": "pass", "temperature": "pass"}
    assert _verdicts(rows) == expected


def test_a_few_far_tokens_have_no_cause() -> None:
    """A dropped option moves few tokens, and those far: no part of a sequence is to blame."""
    far = torch.rand(LOGITS.shape[:2], generator=torch.Generator().manual_seed(5)) < 0.01
    far[:, :20] = False
    values = _noisy(_log_probs()) - 6.0 * far

    rows = compare(A, _recording(values))

    expected = {"gap": "fail", "masking": "pass", "shift": "pass", "temperature": "pass"}
    assert _verdicts(rows) == expected


@pytest.mark.parametrize(("lag", "words"), [(1, "1 position later"), (-2, "2 positions earlier")])
def test_a_shift_is_named(lag: int, words: str) -> None:
    rows = compare(A, _recording(_noisy(_log_probs().roll(lag, 1))))

    assert _verdicts(rows)["shift"] == "fail"
    assert words in _row(rows, "shift").note
    assert _verdicts(rows)["temperature"] == "not_run"


@pytest.mark.parametrize("temperature", [0.6, 0.8, 0.9, 1.1, 1.25, 1.5])
def test_a_temperature_is_named_and_estimated(temperature: float) -> None:
    rows = compare(A, _recording(_noisy(_log_probs(LOGITS / temperature))))

    row = _row(rows, "temperature")
    assert row.verdict == "fail"
    said = float(row.note.partition("about ")[2].partition(" times")[0])
    assert (said > 1) == (temperature > 1)
    assert abs(math.log(said) - math.log(temperature)) < 0.5 * abs(math.log(temperature))
    assert _verdicts(rows)["shift"] == _verdicts(rows)["masking"] == "pass"


def test_a_prompt_that_one_side_masks_is_named() -> None:
    values = _noisy(_log_probs())
    values[:, :5] = 0.0

    for rows in (compare(A, _recording(values)), compare(_recording(values), A)):
        assert "exactly 0" in _row(rows, "masking").note
        assert "sequence 0, token" in _row(rows, "masking").note


def test_masks_that_differ_are_named_even_where_the_gap_is_small() -> None:
    masks = torch.ones(SEQUENCES, LENGTH, dtype=torch.bool)
    masks[:, :4] = False
    late = masks.clone()
    late[3, 4] = False
    a = _recording(_log_probs(), "a", masks=list(masks))

    rows = compare(a, _recording(_noisy(_log_probs()), masks=list(late)))

    assert _verdicts(rows)["gap"] == "pass"
    assert "masks differ at 1 tokens; first: a: sequence 3, token 4" in _row(rows, "masking").note


def test_one_mask_holds_for_both() -> None:
    masks = torch.ones(SEQUENCES, LENGTH, dtype=torch.bool)
    masks[:, 0] = False
    values = _log_probs()
    values[:, 0] = float("nan")
    a = _recording(values, "a", masks=list(masks))

    rows = compare(a, _recording(_log_probs()))

    assert set(_verdicts(rows).values()) == {"pass"}


def test_padding_that_is_attended_to_is_named() -> None:
    lengths = [LENGTH if index % 3 == 0 else 30 + index for index in range(SEQUENCES)]
    a = [row[:n] for row, n in zip(_log_probs(), lengths, strict=True)]
    wrong = _noisy(_log_probs(), 0.5)
    right = _noisy(_log_probs())
    b = [(right if n == LENGTH else wrong)[i][:n] for i, n in enumerate(lengths)]

    rows = compare(Recording(name="a", log_probs=a), Recording(name="b", log_probs=b))

    assert "padding is attended to" in _row(rows, "masking").note


@pytest.mark.parametrize(("part", "words"), [(slice(40, None), "from 40"), (slice(6), "before 6")])
def test_a_gap_on_one_side_of_a_position_is_named(part: slice, words: str) -> None:
    values = _noisy(_log_probs())
    values[:, part] = _noisy(_log_probs(), 0.5)[:, part]

    note = _row(compare(A, _recording(values)), "masking").note

    side, _, place = words.partition(" ")
    assert f"only tokens {side} position " in note
    assert abs(int(note.partition("position ")[2].partition(" ")[0]) - int(place)) <= 2


def test_the_control_decides_what_is_allowed() -> None:
    noisy = _recording(_noisy(_log_probs(), 0.05, seed=7), "a again")
    b = _recording(_noisy(_log_probs(), 0.05))

    assert _verdicts(compare(A, b))["gap"] == "fail"
    rows = compare(A, b, control=noisy)
    assert _verdicts(rows)["gap"] == "pass"
    assert _row(rows, "gap").allowed == 2 * (_row(rows, "control").measured or 0)


def test_rows_travel_as_json() -> None:
    far = _log_probs()
    far[0, 0] = -2000.0

    lines = [json.loads(row.to_json()) for row in compare(_recording(far, "a"), A)]

    assert lines[0]["check"] == "logprobs"
    assert lines[0]["figures"]["k3"] is None
    assert lines[0]["figures"]["max"] > 1000


def _model(table: Tensor, temperature: float = 1.0):  # type: ignore[no-untyped-def]
    def model(tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        del attention_mask
        return table[tokens] / temperature

    return model


def test_two_models_of_this_process() -> None:
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 3
    tokens = TOKENS[:, :40]

    same = compare_models(_model(table), _model(table), tokens, allowed=0.0)
    hot = compare_models(_model(table), _model(table, 1.3), tokens)

    assert set(_verdicts(same).values()) == {"pass"}
    assert "control" in _verdicts(same)
    assert _verdicts(hot)["temperature"] == "fail"


def test_a_recorded_model_leaves_padding_out() -> None:
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3))
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[1, :2] = 0

    found = record(_model(table), TOKENS[:2, :6], name="m", mask=mask)

    assert found.mask(0).tolist() == [True] * 5
    assert found.mask(1).tolist() == [False, False, True, True, True]
    expected = table[TOKENS[0, 0]].double().log_softmax(-1)[TOKENS[0, 1]]
    assert float(found.log_probs[0][0]) == float(expected)


def test_shapes_of_models_are_checked() -> None:
    def flat(tokens: Tensor) -> Tensor:
        return torch.zeros(tokens.shape[0], VOCABULARY)

    with pytest.raises(ValueError, match="model m must return logits of shape"):
        record(flat, TOKENS, name="m")
    with pytest.raises(ValueError, match="tokens must have shape"):
        record(flat, TOKENS[0], name="m")
    with pytest.raises(ValueError, match="mask must have the shape of tokens"):
        record(flat, TOKENS, name="m", mask=torch.ones(3, 3))
    with pytest.raises(ValueError, match="allowed must be finite and >= 0"):
        compare(A, A, allowed=float("nan"))


def _of_a_table(scale: float, change: float) -> tuple[Tensor, Tensor]:
    """Log-probs of a chain of tokens and of a disturbed one: few states, seen again and again."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(50, 50, generator=generator) * scale
    tokens = torch.zeros(40, 60, dtype=torch.long)
    for place in range(1, 60):
        chances = table[tokens[:, place - 1]].softmax(-1)
        tokens[:, place] = torch.multinomial(chances, 1, generator=generator)[:, 0]
    other = table + change * torch.randn(table.shape, generator=generator)
    first, second = (
        t.double().log_softmax(-1)[tokens[:, :-1], tokens[:, 1:]] for t in (table, other)
    )
    return first, second


@pytest.mark.parametrize(("scale", "change"), [(3.0, 0.5), (3.0, 2.0), (6.0, 0.5)])
def test_other_weights_are_no_temperature_where_sequences_repeat(scale, change) -> None:
    first, second = _of_a_table(scale, change)

    rows = compare(_recording(first, "a"), _recording(second))

    assert _row(rows, "gap").verdict == "fail"
    assert _row(rows, "temperature").verdict in ("pass", "not_run")


def test_the_position_from_which_tokens_are_off_is_the_first_that_is() -> None:
    values = _log_probs()
    wrong = values.clone()
    wrong[:, 30:] = _log_probs(LOGITS + _logits(seed=3))[:, 30:]

    row = _row(compare(A, _recording(wrong)), "masking")

    assert row.verdict == "fail"
    assert "from position 30 are off" in row.note


def test_a_shift_that_leaves_a_gap_says_so() -> None:
    rows = compare(A, _recording(_log_probs(LOGITS / 1.3).roll(1, 1)))

    assert _row(rows, "shift").verdict == "fail"
    assert "compare again when this is mended" in _row(rows, "shift").note


@pytest.mark.parametrize(
    ("model", "tokens", "message"),
    [
        (lambda t: None, TOKENS, "model b must return logits, or an object"),
        (lambda t: (LOGITS,), TOKENS, "model b must return logits, or an object"),
        (lambda t: torch.tensor(1.0), TOKENS, "model b must return logits of shape"),
        (lambda t: torch.zeros(*t.shape, 32), TOKENS, "be ids below 32, the vocabulary of model b"),
        (lambda t: torch.zeros(*t.shape, 64), TOKENS.float(), "be ids: whole numbers >= 0"),
        (lambda t: torch.zeros(*t.shape, 64), TOKENS - 1, "be ids: whole numbers >= 0"),
    ],
)
def test_models_that_cannot_be_compared_are_refused(model, tokens, message) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        compare_models(lambda t: torch.zeros(*t.shape, 64), model, tokens)
