"""Which value types llama.cpp's converter gives the keys it knows.

Its readers refuse a key of another type, so a plain Python value gets its type from this table.
`*` is the architecture. Strings are a list of their own: a str is always one. Taken from
gguf-py's GGUFWriter, which a test compares; a key may be in two rows, one for a number and one
for a list.
"""

from collections.abc import Mapping, Sequence

_ROWS: Mapping[str, str] = {
    "uint32": """
        *.altup.active_idx *.altup.num_inputs *.attention.decay_lora_rank
        *.attention.gate_lora_rank *.attention.group_norm_groups *.attention.head_count
        *.attention.head_count_kv *.attention.iclr_lora_rank *.attention.indexer.head_count
        *.attention.indexer.key_length *.attention.indexer.top_k *.attention.key_length
        *.attention.key_length_mla *.attention.key_length_swa *.attention.kv_lora_rank
        *.attention.q_lora_rank *.attention.relative_buckets_count
        *.attention.shared_kv_layers *.attention.sliding_window
        *.attention.sliding_window_pattern *.attention.temperature_length
        *.attention.value_length *.attention.value_length_mla *.attention.value_length_swa
        *.attention.value_residual_mix_lora_rank *.block_count *.context_length
        *.convnext.block_count *.convnext.embedding_length *.decoder_block_count
        *.decoder_start_token_id *.embedding_length *.embedding_length_out
        *.embedding_length_per_layer_input *.expert_chunk_feed_forward_length *.expert_count
        *.expert_feed_forward_length *.expert_gating_func *.expert_group_count
        *.expert_group_used_count *.expert_shared_count *.expert_shared_feed_forward_length
        *.expert_used_count *.experts_per_group *.features_length *.feed_forward_length
        *.full_attention_interval *.interleave_moe_layer_step *.kda.head_dim
        *.leading_dense_block_count *.moe_every_n_layers *.moe_latent_size
        *.n_deepstack_layers *.nextn_predict_layers *.pooling_type *.posnet.block_count
        *.posnet.embedding_length *.rescale_every_n_layers *.rope.dimension_count
        *.rope.dimension_count_swa *.rope.scaling.original_context_length *.s_feat_in
        *.s_feat_out *.shortconv.l_cache *.ssm.conv_kernel *.ssm.group_count
        *.ssm.inner_size *.ssm.state_size *.ssm.time_step_rank *.time_decay_extra_dim
        *.time_mix_extra_dim *.token_shift_count *.vocab_size *.wkv.head_size
        clip.audio.attention.head_count clip.audio.block_count clip.audio.chunk_size
        clip.audio.conv_kernel_size clip.audio.embedding_length
        clip.audio.feed_forward_length clip.audio.max_pos_emb clip.audio.num_mel_bins
        clip.audio.projection_dim clip.audio.projector.downsample_rate
        clip.audio.projector.head_count clip.audio.projector.stack_factor
        clip.audio.projector.window_size clip.vision.attention.head_count
        clip.vision.block_count clip.vision.embedding_length clip.vision.feed_forward_length
        clip.vision.image_max_pixels clip.vision.image_min_pixels clip.vision.image_size
        clip.vision.n_wa_pattern clip.vision.patch_size clip.vision.preproc_image_size
        clip.vision.preproc_max_tiles clip.vision.preproc_min_tiles
        clip.vision.projection_dim clip.vision.projector.scale_factor
        clip.vision.sam.block_count clip.vision.sam.embedding_length
        clip.vision.sam.head_count clip.vision.spatial_merge_size clip.vision.window_size
        general.alignment general.base_model.count general.dataset.count general.file_type
        general.quantization_version tokenizer.ggml.bos_token_id tokenizer.ggml.eom_token_id
        tokenizer.ggml.eos_token_id tokenizer.ggml.eot_token_id tokenizer.ggml.mask_token_id
        tokenizer.ggml.fim_mid_token_id tokenizer.ggml.fim_pad_token_id
        tokenizer.ggml.fim_pre_token_id tokenizer.ggml.fim_rep_token_id
        tokenizer.ggml.fim_sep_token_id tokenizer.ggml.fim_suf_token_id
        tokenizer.ggml.middle_token_id tokenizer.ggml.prefix_token_id
        tokenizer.ggml.suffix_token_id
        tokenizer.ggml.padding_token_id tokenizer.ggml.seperator_token_id
        tokenizer.ggml.token_type_count tokenizer.ggml.unknown_token_id
    """,
    "int32": """
        general.sampling.mirostat general.sampling.penalty_last_n general.sampling.top_k
    """,
    "float32": """
        *.attention.clamp_kqv *.attention.group_norm_epsilon *.attention.layer_norm_epsilon
        *.attention.layer_norm_rms_epsilon *.attention.max_alibi_bias
        *.attention.output_scale *.attention.scale *.attention.temperature_scale
        *.attn_logit_softcapping *.embedding_scale *.expert_group_scale
        *.expert_weights_scale *.final_logit_softcapping *.logit_scale *.residual_scale
        *.rope.freq_base *.rope.freq_base_swa *.rope.scaling.alpha
        *.rope.scaling.attn_factor *.rope.scaling.factor *.rope.scaling.yarn_attn_factor
        *.rope.scaling.yarn_beta_fast *.rope.scaling.yarn_beta_slow
        *.rope.scaling.yarn_ext_factor *.rope.scaling.yarn_log_multiplier
        *.router_logit_softcapping clip.audio.attention.layer_norm_epsilon
        clip.vision.attention.layer_norm_epsilon general.sampling.min_p
        general.sampling.mirostat_eta general.sampling.mirostat_tau
        general.sampling.penalty_repeat general.sampling.temp general.sampling.top_p
        general.sampling.xtc_probability general.sampling.xtc_threshold
    """,
    "bool": """
        *.attention.causal *.expert_weights_norm *.rope.scaling.finetuned *.ssm.dt_b_c_rms
        *.swin_norm *.use_parallel_residual clip.has_audio_encoder
        clip.has_llava_projector clip.has_vision_encoder clip.use_gelu clip.use_silu
        diffusion.shift_logits tokenizer.ggml.add_bos_token
        tokenizer.ggml.add_eos_token tokenizer.ggml.add_sep_token
        tokenizer.ggml.add_space_prefix tokenizer.ggml.remove_extra_whitespaces
    """,
    "array:float32": """
        *.activation_sparsity_scale *.swiglu_clamp_exp *.swiglu_clamp_shexp
        clip.vision.image_mean clip.vision.image_std tokenizer.ggml.scores xielu.alpha_n
        xielu.alpha_p xielu.beta xielu.eps
    """,
    "array:int32": """
        *.attention.head_count *.attention.head_count_kv *.feed_forward_length
        *.rope.dimension_sections clip.vision.wa_layer_indexes tokenizer.ggml.token_type
    """,
    "array:bool": """
        clip.vision.is_deepstack_layers
    """,
    "array:uint8": """
        tokenizer.ggml.precompiled_charsmap
    """,
    "array:string": """
        *.classifier.output_labels general.languages general.tags tokenizer.chat_templates
        tokenizer.ggml.merges tokenizer.ggml.tokens
    """,
}

