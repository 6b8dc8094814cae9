"""A config.json as --model of `plan`: what a Hugging Face model does to its logits."""

import json

import pytest

SIZES = {"hidden_size": 64, "vocab_size": 512}


@pytest.fixture
def model(tmp_path):
    """Returns model(config) -> arguments of `plan` for a folder with this config.json, an object or text."""
    (tmp_path / "model").mkdir()

    def call(config):
        # Python's json writes Infinity, which JSON does not have.
        text = config if isinstance(config, str) else json.dumps(config).replace('"@"', "Infinity")
        (tmp_path / "model" / "config.json").write_text(text)
        return ["plan", "--model", "model"]

    return call


NESTED = {"model_type": "granite4_vision", "text_config": {"model_type": "granite", "logits_scaling": 8.0}}
CONFIGS = [
    ({"model_type": "llama"}, 1, 0),
    ({"model_type": "gemma2", "final_logit_softcapping": 3.0}, 1, 3),
    ({"model_type": "gemma2"}, 1, 30),
    ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "final_logit_softcapping": None}}, 1, 0),
    ({"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text"}}, 1, 30),
    ({"model_type": "t5gemma", "decoder": {"model_type": "t5_gemma_module", "final_logit_softcapping": 5}}, 1, 5),
    ({"model_type": "recurrent_gemma", "logits_soft_cap": 2.0}, 1, 2),
    ({"model_type": "xlstm", "output_logit_soft_cap": 4.0}, 1, 4),
    ({"model_type": "cohere2", "logit_scale": 0.25}, 0.25, 0),
    ({"model_type": "cohere"}, 0.0625, 0),
    (NESTED, 0.125, 0),
    ({"model_type": "hyperclovax", "logits_scaling": 0.5}, 0.5, 0),
    ({"model_type": "minicpm3", "hidden_size": 64, "dim_model_base": 16}, 0.25, 0),
    ({"model_type": "minicpm3", "hidden_size": 64, "dim_model_base": None}, 1, 0),
    ({"model_type": "grok", "output_multiplier_scale": 0.5, "final_logit_softcapping": 3}, 0.5, 3),
    ({"model_type": "falcon_h1", "lm_head_multiplier": 0.75, "time_step_limit": [0.0, "@"]}, 0.75, 0),
    ({"model_type": "t5", "d_model": 16}, 0.25, 0),
    ({"model_type": "t5", "d_model": 16, "tie_word_embeddings": False}, 1, 0),
    ({"model_type": "t5", "d_model": 16, "tie_word_embeddings": True, "scale_decoder_outputs": False}, 1, 0),
    ({"model_type": "mpt", "logit_scale": None}, 1, 0),
    ({"model_type": "phi3small", "mup_width_multiplier": 1.0}, 1, 0),
]


@pytest.mark.parametrize(
    "config, scale, softcap", CONFIGS, ids=lambda x: x["model_type"] if isinstance(x, dict) else None
)
def test_what_the_config_says_is_applied(ok, model, config, scale, softcap):
    sizes = ({"d_model": 16} if "d_model" in config else {"hidden_size": 64}) | {"vocab_size": 512}
    result = ok("--json", *model(sizes | config)).json
    assert (result["problem"]["scale"], result["problem"]["softcap"]) == (scale, softcap)
    applied = {entry["option"] for entry in result["model"]["applied"]}
    assert applied == {name for name, on in (("scale", scale != 1), ("softcap", softcap != 0)) if on}


def test_options_win_over_the_config(ok, model):
    plan = model(SIZES | {"model_type": "grok", "output_multiplier_scale": "none", "final_logit_softcapping": 3})
    problem = ok("--json", *plan, "--scale", 2).json["problem"]
    assert (problem["scale"], problem["softcap"]) == (2, 3)
    result = ok("--json", *plan, "--scale", 1, "--softcap", 0).json
    assert (result["problem"]["scale"], result["problem"]["softcap"]) == (1, 0) and result["model"]["applied"] == []


@pytest.mark.parametrize(
    "config, message",
    [
        ({"model_type": "mpt", "logit_scale": "inv_sqrt_d_model"}, "'logit_scale' is '\"inv_sqrt_d_model\"', and what"),
        ({"model_type": "new", "logits_scaling": 8}, "'logits_scaling' is '8', and what model type 'new' does"),
        ({"logit_scale": 0.5}, "'logit_scale' is '0.5', and what model type '' does"),
        ({"model_type": "phi3small", "mup_width_multiplier": 8.0}, "'mup_width_multiplier' is '8.0'"),
        ({"model_type": "gemma2", "final_logit_softcapping": "x"}, "'final_logit_softcapping': expected a number"),
        ({"final_logit_softcapping": 3, "logits_soft_cap": 4}, "expected the 3.0 of 'final_logit_softcapping', got '4"),
        ({"model_type": "gemma2", "final_logit_softcapping": -1}, "'final_logit_softcapping': expected a positive"),
        ({"model_type": "granite", "logits_scaling": 0}, "'logits_scaling': expected a positive number"),
        ({"model_type": "minicpm3", "dim_model_base": 16}, "'hidden_size', which is not there"),
        ({"model_type": "umt5", "d_model": 16, "tie_word_embeddings": False}, "give --scale"),
        ("[]", "expected a JSON object"),
        ('{"a": 1', "is not valid JSON"),
    ],
)
def test_what_cannot_be_applied_is_refused_by_name(refused, ok, model, config, message):
    plan = model(config)
    refused(1, "model/config.json: ", *plan)
    refused(1, message, *plan)
    if not isinstance(config, str):
        ok(*plan, "--scale", 1, "--softcap", 0, "--vocab", 512, "--hidden", 64)


