"""Each rank's actions and results, compared with single-process heads of the same data."""

import gc
import weakref

import logitless
import torch
import torch.distributed as dist

from groups.common import (
    OPTIONS,
    ROWS,
    WHOLE,
    D,
    Data,
    add_cases,
    agree,
    agree_compiled,
    agree_sequence_parallel,
    call,
    objective,
    of_group,
    of_whole,
)
from groups.ranks import sizes

add_cases(globals(), OPTIONS, (torch.float64, torch.float32))
add_cases(globals(), {"plain": {}}, (torch.bfloat16, torch.float16))


def case_starts_that_are_given(ranks):
    """Shards in the reverse order of ranks."""
    data = Data(ranks)
    data.start = sum(data.rows[ranks.rank + 1 :])
    starts = {"vocab_start": data.start, "vocab_total": data.vocab}
    agree(data, of_group(ranks, data, {}, True, **starts), of_whole(data, {}, True))


def case_losses_without_gradients(ranks):
    data = Data(ranks)
    with torch.no_grad():
        got = call(ranks, data)
    whole = logitless.linear_cross_entropy(data.input, data.weight, data.target)
    torch.testing.assert_close(got, whole, rtol=1e-13, atol=0)


def case_learned_scale_and_temperature(ranks):
    data, results = Data(ranks), []
    for run in (of_whole, lambda *given: of_group(ranks, *given)):
        learned = {name: torch.tensor(value, requires_grad=True) for name, value in
                   (("scale", 0.8), ("temperature", 1.3))}  # fmt: skip
        results.append((*run(data, learned, True), [number.grad for number in learned.values()]))
    agree(data, results[1], results[0])
    torch.testing.assert_close(results[1][2], results[0][2], rtol=1e-6, atol=1e-14)


def case_main_grad(ranks):
    data = Data(ranks, torch.float32)
    main_grad = torch.ones(data.rows_here, D)
    _, (d_hidden, d_shard, _) = of_group(ranks, data, {}, main_grad=main_grad)
    _, exact = of_whole(data.to(torch.float64), {})
    assert d_shard is None
    torch.testing.assert_close(main_grad - 1, exact[1][data.shard].float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(d_hidden, exact[0].float(), rtol=1e-5, atol=1e-6)


@sizes(2, 3, 4)
def case_sequence_parallel(ranks):
    agree_sequence_parallel(ranks, Data(ranks), {"token_weight": "@token_weight"})
    agree_sequence_parallel(ranks, Data(ranks, shape=(ROWS, 2)), {"temperature": "@temperature"})


def case_sequence_parallel_with_a_later_backward_pass(ranks):
    agree_sequence_parallel(ranks, Data(ranks), {"reduction": "none", "shift": 1})


def case_compiled(ranks):
    for reduction in ("mean", "none"):
        agree_compiled(ranks, Data(ranks), reduction=reduction)


def case_two_heads_at_once(ranks):
    """Backward passes follow work on another vocabulary whose shard has as many rows here."""
    data = Data(ranks)
    options = {"reduction": "none", "label_smoothing": 0.3}
    leaf, shard, _ = data.leaves(columns=data.shard)
    loss = call(ranks, data, hidden=leaf, weight=shard, **options)
    more = 0 if ranks.rank == 0 else 9
    other = torch.cat([data.weight[data.shard], data.weight[:more]]).requires_grad_()
    call(ranks, data, weight=other, **options)
    objective(loss, data).backward()
    agree(data, (loss, [leaf.grad, shard.grad]), of_whole(data, options), gradients=1e-13)


def case_nothing_outlives_its_use(ranks):
    """This holds for a run's workspace, without waiting for Python's search for cycles, and for a destroyed group."""
    from logitless.distributed._passes import _Exchange

    data = Data(ranks)
    group = dist.new_group(list(range(ranks.size)))
    known = weakref.ref(group)
    gc.collect()
    gc.disable()
    try:
        for reduction in ("mean", "none"):
            of_group(ranks.within(group), data, {"reduction": reduction})
        assert not any(type(thing) is _Exchange for thing in gc.get_objects())
    finally:
        gc.enable()
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert known() is None


def case_group_of_one(ranks):
    alone = [dist.new_group([rank]) for rank in range(ranks.size)][ranks.rank]
    data = Data(ranks)
    got = call(ranks.within(alone), data, weight=data.weight)
    assert torch.equal(got, logitless.linear_cross_entropy(data.input, data.weight, data.target))


@sizes(4)
def case_two_groups_side_by_side(ranks):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    data = Data(ranks, seed=ranks.rank // 2)
    half = slice(0, 30) if ranks.rank % 2 == 0 else slice(30, 57)
    leaf = data.leaves()[0]
    loss = call(ranks.within(pairs[ranks.rank // 2]), data, hidden=leaf, weight=data.weight[half])
    loss.backward()
    loss_alone, (d_hidden, *_) = of_whole(data, {})
    agree(data, (loss, [leaf.grad]), (loss_alone, [d_hidden]), WHOLE, loss=1e-13)
