"""The cost model: configurations, batches that fit, sweeps, the command."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tracemalloc

import logitless
import pytest
from logitless.cost_model import Batch, Head, Model, draw, from_config, largest_batch, predict, read_config, step, sweep
from logitless.cost_model.command import main, parse_bytes, parse_fields, parse_threshold
from logitless.cost_model.published import find_model, names
from logitless.cost_model.step import parameters
from support import environment, process, python

SIZES = {"vocab": 32000, "hidden": 512, "layers": 4, "intermediate": 1536, "heads": 8}
MODEL = Model("attention", **SIZES)
FIELDS = "mixer=attention," + ",".join(f"{name}={value}" for name, value in SIZES.items())
LLAMA = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 512, "num_hidden_layers": 4}
LLAMA |= {"intermediate_size": 1536, "num_attention_heads": 8, "tie_word_embeddings": True}
WINDOWS = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8, "layer_types": ["x"]}
GIB = 1 << 30


def configured(change, without=None):
    return from_config({key: value for key, value in (LLAMA | change).items() if key != without})


def test_a_config_and_fields_are_one_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == from_config(LLAMA) == MODEL
    assert from_config({"text_config": LLAMA}) == MODEL
    assert from_config(LLAMA | {"tie_word_embeddings": False}) == dataclasses.replace(MODEL, tied=False)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3Text"])
def test_entries_that_a_file_has_not_are_the_classs(name):
    """A file has the differences from its class's defaults; any entry may be missing or be the only one."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")
    changes = {"hidden_size": 1024, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 2}
    changes |= {"vocab_size": 1000, "intermediate_size": 96, "head_dim": 64, "sliding_window": 128, "layer_types": None}
    known = set(config().to_dict())
    for entry in (*changes, "use_sliding_window", None):
        value = changes.get(entry, True)
        if entry in known or entry is None:
            written = {} if entry is None else {entry: value}
            whole = config(**written).to_dict()
            parsed = from_config({"model_type": config.model_type} | written)
            assert parsed == from_config(whole), (entry, whole)
            assert parsed.vocab == whole["vocab_size"] and parsed.kv_heads == whole["num_key_value_heads"]


