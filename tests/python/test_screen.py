"""Sparsified gradients behind an 8-bit screen, against exact float64 values of PyTorch."""

import logitless
import logitless.numpy
import numpy as np
import pytest
import torch
from logitless import options as _options
from sparsified_cases import check_mean_over_seeds, gradients, head
from support import DEVICES, lce

SCREEN = {"gradient": "always-sparsified", "threshold": 2**-6, "screen": "fp8"}


def e4m3(rows):
    """Rounds rows to e4m3, with the least power of two for each row with which its largest element is at most 448."""
    fraction, exponent = torch.frexp(rows.abs().amax(-1, keepdim=True))
    scale = torch.exp2(exponent - 9 + (fraction > 448 / 512))
    return (rows / scale).to(torch.float8_e4m3fn).double() * scale


class Truth:
    """Exact float64 values of a call, and the errors that the screen's formulas predict for them.

    Attributes:
        loss, gradients: Exact ones; the gradients are of input, weight and bias.
        nll: Of each row; 0 in ignored ones.
        error: The standard deviation of nll.
        loss_bias: Bounds the bias of the loss.
        bias: Bounds the biases of the gradients.
    """

    def __init__(self, input, weight, bias, target, threshold, scale=1.0, softcap=None, temperature=1.0, z_loss=0.0,
                 class_weight=None, token_weight=None, num_items=None, shift=0, reduction="mean"):  # fmt: skip
        input, weight, bias = leaves = [t.detach().cpu().double().requires_grad_() for t in (input, weight, bias)]
        target = target.cpu()
        target = torch.cat([target[shift:], target.new_full((shift,), -100)])
        by = temperature.double()[:, None] if torch.is_tensor(temperature) else temperature

        def logits(input, weight):
            z = scale * input @ weight.T + bias
            return (softcap * torch.tanh(z / softcap) if softcap else z) / by

        valid, y = target != -100, target.clamp_min(0)
        z = logits(input, weight)
        lse = z.logsumexp(1)
        known = lse.detach().requires_grad_()  # the loss's gradient for lse is each row's coefficient of p
        nll = [(value - z.gather(1, y[:, None])[:, 0]).where(valid, 0.0) for value in (lse, known)]
        of_class = torch.ones(weight.shape[0]) if class_weight is None else class_weight
        of_rows = torch.ones(len(y)) if token_weight is None else token_weight
        weights = (of_rows * of_class[y]).double().where(valid, 0.0)
        items = {"sum": 1, "mean": num_items or weights.sum()}[reduction]
        self.rows = weights / items  # each row's share in the loss
        squared = of_rows.double().where(valid, 0.0) * z_loss / items
        loss, again = ((self.rows * n + squared * v.square()).sum() for n, v in zip(nll, (lse, known)))
        (coefficient,) = torch.autograd.grad(again, known, retain_graph=True)
        self.loss, self.nll = loss.detach(), nll[0].detach()
        self.gradients = [g.detach() for g in torch.autograd.grad(loss, leaves)]

        with torch.no_grad():
            z8 = logits(e4m3(input), e4m3(weight))
            p, p8, ratio = z.softmax(1), z8.softmax(1), (z - z8).exp()
            drawn = (p8 < threshold) & (y[:, None] != torch.arange(weight.shape[0]))
            total = (z.logsumexp(1) - z8.logsumexp(1)).exp()[:, None]
            # An element is kept with the probability p8 / threshold, and its part of the sum is then this step.
            step = torch.where(drawn, threshold * (ratio - 1).abs() / total, 0.0)
            variance = torch.where(drawn, p8 / threshold * (1 - p8 / threshold) * step.square(), 0.0).sum(1)
            self.error = variance.sqrt().where(valid, 0.0)
            # Terms of third and fourth order are left of the sum's logarithm. The ratio keeps those of second order: an
            # element's covariance with the sum, and the sum's variance.
            left = 3 * variance * (step.amax(1) + variance)
            self.loss_bias = (self.rows.abs() * left + squared.abs() * (variance + lse.abs() * left)).sum()
            bound = coefficient.abs()[:, None] * p * 2 * (step + variance[:, None]) * abs(scale) / by
            self.bias = [bound @ weight.abs(), bound.T @ input.abs(), bound.sum(0) / abs(scale)]


def problem(tokens=24, vocab=400, hidden=16, spread=0.4, dtype=torch.float32, device="cpu"):
    return head(device, tokens, vocab, hidden, dtype, spread)


