"""Parameters, order and defaults equal those of the other libraries when logitless.compat was written.

A library that is available is also compared as it is now, so that a change is noticed.
"""

import ast
import inspect
import textwrap
from copy import copy

import pytest
import torch
from logitless.compat import cut_cross_entropy, fla, liger_kernel, quack
from logitless.compat import torch as compat_torch
from peers import definition, ours, parameters
from torch import nn

LIGER = "ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction='mean', softcap=None, " + (
    "return_z_loss=False, accum_dtype=None, use_token_scaling=False, return_token_accuracy=False, "
    "return_predicted_tokens=False"
)
FLA = "ignore_index=-100, label_smoothing=0.0, logit_scale=1.0, logit_softcapping=None, num_chunks=8, " + (
    "reduction='mean', use_l2warp=False, l2_penalty_factor=0.0001, accumulate_grad_in_fp32=True, process_group=None"
)
CCE = "accum_e_fp32=False, accum_c_fp32=False, filter_e_grad=True, filter_c_grad=True"
TORCH = "reduction='mean', weight=None, ignore_index=None, label_smoothing=0.0, options=None"
QUACK = "chunk_size=4096, ignore_index=-100, reduction='mean'"

# Files of their functions and classes.
PLACES = {
    "torch function": "torch/nn/functional.py",
    "torch": "torch/nn/modules/loss.py",
    "liger function": "liger_kernel/transformers/functional.py",
    "liger apply": "liger_kernel/ops/fused_linear_cross_entropy.py",
    "liger": "liger_kernel/transformers/fused_linear_cross_entropy.py",
    "fla": "fla/modules/fused_linear_cross_entropy/ops.py",
    "quack": "quack/linear_cross_entropy.py",
}
# Our callable, and its signature as read from theirs. Theirs has the same name unless a third entry gives another.
READ = {
    "torch function": (
        compat_torch.linear_cross_entropy,
        "input, linear_weight, target, *, linear_bias=None, weight=None, reduction='mean', ignore_index=None, "
        "label_smoothing=0.0, options=None",
    ),
    "torch module": (
        compat_torch.LinearCrossEntropyLoss.__init__,
        f"in_features, num_classes, *, out_features=(), bias=False, device=None, dtype=None, {TORCH}",
    ),
    "torch forward": (compat_torch.LinearCrossEntropyLoss.forward, "input, target"),
    "liger function": (
        liger_kernel.liger_fused_linear_cross_entropy,
        f"input, weight, target, bias=None, ce_weight=None, {LIGER}, chunk_mem_const=1",
    ),
    "liger module": (liger_kernel.LigerFusedLinearCrossEntropyLoss.__init__, f"ce_weight=None, {LIGER}"),
    "liger forward": (
        liger_kernel.LigerFusedLinearCrossEntropyLoss.forward, "lin_weight, _input, target, bias=None",
    ),
    "liger apply": (
        liger_kernel.LigerFusedLinearCrossEntropyFunction.apply,
        f"_input, weight, target, bias=None, ce_weight=None, {LIGER}, ce_impl=None, ce_mode=None, chunk_mem_const=1",
        "LigerFusedLinearCrossEntropyFunction.forward",
    ),
    "fla function": (fla.fused_linear_cross_entropy_loss, f"x, target, weight, bias=None, {FLA}"),
    "fla module": (fla.FusedLinearCrossEntropyLoss.__init__, FLA),
    "quack function": (
        quack.linear_cross_entropy_func,
        "x, weight, bias, target, ignore_index=-100, reduction='mean', inplace_backward=False",
    ),
    "quack chunked": (
        quack.chunked_linear_cross_entropy, f"x, weight, target, {QUACK}, tuned=True, use_scaled_exp=None",
    ),
    "quack scaled exp": (quack.scaled_exp_linear_cross_entropy, f"x, weight, target, {QUACK}, tile_n1=None"),
    "quack module": (
        quack.LinearCrossEntropy.__init__,
        "in_features, out_features, bias=False, ignore_index=-100, reduction='mean', chunk_size=None, "
        "inplace_backward=False, tuned=True, use_scaled_exp=None, device=None, dtype=None",
    ),
    "quack forward": (quack.LinearCrossEntropy.forward, "input, target"),
    "cce function": (
        cut_cross_entropy.linear_cross_entropy,
        "e, c, targets, bias=None, ignore_index=-100, softcap=None, reduction='mean', shift=0, return_lse=False, "
        f"filter_eps='auto', {CCE}, impl=CCE, vocab_parallel_options=None",
    ),
    "cce module": (
        cut_cross_entropy.LinearCrossEntropy.__init__,
        f"ignore_index=-100, softcap=None, reduction='mean', shift=0, filter_eps='auto', {CCE}, impl=CCE, "
        "return_lse=False",
    ),
    "cce forward": (cut_cross_entropy.LinearCrossEntropy.forward, "e, c, targets, bias=None"),
    "cce patch": (
        cut_cross_entropy.cce_patch,
        f"model_type_or_model, impl=CCE, reduction='mean', filter_eps='auto', {CCE}, train_only=False",
    ),
    "cce z-loss": (
        cut_cross_entropy.compute_z_loss, "lse, targets=None, shift=False, ignore_index=-100, reduction='mean'",
    ),
}  # fmt: skip


