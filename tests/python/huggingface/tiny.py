"""Tiny instances of the classes of the installed transformers, and inputs for them."""

from __future__ import annotations

import importlib
import inspect

import torch
from special import adapt, configure
from torch import nn

VOCAB, TEXT = 99, (2, 8)

# Sizes by their names in configurations. A size missing from a configuration is not set.
SIZES = {
    "vocab_size decoder_vocab_size vocab_size_per_layer_input": VOCAB,
    "mamba_d_ssm": 64,
    "mamba_chunk_size chunk_size": 8,
    "mamba_d_state state_size ssm_state_size": 16,
    "expand attn_layer_offset": 1,
    "attn_layer_period": 2,
    "mamba_n_heads mamba_d_head hidden_size_per_layer_input": 8,
    "hidden_size d_model n_embd dim embed_dim word_embed_proj_dim embedding_size emb_dim hidden_dim model_dim": 32,
    "intermediate_size d_ff ffn_dim n_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim d_inner dim_ff mlp_dim": 48,
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers depth": 2,
    "num_encoder_layers num_blocks num_hidden_groups": 2,
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads": 4,
    "num_key_value_heads num_kv_heads n_head_kv": 2,
    "head_dim d_kv d_head kv_channels attention_head_size": 8,
    "max_position_embeddings n_positions max_seq_len n_ctx max_seq_length": 64,
    "num_local_experts num_experts n_routed_experts moe_num_experts": 4,
    "num_experts_per_tok num_experts_per_token moe_k moe_topk top_k": 2,
    "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size": 24,
    "n_group topk_group n_shared_experts n_groups": 1,
    "q_lora_rank kv_lora_rank": 16,
    "qk_rope_head_dim qk_nope_head_dim v_head_dim": 8,
    "image_size": 16,
    "patch_size": 8,
    "out_hidden_size projection_dim project_dim encoder_hidden_size cross_attention_hidden_size": 32,
    "initializer_range init_std initializer_factor": 0.2,
}
# Values that are None by default and then have no size, and values that a class needs.
MISSING = {
    "vocab_size": VOCAB,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": 16,
    "default_language": "en_XX",
    "vocabulary_map": {"<image>": 90, "IMGIMGA": 91, "<|visual token 000000|>": 92, "<|extra_200|>": 93},
}
ABSENT = {"Qwen2_5OmniThinkerConfig": "vision_start_token_id", "Qwen3OmniMoeThinkerConfig": "vision_start_token_id"}
DROPOUT = ("dropout", "drop_rate", "pdrop", "layerdrop", "drop_path_rate")


def shrink(config: object) -> object:
    """Gives the configuration, and those within it, tiny sizes and no dropout."""
    for names, value in SIZES.items():
        for name in names.split():
            old = config.__dict__.get(name)
            if isinstance(old, (int, float)) and not isinstance(old, bool) and (old > value or name.startswith("init")):
                _set(config, name, value)
    if type(config).__name__ in ABSENT:
        _set(config, ABSENT[type(config).__name__], 7)
    for name, value in MISSING.items():
        if name in config.__dict__ and config.__dict__[name] is None:
            _set(config, name, value)
    for rope in (config.__dict__.get("rope_parameters"), config.__dict__.get("rope_scaling")):
        if isinstance(rope, dict) and "rope_type" in rope:
            pairs = int(4 * (rope.get("partial_rotary_factor") or 1.0))
            rope["mrope_section"] = [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]
    for name, value in (("num_kv_shared_layers", 0), ("axial_pos_embds", False)):
        if name in config.__dict__:
            _set(config, name, value)
    heads = config.__dict__.get("num_attention_heads")
    if config.__dict__.get("kv_lora_rank") and "num_key_value_heads" in config.__dict__:
        _set(config, "num_key_value_heads", heads)
    if config.__dict__.get("rotary_dim"):
        _set(config, "rotary_dim", 8)
    if "use_cache" in config.__dict__:
        _set(config, "use_cache", False)
    layers = next((config.__dict__[n] for n in ("num_hidden_layers", "n_layer") if n in config.__dict__), None)
    special = 3
    for name, value in list(config.__dict__.items()):
        if hasattr(value, "to_dict"):
            shrink(value)
        elif isinstance(value, float) and any(part in name for part in DROPOUT):
            _set(config, name, 0.0)
        elif name in ("layer_types", "mlp_layer_types", "layers_block_type") and isinstance(value, list) and layers:
            kinds = list(dict.fromkeys(value))
            _set(config, name, (kinds * layers)[:layers])
        elif isinstance(value, int) and name.endswith(("_token_id", "_token_index")) and value >= VOCAB:
            special += 1
            _set(config, name, VOCAB - special)
        elif name == "eos_token_id" and isinstance(value, list):
            _set(config, name, 2)
    for name, value in (("pad_token_id", 0), ("decoder_start_token_id", 1)):
        if config.__dict__.get(name) is None or config.__dict__[name] >= VOCAB or config.__dict__[name] < 0:
            _set(config, name, value)
    configure(config, _set)
    return config