on_devices = pytest.mark.parametrize("device", DEVICES)


def check_means(tensors, target, threshold=SCREEN["threshold"], seeds=250, unit=1e-5, draws_loss=True, **options):
    """Checks the means over seeds of loss and gradients; returns the truth. Without draws_loss, leaves out the loss."""
    truth = Truth(*tensors, target, threshold, **options)
    moved = {name: v.to(target.device) if torch.is_tensor(v) else v for name, v in options.items()}

    def draw(seed):
        loss = lce(*tensors[:2], target, bias=tensors[2], seed=seed, **SCREEN | {"threshold": threshold}, **moved)
        return [loss.detach().double().cpu(), *gradients(tensors, loss)][first:]

    first = 0 if draws_loss else 1
    exact, bias = [truth.loss, *truth.gradients], [truth.loss_bias, *truth.bias]
    check_mean_over_seeds(draw, exact[first:], seeds, unit, bias[first:])
    return truth


OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum", "scale": 0.7},
    "softcap": {"softcap": 2.0},
    "z_loss": {"z_loss": 0.1},
    "temperature": {"temperature": 1.7},
    "temperatures": {"temperature": torch.linspace(0.7, 3, 24)},
    "class_weight": {"class_weight": torch.linspace(0.5, 2, 400)},
    "token_weight": {"token_weight": torch.linspace(0, 1, 24), "num_items": 5},
    "shift": {"shift": 1},
}


@on_devices
@pytest.mark.parametrize("name", OPTIONS)
def test_means_over_seeds_are_exact(name, device):
    *tensors, target = problem(device=device)
    check_means(tensors, target, **OPTIONS[name])


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_outlier_channels(dtype, device):
    """Channels 100 times as large as the others leave these fewer bits, and logits of up to 40 large 8-bit errors."""
    *tensors, target = problem(16, 1000, 48, spread=1.0, dtype=dtype, device=device)
    with torch.no_grad():
        input, weight, bias = tensors
        input[:, [3, 17]] *= 100
        weight[:, [3, 17]] /= 40
        weight *= 40 / (input.double() @ weight.double().T).abs().max().item()
        assert 39 < (input.double() @ weight.double().T).abs().max() < 41
        bias /= 10
    unit = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    # On GPUs one bad estimate of lse makes all sums of 128 rows exact.
    truth = check_means(tensors, target, 2**-9, unit=unit, draws_loss=device == "cpu")
    assert truth.error.max() > 1e-3


@pytest.mark.parametrize("trains", [True, False])
def test_the_loss_error_is_the_standard_deviation(trains):
    *tensors, target = problem(spread=0.6)
    truth, names, seeds = Truth(*tensors, target, SCREEN["threshold"]), ["nll", "loss_error"], 1000
    with torch.set_grad_enabled(trains):
        outs = [
            lce(*tensors[:2], target, bias=tensors[2], seed=s, return_stats=names, differentiable_stats=False, **SCREEN)
            for s in range(seeds)
        ]
    nll, error = (torch.stack([getattr(out, name) for out in outs]).double() for name in names)
    assert not outs[0].loss_error.requires_grad and outs[0].loss_error.dtype == torch.float32
    assert (error[:, 0] == 0).all() and (nll[:, 0] == 0).all()  # it is ignored
    size = truth.error > truth.error.median() / 2
    assert size.sum() > 12
    for predicted in (error.square().mean(0).sqrt(), truth.error):
        assert (nll.std(0) / predicted - 1).abs()[size].max() < 0.2
    assert ((nll.mean(0) - truth.nll).abs() <= 6 * truth.error / seeds**0.5 + 3 * truth.error**2 + 1e-5).all()


@on_devices
def test_a_forward_pass_alone_has_the_same_loss(device):
    *tensors, target = problem(device=device)
    names = ["nll", "lse", "loss_error", "target_logit", "valid_count", "kept_count", "draw_variance"]
    options = {"bias": tensors[2], "return_stats": names, "differentiable_stats": False, "seed": 3, **SCREEN}
    trained = lce(*tensors[:2], target, **options)
    with torch.no_grad():
        alone = lce(*tensors[:2], target, **options)
        by_row = lce(*tensors[:2], target, reduction="none", **options)
    for name in ("loss", *names):
        assert torch.equal(getattr(alone, name), getattr(trained, name)), name
        if name == "draw_variance":  # with other coefficients, which cancel up to rounding
            torch.testing.assert_close(by_row.draw_variance, trained.draw_variance)
        elif name != "loss":
            assert torch.equal(getattr(by_row, name), getattr(trained, name)), name
    assert torch.equal(by_row.loss, by_row.nll)
    half = [tensor.detach().half() for tensor in tensors]
    assert lce(*half[:2], target, bias=half[2], seed=3, **SCREEN).isfinite()