def written(text):
    """Returns the parameters written above in the form of peers.parameters."""
    node = ast.parse(f"def f({text}): ...").body[0].args
    plain = [*([None] * (len(node.args) - len(node.defaults))), *node.defaults]
    entries = [(a.arg, "positional", d) for a, d in zip(node.args, plain)]
    entries += [(a.arg, "keyword", d) for a, d in zip(node.kwonlyargs, node.kw_defaults)]
    return [(name, kind, "-" if default is None else ast.unparse(default)) for name, kind, default in entries]


@pytest.mark.parametrize("name", READ)
def test_our_signature(name):
    function, text, *_ = READ[name]
    assert ours(function) == written(text)


@pytest.mark.parametrize("name", [name for name in READ if not name.startswith("cce")])
def test_signature_of_the_library(name):
    function, text, *theirs = READ[name]
    place = PLACES.get(name) or PLACES[name.split()[0]]
    assert parameters(place, *(theirs or [function.__qualname__])) == written(text)


def test_cut_cross_entropy_of_pypi_has_some_of_these_arguments():
    """The version is 25.1.1 or later, and a later one has all of them.

    Only filter_eps had another default: "high", which means the same number.
    """
    for theirs, function in [
        ("linear_cross_entropy", cut_cross_entropy.linear_cross_entropy),
        ("LinearCrossEntropy.__init__", cut_cross_entropy.LinearCrossEntropy.__init__),
    ]:
        known = {entry[0]: entry[2] for entry in ours(function)}
        names = {"IGNORE_INDEX": "-100", "LCE_IMPL_DEFAULT": "CCE", "False": "0", "'high'": "'auto'"}
        for argument, _, default in parameters("cut_cross_entropy/linear_cross_entropy.py", theirs):
            expected = known[argument]
            assert names.get(default, default) == names.get(expected, expected), argument


def test_fla_forward_also_takes_logits():
    """FLA's own criterion requires the weight in any case."""
    theirs = parameters("fla/modules/fused_linear_cross_entropy/ops.py", "FusedLinearCrossEntropyLoss.forward")
    assert [entry[0] for entry in theirs] == list(
        inspect.signature(fla.FusedLinearCrossEntropyLoss.forward).parameters
    )[1:]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("items", [None, 7])
def test_loss_code_of_fla_models(items, fused):
    """The installed FLA's own method runs with our criterion in place of PyTorch's."""
    node = definition("fla/models/modeling_utils.py", "FLAPreTrainedModel._compute_logits_and_loss")
    for argument in [*node.args.args, *node.args.kwonlyargs]:
        argument.annotation = None
    node.returns = None
    scope = {"torch": torch, "nn": nn, "copy": copy, "l2_warp": None}
    exec(textwrap.dedent(ast.unparse(node)), scope)

    class Model(nn.Module):
        compute = scope["_compute_logits_and_loss"]

        def __init__(self, criterion):
            super().__init__()
            self.lm_head, self.criterion = nn.Linear(6, 17), criterion
            self.config = type("Config", (), {"fuse_linear_cross_entropy": False})()

    stock, model = Model(nn.CrossEntropyLoss()), Model(fla.FusedLinearCrossEntropyLoss())
    model.load_state_dict(stock.state_dict())
    hidden, labels = torch.randn(2, 5, 6), torch.randint(0, 17, (2, 5))
    expected, _ = stock.compute(hidden, labels, num_items_in_batch=items, fuse_linear_cross_entropy=False)
    got, logits = model.compute(hidden, labels, num_items_in_batch=items, fuse_linear_cross_entropy=fused)
    assert (logits is None) == fused
    torch.testing.assert_close(got, expected)
    got.backward(), expected.backward()
    torch.testing.assert_close(model.lm_head.weight.grad, stock.lm_head.weight.grad)
