"""A patched model behaves like the unpatched one in any order of clients' operations around it."""

import copy
import inspect
import itertools
import types

import logitless.transformers
import pytest
import torch
import transformers
from logitless.errors import UnsupportedError

accelerate = pytest.importorskip("accelerate")
from accelerate import hooks  # noqa: E402
from accelerate.utils import extract_model_from_parallel  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402

pytestmark = pytest.mark.slow

VOCAB = 11
IDS = torch.arange(8).reshape(2, 4)
COMPILED = {"compile", "compile outside"}
PATCHES = ("patch", "patch again", "unpatch")


class Counted(hooks.ModelHook):
    """A hook of accelerate, whose copies share the count."""

    calls = 0

    def pre_forward(self, module, *args, **kwargs):
        Counted.calls += 1
        return args, kwargs


class World:
    """A tiny model and its history. After a copy, the model is the copy."""

    def __init__(self, template):
        self.models = [copy.deepcopy(template)]
        self.patched = [False]
        self.saved = []  # forwards that existed before they were wrapped
        self.wrapped = 0  # calls of these wrappers
        self.called = None

    @property
    def model(self):
        return self.models[-1]

    def do(self, name):
        getattr(self, "_" + name.replace(" ", "_"))()

    def _patch(self):
        logitless.transformers.patch(self.model)
        self.patched[-1] = True

    def _patch_again(self):
        logitless.transformers.patch(self.model, max_workspace_bytes=1 << 20)
        self.patched[-1] = True

    def _unpatch(self):
        logitless.transformers.unpatch(self.model)
        self.patched[-1] = False

    def _prepare(self):
        ACCELERATOR.prepare_model(self.model)
        ACCELERATOR._models.clear()

    def _hook(self):
        hooks.add_hook_to_module(self.model, Counted(), append=True)

    def _remove_hook(self):
        hooks.remove_hook_from_module(self.model)

    def _unwrap(self):
        extract_model_from_parallel(self.model, keep_fp32_wrapper=False)

    def _wrap(self):
        """Wraps what exists with a method of the model's own, as a user does."""
        original = self.model.forward
        self.saved.append((self.model, original))

        def forward(module, *args, **kwargs):
            self.wrapped += 1
            return original(*args, **kwargs)

        self.model.forward = types.MethodType(forward, self.model)

    def _restore(self):
        """Puts back the kept forward, though others may have wrapped it since."""
        owner, original = self.saved.pop()
        owner.forward = original

    def _copy(self):
        self.models.append(copy.deepcopy(self.model))
        self.patched.append(self.patched[-1])
        with torch.no_grad():  # shows which of the two has run
            self.model.lm_head.weight.mul_(-1.0)

    def _parametrize(self):
        """Parametrizes a tensor of the model itself: its class gets a property."""
        parametrize.register_parametrization(self.model, "extra", torch.nn.Softplus())

    def _unparametrize(self):
        parametrize.remove_parametrizations(self.model, "extra")

    def _compile(self):
        self.model.compile(backend="eager")

    def _compile_outside(self):
        """Compiles the model. Calls use the compiled model, other operations the one inside it."""
        self.called = torch.compile(self.model, backend="eager")

    def look(self):
        """Returns each model's visible state, and which model made the loss: for a copy it may be the original."""
        return [self._look(model) for model in self.models]

    def _look(self, model):
        seen, before = [], (Counted.calls, self.wrapped)
        layers = [each.model.layers[0].self_attn.q_proj for each in self.models]
        handles = [
            layer.register_forward_hook(lambda module, args, out, of=of: seen.append((of, out.dtype)))
            for of, layer in enumerate(layers)
        ]
        try:
            called = self.called or model
            outputs = called(input_ids=IDS, labels=IDS)
            with torch.no_grad():
                logits = called(input_ids=IDS, labels=IDS).logits
        except Exception as error:
            return type(error), None, None, None
        finally:
            for handle in handles:
                handle.remove()
        facts = {
            "runs": seen,
            "calls": (Counted.calls - before[0], self.wrapped - before[1]),
            "signature": str(inspect.signature(model.forward)),
            "class": type(model).__name__,
            "modules": len(list(model.modules())),
            "state": list(model.state_dict()),
            "places": list(outputs),
            "extra": (type(model.extra), model.extra.item(), parametrize.is_parametrized(model)),
            "dtypes": (outputs.loss.dtype, logits.dtype),
        }
        return facts, outputs.loss.detach(), logits, outputs.logits is None