def test_the_default_statistics_are_those_of_a_screen():
    *tensors, target = problem()
    out = lce(*tensors[:2], target, return_stats=True, differentiable_stats=False, **SCREEN)
    given = {name for name, value in out._asdict().items() if value is not None}
    assert given == {"loss", "nll", "lse", "valid_count"}
    exact = lce(*tensors[:2], target, return_stats=["target_logit"]).target_logit
    got = lce(*tensors[:2], target, return_stats=["target_logit"], differentiable_stats=False, **SCREEN)
    torch.testing.assert_close(got.target_logit, exact)


def test_seeds_and_threads():
    *tensors, target = problem(100, 1000, 24)

    def draw(seed):
        loss = lce(*tensors[:2], target, bias=tensors[2], seed=seed, **SCREEN)
        return [loss.detach(), *gradients(tensors, loss)]

    first, threads = draw(7), torch.get_num_threads()
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            for _ in range(3):
                assert all(torch.equal(a, b) for a, b in zip(draw(7), first))
    finally:
        torch.set_num_threads(threads)
    assert not any(torch.equal(a, b) for a, b in zip(draw(8), first))
    torch.manual_seed(1)
    drawn = [lce(*tensors[:2], target, **SCREEN) for _ in range(2)]
    torch.manual_seed(1)
    with torch.no_grad():
        assert [lce(*tensors[:2], target, **SCREEN) for _ in range(2)] == drawn and drawn[0] != drawn[1]


SHAPES = [(1, 1, 1), (1, 400, 16), (7, 1, 3), (5, 2, 1), (17, 133, 7), (33, 1025, 65)]


@on_devices
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shapes(shape, dtype, device):
    """With a threshold below every element nothing is drawn, so all is exact up to the dtype."""
    tokens, vocab, hidden = shape
    *tensors, target = problem(tokens, vocab, hidden, dtype=dtype, device=device)
    if tokens == 1:
        target[:] = vocab - 1
    options = {"bias": tensors[2], "return_stats": ["nll", "loss_error"], "differentiable_stats": False}
    truth = Truth(*tensors, target, 1e-30)
    out = lce(*tensors[:2], target, seed=1, **SCREEN | {"threshold": 1e-30}, **options)
    torch.testing.assert_close(out.nll.double().cpu(), truth.nll, rtol=2e-5, atol=2e-5)
    assert (out.loss_error == 0).all()
    unit = 1e-5 if dtype == torch.float32 else 2**-6
    for got, expected in zip(gradients(tensors, out.loss), truth.gradients):
        assert (got - expected).abs().max() <= unit * (1e-3 + expected.abs().max())
    assert lce(*tensors[:2], target, seed=1, **SCREEN, **options).loss.isfinite()


@on_devices
@pytest.mark.parametrize("tokens", [0, 9])
def test_no_row_counts(tokens, device):
    *tensors, _ = problem(12, device=device)
    input, target = tensors[0].detach()[:tokens].requires_grad_(), torch.full((tokens,), -100, device=device)
    options = {"return_stats": ["nll", "loss_error"], "differentiable_stats": False, "reduction": "sum"}
    out = lce(input, tensors[1], target, **SCREEN, **options)
    assert out.loss == 0 and not out.nll.any() and not out.loss_error.any()
    assert not any(gradient.any() for gradient in torch.autograd.grad(out.loss, (input, tensors[1])))
    assert lce(input, tensors[1], target, **SCREEN).isnan()


def one(place, value):
    def change(input, weight, bias):
        {"input": input, "weight": weight, "bias": bias}[place].view(-1)[40] = value

    return change


STRANGE = {
    f"{value} in {place}": one(place, value)
    for place in ("input", "weight", "bias")
    for value in (float("nan"), float("inf"), -float("inf"))
}


def enlarge(input, weight, bias):
    weight *= 1e4 / (input @ weight.T).abs().max()


