"""Memory of the ranks' agreement, with a channel that answers for the other rank."""

import pytest
import torch.distributed as dist
from logitless.distributed import _agreement

pytestmark = pytest.mark.slow


class Group:
    """Stands for a process group as a key of the memory."""


class Channel:
    def __init__(self):
        self.others = {}

    def numbers(self, mine):
        return [mine, list(_agreement._Header(*mine)._replace(**self.others))]


@pytest.fixture
def agree(monkeypatch):
    """Returns agree(own, **others) -> the agreement of two ranks, where ``others`` changes fields of the other's
    header."""
    group, channel = Group(), Channel()
    monkeypatch.setattr(_agreement, "channel_of", lambda _: channel)
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)

    def call(own, **others):
        channel.others = others
        agreed = _agreement.agree(group, {"vocab_total": None, "seed": None}, own, None, "targets", 0)
        if agreed.new is not None:
            _agreement.keep(group, agreed)
        return agreed

    return call


@pytest.mark.parametrize("field, value", [("rows", 9), ("threads", 3), ("unaligned", 1)])
@pytest.mark.parametrize("of_this_rank", [False, True])
def test_a_change_of_one_rank_makes_all_plan_anew(agree, field, value, of_this_rank):
    own = _agreement.RankInfo(rows=8, vocab_start=-1, threads=2, unaligned=0)
    assert agree(own).new is not None
    assert agree(own).new is None
    kept = {field: getattr(own, field)}
    changed = agree(own._replace(**{field: value}), **kept) if of_this_rank else agree(own, **{field: value})
    assert changed.new is not None
    assert agree(own).new is None