ACCELERATOR = None


@pytest.fixture(scope="module", autouse=True)
def _accelerator():
    global ACCELERATOR
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    accelerate.state.AcceleratorState._reset_state(True)
    ACCELERATOR = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    yield
    accelerate.state.AcceleratorState._reset_state(True)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def template():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        initializer_range=1.0,
    )
    model = transformers.LlamaForCausalLM(config)
    model.extra = torch.nn.Parameter(torch.tensor(0.5))
    return model


def useful(order):
    """Returns whether an order is worth a run: it has a patch, and every undoing operation has something to undo.

    Shorter orders have the rest. A parametrization is removed if there is one, and not after a copy: PyTorch removes it
    from both.
    """
    after = {
        "unpatch": {"patch", "patch again"},
        "patch again": {"patch"},
        "remove hook": {"hook"},
        "unwrap": {"prepare"},
    }
    known = all(name not in after or after[name] & set(order[:place]) for place, name in enumerate(order))
    wraps = itertools.accumulate({"wrap": 1, "restore": -1}.get(name, 0) for name in order)
    parametrized = itertools.accumulate({"parametrize": 1, "unparametrize": -1}.get(name, 0) for name in order)
    separable = all("copy" not in order[:place] for place, name in enumerate(order) if name == "unparametrize")
    return known and "patch" in order and min(wraps) >= 0 and min(parametrized) >= 0 and separable


def observed(template, order):
    if COMPILED & set(order):
        torch._dynamo.reset()
    world = World(template)
    for name in order:
        world.do(name)
    return world.look(), world.patched


def compare(template, orders):
    stock = {}
    for order in orders:
        bare = tuple(name for name in order if name not in PATCHES)
        if bare not in stock:
            stock[bare] = observed(template, bare)[0]
        seen, patched = observed(template, order)
        for own, (facts, loss, logits, fused) in enumerate(seen):
            expected, stock_loss, stock_logits, _ = stock[bare][own]
            if stock_loss is None:  # accelerate binds the forward of such a model twice
                assert expected is TypeError
                continue
            itself = {of for of, _ in expected["runs"]} == {own}  # a copy's wrapper may call the original's forward
            if not itself and patched[own] and facts is UnsupportedError:
                continue
            assert facts == expected, order
            assert fused == patched[own] or not itself, order
            bound = rounding(stock_logits, torch.bfloat16 if "prepare" in order else torch.float32)
            assert float((loss - stock_loss).abs()) <= bound, order
            assert torch.equal(logits, stock_logits), order


def rounding(logits, dtype):
    """Returns the rounding of each logit, once more than the fused head's, and of a row's sum in float32."""
    size = float(logits.abs().max())
    return 2 * (torch.finfo(dtype).eps * size + (VOCAB + 8) * torch.finfo(torch.float32).eps * (1 + size))


OPERATIONS = ("patch", "patch again", "unpatch", "prepare", "hook", "remove hook", "unwrap", "wrap", "restore", "copy")
OPERATIONS += ("parametrize", "unparametrize")


def test_every_order_is_as_without_the_patch(template):
    orders = [
        order for length in range(1, 5) for order in itertools.product(OPERATIONS, repeat=length) if useful(order)
    ]
    print(len(orders), "orders")
    compare(template, orders)


def test_orders_with_compiled_code(template):
    names = ("patch", "unpatch", "prepare", "hook", "wrap")
    pairs = [("patch", name) for name in names] + [(name, "patch") for name in names if name != "unpatch"]
    orders = {("patch", compiled) for compiled in COMPILED} | {(compiled, "patch") for compiled in COMPILED}
    orders |= {(first, "compile", second) for first, second in pairs}
    compare(template, sorted(order for order in orders if useful(order)))
