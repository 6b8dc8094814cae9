"""Labels of sequences that are cut over ranks."""

import logitless
import pytest
import torch

pytestmark = pytest.mark.slow

SEQUENCES = torch.arange(24).view(2, 12)


def shifted(mesh, shift):
    part = SEQUENCES.chunk(mesh.size(), dim=1)[mesh.get_rank()]
    return logitless.distributed.next_labels(part, group=mesh.get_group(), shift=shift)


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_the_next_rank_has_the_last_label(three, shift):
    expected = torch.cat((SEQUENCES[:, shift:], torch.full((2, shift), -100)), dim=1)
    assert torch.equal(torch.cat(three(shifted, shift), dim=1), expected)


def test_a_part_that_is_too_short():
    with pytest.raises(ValueError, match="shift: expected 0 <= shift <= the last size of labels"):
        logitless.distributed.next_labels(SEQUENCES, shift=13)
