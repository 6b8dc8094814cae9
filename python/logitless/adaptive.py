"""``logitless.nn.AdaptiveLogSoftmaxWithLoss``: PyTorch's adaptive softmax without the logits of head and clusters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from . import options as _options
from .call import check_integers, check_linear, check_tensor
from .candidates import linear_candidates
from .functional import linear_cross_entropy, linear_top_k
from .options import TrainingOptions, accepts
from .run import stats_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NAMES = _options.names_of(TrainingOptions)


class AdaptiveLogSoftmaxOutput(NamedTuple):
    """Log-probabilities of the targets ``[N]`` or ``[]``, and the mean of their negatives; float32 or float64."""

    output: Tensor
    loss: Tensor


class AdaptiveLogSoftmaxWithLoss(nn.AdaptiveLogSoftmaxWithLoss):
    """``torch.nn.AdaptiveLogSoftmaxWithLoss`` whose loss stores no logits.

    It has PyTorch's constructor, parameters and state dict. ``predict`` stores no logits either. ``log_prob`` is
    PyTorch's: its result has the size of all logits. Output and loss of 16-bit inputs are float32, where PyTorch rounds
    them.

    Args:
        in_features: D, the size of each hidden state.
        n_classes: The number of classes, of which the most frequent come first.
        cutoffs: Where clusters begin.
        div_value: Divides the hidden size of each further cluster.
        head_bias: Whether the head has a bias.
        device: The module's device.
        dtype: The module's dtype.

    The other options are those of :func:`logitless.linear_cross_entropy`, for the head and each cluster. There is no
    ``screen``. ``predict`` uses the budget alone.

    Raises:
        ValueError: ``cutoffs`` are not ascending numbers in [1, n_classes - 1], or an option is out of range.
    """

    @accepts(TrainingOptions)
    def __init__(
        self,
        in_features: int,
        n_classes: int,
        cutoffs: Sequence[int],
        div_value: float = 4.0,
        head_bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[TrainingOptions],
    ) -> None:
        _options.check_names("AdaptiveLogSoftmaxWithLoss", options, _NAMES)
        checked = _options.checked_training(options)
        if checked["screen"] != "none":
            raise ValueError(f'screen: expected "none", as gradients come after the loss, got {checked["screen"]!r}')
        super().__init__(in_features, n_classes, cutoffs, div_value, head_bias, device, dtype)
        self._options: dict[str, Any] = checked

    def forward(self, input_: Tensor, target_: Tensor) -> AdaptiveLogSoftmaxOutput:  # type: ignore[override]
        """Returns the log-probabilities of targets, and the loss.

        Args:
            input_: Hidden states, ``[N, D]`` or ``[D]``.
            target_: Classes, ``[N]`` or ``[]``.

        Raises:
            RuntimeError: Shapes do not fit, or a target is no class.
            UnsupportedError: A layer is no plain ``nn.Linear``, but for example an adapter's, or it has hooks.
            TypeError, ValueError, BudgetTooSmallError: As in :func:`logitless.linear_cross_entropy`.

        The host waits for the number of rows in each cluster, as PyTorch's does.
        """
        self._check_input("input_", input_)
        check_tensor("target_", target_)
        check_integers("target_", target_)
        if target_.dim() > 1 or input_.dim() != target_.dim() + 1 or input_.shape[:-1] != target_.shape:
            raise RuntimeError(
                "target_: expected shape [N] with an input_ [N, D], or [] with [D], got "
                f"{_options.shape_text(target_.shape)} with {_options.shape_text(input_.shape)}"
            )
        input, target = input_.reshape(-1, input_.shape[-1]), target_.reshape(-1)
        if ((target < 0) | (target >= self.n_classes)).any():
            raise RuntimeError(
                f"target_: expected classes in [0, {self.n_classes - 1}], got values in [{target.min().item()}, "
                f"{target.max().item()}]"
            )
        check_linear(self.head, "head")
        in_head, of_clusters, rows = target.clone(), [], []
        for cluster, (start, stop) in enumerate(zip(self.cutoffs, self.cutoffs[1:])):
            own = ((target >= start) & (target < stop)).nonzero()[:, 0]
            if own.numel() == 0:
                continue
            in_head[own] = self.shortlist_size + cluster
            of_clusters.append(self._of_cluster(cluster, input[own], target[own] - start))
            rows.append(own)
        output = self._log_probs(input, self.head, in_head)
        if rows:
            output = output.index_add(0, torch.cat(rows), torch.cat(of_clusters))
        return AdaptiveLogSoftmaxOutput(output.reshape(target_.shape), -output.mean())

    @torch.no_grad()
    def predict(self, input: Tensor) -> Tensor:
        """Returns the most probable class of each row.

        Args:
            input: Hidden states, ``[N, D]``.

        A class of a cluster can only win where the cluster itself is the head's largest logit.

        Raises:
            RuntimeError: The shape does not fit.
            UnsupportedError: As in :meth:`forward`.
            BudgetTooSmallError: No plan fits the budget.
        """
        self._check_input("input", input)
        if input.dim() != 2:
            raise RuntimeError(f"input: expected shape [N, D], got {_options.shape_text(input.shape)}")
        check_linear(self.head, "head")
        bias, shortlist = self.head.bias, self.shortlist_size
        best = self._largest(input, self.head.weight, bias)[0]
        rows = (best >= shortlist).nonzero()[:, 0]
        if rows.numel() == 0:
            return best
        hidden = input[rows]
        listed = None if bias is None else bias[:shortlist]
        classes = [self._largest(hidden, self.head.weight[:shortlist], listed)[0]]
        clusters = torch.arange(shortlist, self.head_size, device=input.device).expand(len(rows), -1)
        ids = torch.cat([classes[0][:, None], clusters], 1)
        scores = linear_candidates(hidden, self.head.weight, ids, bias=bias, **self._budget()).log_probs
        for cluster, start in enumerate(self.cutoffs[:-1]):
            narrow, wide = self._layers(cluster)
            own, log_probs = self._largest(narrow(hidden), wide.weight, None)
            classes.append(own + start)
            scores[:, cluster + 1] += log_probs
        best[rows] = torch.stack(classes, 1).gather(1, scores.argmax(1, keepdim=True))[:, 0]
        return best

    def _budget(self) -> Any:
        return {name: value for name, value in self._options.items() if name in _options.TOP_K_OPTIONS}

    def _check_input(self, name: str, input: Tensor) -> None:
        check_tensor(name, input)
        if input.shape[-1:] != (self.in_features,):
            expected = f"a last dimension of {self.in_features}"
            raise RuntimeError(f"{name}: expected {expected}, got shape {_options.shape_text(input.shape)}")

    def _largest(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the class of each row's largest logit, and its log-probability."""
        if weight.shape[1] == 0:
            return hidden.new_zeros(len(hidden), dtype=torch.int64), _uniform(hidden, len(weight))
        top = linear_top_k(hidden, weight, 1, bias=bias, **self._budget())
        return top.ids[:, 0], top.log_probs[:, 0]

    def _layers(self, cluster: int) -> tuple[nn.Linear, nn.Linear]:
        """Returns the layer that projects, which is called, and the one whose weight is used."""
        layers: Any = self.tail[cluster]
        check_linear(layers[1], f"tail[{cluster}][1]")
        return layers[0], layers[1]

    def _of_cluster(self, cluster: int, input: Tensor, target: Tensor) -> Tensor:
        narrow, wide = self._layers(cluster)
        projected = narrow(input)
        if projected.shape[1] == 0:
            return _uniform(input, wide.out_features)
        return self._log_probs(projected, wide, target)

    def _log_probs(self, input: Tensor, layer: nn.Linear, target: Tensor) -> Tensor:
        nll: Tensor = linear_cross_entropy(
            input, layer.weight, target, bias=layer.bias, reduction="none", **self._options
        )
        return -nll


def _uniform(hidden: Tensor, count: int) -> Tensor:
    """Returns log-probabilities of a cluster that div_value left no hidden size: all its classes are equally likely."""
    return torch.full(hidden.shape[:1], -math.log(count), dtype=stats_dtype(hidden), device=hidden.device)
