"""The wheel LOGITLESS_WHEEL as a kernel repository of Hugging Face, on CUDA if the wheel has kernels for it.

`kernels` imports the package under another name, so an installed package is another copy of it, in the same process.
"""

import base64
import copy
import hashlib
import importlib.metadata
import json
import os
import pathlib
import pickle
import re
import runpy
import shutil
import subprocess
import sys
import zipfile

import pytest
import torch
import torch.nn.functional as F
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("LOGITLESS_LIBRARY", None)  # of all copies of the package
import kernels  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAKE = runpy.run_path(str(ROOT / "hub" / "make.py"))
WHEEL = pathlib.Path(os.environ["LOGITLESS_WHEEL"]).resolve()
ARCHITECTURES = MAKE["architectures"](zipfile.ZipFile(WHEEL).read("logitless/liblogitless.so"))
CUDA, DEVICE = (torch.version.cuda, "cuda") if ARCHITECTURES else (None, "cpu")
torch.version.cuda = CUDA  # for a PyTorch with CUDA `kernels` takes variants with CUDA alone
LIKE_HERE = f"import sys, torch; torch.version.cuda = {CUDA!r}"
MODES = [kernels.Mode.INFERENCE, kernels.Mode.TRAINING, kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE]


def make(out, *arguments):
    command = [sys.executable, ROOT / "hub" / "make.py", out, *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True)


def beside(folder):
    """Returns the environment of a process that finds a folder's modules, and this process's."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    out = tmp_path_factory.mktemp("hub") / "logitless"
    done = make(out, WHEEL, *(["--cuda", CUDA] if CUDA else []))
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def kernel(repository):
    installed, known = importlib.metadata.version("kernels"), MAKE["KERNELS"]
    assert installed in known, f"kernels: expected one of {', '.join(known)}, got {installed}, which has not been tried"
    return kernels.get_local_kernel(repository)


@pytest.fixture(scope="module")
def package(kernel, tmp_path_factory):
    """Returns the wheel's package under its own name, beside the kernel."""
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(WHEEL).extractall(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        import logitless

        assert pathlib.Path(logitless.__file__).is_relative_to(folder)
        yield logitless


@pytest.fixture(autouse=True)
def _fixed_state():
    torch.manual_seed(0)
    torch._dynamo.reset()


class Head(nn.Module):
    """A module with the attributes of torch.nn.LinearCrossEntropyLoss, which PyTorch has since 2.13."""

    def __init__(self, **_):
        super().__init__()
        self.linear = nn.Linear(32, 96, bias=True)
        self.num_classes, self.out_features = 96, ()
        self.weight, self.reduction, self.ignore_index, self.label_smoothing, self.options = None, "mean", 3, 0.1, None

    def forward(self, input, target):
        logits = F.linear(input, self.linear.weight, self.linear.bias)
        return F.cross_entropy(logits, target, ignore_index=self.ignore_index, label_smoothing=self.label_smoothing)


def head_loss(input, linear_weight, target, *, linear_bias=None, weight=None, reduction="mean", ignore_index=None,
              label_smoothing=0.0, options=None):  # fmt: skip
    """PyTorch's signature."""
    logits = F.linear(input, linear_weight, linear_bias)
    return F.cross_entropy(logits, target, weight, reduction=reduction, label_smoothing=label_smoothing)


def causal_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None,
                hidden_states=None, lm_head_weight=None, lm_head_bias=None, **kwargs):  # fmt: skip
    """The signature that transformers' mapping of ForCausalLMLoss names."""
    logits = F.linear(hidden_states, lm_head_weight, lm_head_bias)
    if cap := kwargs.get("final_logit_softcapping"):
        logits = cap * torch.tanh(logits / cap)
    targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def problem(dtype, rows=(48,)):
    hidden, weight = torch.randn(*rows, 32, dtype=torch.float64), torch.randn(96, 32, dtype=torch.float64)
    target = torch.randint(96, rows)
    return hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype), target.to(DEVICE)


def results(loss, *leaves):
    """Returns the loss and the gradients, in float64."""
    return [t.detach().double().cpu() for t in (loss, *torch.autograd.grad(loss, leaves))]