def _set(config: object, name: str, value: object) -> None:
    try:
        setattr(config, name, value)
    except Exception:
        config.__dict__[name] = value


def build(kind: type | str, **options: object) -> nn.Module:
    """Builds a model of the class; noise fills floating-point parameters and buffers that are 0.

    ``options`` belong to its configuration, and to the model's copy of them.
    """
    if isinstance(kind, str):
        kind = getattr(importlib.import_module("transformers"), kind)
    torch.manual_seed(0)
    config = composite(kind) or shrink(kind.config_class())
    model = kind(config).float()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.is_floating_point() and value.numel() and not bool(value.any()):
                if isinstance(value, nn.Parameter) or "final_logits_bias" in name:
                    value.normal_(0, 0.1)
    for name, option in options.items():
        assert hasattr(model.config, name)
        for owner in (model.config, *([model] if hasattr(model, name) else [])):
            setattr(owner, name, option)
    return model.train()


def composite(kind: type) -> object | None:
    """Builds configurations that have no defaults."""
    import transformers as T

    if kind.__name__ in ("EncoderDecoderModel",):
        both = shrink(T.BertConfig()), shrink(T.BertConfig(is_decoder=True, add_cross_attention=True))
        made = T.EncoderDecoderConfig.from_encoder_decoder_configs(*both)
    elif kind.__name__ == "VisionEncoderDecoderModel":
        both = shrink(T.ViTConfig()), shrink(T.GPT2Config(add_cross_attention=True))
        made = T.VisionEncoderDecoderConfig.from_encoder_decoder_configs(*both)
    elif kind.__name__ == "SpeechEncoderDecoderModel":
        both = shrink(T.Wav2Vec2Config()), shrink(T.BertConfig(is_decoder=True, add_cross_attention=True))
        made = T.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(*both)
    else:
        return None
    made.decoder_start_token_id, made.pad_token_id = 1, 0
    return made


def inputs(model: nn.Module, time_first: bool = False) -> dict[str, torch.Tensor]:
    """Returns a batch with labels, some of them ignored; sound features are [..., channels, time] or the reverse."""
    torch.manual_seed(1)
    parameters = inspect.signature(model.forward).parameters
    ids = torch.randint(10, 80, TEXT)
    labels = ids.clone()
    labels[0, :3] = -100
    batch = {"labels": labels}
    main = model.main_input_name
    if main == "pixel_values":
        size = _find(model.config, "image_size") or 16
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        batch["pixel_values"] = torch.randn(2, _find(model.config, "num_channels") or 3, height, width)
    elif main == "input_features":
        channels = _find(model.config, "num_mel_bins") or 80
        time = 40 if time_first else 2 * (_find(model.config, "max_source_positions") or 50)
        batch["input_features"] = torch.randn(2, *((time, channels) if time_first else (channels, time)))
    elif main == "input_values" or type(model).__name__ == "SpeechEncoderDecoderModel":
        batch["input_values"] = torch.randn(2, 16000)
    if "input_ids" in parameters and main not in ("input_features", "input_values"):
        batch["input_ids"] = ids
    if "decoder_input_ids" in parameters and type(model).__name__.endswith("EncoderDecoderModel"):
        batch["decoder_input_ids"] = ids
    if "attention_mask" in parameters and "input_ids" in batch and main == "input_ids":
        batch["attention_mask"] = torch.ones_like(ids)
    for name in ("next_sentence_label", "sentence_order_label"):
        if name in parameters:
            batch[name] = torch.tensor([0, 1])
    if "qformer_input_ids" in parameters:
        batch["qformer_input_ids"] = ids
    if "bbox" in parameters:
        batch["bbox"] = torch.zeros(*TEXT, 4, dtype=torch.float if "Udop" in type(model).__name__ else torch.int64)
    if "langs" in parameters and _find(model.config, "use_lang_emb"):
        batch["langs"] = torch.zeros_like(ids)
    return adapt(model, batch)


def _find(config: object, name: str) -> object | None:
    if name in config.__dict__:
        return config.__dict__[name]
    return next((f for v in config.__dict__.values() if hasattr(v, "to_dict") and (f := _find(v, name))), None)
