"""Two heads in turn whose shards have as many rows on one rank; on GPUs with NCCL, where hosts compare beside it."""

import logitless.distributed
import pytest
import torch
from client_oracle import excess, factors, loss_and_gradients

pytestmark = pytest.mark.slow

TOKENS, D = 96, 64
VOCABS = (100, 99)
SMOOTHING = 0.1


def head(vocab, step):
    generator = torch.Generator().manual_seed(1000 * step + vocab)
    hidden = torch.randn(TOKENS, D, generator=generator) / D**0.5
    weight = torch.randn(vocab, D, generator=generator)
    target = torch.randint(0, vocab, (TOKENS,), generator=generator)
    target[0] = vocab - 1
    return hidden, weight, target


def cut(weight, mesh):
    most = -(-len(weight) // mesh.size())
    return weight[mesh.get_rank() * most : (mesh.get_rank() + 1) * most]


def in_turn(mesh):
    found = []
    for step in range(3):
        for vocab in VOCABS:
            hidden, weight, target = (t.to(mesh.device_type) for t in head(vocab, step))
            hidden, shard = hidden.requires_grad_(), cut(weight, mesh).clone().requires_grad_()
            loss = logitless.distributed.linear_cross_entropy(
                hidden, shard, target, group=mesh.get_group(), label_smoothing=SMOOTHING
            )
            (loss * factors(loss)).backward()
            found.append((loss.detach(), hidden.grad, shard.grad))
    return found


def refusals(mesh):
    """Makes calls of which rank 1's differs, each between calls that are right: what is raised, and their losses."""
    found = []
    (hidden, weight, target), (_, small, _) = ((t.to(mesh.device_type) for t in head(v, 0)) for v in VOCABS)
    shard, other = cut(weight, mesh), cut(small, mesh)
    wrong = (
        {"shard": other},
        {"shard": other, "vocab_total": 99},
        {"vocab_start": 49 * mesh.get_rank()},
        {"label_smoothing": 0.2},
        {"hidden": hidden.bfloat16()},
        {"target": target.double()},
    )

    def call(hidden=hidden, shard=shard, target=target, **more):
        options = {"vocab_total": 100, "vocab_start": 50 * mesh.get_rank(), "label_smoothing": SMOOTHING} | more
        return logitless.distributed.linear_cross_entropy(hidden, shard, target, group=mesh.get_group(), **options)

    for options in wrong:
        right = call().item()
        try:
            call(**options if mesh.get_rank() == 1 else {})
            found.append(("nothing", right, call().item()))
        except Exception as error:
            found.append((str(error), right, call().item()))
    return found


def is_ahead_of_the_device(mesh):
    """Whether the host comes back from a call that is known while the device has not begun with it."""
    hidden, weight, target = (t.to(mesh.device_type) for t in head(100, 0))
    shard = cut(weight, mesh)

    def call():
        return logitless.distributed.linear_cross_entropy(hidden, shard, target, group=mesh.get_group())

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    event = torch.cuda.Event()
    torch.cuda._sleep(4_000_000_000)  # cycles: about two seconds
    event.record()
    call()
    is_ahead = not event.query()
    torch.cuda.synchronize()
    return is_ahead


def check_in_turn(ranks):
    every = ranks(in_turn)
    for index, (step, vocab) in enumerate((step, vocab) for step in range(3) for vocab in VOCABS):
        problem = head(vocab, step)
        naive = loss_and_gradients(*problem, label_smoothing=SMOOTHING)
        true = loss_and_gradients(*problem, label_smoothing=SMOOTHING, dtype=torch.float64)
        first = every[0][index]
        assert all(torch.equal(mine[index][0], first[0]) for mine in every)
        shards = torch.cat([mine[index][2] for mine in every])
        for ours, theirs, exact in zip((*first[:2], shards), naive, true):
            assert excess(ours, theirs, exact) <= 1


def check_refusals(ranks):
    every = ranks(refusals)
    starts = ("vocab_total: expected 99,", "vocab_total: expected the same", "vocab_start: expected shards",
              "label_smoothing: expected the same", "input: expected the same")  # fmt: skip
    for index, start in enumerate(starts):
        assert {mine[index][0] for mine in every} == {every[0][index][0]}
        assert every[0][index][0].startswith(start), every[0][index][0]
    assert every[1][-1][0].startswith("target: expected")
    assert "rank 1 of the group refused its arguments" in every[0][-1][0]
    assert len({loss for mine in every for _, before, after in mine for loss in (before, after)}) == 1


def test_in_turn(two):
    check_in_turn(two)


def test_refusals(two):
    check_refusals(two)


@pytest.mark.gpu
def test_in_turn_on_gpus(two_gpus):
    check_in_turn(two_gpus)


@pytest.mark.gpu
def test_refusals_on_gpus(two_gpus):
    check_refusals(two_gpus)


@pytest.mark.gpu
def test_hosts_do_not_wait_for_gpus(two_gpus):
    assert all(two_gpus(is_ahead_of_the_device))
