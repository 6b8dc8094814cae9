"""ScreenedWeight: results are those without it, it follows each change of its weight, and no call takes a wrong one."""

import copy
import pickle
import threading

import logitless
import pytest
import torch
from logitless import screened
from sparsified_cases import gradients, head
from support import DEVICES, in_threads, lce, python

SCREEN = {"gradient": "always-sparsified", "threshold": 2**-6, "screen": "fp8"}
on_devices = pytest.mark.parametrize("device", DEVICES)


def problem(tokens=24, vocab=400, hidden=16, device="cpu", dtype=torch.bfloat16):
    """Returns hidden states, weight and bias that require gradients, and targets."""
    *tensors, target = head(device, tokens, vocab, hidden, dtype, 0.4)
    return [*(t.detach().requires_grad_() for t in tensors), target]


def results(hidden, weight, bias, target, screen, seed=3, **options):
    loss = lce(hidden, weight, target, bias=bias, seed=seed, **SCREEN | {"screen": screen}, **options)
    return [loss.detach(), *gradients((hidden, weight, bias), loss)]


def same(got, expected):
    return all(torch.equal(a, b) for a, b in zip(got, expected))


@pytest.fixture
def makes(monkeypatch):
    """A list that gets an entry whenever a call makes a copy."""
    times, find = [], screened.ScreenedWeight._find

    def counting(call, tensors, size):
        if size == 0:
            times.append(1)
        return find(call, tensors, size)

    monkeypatch.setattr(screened.ScreenedWeight, "_find", staticmethod(counting))
    return times


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_results_have_the_same_bits(makes, device, dtype, reduction):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("the portable engine has equal bits for equal plans alone")
    first = problem(device=device, dtype=dtype)
    screen = logitless.ScreenedWeight(first[1])
    assert screen.nbytes == 0
    for tokens in (24, 9, 131):
        hidden, _, _, target = problem(tokens, device=device, dtype=dtype)
        batch = [hidden, *first[1:3], target]
        for seed in (1, 2):
            expected = results(*batch, "fp8", seed, reduction=reduction)
            assert same(results(*batch, screen, seed, reduction=reduction), expected)
    with torch.no_grad():
        options = SCREEN | {"seed": 2, "bias": first[2], "return_stats": ["nll", "loss_error"]}
        for got, expected in zip(*(lce(hidden, first[1], target, **options | {"screen": s}) for s in (screen, "fp8"))):
            assert (got is None and expected is None) or torch.equal(got, expected)
    assert len(makes) == 1
    assert screen.nbytes >= (400 * 16 if device == "cuda" else 4 * 400)


@on_devices
def test_ignored_rows_and_none_at_all(makes, device):
    hidden, weight, bias, target = problem(device=device)
    screen = logitless.ScreenedWeight(weight)
    empty = hidden.detach()[:0].requires_grad_()
    assert lce(empty, weight, target[:0], reduction="sum", **SCREEN | {"screen": screen}) == 0
    assert screen.nbytes == 0
    ignored = torch.full_like(target, -100)
    assert lce(hidden, weight, ignored, reduction="sum", **SCREEN | {"screen": screen}) == 0
    assert same(results(hidden, weight, bias, target, screen), results(hidden, weight, bias, target, "fp8"))
    assert len(makes) == 2  # the first without a row makes none


def step(weight):
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], 1e3).step()


def write_past_the_version(weight):
    """As optimizers with kernels of their own do."""

    class Own(torch.optim.Optimizer):
        def __init__(self):
            super().__init__([weight], {})

        def step(self, closure=None):
            weight.data.mul_(300)

    Own().step()


def of_master_weights(weight):
    master = weight.detach().float().clone().requires_grad_()
    master.grad = torch.full_like(master, 1e3)
    torch.optim.SGD([master], 1.0).step()
    weight.data.copy_(master)


def load(weight):
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device=weight.device)
    state = {"weight": 300 * weight.detach()}
    module.weight = weight
    module.load_state_dict(state)