# Keys of text, `{n}` for a number and `{name}` for any word (gguf-py's constants).
_STRINGS = """
    general.architecture general.author general.basename general.description general.doi
    general.finetune general.license general.license.link general.license.name general.name
    general.organization general.quantized_by general.repo_url general.sampling.sequence
    general.size_label general.source.doi general.source.repo_url general.source.url
    general.source.uuid general.type general.url general.uuid general.version
    *.rope.scaling.type *.tensor_data_layout
    clip.audio.projector_type clip.projector_type clip.vision.projector_type
    tokenizer.chat_template tokenizer.chat_template.{name} tokenizer.ggml.model tokenizer.ggml.pre
    tokenizer.huggingface.json tokenizer.rwkv.world
"""
_OF_SOURCES = "author description doi name organization repo_url url uuid version".split()
_TEXTS: tuple[str, ...] = (
    *_STRINGS.split(),
    *(f"general.{kind}.{{n}}.{name}" for kind in ("base_model", "dataset") for name in _OF_SOURCES),
)

_BY_KEY: Mapping[tuple[str, bool], str] = {
    (key, kind.startswith("array")): kind for kind, keys in _ROWS.items() for key in keys.split()
}


def known_type(key: str, is_list: bool) -> str | None:
    """Return the GGUF type of a well-known key for a number or for a list, None for other keys.

    A list under a key that is a float elsewhere is a list of floats.
    """
    wild = f"*.{key.partition('.')[2]}"
    for name in (key, wild):
        if (name, is_list) in _BY_KEY:
            return _BY_KEY[name, is_list]
        if is_list and _BY_KEY.get((name, False)) == "float32":
            return "array:float32"
    return None


def known_keys(architectures: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Return {key: types it may have} of every known key; `*` stands for a number or any word.

    Keys of an architecture are given for each of `architectures`.
    """
    found: dict[str, tuple[str, ...]] = {}
    for (key, _), kind in _BY_KEY.items():
        found[key] = (*found.get(key, ()), kind)
    found |= dict.fromkeys(_TEXTS, ("string",))
    spelled: dict[str, tuple[str, ...]] = {}
    for key, kinds in found.items():
        prefixes = architectures if key.startswith("*.") else [""]
        for prefix in prefixes:
            name = key.replace("*", prefix, 1) if prefix else key
            spelled[name.replace("{n}", "*").replace("{name}", "*")] = kinds
    return spelled
