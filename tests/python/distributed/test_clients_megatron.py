"""Megatron core's GPTModel, patched and unpatched, with tensor and sequence parallelism; needs Megatron core.

Megatron core takes its device and random states from CUDA, and norms of sequence-parallel states from Apex. On the CPU,
without dropout, the tests substitute the device and PyTorch's norm.
"""

import contextlib
import os

import pytest
import torch
from client_oracle import excess

pytestmark = pytest.mark.slow

pytest.importorskip("megatron.core", exc_type=ImportError)
VOCAB, LENGTH = 32, 8


def model_of(mesh, shared, sequence_parallel):
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    torch.cuda.current_device = lambda: torch.device("cpu")
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    torch_norm.WrappedTorchNorm.__new__ = lambda cls, config, hidden_size, eps=1e-5, **_: torch.nn.LayerNorm(
        hidden_size, eps
    )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(mesh.size())
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        attention_backend=AttnBackend.unfused,
        tensor_model_parallel_size=mesh.size(),
        sequence_parallel=sequence_parallel,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=shared,
        parallel_output=True,
    )


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (2, LENGTH), generator=generator)
    positions = torch.arange(LENGTH)[None].expand(2, LENGTH)
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    return ids, positions, mask, ids.roll(-1, 1)


def step(model, fused, main_grad=None):
    from logitless.compat import megatron

    if fused:
        megatron.patch(model)
    ids, positions, mask, labels = batch()
    loss_mask = (ids % 3 > 0).double().to(next(model.parameters()).dtype)
    weight = model.output_layer.weight
    if main_grad:
        model.output_layer.gradient_accumulation_fusion = True
        weight.main_grad = torch.full(weight.shape, 0.5)
        weight.grad_added_to_main_grad = False
        weight.zero_out_wgrad = main_grad == "zeros"
    losses = model(ids, positions, mask, labels=labels)
    (losses * loss_mask).sum().div(loss_mask.sum()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    if main_grad:
        assert weight.grad_added_to_main_grad
        assert main_grad != "zeros" or not bool(weight.grad.any())
        gradients["output_layer.weight"] = weight.main_grad - 0.5
    logits = model(ids, positions, mask)
    assert logits.shape == (
        2,
        LENGTH,
        model.output_layer.weight.shape[0] if model.output_layer.weight is not None else 16,
    )
    megatron.unpatch(model)
    assert "forward" not in model.output_layer.__dict__ and "_postprocess" not in model.__dict__
    return losses.detach(), gradients


def steps(mesh, shared, sequence_parallel, main_grad):
    stock = step(model_of(mesh, shared, sequence_parallel), False)
    fused = step(model_of(mesh, shared, sequence_parallel), True, main_grad)
    exact = step(model_of(mesh, shared, sequence_parallel).double(), False)
    return stock, fused, exact


@pytest.mark.parametrize(
    ("shared", "sequence_parallel", "main_grad"),
    [(False, False, None), (True, False, None), (False, True, None), (False, False, "zeros"), (False, True, "empty")],
)
def test_a_gpt_model(two, shared, sequence_parallel, main_grad):
    for stock, fused, exact in two(steps, shared, sequence_parallel, main_grad):
        assert fused[0].shape == (2, LENGTH) and fused[0].dtype == torch.float32
        assert excess(fused[0], stock[0], exact[0]) <= 1
        assert fused[1].keys() == stock[1].keys()
        for name, gradient in exact[1].items():
            assert excess(fused[1][name], stock[1][name], gradient) <= 1, name