def in_place(weight):
    with torch.no_grad():
        weight[7] *= 300


def through_a_view(weight):
    weight.detach().view(-1)[5:9].fill_(200.0)


def assign_data(weight):
    weight.data = weight.data * 300


def transpose(weight):
    weight.data = (300 * weight.data).T.contiguous().T


CHANGES = [
    step,
    write_past_the_version,
    of_master_weights,
    load,
    in_place,
    through_a_view,
    assign_data,
    transpose,
]


@on_devices
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_the_copy_follows_the_weight(makes, change, device):
    """Elements become larger than the rows' exponents allow for: an old copy would give another result."""
    hidden, weight, bias, target = problem(device=device)
    weight = torch.nn.Parameter(weight.detach())
    screen = logitless.ScreenedWeight(weight)
    before = results(hidden, weight, bias, target, screen)
    change(weight)
    after = results(hidden, weight, bias, target, screen)
    assert same(after, results(hidden, weight, bias, target, "fp8")) and not same(after, before)
    assert len(makes) == 2
    assert same(results(hidden, weight, bias, target, screen), after) and len(makes) == 2


def test_another_storage_at_the_same_place_is_seen():
    hidden, weight, bias, target = problem(dtype=torch.float32)
    memory = bytearray(weight.detach().numpy().tobytes())
    place = [torch.frombuffer(memory, dtype=torch.float32).view_as(weight) for _ in range(2)]
    weight = torch.nn.Parameter(place[0])
    screen = logitless.ScreenedWeight(weight)
    results(hidden, weight, bias, target, screen)
    place[1].mul_(300)
    weight.data = place[1]
    assert weight.data_ptr() == place[0].data_ptr()
    assert same(results(hidden, weight, bias, target, screen), results(hidden, weight, bias, target, "fp8"))


def test_unseen_writes_need_a_refresh():
    hidden, weight, bias, target = problem()
    screen = logitless.ScreenedWeight(weight)
    results(hidden, weight, bias, target, screen)
    weight.data.mul_(300)
    fresh = results(hidden, weight, bias, target, "fp8")
    assert not same(results(hidden, weight, bias, target, screen), fresh)  # so a copy is read
    screen.refresh()
    assert same(results(hidden, weight, bias, target, screen), fresh)


def test_a_step_that_fails_after_writing_is_seen():
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["params"][0].data.mul_(300)
            raise RuntimeError("out of memory")

    hidden, weight, bias, target = problem()
    weight = torch.nn.Parameter(weight.detach())
    screen = logitless.ScreenedWeight(weight)
    results(hidden, weight, bias, target, screen)
    with pytest.raises(RuntimeError, match="out of memory"):
        Fails([weight]).step()
    assert same(results(hidden, weight, bias, target, screen), results(hidden, weight, bias, target, "fp8"))


def test_a_refresh_during_a_call_is_kept():
    hidden, weight, bias, target = problem()
    screen = logitless.ScreenedWeight(weight)
    results(hidden, weight, bias, target, screen)
    with screen._lock:  # as a call holds it
        thread = threading.Thread(target=screen.refresh)
        thread.start()
        thread.join(0.05)
        assert thread.is_alive() and screen._made_of is not None
    thread.join()
    assert screen._made_of is None


def test_weights_that_are_wrapped_later_are_refused():
    hidden, weight, bias, target = problem()
    screen = logitless.ScreenedWeight(weight)
    weight.ds_id = 1
    with pytest.raises(logitless.UnsupportedError, match="got one that DeepSpeed ZeRO-3 gathers"):
        results(hidden, weight, bias, target, screen)


def test_a_kept_copy_does_not_change_the_default_plan():
    sizes = {"dtype": "bf16", "device": "h100", **SCREEN, "gradient": "sparsified", "threshold": 2**-11}
    kept, made = (logitless.plan(512, 256000, 2048, keeps_screen=k, **sizes) for k in (True, False))
    assert kept.kind == made.kind == "sparsified" and kept.workspace_bytes <= made.workspace_bytes


