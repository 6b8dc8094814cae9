"""torchtitan's loss by the fused head, beside torchtitan's own; needs torchtitan."""

import pytest
import torch
from client_models import D, Model
from client_oracle import check_steps, check_values

pytestmark = pytest.mark.slow

pytest.importorskip("torchtitan.components.loss", exc_type=ImportError)


def hidden_of(model, ids):
    return model.norm(torch.tanh(model.body(model.embed(ids))))


def batch(rank):
    torch.manual_seed(rank + 1)
    ids = torch.randint(0, 23, (2, 8))
    labels = ids.roll(1, 1)
    labels[0, : 3 * rank] = -100
    return ids, labels


def losses():
    from logitless.compat.torchtitan import FusedHeadLoss
    from torchtitan.components.loss import ChunkedLossWrapper

    return ChunkedLossWrapper.Config(num_chunks=2).build(), FusedHeadLoss.Config().build()


def data_parallel(mesh, unit):
    """Shards like torchtitan: the norm and the head form one unit, and the divisor counts all ranks' tokens."""
    from torch.distributed.fsdp import fully_shard

    results = []
    for loss_fn in losses():
        model = Model("stock")
        fully_shard(model.body, mesh=mesh)
        if unit == "grouped":
            fully_shard([model.norm, model.lm_head], mesh=mesh)
        elif unit == "own":
            fully_shard(model.lm_head, mesh=mesh)
        model.forward = lambda ids, model=model: hidden_of(model, ids)
        fully_shard(model, mesh=mesh)
        loss_fn.set_lm_head(model.lm_head)
        for _ in range(2):
            model.zero_grad()
            ids, labels = batch(mesh.get_rank())
            loss, metrics = loss_fn(model(ids), labels, torch.tensor(29.0))
            loss.backward()
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        with torch.no_grad():
            evaluated, _ = loss_fn(model(ids), labels, torch.tensor(29.0))
        torch.testing.assert_close(evaluated, loss.detach())
        assert metrics == {}
        results.append((loss.detach(), gradients))
    return results


@pytest.mark.parametrize("unit", ["grouped", "own", "root"])
def test_data_parallel(two, unit):
    true = Model("stock").double()
    total = 0.0
    for rank in range(2):
        ids, labels = batch(rank)
        logits = true.lm_head(hidden_of(true, ids)).flatten(0, 1)
        total = total + torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / 29.0 / 2
    total.backward()
    exact = {name: parameter.grad for name, parameter in true.named_parameters()}
    check_steps(two(data_parallel, unit), exact)


def tensor_parallel(mesh, plain):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("partial_dtensor")
    model = Model("stock")
    weight = torch.nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh, [Shard(0)]))
    model.lm_head.weight = weight
    ids, labels = batch(0)
    hidden = hidden_of(model, ids).detach().requires_grad_()
    loss_fn = losses()[1]
    loss_fn.set_lm_head(model.lm_head)
    pred = hidden if plain else DTensor.from_local(hidden, mesh, [Replicate()])
    loss, _ = loss_fn(pred, labels, torch.tensor(16.0))
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad.full_tensor()


@pytest.mark.parametrize("plain", [True, False])
def test_tensor_parallel(two, plain):
    made = []
    for dtype in (torch.float32, torch.float64):
        model = Model("stock").to(dtype)
        ids, labels = batch(0)
        hidden = hidden_of(model, ids).detach().requires_grad_()
        logits = model.lm_head(hidden).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / 16
        loss.backward()
        made.append((loss.detach(), hidden.grad, model.lm_head.weight.grad))
    check_values(two(tensor_parallel, plain), *made)


def test_what_is_not_known_is_refused():
    from logitless.compat.torchtitan import FusedHeadLoss
    from torchtitan.components.loss import MSELoss

    with pytest.raises(NotImplementedError, match="loss_fn: expected CrossEntropyLoss.Config, got MSELoss.Config"):
        FusedHeadLoss.Config(loss_fn=MSELoss.Config()).build()
    loss_fn = FusedHeadLoss.Config().build()
    with pytest.raises(NotImplementedError, match="lm_head: expected a linear layer, got a LayerNorm"):
        loss_fn.set_lm_head(torch.nn.LayerNorm(D))
    loss_fn.set_lm_head(torch.nn.Linear(D, 5))
    with pytest.raises(NotImplementedError, match="expected no advantages"):
        loss_fn(torch.ones(1, 2, D), torch.zeros(1, 2, dtype=torch.long), advantages=torch.ones(1, 2))