@on_devices
@pytest.mark.parametrize("name", STRANGE)
def test_numbers_that_are_not_finite(name, device):
    """Rows are finite, or NaN, where they are so without the screen. A weight without e4m3 number makes all NaN, but on
    GPUs not those whose sums are made again."""
    *tensors, target = problem(device=device)
    with torch.no_grad():
        STRANGE[name](*tensors)
    options = {"bias": tensors[2], "return_stats": ["nll"], "differentiable_stats": False, "reduction": "sum"}
    exact = lce(*tensors[:2], target, **options)
    got = lce(*tensors[:2], target, seed=1, **SCREEN, **options)
    if "inf in weight" in name:
        again = torch.isclose(got.nll, exact.nll) & (device == "cuda")
        assert (got.nll.isnan() | again)[1:].all() and got.loss.isnan()
        return
    assert torch.equal(got.nll.isfinite(), exact.nll.isfinite())
    assert got.nll[exact.nll.isnan()].isnan().all() and (got.loss.isnan() or not exact.loss.isnan())
    rows = [torch.autograd.grad(out.loss, tensors)[0].isfinite().all(1) for out in (got, exact)]
    assert torch.equal(*rows)


@on_devices
def test_large_logits(device):
    *tensors, target = problem(device=device)
    with torch.no_grad():
        enlarge(*tensors)
    names = ["nll", "lse", "loss_error"]
    for seed in range(20):
        options = {"return_stats": names, "differentiable_stats": False, "seed": seed}
        out = lce(*tensors[:2], target, **SCREEN, **options)
        assert all(getattr(out, name).isfinite().all() for name in ("loss", *names))
        assert (out.nll >= -1e-3).all()
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.loss, tensors[:2]))


def test_8_bit_logits_that_are_far_off():
    """Two channels of about 100 cancel: logits stay below 10, and their 8-bit errors have a deviation of 3."""
    *tensors, target = problem(16, 1000, 48)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        input, weight, _ = tensors
        large, factor = 100 * torch.randn(16, generator=generator).abs(), torch.randn(1000, generator=generator) / 2
        input /= 2
        input[:, 5], input[:, 9], weight[:, 5], weight[:, 9] = large, 1.03 * large, factor, -factor / 1.03
    exact = lce(*tensors[:2], target, return_stats=["nll"]).nll
    options = {"return_stats": ["nll"], "differentiable_stats": False}
    for seed in range(50):
        out = lce(*tensors[:2], target, seed=seed, **SCREEN | {"threshold": 2**-9}, **options)
        assert (out.nll - exact).abs().max() < 50
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.loss, tensors[:2]))


ONE_PASS = r"with a screen \(it makes gradients with the loss\), got"
REFUSED = {
    "exact": ({"gradient": "exact"}, 'screen: expected "none" unless gradient is "sparsified", got "fp8" with "exact"'),
    "name": ({"screen": "fp4"}, 'screen: expected one of "none", "fp8", got .fp4'),
    "none": ({"reduction": "none"}, f'reduction: expected "mean" or "sum" {ONE_PASS} "none"'),
    "main_grad": ({"main_grad": torch.zeros(400, 16)}, f"main_grad: expected None {ONE_PASS} a tensor"),
    "later": ({"return_stats": True}, f"differentiable_stats: expected False {ONE_PASS} True"),
    "smoothing": ({"label_smoothing": 0.1}, "label_smoothing: expected 0 with a screen, got 0.1"),
    "batch_invariant": ({"batch_invariant": True}, "batch_invariant: expected False unless"),
    "several": (
        {"targets": torch.zeros(24, 2).long(), "target_weight": torch.ones(24, 2)},
        'gradient: expected "exact" with several targets',
    ),
    "float64": (torch.float64, "screen: expected none .* with float64 operands, got fp8"),
    "float16": (torch.float16, 'screen: expected "none" with float16 gradients'),
    "loss_error": (
        {"screen": "none", "return_stats": ["loss_error"]},
        'return_stats: expected loss_error only with a screen, got it with "none"',
    ),
} | {
    name: ({"return_stats": [name]}, f"return_stats: expected no {name} with a screen")
    for name in _options.UNSCREENED_STATS
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    changes, message = REFUSED[name]
    dtype = torch.float32 if isinstance(changes, dict) else changes
    input, weight, bias, target = problem(dtype=dtype)
    given = {"hidden": input, "weight": weight, "targets": target, **SCREEN}
    with pytest.raises(ValueError, match=message):
        lce(**given | (changes if isinstance(changes, dict) else {}))


def test_other_interfaces_refuse_by_name():
    with pytest.raises(ValueError, match="screen: expected none .* where gradients come after the loss"):
        logitless.plan(64, 400, 16, later=True, **SCREEN)
    for call in (logitless.linear_log_probs, logitless.linear_top_k):
        with pytest.raises(TypeError, match="unexpected keyword argument 'screen'"):
            call(torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2, 1).long(), screen="fp8")


