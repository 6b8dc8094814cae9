"""Additions of single classes to the sizes of tiny.py: values of their configurations, and other inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

# Keys are configuration classes; a dictionary is merged into the existing one.
CONFIGS: dict[str, dict[str, object]] = {
    "BailingHybridConfig": {"num_expert_group": 1, "qk_head_dim": 16, "linear_head_dim": 8, "linear_num_heads": 4},
    "Blip2Config": {"image_token_id": 98, "image_token_index": 98, "num_query_tokens": 4},
    "BltConfig": {"encoder_hash_byte_group_vocab": 50, "patching_threshold": 100.0, "max_patch_length": 3},
    "BltGlobalTransformerConfig": {"encoder_cross_output_size": 64},
    "BltLocalDecoderConfig": {"hidden_size_global": 32},
    "BltLocalEncoderConfig": {"hidden_size_global": 32},
    "BridgeTowerConfig": {"hidden_size": 64},
    "BridgeTowerTextConfig": {"hidden_size": 64},
    "BridgeTowerVisionConfig": {"hidden_size": 64},
    "CohereCompassTextConfig": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        },
        "logit_scale": 0.25,
    },
    "CsmDepthDecoderConfig": {"backbone_hidden_size": 32},
    "DbrxAttentionConfig": {"rope_theta": 1e4, "clip_qkv": 8.0},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
    "DiaDecoderConfig": {
        "cross_hidden_size": 32,
        "cross_num_attention_heads": 4,
        "cross_num_key_value_heads": 4,
        "cross_head_dim": 8,
    },
    "Ernie4_5_VLMoeTextConfig": {"rope_parameters": {"mrope_section": [1, 1, 2]}, "moe_intermediate_size": [24, 24]},
    "EsmcConfig": {"vocab_size": 99, "num_key_value_heads": 4},
    "Glm5NextTextConfig": {"linear_head_dim": 8, "linear_num_heads": 4, "index_head_dim": 8, "index_n_heads": 2},
    "GlmImageTextConfig": {"vision_vocab_size": 99},
    "Granite4VisionConfig": {
        "deepstack_layer_map": [],
        "spatial_target_layers": [0, 0, 1, 1],
        "downsample_rate": "1/2",
    },
    "InstructBlipConfig": {"image_token_id": 98, "image_token_index": 98, "num_query_tokens": 4},
    "InstructBlipVideoConfig": {"video_token_id": 98, "video_token_index": 98, "num_query_tokens": 4},
    "KimiLinearConfig": {"linear_head_dim": 8, "linear_num_heads": 4},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "LongcatFlashConfig": {"qk_head_dim": 16, "zero_expert_num": 2},
    "MimiConfig": {"upsample_groups": 32},
    "Mistral4Config": {"qk_head_dim": 16, "rope_parameters": {"partial_rotary_factor": 1.0}},
    "MoonshineStreamingConfig": {"num_key_value_heads": 4},
    "MoonshineStreamingEncoderConfig": {"num_key_value_heads": 4},
    "MusicgenDecoderConfig": {"num_codebooks": 2},
    "MusicgenMelodyDecoderConfig": {"num_codebooks": 2},
    "NeoMMEConfig": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "PPFormulaNetVisionConfig": {"post_conv_out_channels": 32, "post_conv_mid_channels": 32, "decoder_hidden_size": 32},
    "PerceiverConfig": {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2},
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 24},
    "Qwen4ExpTextConfig": {
        "hc_lowrank": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "indexer_head_dim": 8,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "ngram_vocab_size_base": 64,
        "ple_embed_dim": 32,
        "split_ngram_parts": 2,
        "output_gate_type": "swish",
    },
    "VibeVoiceAcousticTokenizerConfig": {"num_filters": 2},
    "VibeVoiceAcousticTokenizerEncoderConfig": {"num_filters": 2},
    "Zamba2Config": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_headdim": 8,
        "adapter_rank": 4,
        "num_query_groups": 4,
        "num_key_value_heads": 4,
    },
    "ZambaConfig": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 4,
    },
    "xLSTMConfig": {"embedding_dim": 32, "mode": "train", "ffn_round_up_to_multiple_of": 8},
}


def configure(config: object, set_value: Callable[[object, str, object], None]) -> None:
    for name, value in CONFIGS.get(type(config).__name__, {}).items():
        old = config.__dict__.get(name)
        set_value(config, name, {**old, **value} if isinstance(value, dict) and isinstance(old, dict) else value)


Inputs = dict[str, Tensor | None]
Maker = Callable[[nn.Module, dict[str, Tensor]], Inputs]


def _ids(*shape: int) -> Tensor:
    return torch.randint(10, 80, shape)


def _text(ids: Tensor) -> Inputs:
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def _codebooks(model: nn.Module, batch: dict[str, Tensor]) -> Inputs:
    ids = _ids(4, 8)
    return {"input_ids": ids, "attention_mask": torch.ones(2, 8), "labels": ids.view(2, 2, 8).transpose(1, 2)}


def _audio_tokens(ids: int, *labels: int) -> Maker:
    """Returns codebook numbers: ids [2, 8, ids] and labels [2, 8, *labels]."""
    return lambda model, batch: {"input_ids": _ids(2, 8, ids), "labels": _ids(2, 8, *labels)}


def _audio_labels(model: nn.Module, batch: dict[str, Tensor]) -> Inputs:
    return {"labels": _ids(2, 8, 2)}


def _dia(model: nn.Module, batch: dict[str, Tensor]) -> Inputs:
    ids = _ids(2, 8, 9)
    return {"decoder_input_ids": ids, "labels": ids.transpose(1, 2).reshape(18, 8)}


def _kosmos(model: nn.Module, batch: dict[str, Tensor]) -> Inputs:
    places = torch.arange(8).expand(2, 8) < 3
    return {"image_embeds": torch.randn(2, 3, 32), "image_embeds_position_mask": places, "pixel_values": None}


def _image(*size: int) -> Maker:
    return lambda model, batch: {"pixel_values": torch.randn(2, *size)}


def _image_tokens(*size: int) -> Maker:
    def made(model: nn.Module, batch: dict[str, Tensor]) -> Inputs:
        ids = _ids(2, 12 if len(size) == 4 else 8)
        ids[:, : ids.shape[1] - 4] = 98
        given = {"pixel_values": torch.randn(2, *size)} | _text(ids)
        return given | ({"qformer_input_ids": batch["qformer_input_ids"]} if "qformer_input_ids" in batch else {})

    return made


def _lxmert(model: nn.Module, batch: dict[str, Tensor]) -> Inputs:
    return {"visual_feats": torch.randn(2, 5, model.config.visual_feat_dim), "visual_pos": torch.rand(2, 5, 4)}


def _patches(model: nn.Module, batch: dict[str, Tensor]) -> Inputs:
    size = model.config.vision_config.patch_embed_hidden_size
    patches = torch.cat([torch.randint(1, 4, (2, 6, 2)).float(), torch.randn(2, 6, size)], -1)
    return {"flattened_patches": patches, "attention_mask": torch.ones(2, 6)}


# Keys are model classes. Values are additional inputs, or None for an input to leave out.
INPUTS: dict[str, Maker] = {
    "Blip2ForConditionalGeneration": _image_tokens(3, 16, 16),
    "BridgeTowerForMaskedLM": _image(3, 16, 16),
    "CsmForConditionalGeneration": _audio_tokens(32, 32),
    "DiaForConditionalGeneration": _dia,
    "GitForCausalLM": _image(3, 16, 16),
    "InstructBlipForConditionalGeneration": _image_tokens(3, 16, 16),
    "InstructBlipVideoForConditionalGeneration": _image_tokens(2, 3, 16, 16),
    "Kosmos2ForConditionalGeneration": _kosmos,
    "KyutaiSpeechToTextForConditionalGeneration": _audio_tokens(33),
    "LxmertForPreTraining": _lxmert,
    "Molmo2ForConditionalGeneration": lambda model, batch: {"mm_token_type_ids": torch.zeros(2, 8, dtype=torch.int64)},
    "MusicgenForCausalLM": _codebooks,
    "MusicgenForConditionalGeneration": _audio_labels,
    "MusicgenMelodyForCausalLM": _codebooks,
    "MusicgenMelodyForConditionalGeneration": _audio_labels,
    "PerceiverForMaskedLM": lambda model, batch: _text(_ids(2, 64)),
    "Pix2StructForConditionalGeneration": _patches,
    "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration": lambda model, batch: {"generation_steps": 1},
    "Qwen3OmniMoeTalkerForConditionalGeneration": lambda model, batch: (
        {"inputs_embeds": torch.randn(2, 8, 32), "talker_input_ids": batch["input_ids"], "input_ids": None}
    ),
    "SeamlessM4TTextToUnitForConditionalGeneration": lambda model, batch: (
        {"inputs_embeds": torch.randn(2, 8, 32), "input_ids": None}
    ),
    "ViltForMaskedLM": _image(3, 16, 16),
    "VoxtralRealtimeForConditionalGeneration": lambda model, batch: {"input_features": torch.randn(2, 128, 64)},
    "VisualBertForPreTraining": lambda model, batch: {
        "visual_embeds": torch.randn(2, 3, model.config.visual_embedding_dim),
        "visual_attention_mask": torch.ones(2, 3),
        "labels": torch.cat([batch["labels"], torch.full((2, 3), -100)], 1),
    },
}


def adapt(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the inputs that the model's class needs."""
    made = INPUTS.get(type(model).__name__)
    changed = batch | (made(model, batch) if made else {})
    return {name: value for name, value in changed.items() if value is not None}
