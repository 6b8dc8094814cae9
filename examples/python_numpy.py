"""The head's loss and gradients of numpy arrays, without PyTorch.

Run: python examples/python_numpy.py
"""

import logitless.numpy
import numpy as np


def main() -> None:
    rng = np.random.default_rng(0)
    input = rng.standard_normal((6, 16), np.float32)
    weight = rng.standard_normal((1000, 16), np.float32)
    target = np.array([1, 2, -100, 4, 5, 999])  # the third row has no target
    result = logitless.numpy.linear_cross_entropy(input, weight, target, gradients=True, return_stats=True)
    print(f"loss {result.loss:.4f} of {result.valid_count} rows, nll {result.nll}")

    valid = target != -100
    logits = (input @ weight.T).astype(np.float64)[valid]
    lse = np.log(np.exp(logits).sum(1))
    expected = (lse - logits[np.arange(valid.sum()), target[valid]]).mean()
    assert abs(result.loss - expected) < 1e-5
    assert (result.d_input[2] == 0).all() and result.d_linear_weight.shape == weight.shape


if __name__ == "__main__":
    main()