def test_gemma_3_as_its_files_write_it():
    """google/gemma-3-4b-pt has a text configuration of four entries; another file has only the type."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    assert from_config({"model_type": "gemma3", "text_config": text}) == find_model("gemma-3-4b")
    assert from_config({"model_type": "gemma3"}) == from_config({"model_type": "gemma3_text"})


# the hub's counts, for all but gemma-3-4b, whose image part is not counted
PARAMETERS = {
    "llama-3-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496, "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800, "llama-3.2-1b": 1_235_814_400, "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168, "qwen2.5-0.5b": 494_032_768, "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920, "qwen3-8b": 8_190_735_360, "mistral-nemo-12b": 12_247_782_400,
    "smollm2-1.7b": 1_711_376_384,
}  # fmt: skip


def test_names_are_those_of_plan(capsys, tmp_path, monkeypatch):
    assert {name: parameters(find_model(name)) for name in names()} == PARAMETERS
    cli = os.environ.get("LOGITLESS_CLI")
    if cli:
        listed = json.loads(subprocess.run([cli, "plan", "--list-models", "--json"], capture_output=True).stdout)
        heads = {known["name"]: (known["vocab"], known["hidden"], known["weights"]) for known in listed}
        for name in names():
            assert (find_model(name).vocab, find_model(name).hidden) == heads[name][:2]
            assert find_model(heads[name][2].upper().replace("-", "_")) == find_model(name)
    assert main(["--model", "Llama_3.2-1B", "--heads", "whole"]) == 0
    assert "1,235,814,400 parameters" in capsys.readouterr().out
    assert main(["--model", "gemma-2-2b"]) == 2
    assert "model: expected a folder with a config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path.parent)
    assert find_model(tmp_path.name) == find_model(str(tmp_path / "config.json")) == MODEL


@pytest.mark.parametrize("layers", [1, 2, 7, 12, 10**9])
def test_layers_are_counted_not_listed(layers):
    """A layer's part is the same for any number of layers, with masks and checkpoints of any size, in no memory."""
    tracemalloc.start()
    one = dataclasses.replace(MODEL, layers=1)
    for sliding in {0, 1, layers // 2, layers}:
        model = dataclasses.replace(MODEL, layers=layers, sliding_layers=sliding, window=32)
        masked = dataclasses.replace(one, sliding_layers=1, window=32)
        batch, head = Batch(2, 64), Head("whole")
        base, first, full = (predict(m, batch, head) for m in (one, masked, one))
        predicted = predict(model, batch, head)
        norm = 2 * full.saved_bytes - predict(dataclasses.replace(MODEL, layers=2), batch, head).saved_bytes
        expected = norm + sliding * (first.saved_bytes - norm) + (layers - sliding) * (full.saved_bytes - norm)
        assert predicted.saved_bytes == pytest.approx(expected, rel=1e-12) and base == full
        assert predicted.parameters - layers * (one_layer := parameters(model) // layers) < one_layer + 2**25
        kinds = [first.saved_bytes - norm] * min(sliding, 20) + [full.saved_bytes - norm] * min(layers - sliding, 20)
        for checkpoint in {1, *({2, 3, 5} & set(range(layers))), layers} if layers < 20 else {1, layers // 3}:
            again = predict(model, batch, head, checkpoint=checkpoint)
            assert again.saved_bytes < predicted.saved_bytes or layers == 1
            if layers < 20:
                segments = [sum(kinds[i : i + checkpoint]) for i in range(0, layers, checkpoint)]
                _, most = step._saved(step._layers(model, batch), batch, model, checkpoint)
                assert most == pytest.approx(max(segments), rel=1e-12)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("words", [["--fields", FIELDS], ["--help"], ["--fields", FIELDS, "--json"]])
def test_who_stops_reading_is_no_error(words):
    """Like ``logitless plan``, it prints no message and has the status of a program that the signal ended."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "logitless.cost_model", *words]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=environment())
    os.close(write)
    assert done.stderr == "" and done.returncode in ((0, 141) if words == ["--help"] else (141,))


def test_files_that_cannot_be_read(tmp_path):
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match="config: .*config.json: expected a JSON"):
            read_config(tmp_path)
    with pytest.raises(ValueError, match="no-such-file"):
        read_config(tmp_path / "no-such-file")


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Batch(0, 1), "sequences: expected a number of at least 1, got 0"),
        (lambda: Head("fast"), "head: expected one of .*, got 'fast'"),
        (lambda: Head("whole", 1 << 20), "max_workspace_bytes: expected a head of Logitless's, got 'whole'"),
        (lambda: Model("rnn", **SIZES), "mixer: expected one of .*, got 'rnn'"),
        (lambda: Model("attention", **SIZES, sliding_layers=5), "sliding_layers: expected at most the 4 layers"),
        (lambda: predict(MODEL, Batch(1, 64), Head("whole"), optimizer="lion"), "optimizer: expected one of"),
        (lambda: predict(MODEL, Batch(1, 64), Head("whole"), checkpoint=5), "checkpoint: expected 0 to the 4 layers"),
        (lambda: predict(MODEL, Batch(1, 64), Head("whole"), device="tpu"), "device: expected one of .*, got 'tpu'"),
        (lambda: sweep(MODEL, Batch(1, 64), [], "layers", [1]), "over: expected one of tokens, vocab"),
        (lambda: sweep(MODEL, Batch(1, 64), [], "tokens", [65]), "values: expected multiples of the length 64, got 65"),
        (lambda: configured({}, "model_type"), "model_type: expected .* got None"),
        (lambda: configured({"model_type": "mamba"}), "config: model_type: expected one of llama, .*, got 'mamba'"),
        (lambda: configured({"hidden_size": "512"}), "config: hidden_size: expected a whole number, got '512'"),
        (lambda: configured({"num_hidden_layers": None}), "num_hidden_layers: expected a whole number, got None"),
        (lambda: configured({"attention_bias": True}), "config: attention_bias: expected False, got True"),
        (lambda: configured({"hidden_act": "relu"}), "config: hidden_act: expected 'silu', got 'relu'"),
        (lambda: configured({"num_attention_heads": 7}), "head_dim: expected a number, got none"),
        (lambda: configured({"vocab_size": 0}), "vocab: expected a number of at least 1, got 0"),
        (lambda: configured({"model_type": "gla", "attn": {"layers": [1]}}), "config: attn: expected None"),
        (lambda: configured({"model_type": "kda", "fuse_norm": False}), "fuse_norm: expected True, got False"),
        (lambda: configured(WINDOWS), "layer_types"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", ["vocab", "hidden", "layers", "window"])
@pytest.mark.parametrize("value", [2**40 + 1, 10**400])
def test_sizes_beyond_all_models_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected a number of at most 2\\^40, got one of"):
        Model("attention", **SIZES | {name: value})


def test_a_budget_that_is_too_small():
    with pytest.raises(logitless.BudgetTooSmallError):
        predict(MODEL, Batch(1, 4096), Head("logitless", 1 << 10))
    assert largest_batch(MODEL, 4096, Head("logitless", 1 << 10), 100 * GIB) == 0
    assert sweep(MODEL, Batch(1, 4096), [Head("logitless", 1 << 10)], "vocab", [32000]) == []


@pytest.mark.parametrize("head", [Head("upcast"), Head("logitless"), Head("logitless", 64 << 20), Head("sparsified")])
def test_the_largest_batch_fits_and_one_more_does_not(head):
    memory = 20 * GIB
    most = largest_batch(MODEL, 1024, head, memory)
    assert predict(MODEL, Batch(most, 1024), head).peak_bytes <= memory
    assert predict(MODEL, Batch(most + 1, 1024), head).peak_bytes > memory
    assert largest_batch(MODEL, 1024, head, 1) == 0


def test_logitless_holds_what_its_plan_says():
    tokens, batch = 4096, Batch(4, 1024)
    plan = logitless.plan(tokens, 32000, 512, dtype="bfloat16", device="h200", max_workspace_bytes=64 << 20)
    cost = predict(MODEL, batch, Head("logitless", 64 << 20)).head
    assert cost.held_bytes == plan.workspace_bytes + 2 * (32000 + tokens) * 512
    assert cost.seconds == plan.predicted_seconds and cost.flop == plan.cost_matmuls * 2 * tokens * 32000 * 512


def test_whole_logits():
    """A logit takes 12 bytes in float32 and 6 in bf16; a softcap keeps two more."""
    batch = Batch(4, 1024)
    logits = batch.tokens * 32000
    assert predict(MODEL, batch, Head("upcast")).head.held_bytes == 12 * logits
    assert predict(MODEL, batch, Head("whole")).head.held_bytes == 6 * logits
    capped = dataclasses.replace(MODEL, softcap=True)
    assert predict(capped, batch, Head("upcast")).head.held_bytes == 14 * logits


def test_checkpointing_trades_memory_for_the_layers_forward_pass():
    batch, head = Batch(4, 1024), Head("logitless", 32 << 20)  # the layers are the peak
    plain, every, pairs = (predict(MODEL, batch, head, checkpoint=size) for size in (0, 1, 2))
    assert every.saved_bytes - pairs.saved_bytes == 2 * (2 * 512 * batch.tokens)  # two inputs of layers fewer
    assert every.saved_bytes < plain.saved_bytes
    assert every.peak_bytes < pairs.peak_bytes < plain.peak_bytes
    assert plain.layers_seconds < every.layers_seconds == pairs.layers_seconds < 1.5 * plain.layers_seconds
    assert plain.model_flop == every.model_flop


def test_optimizers():
    bytes_a_parameter = {"adamw": 4, "adamw-fp32": 8, "adamw-fp32-master": 12, "sgd": 0, "sgd-momentum": 2}
    for name, size in bytes_a_parameter.items():
        step = predict(MODEL, Batch(1, 64), Head("whole"), optimizer=name)
        assert step.optimizer_bytes == size * step.parameters


def test_many_parameters_and_few_tokens_peak_with_the_gradients():
    step = predict(dataclasses.replace(MODEL, vocab=1000, layers=40), Batch(1, 16), Head("logitless"))
    assert step.peak_at == "gradients" and step.peak_bytes >= 2 * step.weight_bytes + step.optimizer_bytes


def test_shares_are_of_the_whole():
    step = predict(MODEL, Batch(4, 1024), Head("upcast"))
    assert step.seconds == step.layers_seconds + step.optimizer_seconds + step.head_seconds
    for share in (step.head_time_share, step.head_memory_share, step.head_flop_share):
        assert 0 < share < 1
    assert step.head_flop_share == pytest.approx(6 * 4096 * 32000 * 512 / step.model_flop)


@pytest.mark.parametrize("over, values", [("tokens", [1024, 4096]), ("vocab", [32000, 64000])])
def test_a_chart(over, values, tmp_path):
    pytest.importorskip("matplotlib")
    points = sweep(MODEL, Batch(1, 1024), [Head("upcast"), Head("sparsified")], over, values)
    assert [(point.value, point.head.kind) for point in points] == [
        (v, k) for v in values for k in ("upcast", "sparsified")
    ]
    draw(points, over, tmp_path / "a.svg")
    draw(points, over, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_text().count("<svg") == 1
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_chart_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="needs matplotlib, which is not installed"):
        draw([], "vocab", tmp_path / "a.svg")


def test_options_are_read():
    assert parse_bytes("256MiB") == 256 << 20 and parse_bytes("1.5GB") == 1_500_000_000 and parse_bytes("7") == 7
    assert parse_threshold("2^-9") == 2**-9 and parse_threshold("0.5") == 0.5
    assert parse_fields("mixer=gla,tied=false,vocab=3") == {"mixer": "gla", "tied": False, "vocab": 3}


def test_the_command_says_what_the_functions_say(capsys):
    heads = ["--heads", "upcast,logitless:64MiB", "--length", "1024", "--sequences", "4"]
    assert main(["--fields", FIELDS, *heads, "--memory", "20GiB", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["predicted"] and printed["model"] == dataclasses.asdict(MODEL)
    for entry, head in zip(printed["steps"], (Head("upcast"), Head("logitless", 64 << 20))):
        step = predict(MODEL, Batch(4, 1024), head)
        assert entry["head"] == head.name and entry["peak_bytes"] == step.peak_bytes
        assert entry["seconds"] == step.seconds
        assert entry["largest_batch_sequences"] == largest_batch(MODEL, 1024, head, 20 * GIB)
    assert main(["--fields", FIELDS, *heads]) == 0
    out = capsys.readouterr().out
    assert "predicted" in out and "logitless 64 MiB" in out


def test_a_head_without_a_plan_does_not_hide_the_others(capsys):
    assert main(["--fields", FIELDS, "--heads", "whole,logitless:1KiB"]) == 0
    out = capsys.readouterr().out
    assert "whole" in out and "max_workspace_bytes: expected at least" in out


def test_a_sweep_from_the_command(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    svg = tmp_path / "vocab.svg"
    options = ["--sweep", "vocab", "--values", "32768,65536", "--heads", "whole", "--svg", str(svg)]
    assert main(["--fields", FIELDS, *options]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3 and svg.exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "expected --model, or --fields with mixer, vocab, .*; missing: mixer"),
        (["--fields", "speed=3"], "fields: expected names out of mixer, .*, got 'speed'"),
        (["--fields", "vocab=many"], "fields: vocab: expected a number, got 'many'"),
        (["--fields", FIELDS, "--heads", "logitless:lots"], "heads: logitless:lots: expected a size"),
        (["--fields", FIELDS, "--svg", "x.svg"], "expected --sweep"),
        (["--config", "no-such-file"], "no-such-file"),
    ],
)
def test_wrong_usage(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("logitless model: error: ")
    assert re.search(message, error), error


def test_it_is_a_command_of_the_package_and_a_module():
    """It imports no PyTorch."""
    for module in (["logitless", "model"], ["logitless.cost_model"]):
        done = process("-m", *module, "--fields", FIELDS, "--heads", "sparsified")
        assert done.returncode == 0 and "sparsified" in done.stdout, done.stderr
    python("import sys, logitless.cost_model; assert 'torch' not in sys.modules")
