"""Patched models of transformers on two gloo ranks: DDP, FSDP2 in its units, tensor-parallel heads."""

import inspect
import sys
import types
from pathlib import Path

import logitless.transformers
import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "huggingface"))
transformers = pytest.importorskip("transformers")

from compare import Reference, Step, step  # noqa: E402
from tiny import build, inputs, shrink  # noqa: E402

pytestmark = pytest.mark.slow


def model_of(tied, vocab=None):
    if not tied and vocab is None:
        return build(transformers.LlamaForCausalLM)
    torch.manual_seed(0)
    config = shrink(transformers.LlamaConfig(tie_word_embeddings=tied))
    config.vocab_size = vocab or config.vocab_size
    return transformers.LlamaForCausalLM(config).train()


def batch_of(rank, model):
    batch = inputs(model)
    batch["labels"] = batch["labels"].roll(rank, 0)
    return batch


def mean(steps):
    """Returns rank 0's results: its own loss, and the mean of the gradients."""
    names = steps[0].gradients
    return Step(steps[0].loss, {name: sum(s.gradients[name] for s in steps) / len(steps) for name in names})


def planned(model, mesh):
    """Shards by the plan of the model's class; from 5.23 on it is resolved before."""
    from transformers.distributed.fsdp import apply_fully_sharded_data_parallelism as apply

    if "fsdp_plan" not in inspect.signature(apply).parameters:
        return apply(model, mesh)
    config = transformers.distributed.DistributedConfig(fsdp_size=mesh.size())
    _, experts, plan = model._resolve_parallel_plans(config)
    return apply(model, types.SimpleNamespace(get_mesh=lambda name: mesh), plan, experts)


def wrapped(model, way, mesh):
    if way == "DDP":
        return torch.nn.parallel.DistributedDataParallel(model)
    if way == "plan":
        return planned(model, mesh)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if way == "grouped":
        fully_shard([model.model.norm, model.lm_head], mesh=mesh)
    elif way == "pair":
        fully_shard([model.model.embed_tokens, model.lm_head], mesh=mesh)
    elif way != "root":
        fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=way == "freed")
    return fully_shard(model, mesh=mesh)


def whole(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def run(model, batch):
    loss, gradients, _ = step(model, batch)
    return Step(loss, {name.removeprefix("module."): whole(gradient) for name, gradient in gradients.items()})


def data_parallel(mesh, way, tied):
    results = []
    for fused in (False, True):
        model = model_of(tied)
        if fused and way == "DDP":
            logitless.transformers.patch(model)
        made = wrapped(model, way, mesh)
        if fused and way != "DDP":
            logitless.transformers.patch(model)
        steps = [run(made, batch_of(mesh.get_rank(), model)) for _ in range(2)]  # the second step uses what was freed
        results.append(steps[1])
    return results


def check(reference, fused):
    assert reference.share(fused) <= 1
    assert not reference.unseen(torch.float32)


WAYS = [("DDP", False), ("root", False), ("kept", False), ("freed", False), ("grouped", False), ("plan", False)]


@pytest.mark.parametrize(("way", "tied"), [*WAYS, ("DDP", True), ("root", True), ("pair", True)])
def test_data_parallel(two, way, tied):
    stock, fused = two(data_parallel, way, tied)[0]
    model = model_of(tied)
    alone = [Reference.of(model, batch_of(rank, model)) for rank in range(2)]
    exact, *rounded = (mean(steps) for steps in zip(*([r.exact, *r.rounded] for r in alone), strict=True))
    check(Reference(stock, exact, tuple(rounded)), fused)


VOCABULARIES = {"local": None, "transformers": 100}


def shard_head(head, mesh):
    """Shards the head by transformers' own parallel layer."""
    from transformers.distributed.tensor_parallel import ColwiseParallel as Style

    style = Style(input_layouts=Replicate(), output_layouts=Replicate())
    style.shard_param(head, "weight", mesh)
    style.install_forward(head, mesh)


def tensor_parallel(mesh, way):
    """Two ranks do not divide a vocabulary of 99. transformers' own parallel layer needs one that they divide."""
    results = []
    for fused in (False, True):
        model = model_of(False, VOCABULARIES[way])
        if way == "transformers":
            shard_head(model.lm_head, mesh)
        else:
            parallelize_module(model.lm_head, mesh, ColwiseParallel(output_layouts=Replicate()))
        if fused:
            logitless.transformers.patch(model, tp_mesh=mesh if way == "transformers" else None)
        results.append(run(model, batch_of(0, model)))
    return results


@pytest.mark.parametrize("way", ["local", "transformers"])
def test_a_tensor_parallel_head(two, way):
    model = model_of(False, VOCABULARIES[way])
    alone = Reference.of(model, batch_of(0, model))
    for stock, fused in two(tensor_parallel, way):
        check(Reference(stock, alone.exact, alone.rounded), fused)


def refusals(mesh):
    sharded = ColwiseParallel(output_layouts=Shard(-1))
    for change, message in (
        (lambda head: shard_head(head, mesh), r"patch\(model, tp_mesh=mesh\)"),
        (lambda head: parallelize_module(head, mesh, sharded), r"expected Replicate\(\) for the head's output"),
    ):
        model = model_of(False, 100)
        change(model.lm_head)
        logitless.transformers.patch(model)
        with pytest.raises(NotImplementedError, match=message):
            step(model, batch_of(0, model))


def test_what_is_not_known_is_refused(two):
    two(refusals)
