"""Errors of losses and gradients against the fp64 reference, and whether a second call gives the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from clock import Clock
from data import Inputs, make_inputs
from harness import describe
from limits import Deadline, StepTimeout, step_limit
from methods import MIB, Method, seen_plan
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


def _run(method: Method, inputs: Inputs, gradients: bool) -> list[Tensor]:
    """Returns the loss, followed by dE and dC if gradients are requested."""
    if not gradients:
        with torch.no_grad():
            return [method.loss(*inputs)]
    leaves = inputs.leaves()
    loss = method.loss(*leaves)
    loss.backward()
    assert leaves.hidden.grad is not None and leaves.weight.grad is not None
    return [loss.detach(), leaves.hidden.grad, leaves.weight.grad]


def check_method(row: Accuracy, method: Method, inputs: Inputs, reference: Reference, device: str) -> None:
    """Checks one method on one data set."""
    gradients = "gradients" in method.passes
    with seen_plan(method) as plans:
        outputs = _run(method, inputs, gradients)
    row.plan = "".join(plans)
    row.loss_error = abs(outputs[0].double().item() - reference.loss) / abs(reference.loss)
    if gradients:
        row.d_hidden_error = relative_error(outputs[1][reference.rows], reference.d_hidden)
        row.d_weight_error = relative_error(outputs[2][reference.columns], reference.d_weight)
        row.baseline_d_hidden = reference.baseline_d_hidden
        row.baseline_d_weight = reference.baseline_d_weight
    _poison(device, method.budget_mib)
    again = _run(method, inputs, gradients)
    row.repeats = all(torch.equal(a, b) for a, b in zip(outputs, again))


def check_shape(
    record: Record, clock: Clock, shape: Shape, kinds: list[str], methods: list[Method], deadline: Deadline
) -> None:
    """Checks every method on every data set, as far as the time goes."""
    for kind in kinds:
        if deadline.left() <= 0:
            record.note(f"{shape.name}: accuracy on {kind} left out: no time left")
            continue
        try:
            inputs = make_inputs(shape, kind, clock.device, seed=2)
            reference = make_reference(inputs)
        except Exception as error:
            record.note(f"{shape.name}: accuracy on {kind} left out: {describe(error)}")
            clock.release()
            continue
        for method in methods:
            if not method.ours and deadline.left() <= 0:
                record.note(f"{shape.name}: accuracy of {method.name} on {kind} left out: no time left")
                continue
            row = Accuracy(shape.name, kind, method.name, method.ours, threshold=method.threshold)
            record.accuracy.append(row)
            try:
                with step_limit(max(10.0, deadline.left())):
                    check_method(row, method, inputs, reference, clock.device)
            except (Exception, StepTimeout) as error:
                row.reason = describe(error)
            clock.release()
        del inputs, reference
        clock.release()
        record.save()