@pytest.mark.parametrize("gradients_too", [True, False])
def test_numpy(gradients_too):
    *tensors, target = problem()
    arrays = [t.detach().numpy() for t in (*tensors, target)]
    input, weight, bias, y = arrays
    options = {"seed": 5, "return_stats": ["nll", "loss_error"], **SCREEN}
    expected = lce(*tensors[:2], target, bias=tensors[2], differentiable_stats=False, **options)
    got = logitless.numpy.linear_cross_entropy(input, weight, y, bias=bias, gradients=gradients_too, **options)
    for name in ("loss", "nll", "loss_error"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name).detach())
    if gradients_too:
        for name, gradient in zip(("d_hidden", "d_weight", "d_bias"), gradients(tensors, expected.loss)):
            np.testing.assert_array_equal(getattr(got, name), gradient.float())
    with pytest.raises(ValueError, match="return_stats: expected no entropy with a screen"):
        logitless.numpy.linear_cross_entropy(input, weight, y, **options | {"return_stats": ["entropy"]})


def test_backends_draw_alike():
    """The reference rounds and draws as the CPU does. Logits near a bound may fall on either side of it."""
    arrays = [t.detach().numpy() for t in problem()]
    input, weight, bias, target = arrays
    results = [
        logitless.numpy.linear_cross_entropy(
            input, weight, target, bias=bias, gradients=True, backend=name, seed=2, return_stats=["lse"], **SCREEN
        )
        for name in ("cpu", "reference")
    ]
    got, expected = results
    same = np.abs(got.lse - expected.lse) < 1e-4
    assert same.mean() > 0.9
    np.testing.assert_allclose(got.d_hidden[same], expected.d_hidden[same], rtol=1e-3, atol=1e-5)


def test_modules():
    input, _, _, target = problem()
    for model in (logitless.LinearCrossEntropyLoss(16, 400, **SCREEN), logitless.nn.FusedHead(16, 400, **SCREEN)):
        assert "screen=fp8" in repr(model)
        weight = getattr(model, "linear", model).weight
        model(input, target, seed=2).backward()
        loss = lce(input, weight, target, seed=2, **SCREEN)
        assert torch.equal(weight.grad, torch.autograd.grad(loss, weight)[0])


@on_devices
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trains", [True, False])
def test_compiled_is_bitwise_eager(trains, device):
    """test_tools.py compiles and checks the operator with gradients."""

    def eager(input, weight, target, seed):
        out = lce(
            torch.relu(input), weight, target, seed=seed, return_stats=["nll", "loss_error"],
            differentiable_stats=False, **SCREEN,
        )  # fmt: skip
        return out.loss, out.nll, out.loss_error

    compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (12, 9):
        input, weight, _, target = problem(tokens, device=device)
        with torch.set_grad_enabled(trains):
            got, expected = (f(input, weight, target, 5) for f in (compiled, eager))
        assert all(torch.equal(a, b) for a, b in zip(got, expected))
        if trains:
            for a, b in zip(*(gradients((input, weight), out[0]) for out in (got, expected))):
                assert torch.equal(a, b)


@on_devices
@pytest.mark.parametrize("trains", [True, False])
def test_budgets(trains, device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16  # the portable engine's draws depend on its blocks
    *tensors, target = problem(300, 2000, 32, device=device, dtype=dtype)
    leaves = [t.detach().requires_grad_(trains) for t in tensors[:2]]

    def call(budget):
        loss = lce(*leaves, target, seed=1, max_workspace_bytes=budget, **SCREEN)
        return [loss.detach(), *gradients(leaves, loss)] if trains else [loss]

    with pytest.raises(logitless.BudgetTooSmallError) as error:
        call(1)
    least = error.value.required_bytes
    with pytest.raises(logitless.BudgetTooSmallError):
        call(least - 1)
    gradients_of = ["hidden", "weight"][: 2 * trains]
    info = logitless.plan(
        300, 2000, 32, device=device, dtype=dtype, max_workspace_bytes=least, gradients=gradients_of, **SCREEN
    )
    assert info.workspace_bytes <= least
    for budget in (least, 2 * least, None, "fastest"):
        for got, expected in zip(call(budget), call(None)):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