def check(compute, plain, leaves):
    """Compares with float64. The bound is twice the error of the plain computation, plus a unit of rounding."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact, naive = results(plain(*wide), *wide), results(plain(*leaves), *leaves)
    got = results(compute(*leaves), *leaves)
    for value, other, true in zip(got, naive, exact, strict=True):
        largest = true.abs().max().clamp_min(1e-30)
        unit = torch.finfo(leaves[0].dtype).eps if true.dim() else torch.finfo(torch.float32).eps
        bound = 2 * (other - true).abs().max() + unit * largest
        assert (value - true).abs().max() <= bound, ((value - true).abs().max(), bound)


def kernelized(module, layer, repository, mode):
    """Kernelizes a module whose class has the layer's name, and returns it."""
    mapping = {layer: {DEVICE: {mode: kernels.LocalLayerRepository(repo_path=repository, layer_name=layer)}}}
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        return kernels.kernelize(module, mode=mode, device=DEVICE, use_fallback=False)


def test_repository(repository):
    (variant,) = (path for path in (repository / "build").iterdir() if path.is_dir())
    backend = "cpu" if CUDA is None else f"cu{CUDA.replace('.', '')}"
    assert re.fullmatch(rf"torch-stable-abi26-{backend}-(x86_64|aarch64)-linux", variant.name)
    files = {path.relative_to(variant).as_posix(): path for path in variant.rglob("*") if path.is_file()}
    sources = {name: path.read_text() for name, path in files.items() if name.endswith(".py")}
    assert "__init__.py" in sources and "layers.py" in sources and "LICENSE" in files
    assert not any(name.startswith("bin/") for name in files)
    absolute = re.compile(r"^\s*(from|import) logitless\b", re.M)
    inside = {name for name, text in sources.items() if absolute.search(re.sub(r'"""[\s\S]*?"""', "", text))}
    assert inside == set()

    described = json.loads(files.pop("metadata.json").read_text())
    assert described["backend"]["type"] == DEVICE
    assert described["backend"].get("archs", []) == ARCHITECTURES
    digests = {name: base64.b64encode(hashlib.sha256(p.read_bytes()).digest()).decode() for name, p in files.items()}
    assert described["kernels-minver"] == MAKE["KERNELS"][0]
    assert described["digest"] == {"algorithm": "sha256", "files": digests}
    card = (repository / "build" / "CARD.md").read_text()
    assert f"version={described['version']}" in card


