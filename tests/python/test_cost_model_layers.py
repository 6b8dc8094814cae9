"""The cost model beside PyTorch and transformers on the CPU: parameters, what autograd saves, bytes that move."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from logitless.cost_model import Batch, from_config, linear_rnn, parameters, transformer  # noqa: E402
from logitless.cost_model.config import Model  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "llama, one key head": ("LlamaConfig", {"num_key_value_heads": 1}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral, window": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {"head_dim": 16}),
    "qwen3": ("Qwen3Config", {}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8}),
    "gemma3, one key head": ("Gemma3TextConfig", {"sliding_window": 8, "num_key_value_heads": 1}),
    "gemma3, wide window": ("Gemma3TextConfig", {"sliding_window": 64}),
}
BATCH = Batch(2, 32)


def both(family, layers):
    """Returns a tiny model of transformers in bf16, and its sizes."""
    name, others = FAMILIES[family]
    config = getattr(transformers, name)(**(SIZES | others), num_hidden_layers=layers)
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    return model, from_config(config.to_dict())


def hidden_of(model):
    tokens = torch.zeros(BATCH.sequences, BATCH.length, dtype=torch.long)
    return model.base_model(input_ids=tokens, use_cache=False)[0]


def saved_bytes(model):
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage  # kept alive, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden_of(model)
    return sum(storage.nbytes() for storage in seen.values())


def weights_in_float32(model):
    """Returns bytes of Gemma's norms, which keep 1 + weight in float32. They do not grow with tokens and are not
    modelled."""
    per_layer = 4 * (4 * model.hidden + 2 * model.head_dim)
    return per_layer if model.gemma_norms else 0


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters(family):
    for layers in (1, 3):
        model, sizes = both(family, layers)
        assert parameters(sizes) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_saves_what_autograd_saves(family):
    (one, sizes), (two, _) = both(family, 1), both(family, 2)
    masked = 0 < sizes.window <= BATCH.length and sizes.sliding_layers > 0
    layer = transformer.mixer(sizes, BATCH, masked) + transformer.mlp(sizes, BATCH)
    assert saved_bytes(two) - saved_bytes(one) - weights_in_float32(sizes) == layer.saved


class Traffic(TorchDispatchMode):
    """Counts bytes that operations read and write, except products, attention, views and empty tensors."""

    ASIDE = {"mm", "addmm", "bmm", "empty", "empty_like", "empty_strided", "new_empty", "zeros", "zeros_like"}

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[1]
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        inputs = {leaf.data_ptr(): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        view = any(result.data_ptr() in inputs for result in results) and not name.endswith("_")
        if name not in self.ASIDE and "attention" not in name and not view:
            for tensor in [*inputs.values(), *results]:
                self.bytes += min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
        return out


def moved_bytes(model):
    with Traffic() as traffic:
        hidden = hidden_of(model)
        hidden.backward(torch.ones_like(hidden))
    return traffic.bytes


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3, wide window"])
def test_a_layer_moves_what_the_dispatcher_shows(family):
    """The bound is 5%: numbers of rows, weights and rotations are not modelled, and count much in tiny layers."""
    (one, sizes), (two, _) = both(family, 1), both(family, 2)
    layer = transformer.mixer(sizes, BATCH, False) + transformer.mlp(sizes, BATCH)
    predicted = layer.forward.traffic + layer.backward.traffic
    assert predicted == pytest.approx(moved_bytes(two) - moved_bytes(one), rel=0.05)


def test_flop_of_a_layer():
    """A weight and token take 6 FLOP. Attention takes 4 L head_dim, of which a causal kernel does half."""
    sizes = Model("attention", 97, 64, 1, 176, 4)
    layer = transformer.mixer(sizes, BATCH, False) + transformer.mlp(sizes, BATCH)
    weights = layer.parameters - 2 * 64  # norms
    assert layer.forward.products + layer.backward.products == 6 * weights * BATCH.tokens
    assert layer.forward.attention == 2 * BATCH.length * BATCH.tokens * 64
    masked = transformer.mixer(sizes, BATCH, True)
    assert masked.forward.masked == 2 * layer.forward.attention and masked.forward.attention == 0


# The shapes of flash-linear-attention's layers give these: q, k, v, gate and output, and small parts.
LINEAR_RNNS = {
    "gla": 2 * 64 * 32 + 3 * 64 * 64 + (64 * 16 + 16 * 32 + 32) + 16,
    "gated_deltanet": 2 * 64 * 48 + 3 * 64 * 96 + 2 * 64 * 3 + 2 * 3 + 4 * (2 * 48 + 96) + 32,
    "kda": 2 * 64 * 48 + 2 * 64 * 48 + 2 * (64 * 16 + 16 * 48) + 48 + 64 * 3 + 3 + 48 + 4 * 3 * 48 + 16,
}


@pytest.mark.parametrize("kind, mixer", LINEAR_RNNS.items())
def test_parameters_of_linear_rnns(kind, mixer):
    others = {} if kind == "gla" else {"num_heads": 3, "head_dim": 16}
    sizes = from_config(
        {"model_type": kind, "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 256}
        | others
    )
    layer = mixer + 3 * 64 * 256 + 2 * 64
    assert parameters(sizes) == 2 * 97 * 64 + 2 * layer + 64
    work = linear_rnn.mixer(sizes, Batch(1, 128)) + linear_rnn.mlp(sizes, Batch(1, 128))
    assert work.saved > 0 and work.backward.flop > work.forward.flop > 0