def test_plan_for_a_folder_or_a_config(ok, refused, tmp_path, model):
    model({"model_type": "gemma3", "text_config": {"hidden_size": 64, "vocab_size": 512, "logits_soft_cap": 7}})
    for name in ("model", "model/config.json"):
        result = ok("--json", "plan", "--model", name).json
        problem = result["problem"]
        assert (problem["vocab"], problem["hidden"], problem["softcap"], problem["scale"]) == (512, 64, 7, 1)
        assert result["model"]["file"].endswith("config.json")
        assert "softcap 7 (logits_soft_cap 7 in " in ok("plan", "--model", name).out
    problem = ok("--json", "plan", "--model", "model", "--softcap", 0, "--vocab", "1Ki").json["problem"]
    assert (problem["vocab"], problem["softcap"]) == (1024, 0)
    model({"model_type": "gpt2", "n_embd": 32, "vocab_size": 100})
    assert ok("--json", "plan", "--model", "model").json["problem"]["hidden"] == 32
    model({"model_type": "gpt2", "vocab_size": 100})
    refused(1, "config.json: has no 'hidden_size'; give --hidden", "plan", "--model", "model")
    ok("plan", "--model", "model", "--hidden", 8)
    model({"model_type": "gpt2", "vocab_size": -5})
    refused(1, "'vocab_size': expected a whole number", "plan", "--model", "model")
    (tmp_path / "empty").mkdir()
    refused(2, "nor a folder with a config.json", "plan", "--model", "empty")


DTYPES = [
    ({"torch_dtype": "float32"}, "f32"),
    ({"torch_dtype": "bfloat16", "dtype": "float16"}, "f16"),
    ({"torch_dtype": "torch.float16"}, "f16"),
    ({"torch_dtype": None}, "bf16"),
    ({"dtype": "float32", "text_config": {"torch_dtype": "bfloat16"}}, "bf16"),
    ({"dtype": "float32", "text_config": {"dtype": None}}, "f32"),
    ({}, "bf16"),
]


@pytest.mark.parametrize("said, dtype", DTYPES, ids=str)
def test_plan_takes_the_configs_dtype(ok, model, said, dtype):
    model({"model_type": "llama", "hidden_size": 64, "vocab_size": 512} | said)
    result = ok("--json", "plan", "--model", "model").json
    assert result["problem"]["dtype"] == result["problem"]["weight_dtype"] == dtype
    keys = [entry["key"] for entry in result["model"]["applied"] if entry["option"] == "dtype"]
    text = ok("plan", "--model", "model").out
    (line,) = (line for line in text.splitlines() if line.startswith("taken: "))
    if keys:
        assert line.startswith(f"taken: dtype {dtype} ({keys[0]} ") and "in model/config.json" in line
    else:
        assert line == "taken: dtype bf16 (the default)"
    given = ok("--json", "plan", "--model", "model", "--dtype", "f32").json
    assert given["problem"]["dtype"] == "f32" and given["model"]["applied"] == []
    assert "taken: " not in ok("plan", "--model", "model", "--dtype", "f32").out


@pytest.mark.parametrize("value", ["float8_e4m3fn", {"text_config": "bfloat16"}, 7, "auto"], ids=str)
def test_a_dtype_that_no_head_has_is_refused_unless_given(ok, refused, model, value):
    model({"model_type": "llama", "hidden_size": 64, "vocab_size": 512, "torch_dtype": value})
    message = "model/config.json: 'torch_dtype': expected float32, bfloat16, float16 or float64, got "
    refused(1, message, "plan", "--model", "model")
    ok("plan", "--model", "model", "--dtype", "bf16")


def test_plan_says_what_a_models_name_brings(ok):
    result = ok("--json", "plan", "--model", "gemma-2-2b").json
    assert result["model"]["applied"] == [{"option": "softcap", "key": "softcap", "value": 30}]
    text = ok("plan", "--model", "gemma-2-2b").out
    assert "\ntaken: softcap 30 (of gemma-2-2b), dtype bf16 (the default)\n" in text
    given = ok("plan", "--model", "gemma-2-2b", "--softcap", 0, "--dtype", "f16").out
    assert "taken: " not in given
