"""The hosts' channel of groups without a host backend, such as NCCL's. Groups of gloo stand in for them."""

import contextlib
import warnings

import pytest
import torch.distributed as dist
from logitless.distributed import _channel

from groups import sequence_cases
from groups.ranks import sizes


@contextlib.contextmanager
def without_host_backend(ranks, has_gloo=True):
    """Gives groups a device backend only, within the block. With has_gloo False, rank 1 has no gloo beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_channel, "_has_host_backend", lambda group: False)
        patch.setattr(_channel, "_device_of", lambda group: ranks.device)
        if not has_gloo and ranks.rank == 1:
            patch.setattr(_channel, "_has_gloo_device", lambda: False)
        group = dist.new_group(list(range(ranks.size)))
        try:
            yield ranks.within(group)
        finally:
            dist.destroy_process_group(group)


def heads_in_turn(ranks):
    sequence_cases.case_two_vocabularies_cut_by_ceil(ranks)
    sequence_cases.case_ranks_that_mean_other_heads(ranks)
    sequence_cases.case_targets_that_differ(ranks)
    sequence_cases.case_a_rank_that_has_forgotten(ranks)


@sizes(2, 3)
def case_a_gloo_connection_beside_the_group(ranks):
    with without_host_backend(ranks) as beside, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        heads_in_turn(beside)
        assert isinstance(_channel.channel_of(beside.group)._link(), dist.ProcessGroupGloo)


@sizes(2, 3)
def case_one_rank_without_gloo(ranks):
    """All ranks use the group itself."""
    with without_host_backend(ranks, has_gloo=False) as alone:
        with pytest.warns(RuntimeWarning, match="each call waits for the device"):
            assert _channel.channel_of(alone.group)._link() is alone.group
        heads_in_turn(alone)


@sizes(2, 3)
def case_objects_of_any_size(ranks):
    for size in (0, 1, 300, 70000):
        mine = ("x" * (size * ranks.rank), ranks.rank)
        assert _channel.channel_of(ranks.group).objects(mine) == [("x" * (size * i), i) for i in range(ranks.size)]