@on_devices
def test_steps_of_compiled_and_other_optimizers_count(makes, device):
    hidden, weight, bias, target = problem(device=device)
    screen, other = logitless.ScreenedWeight(weight), torch.nn.Parameter(torch.ones(3, device=device))
    for optimizer in (torch.optim.SGD([other], 0.1), torch.optim.AdamW([other], fused=True)):
        results(hidden, weight, bias, target, screen)
        other.grad = torch.ones_like(other)
        optimizer.step()
    results(hidden, weight, bias, target, screen)
    assert len(makes) == 3
    weight.grad = torch.ones_like(weight)
    torch.compile(torch.optim.SGD([weight], 10.0).step, backend="eager")()
    assert same(results(hidden, weight, bias, target, screen), results(hidden, weight, bias, target, "fp8"))
    assert len(makes) == 4


def test_other_dtypes_of_hidden_states_have_a_copy_of_their_own():
    hidden, weight, bias, target = problem(dtype=torch.float32)
    with torch.no_grad():
        weight[5, 0] = 448.5 / 1024  # bfloat16 rounds it to 448 / 1024, which has another exponent
    screen = logitless.ScreenedWeight(weight)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            got, expected = (results(hidden, weight, bias, target, s) for s in (screen, "fp8"))
        assert same(got, expected)
        for dtype in (torch.bfloat16, torch.float32):
            cast = hidden.detach().to(dtype).requires_grad_()
            assert same(results(cast, weight, bias, target, screen), results(cast, weight, bias, target, "fp8"))