def test_get_kernel(repository, kernel, monkeypatch):
    """The call that the page and the card name, with a folder in place of the Hub."""
    monkeypatch.setenv("LOCAL_KERNELS", f"OWNER/logitless={repository}")
    assert kernels.get_kernel("OWNER/logitless", version=0, trust_remote_code=True) is kernel


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="the page has a module of PyTorch 2.13")
def test_page(repository, tmp_path, monkeypatch):
    pytest.importorskip("transformers")  # whose model the page patches
    monkeypatch.syspath_prepend(ROOT / "tests" / "site")
    import blocks

    page = "docs/hub.md"
    texts = [(block.line, block.text) for block in blocks.of("python") if block.page == ROOT / page]
    lines = f"where = stand_ins.of_page({page!r})\nfor line, text in {texts!r}:\n    exec(text, where)"
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "hub").symlink_to(repository)
    environment = beside(ROOT / "tests" / "site")
    command = [sys.executable, "-c", f"{LIKE_HERE}\nimport stand_ins\n{lines}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert texts and done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_architectures(tmp_path):
    (tmp_path / "kernel.cu").write_text("__global__ void kernel(float* x) { *x = 1; }")
    codes = ("80,code=sm_80", "90,code=[sm_90,compute_90]", "90a,code=sm_90a", "100f,code=sm_100f")
    codes += ("120,code=[sm_120,compute_120]",)
    options = [option for code in codes for option in ("-gencode", f"arch=compute_{code}")]
    subprocess.run(["nvcc", "-fatbin", "-o", "fat", "kernel.cu", *options], cwd=tmp_path, check=True)
    found = MAKE["architectures"]((tmp_path / "fat").read_bytes())
    assert found == ["8.0", "9.0", "9.0a", "10.0f", "12.0", "12.0+PTX"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients(kernel, dtype):
    hidden, weight, target = problem(dtype)
    check(
        lambda h, w: kernel.linear_cross_entropy(h, w, target),
        lambda h, w: F.cross_entropy(h @ w.T, target),
        (hidden, weight),
    )


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_module(repository, kernel, mode):
    kinds = [Head, *([nn.LinearCrossEntropyLoss] if hasattr(nn, "LinearCrossEntropyLoss") else [])]
    for kind in kinds:
        named = kernels.use_kernel_forward_from_hub("LinearCrossEntropyLoss")(type("Named", (kind,), {}))
        module = named(in_features=32, num_classes=96, bias=True, ignore_index=3, label_smoothing=0.1).to(DEVICE)
        module.train(kernels.Mode.TRAINING in mode)
        plain = copy.deepcopy(module).double()
        hidden, _, target = problem(torch.float32)
        kernelized(module, "LinearCrossEntropyLoss", repository, mode)
        assert module.forward.__func__ is kernel.layers.LinearCrossEntropyLoss.forward
        compiles = kernels.Mode.TORCH_COMPILE in mode
        call = torch.compile(module, fullgraph=True, backend="aot_eager") if compiles else module
        got = results(call(hidden, target), *module.parameters())
        expected = results(plain(hidden.double(), target), *plain.parameters())
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            torch.testing.assert_close(call(hidden, target).double().cpu(), expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_function(repository, mode):
    named = kernels.use_kernel_forward_from_hub("linear_cross_entropy")(head_loss)
    kernelized(named, "linear_cross_entropy", repository, mode)
    assert "_layer_of" in named.forward.__qualname__
    call = torch.compile(named, fullgraph=True, backend="aot_eager") if kernels.Mode.TORCH_COMPILE in mode else named
    hidden, weight, target = problem(torch.float32)
    options = {"linear_bias": torch.randn(96).to(DEVICE), "reduction": "sum", "label_smoothing": 0.1}
    check(
        lambda h, w: call(h, w, target, **options),
        lambda h, w: head_loss(h, w, target, **options | {"linear_bias": options["linear_bias"].to(h.dtype)}),
        (hidden, weight),
    )


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_loss_of_a_causal_model(repository, mode):
    named = kernels.use_kernel_forward_from_hub("LigerForCausalLMLossLayer")(causal_loss)
    kernelized(named, "LigerForCausalLMLossLayer", repository, mode)
    call = torch.compile(named, fullgraph=True, backend="aot_eager") if kernels.Mode.TORCH_COMPILE in mode else named
    hidden, weight, labels = problem(torch.float32, (3, 16))
    labels[0, :9] = -100
    items = (labels[:, 1:] != -100).sum()
    for given in (
        {"labels": labels},
        {"labels": labels, "num_items_in_batch": items, "final_logit_softcapping": 9.0, "hidden_size": 32},
        {"labels": None, "shift_labels": labels, "num_items_in_batch": 7, "lm_head_bias": torch.zeros(96).to(DEVICE)},
    ):

        def wide(given, like):
            return {n: t.to(like) if n == "lm_head_bias" else t for n, t in given.items()}

        check(
            lambda h, w: call(logits=None, vocab_size=96, hidden_states=h, lm_head_weight=w, **given),
            lambda h, w: causal_loss(None, vocab_size=96, hidden_states=h, lm_head_weight=w, **wide(given, h.dtype)),
            (hidden, weight),
        )
    with pytest.raises(ValueError, match="hidden_states: expected a tensor, got None"):
        named(None, labels, 96, lm_head_weight=weight)


@pytest.mark.filterwarnings("ignore:LocalFuncRepository")
def test_function_by_name(repository, kernel):
    """The way of older clients, which `kernels` has announced to remove."""
    found = kernels.LocalFuncRepository(repo_path=repository, func_name="linear_cross_entropy").load()
    hidden, weight, target = problem(torch.float32)
    assert found()(hidden, weight, target) == kernel.linear_cross_entropy(hidden, weight, target)


def test_names_that_transformers_asks_for(kernel):
    hub_kernels = pytest.importorskip("transformers.integrations.hub_kernels")
    if not hub_kernels._kernels_enabled:
        pytest.skip("this transformers takes another version of kernels")
    (asked,) = hub_kernels.get_kernel_mapping_transformers()["ForCausalLMLoss"]["cuda"].values()
    assert asked.layer_name in kernel.layers.__all__


def model():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    return transformers.LlamaForCausalLM(config).to(DEVICE)


def test_patch_of_a_model(kernel, package):
    patched, ids = model(), torch.randint(96, (2, 17)).to(DEVICE)
    plain = copy.deepcopy(patched)
    kernel.transformers.patch(patched)
    expected = results(plain(input_ids=ids, labels=ids).loss, *plain.parameters())
    for each in (patched, copy.deepcopy(patched)):
        output = each(input_ids=ids, labels=ids)
        assert output.logits is None
        torch.testing.assert_close(results(output.loss, *each.parameters()), expected, rtol=1e-4, atol=1e-6)

    with pytest.raises(Exception, match=r"model: expected one without the patch of another copy of this package, got a "
                       rf"LlamaForCausalLM with that of {kernel.__name__}\.transformers") as refused:  # fmt: skip
        package.transformers.patch(patched)
    assert isinstance(refused.value, package.UnsupportedError)
    package.transformers.unpatch(patched)
    assert patched(input_ids=ids, labels=ids).logits is None
    kernel.transformers.unpatch(patched)
    package.transformers.patch(patched)
    assert patched(input_ids=ids, labels=ids).logits is None


def test_patch_of_trl(kernel, package):
    utils = pytest.importorskip("trl.trainer.utils")
    original = utils._ChunkedLogProbFunction
    hidden, weight, target = problem(torch.float32)
    try:
        for copies in ((kernel, package), (package, kernel)):
            for patching in copies:
                patching.trl.patch(max_workspace_bytes="64MiB")
                log_probs = utils._ChunkedLogProbFunction.apply(hidden, weight, None, target, 1.0, 8)[0]
                assert torch.equal(log_probs, -patching.linear_cross_entropy(hidden, weight, target, reduction="none"))
                assert type(utils._ChunkedLogProbFunction).__module__.startswith(f"{patching.__name__}.")
            copies[0].trl.unpatch()
            assert utils._ChunkedLogProbFunction is original
    finally:
        kernel.trl.unpatch()


def test_beside_an_installed_package(kernel, package):
    hidden, weight, target = problem(torch.float32)
    ids = target[:, None].repeat(1, 3)
    for name, last in (("linear_cross_entropy", target), ("linear_candidates", ids)):
        a, b = (getattr(each, name)(hidden, weight, last) for each in (kernel, package))
        assert torch.equal(*(t if torch.is_tensor(t) else t.log_probs for t in (a, b)))
        for each in (kernel, package):
            fused = torch.compile(getattr(each, name), fullgraph=True, backend="aot_eager")
            got = fused(hidden, weight, last)
            assert torch.equal(got if torch.is_tensor(got) else got.log_probs, a if torch.is_tensor(a) else a.log_probs)
    assert kernel.native.library()._name != package.native.library()._name
    for each in (kernel, package):
        assert getattr(torch.ops, each.__name__).run.default.namespace == each.__name__
        assert pickle.loads(pickle.dumps(each.LinearCrossEntropyLoss(32, 96))).__module__ == f"{each.__name__}.nn"


@pytest.mark.parametrize("script", ["import logitless; {load}", "{load}; import logitless"])
def test_either_may_come_first(repository, package, script):
    load = "import pathlib, kernels; kernel = kernels.get_local_kernel(pathlib.Path(sys.argv[1]))"
    lines = [
        LIKE_HERE,
        script.format(load=load),
        f"h, w = torch.randn(8, 16, device='{DEVICE}'), torch.randn(32, 16, device='{DEVICE}')",
        "t = torch.arange(8, device=h.device)",
        "assert torch.equal(kernel.linear_cross_entropy(h, w, t), logitless.linear_cross_entropy(h, w, t))",
    ]
    environment = beside(pathlib.Path(package.__file__).parents[1])
    command = [sys.executable, "-c", "\n".join(lines), str(repository)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_refusals(tmp_path, repository):
    done = make(repository, WHEEL)
    assert done.returncode == 2 and "out: expected the name of a new folder, got" in done.stderr
    other = tmp_path / "other-1.0-py3-none-any.whl"
    other.write_text("")
    done = make(tmp_path / "a", other)
    assert done.returncode == 2 and "wheel: expected a wheel of logitless, got" in done.stderr
    odd = tmp_path / WHEEL.name.replace("x86_64", "riscv64").replace("aarch64", "riscv64")
    odd.symlink_to(WHEEL)
    cuda = ["--cuda", CUDA] if CUDA else []
    done = make(tmp_path / "b", odd, *cuda)
    assert done.returncode == 2 and "wheel: expected a wheel for Linux, macOS or Windows" in done.stderr
    done = make(tmp_path / "c", WHEEL, WHEEL, *cuda)
    assert done.returncode == 2 and "wheel: expected one wheel for torch-stable-abi26-" in done.stderr
    if CUDA:
        done = make(tmp_path / "d", WHEEL)
        assert done.returncode == 2 and "--cuda: expected a version such as 13.0" in done.stderr
