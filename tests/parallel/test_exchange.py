import pytest
import torch

from samebits.ops.permute import combine, permute, sort_slots
from samebits.parallel import copies
from samebits.parallel.exchange import room_for, take

pytestmark = pytest.mark.reference


def test_room_is_close_and_one_of_few_numbers() -> None:
    rooms = [room_for(rows) for rows in range(100_000)]

    assert all(rows <= room <= rows + rows // 32 for rows, room in enumerate(rooms))
    assert rooms[:64] == list(range(64))
    # 32 of them between a power of two and the next.
    assert len(set(rooms[32768:65536])) == 33


def test_take_with_a_number_for_what_is_missing_and_without() -> None:
    rows, index = torch.arange(6.0).view(3, 2), torch.tensor([2, 3, 0])

    assert take(rows, index, -1.0).tolist() == [[4, 5], [-1, -1], [0, 1]]
    assert take(rows, index, None)[::2].tolist() == [[4, 5], [0, 1]]
    assert take(rows[:0], index * 0, None).shape == (3, 2)
    assert take(rows[:0], index * 0, float("nan")).isnan().all()


def test_copies_are_those_of_permute() -> None:
    ids = torch.tensor([[2, 0], [-1, 1], [0, 2]])
    x, probs = torch.randn(3, 4), torch.rand(3, 2)
    count = torch.tensor([2], dtype=torch.int32)
    for valid in (None, count):
        mine, expected = copies.sort(ids, 3, valid), sort_slots(ids, 3, num_valid_tokens=valid)

        assert all(torch.equal(a, b) for a, b in zip(mine[:3], expected[:3], strict=True))
    inverse = copies.sort(ids, 3, None).inverse
    rows = copies.permute(x, inverse, 2, probs)

    assert torch.equal(rows, permute(x, inverse, 2, probs))
    assert torch.equal(
        copies.combine(rows, inverse, 2, probs), combine(rows, inverse, 2, topk_probs=probs)
    )
