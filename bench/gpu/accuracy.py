"""Errors of losses and gradients against the fp64 reference, and whether a second call gives the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from clock import Clock
from data import Inputs, make_inputs
from harness import describe
from limits import Deadline, StepTimeout, step_limit
from methods import MIB, Method, differentiate, seen_plan
from record import Accuracy, Record
from reference import Reference, make_reference, relative_error
from shapes import Shape

POISON_BYTES = 4 << 30


def _poison(device: str, budget_mib: int | None) -> None:
    """Leaves NaN patterns in the memory that the next call's workspace will probably get."""
    if device.startswith("cuda"):
        free = torch.cuda.mem_get_info()[0] // 4
        size = min(free, POISON_BYTES if budget_mib is None else budget_mib * MIB)
        torch.full((size,), 255, dtype=torch.uint8, device=device)


def _run(method: Method, inputs: Inputs, pass_: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Returns the outputs of a pass, and dE and dC unless it is the loss alone."""
    if pass_ == "loss":
        with torch.no_grad():
            return method.outputs(pass_, *inputs), ()
    leaves = inputs.leaves()
    outputs = method.outputs(pass_, *leaves)
    differentiate(outputs, inputs.upstream(pass_))
    assert leaves.hidden.grad is not None and leaves.weight.grad is not None
    return tuple(output.detach() for output in outputs), (leaves.hidden.grad, leaves.weight.grad)


def check_method(row: Accuracy, method: Method, inputs: Inputs, reference: Reference, device: str) -> None:
    """Checks one method's pass on one data set."""
    with seen_plan(method) as plans:
        outputs, gradients = _run(method, inputs, row.pass_)
    row.plan = "".join(plans)
    row.loss_error, *of_entropy = map(relative_error, outputs, reference.outputs)
    row.entropy_error = of_entropy[0] if of_entropy else None
    if gradients:
        row.d_hidden_error = relative_error(gradients[0][reference.rows], reference.d_hidden)
        row.d_weight_error = relative_error(gradients[1][reference.columns], reference.d_weight)
        row.baseline_d_hidden = reference.baseline_d_hidden
        row.baseline_d_weight = reference.baseline_d_weight
    _poison(device, method.budget_mib)
    again = _run(method, inputs, row.pass_)
    row.repeats = all(torch.equal(a, b) for a, b in zip((*outputs, *gradients), (*again[0], *again[1])))


def checked_passes(method: Method) -> list[str]:
    """Returns the passes to check: gradients come with the loss."""
    return [pass_ for pass_ in method.passes if pass_ != "loss" or "gradients" not in method.passes]


def check_shape(
    record: Record, clock: Clock, shape: Shape, kinds: list[str], methods: list[Method], deadline: Deadline
) -> None:
    """Checks every pass of every method on every data set, as far as the time goes."""
    for kind in kinds:
        if deadline.left() <= 0:
            record.note(f"{shape.name}: accuracy on {kind} left out: no time left")
            continue
        try:
            inputs = make_inputs(shape, kind, clock.device, seed=2)
            # by their number of upstream gradients
            needed = {len(inputs.upstream(pass_)) for method in methods for pass_ in checked_passes(method)}
            references = {n: make_reference(inputs, inputs.upstream("entropy")[:n]) for n in needed}
        except Exception as error:
            record.note(f"{shape.name}: accuracy on {kind} left out: {describe(error)}")
            clock.release()
            continue
        for method, pass_ in ((method, pass_) for method in methods for pass_ in checked_passes(method)):
            if not method.ours and deadline.left() <= 0:
                record.note(f"{shape.name}: accuracy of {method.name} ({pass_}) on {kind} left out: no time left")
                continue
            row = Accuracy(shape.name, kind, method.name, method.ours, threshold=method.threshold, pass_=pass_)
            record.accuracy.append(row)
            try:
                with step_limit(max(10.0, deadline.left())):
                    check_method(row, method, inputs, references[len(inputs.upstream(pass_))], clock.device)
            except (Exception, StepTimeout) as error:
                row.reason = describe(error)
            clock.release()
        del inputs, references
        clock.release()
        record.save()