def test_training_is_that_without_it():
    def train(keeps):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), logitless.nn.FusedHead(16, 300, **SCREEN))
        if keeps:
            model[1].screen = logitless.ScreenedWeight(model[1].weight)
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        for k in range(5):
            for micro in range(3):
                x = torch.randn(12, 16, generator=torch.Generator().manual_seed(10 * k + micro))
                (model[1](model[0](x), torch.arange(12) * 7, seed=k) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    assert same(train(True), train(False))


def test_modules():
    hidden, _, _, target = problem(dtype=torch.float32)
    linear = torch.nn.Linear(16, 400, bias=False)
    fused = logitless.nn.FusedHead.from_linear(linear, **SCREEN | {"screen": logitless.ScreenedWeight(linear.weight)})
    loss = logitless.LinearCrossEntropyLoss(16, 400, **SCREEN)
    loss.screen = logitless.ScreenedWeight(loss.linear.weight)
    for module, weight in ((fused, fused.weight), (loss, loss.linear.weight)):
        expected = lce(hidden, weight, target, seed=2, **SCREEN)
        assert module(hidden, target, seed=2) == expected and module.screen.nbytes > 0
        assert "ScreenedWeight(shape=[400, 16]" in repr(module) and list(module.state_dict())
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            own = getattr(other, "linear", other).weight
            assert other.screen.weight is own and own is not weight and other.screen.nbytes == 0
            assert other(hidden, target, seed=2) == expected
        module.to(torch.bfloat16)
        assert module(hidden.bfloat16(), target, seed=2).isfinite()
        with torch.no_grad():
            weight.mul_(300)
        short = hidden.bfloat16()
        assert module(short, target, seed=2) == lce(short, weight, target, seed=2, **SCREEN)


def test_checkpointing_and_threads(makes):
    hidden, weight, bias, target = problem()
    screen = logitless.ScreenedWeight(weight)
    expected = results(hidden, weight, bias, target, "fp8")

    def loss(hidden):
        return lce(hidden, weight, target, bias=bias, seed=3, **SCREEN | {"screen": screen})

    again = torch.utils.checkpoint.checkpoint(loss, hidden, use_reentrant=False)
    assert same([again.detach(), *gradients((hidden, weight, bias), again)], expected)
    got = []
    in_threads(lambda _: got.append(results(hidden, weight, bias, target, screen)), *range(6))
    assert len(got) == 6 and all(same(each, expected) for each in got) and len(makes) == 1


@on_devices
def test_an_exact_plan_makes_no_copy(device):
    hidden, weight, bias, target = problem(device=device)
    screen = logitless.ScreenedWeight(weight)
    options = {"gradient": "sparsified", "max_workspace_bytes": "fastest", "seed": 1}
    got, expected = (lce(hidden, weight, target, **SCREEN | options | {"screen": s}) for s in (screen, "fp8"))
    assert torch.equal(got, expected)
    plan = logitless.plan(
        24, 400, 16, dtype=torch.bfloat16, device=device, **SCREEN | {"gradient": "sparsified"}, keeps_screen=True
    )
    assert screen.nbytes == plan.screen_weight_bytes and (plan.kind == "sparsified") == (screen.nbytes > 0)


@on_devices
def test_budgets(device):
    hidden, weight, bias, target = problem(device=device)
    screen = logitless.ScreenedWeight(weight)

    def call(budget):
        return results(hidden, weight, bias, target, screen, max_workspace_bytes=budget)

    with pytest.raises(logitless.BudgetTooSmallError, match="a workspace of .* and a screen_weight of") as error:
        call(1)
    least = error.value.required_bytes
    with pytest.raises(logitless.BudgetTooSmallError):
        call(least - 1)
    sizes = {"dtype": torch.bfloat16, "device": device, "bias": True, "gradients": ["hidden", "weight", "bias"]}
    plan = logitless.plan(24, 400, 16, max_workspace_bytes=least, keeps_screen=True, **sizes, **SCREEN)
    assert plan.workspace_bytes + plan.screen_weight_bytes == least
    assert same(call(least), results(hidden, weight, bias, target, "fp8"))
    assert screen.nbytes == plan.screen_weight_bytes
    with pytest.raises(logitless.BudgetTooSmallError):  # also once there is a copy
        call(least - 1)
    assert same(call(least), call(None))


def test_plans_of_gpus_count_the_copy():
    sizes = {"dtype": "bf16", "gradients": ["hidden", "weight"], **SCREEN}
    for device, size in (("h100", 2048 + 4), ("a100", 2 * 2048)):
        kept, made = (logitless.plan(8192, 131072, 2048, device=device, keeps_screen=k, **sizes) for k in (True, False))
        assert kept.screen_weight_bytes == 131072 * size and made.screen_weight_bytes == 0
        assert kept.workspace_bytes <= made.workspace_bytes


REFUSED = {
    "another weight": (lambda w: {"screen": logitless.ScreenedWeight(w.detach())}, "got one of another tensor"),
    "exact": (lambda w: {"gradient": "exact"}, 'screen: expected "none" unless gradient is "sparsified"'),
    "none": (lambda w: {"reduction": "none"}, 'reduction: expected "mean" or "sum" with a screen'),
    "smoothing": (lambda w: {"label_smoothing": 0.1}, "label_smoothing: expected 0 with a screen"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    hidden, weight, _, target = problem()
    change, message = REFUSED[name]
    options = SCREEN | {"screen": logitless.ScreenedWeight(weight)} | change(weight)
    with pytest.raises(ValueError, match=message):
        lce(hidden, weight, target, **options)


def test_what_has_no_copy():
    with pytest.raises(TypeError, match="weight: expected a torch.Tensor, got list"):
        logitless.ScreenedWeight([1.0])
    with pytest.raises(ValueError, match=r"weight: expected shape \[V, D\], got \[3\]"):
        logitless.ScreenedWeight(torch.ones(3))
    with torch.inference_mode():
        weight = torch.ones(4, 3)
    with pytest.raises(logitless.UnsupportedError, match="weight: expected .* got one of inference mode"):
        logitless.ScreenedWeight(weight)
    for mark, client in (("_fsdp_flattened", "FSDP"), ("ds_id", "DeepSpeed ZeRO-3")):
        weight = torch.ones(4, 3)
        setattr(weight, mark, True)
        with pytest.raises(logitless.UnsupportedError, match=f"weight: expected .* got one that {client} gathers"):
            logitless.ScreenedWeight(weight)


OF_FSDP2 = """
import logitless, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 8, bias=False)

    def forward(self, hidden):
        try:
            logitless.ScreenedWeight(self.head.weight)
        except logitless.UnsupportedError as error:
            print(error)
        return hidden @ self.head.weight.T

torch.distributed.init_process_group("gloo", init_method="file://{}", rank=0, world_size=1)
model = Model()
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
model(torch.ones(2, 4))
torch.distributed.destroy_process_group()
"""


def test_weights_that_fsdp2_gathers_are_refused(tmp_path):
    assert "one that FSDP gathers before each use" in python(OF_FSDP2.replace("{}", str(tmp_path / "store")))


def test_compiled_code_refuses_by_name():
    hidden, weight, _, target = problem()
    options = SCREEN | {"screen": logitless.ScreenedWeight(weight)}
    compiled = torch.compile(lambda: lce(hidden, weight, target, **options), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match='screen: expected "fp8" under torch.compile, got a ScreenedWeight'):
        compiled()


def test_modes_of_pytorch_leave_it_unused():
    hidden, weight, bias, target = problem()
    screen = logitless.ScreenedWeight(weight)
    expected = results(hidden, weight, bias, target, "fp8")
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        got = results(hidden, weight, bias, target, screen)
    assert same(got, expected) and screen.nbytes == 0


def test_other_interfaces_refuse_by_name():
    hidden, weight, _, target = problem(dtype=torch.float32)
    options = SCREEN | {"screen": logitless.ScreenedWeight(weight)}
    expected = 'screen: expected one of "none", "fp8", got ScreenedWeight'
    with pytest.raises(ValueError, match=expected):
        logitless.plan(24, 400, 16, **options)
    with pytest.raises(ValueError, match=expected):
        logitless.multi_head_linear_cross_entropy(hidden, [weight], target[None], **options)
    with pytest.raises(ValueError, match=expected):
        arrays = [t.detach().numpy() for t in (hidden, weight, target)]
        logitless.numpy.linear_cross_entropy(*arrays, **options)
    with pytest.raises(TypeError, match="keeps_screen: expected a bool, got int"):
        logitless.plan(24, 400, 16, **SCREEN, keeps_screen=1)
    with pytest.raises(logitless.InvalidArgumentError, match="screen_weight: expected none without a screen"):
        logitless.plan(24, 400, 16, keeps_screen=True)


@pytest.mark.gpu
def test_streams_take_turns():
    hidden, weight, bias, target = problem(512, 32768, 256, device="cuda")
    expected = results(hidden, weight, bias, target, "fp8")
    torch.cuda.synchronize()
    for _ in range(5):
        screen = logitless.ScreenedWeight(weight)
        got = []
        for _ in range(3):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                got.append(results(hidden, weight, bias, target, screen))
        torch.cuda.synchronize()
        assert all(same(each, expected) for each in got)


@pytest.mark.gpu
def test_captured_calls_and_steps_are_refused(monkeypatch):
    hidden, weight, bias, target = problem(device="cuda")
    screen = logitless.ScreenedWeight(weight)
    results(hidden, weight, bias, target, screen)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(logitless.UnsupportedError, match="where a CUDA graph captures this call"):
        with torch.cuda.graph(graph):
            lce(hidden, weight, target, **SCREEN | {"screen": screen})
    monkeypatch.setattr(screened, "_steps", screened._Steps())
    screened._steps.begin()
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], 0.1)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    with pytest.raises(logitless.UnsupportedError, match="where a CUDA graph captures an optimizer's step"):
        lce(hidden, weight, target, **SCREEN | {"screen": screen})
