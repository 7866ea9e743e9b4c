"""The names of each architecture by style, and the module that has its tables.

They are in one table here, so that the architecture of a file is found without importing the
tables of all.
"""

from collections.abc import Mapping
from typing import NamedTuple


class ArchRow(NamedTuple):
    """An architecture's names by style, and its module in `aprfmt.arch` ("": of its own name)."""

    called: Mapping[str, tuple[str, ...]]
    module: str


def _alias_row(hf: str, gguf: str, apr: str = "", module: str = "") -> ArchRow:
    """Return the names of an architecture; arguments are names separated by spaces.

    `gguf` is "" where GGUF has no such model, `apr` "" where it is the model type.
    """
    names = {"hf": hf, "gguf": gguf, "apr": apr or hf.split()[0]}
    return ArchRow({style: tuple(text.split()) for style, text in names.items() if text}, module)


# By name; in its module an architecture has this name in capitals.
ROWS: Mapping[str, ArchRow] = {
    "llama": _alias_row("llama LlamaForCausalLM LLaMAForCausalLM", "llama"),
    "mistral": _alias_row("mistral MistralForCausalLM", "llama", module="llama"),
    "mixtral": _alias_row("mixtral MixtralForCausalLM", "llama", module="llama"),
    "qwen2": _alias_row("qwen2 Qwen2ForCausalLM", "qwen2"),
    "qwen3": _alias_row("qwen3 Qwen3ForCausalLM", "qwen3"),
    "gemma": _alias_row("gemma GemmaForCausalLM", "gemma"),
    "gemma2": _alias_row("gemma2 Gemma2ForCausalLM", "gemma2", "gemma2 gemma"),
    "gemma3": _alias_row(
        "gemma3_text Gemma3ForCausalLM gemma3 Gemma3ForConditionalGeneration",
        "gemma3",
        "gemma3 gemma",
    ),
    "phi2": _alias_row("phi PhiForCausalLM", "phi2", "phi2"),
    "phi3": _alias_row("phi3 Phi3ForCausalLM", "phi3", "phi phi3"),
    "gpt2": _alias_row("gpt2 GPT2LMHeadModel", "gpt2"),
    "gpt_oss": _alias_row("gpt_oss GptOssForCausalLM", "gpt-oss", "gpt_oss gpt-oss"),
    "olmo2": _alias_row("olmo2 Olmo2ForCausalLM", "olmo2"),
    "olmo3": _alias_row("olmo3 Olmo3ForCausalLM", "olmo2", module="olmo2"),
    "olmo_hybrid": _alias_row("olmo_hybrid OlmoHybridForCausalLM", ""),
    "stablelm": _alias_row("stablelm StableLmForCausalLM", "stablelm"),
    "starcoder2": _alias_row("starcoder2 Starcoder2ForCausalLM", "starcoder2"),
    "granite": _alias_row("granite GraniteForCausalLM", "granite"),
    "smollm3": _alias_row("smollm3 SmolLM3ForCausalLM", "smollm3"),
    "cohere": _alias_row("cohere CohereForCausalLM", "command-r", "cohere command-r"),
    "qwen2_moe": _alias_row("qwen2_moe Qwen2MoeForCausalLM", "qwen2moe", "qwen2_moe qwen2moe"),
    "qwen3_moe": _alias_row("qwen3_moe Qwen3MoeForCausalLM", "qwen3moe", "qwen3_moe qwen3moe"),
    "deepseek_v2": _alias_row(
        "deepseek_v2 DeepseekV2ForCausalLM",
        "deepseek2",
        "deepseek_v2 deepseek2 deepseek",
        module="deepseek",
    ),
    "deepseek_v3": _alias_row(
        "deepseek_v3 DeepseekV3ForCausalLM kimi_k2",
        "deepseek2",
        "deepseek_v3 deepseek2 deepseek",
        module="deepseek",
    ),
    "deepseek_v32": _alias_row(
        "deepseek_v32 DeepseekV32ForCausalLM", "deepseek32", "deepseek_v32 deepseek32"
    ),
    "deepseek_v4": _alias_row(
        "deepseek_v4 DeepseekV4ForCausalLM", "deepseek4", "deepseek_v4 deepseek4"
    ),
    "glm_moe_dsa": _alias_row(
        "glm_moe_dsa GlmMoeDsaForCausalLM", "glm-dsa", "glm_moe_dsa glm-dsa", module="deepseek_v32"
    ),
    "glm4_moe_lite": _alias_row("glm4_moe_lite Glm4MoeLiteForCausalLM", "deepseek2"),
    "internlm3": _alias_row("internlm3 InternLM3ForCausalLM", "llama"),
    "ministral": _alias_row("ministral MinistralForCausalLM", ""),
    "arcee": _alias_row("arcee ArceeForCausalLM", "arcee"),
    "seed_oss": _alias_row("seed_oss SeedOssForCausalLM", "seed_oss"),
    "exaone4": _alias_row("exaone4 Exaone4ForCausalLM", "exaone4"),
    "exaone_moe": _alias_row(
        "exaone_moe ExaoneMoeForCausalLM ExaoneMoEForCausalLM",
        "exaone-moe",
        "exaone_moe exaone-moe",
    ),
    "cohere2": _alias_row("cohere2 Cohere2ForCausalLM", "cohere2"),
    "ernie4_5": _alias_row(
        "ernie4_5 Ernie4_5ForCausalLM Ernie4_5_ForCausalLM", "ernie4_5", module="ernie"
    ),
    "nemotron": _alias_row("nemotron NemotronForCausalLM", "nemotron"),
    "jais2": _alias_row("jais2 Jais2ForCausalLM", "jais2"),
    "glm": _alias_row("glm GlmForCausalLM", "chatglm", "glm chatglm"),
    "glm4": _alias_row("glm4 Glm4ForCausalLM", "glm4"),
    "olmoe": _alias_row("olmoe OlmoeForCausalLM", "olmoe"),
    "hunyuan_v1_dense": _alias_row(
        "hunyuan_v1_dense HunYuanDenseV1ForCausalLM",
        "hunyuan-dense",
        "hunyuan_v1_dense hunyuan-dense",
        module="hunyuan",
    ),
    "hunyuan_v1_moe": _alias_row(
        "hunyuan_v1_moe HunYuanMoEV1ForCausalLM",
        "hunyuan-moe",
        "hunyuan_v1_moe hunyuan-moe",
        module="hunyuan",
    ),
    "hy_v3": _alias_row("hy_v3 HYV3ForCausalLM", "hy_v3"),
    "solar_open": _alias_row("solar_open SolarOpenForCausalLM", "glm4moe", "solar_open"),
    "glm4_moe": _alias_row("glm4_moe Glm4MoeForCausalLM", "glm4moe", "glm4_moe glm4moe"),
    "kimi_linear": _alias_row(
        "kimi_linear KimiLinearForCausalLM", "kimi-linear", "kimi_linear kimi-linear"
    ),
    "minimax": _alias_row(
        "minimax MiniMaxForCausalLM minimax_text_01 MiniMaxText01ForCausalLM minimax_m1 "
        "MiniMaxM1ForCausalLM",
        "minimax-01",
        "minimax minimax-01",
    ),
    "minimax_m3_vl": _alias_row(
        "minimax_m3_vl_text MiniMaxM3VLForCausalLM minimax_m3_vl "
        "MiniMaxM3SparseForConditionalGeneration MiniMaxM3SparseForCausalLM",
        "minimax-m3",
        "minimax_m3_vl minimax-m3",
    ),
    "minimax_m2": _alias_row(
        "minimax_m2 MiniMaxM2ForCausalLM", "minimax-m2", "minimax_m2 minimax-m2"
    ),
    "ernie4_5_moe": _alias_row(
        "ernie4_5_moe Ernie4_5_MoeForCausalLM", "ernie4_5-moe", module="ernie_moe"
    ),
    "granitemoe": _alias_row("granitemoe GraniteMoeForCausalLM", "granitemoe", module="granite"),
    "dots1": _alias_row("dots1 Dots1ForCausalLM", "dots1"),
    "gpt_neox": _alias_row("gpt_neox GPTNeoXForCausalLM", "gptneox", "gpt_neox gptneox"),
    "gpt_bigcode": _alias_row(
        "gpt_bigcode GPTBigCodeForCausalLM", "starcoder", "gpt_bigcode starcoder"
    ),
    "gptj": _alias_row("gptj GPTJForCausalLM", "gptj"),
    "falcon": _alias_row("falcon FalconForCausalLM RefinedWebModel RWForCausalLM", "falcon"),
    "falcon_40b": _alias_row(
        "falcon FalconForCausalLM RefinedWeb RWForCausalLM", "falcon", "falcon_40b", module="falcon"
    ),
    "falcon_rw": _alias_row("falcon FalconForCausalLM", "", "falcon_rw", module="falcon"),
    "falcon_rw_40b": _alias_row("falcon FalconForCausalLM", "", "falcon_rw_40b", module="falcon"),
    "bert": _alias_row(
        "bert BertModel BertForMaskedLM BertForSequenceClassification", "bert", module="encoders"
    ),
    "roberta": _alias_row(
        "roberta RobertaModel RobertaForMaskedLM xlm-roberta XLMRobertaModel "
        "XLMRobertaForMaskedLM camembert CamembertModel",
        "",
        module="encoders",
    ),
    "bert_causal": _alias_row("bert BertLMHeadModel", "", "bert_causal", module="encoders"),
    "roberta_causal": _alias_row(
        "roberta RobertaForCausalLM xlm-roberta XLMRobertaForCausalLM camembert "
        "CamembertForCausalLM",
        "",
        "roberta_causal",
        module="encoders",
    ),
    "distilbert": _alias_row(
        "distilbert DistilBertModel DistilBertForMaskedLM", "bert", module="encoders"
    ),
    "mpnet": _alias_row("mpnet MPNetModel MPNetForMaskedLM", "", module="encoders"),
    "modernbert": _alias_row("modernbert ModernBertModel ModernBertForMaskedLM", "modern-bert"),
    "nomic_bert": _alias_row("nomic_bert NomicBertModel", "nomic-bert", module="rotary_encoders"),
    "jina_embeddings_v3": _alias_row(
        "jina_embeddings_v3 JinaEmbeddingsV3Model xlm-roberta",
        "jina-bert-v3",
        module="rotary_encoders",
    ),
    "bloom": _alias_row("bloom BloomForCausalLM", "bloom"),
    "mpt": _alias_row("mpt MptForCausalLM MPTForCausalLM", "mpt"),
    "opt": _alias_row("opt OPTForCausalLM", ""),
    "opt_350m": _alias_row("opt OPTForCausalLM", "", "opt_350m", module="opt"),
    "gpt_neo": _alias_row("gpt_neo GPTNeoForCausalLM", "", module="older_decoders"),
    "olmo": _alias_row("olmo OlmoForCausalLM", "olmo", module="older_decoders"),
    "llama4": _alias_row(
        "llama4_text Llama4ForCausalLM llama4 Llama4ForConditionalGeneration", "llama4", "llama4"
    ),
    "phimoe": _alias_row("phimoe PhimoeForCausalLM PhiMoEForCausalLM", "phimoe"),
    "bitnet": _alias_row("bitnet BitNetForCausalLM", "bitnet", module="newer_models"),
    "eurobert": _alias_row(
        "eurobert EuroBertModel EuroBertForMaskedLM", "eurobert", module="newer_models"
    ),
    "apertus": _alias_row("apertus ApertusForCausalLM", ""),
    "persimmon": _alias_row("persimmon PersimmonForCausalLM", "", module="older_decoders"),
    "xglm": _alias_row("xglm XGLMForCausalLM", "", module="older_decoders"),
    "biogpt": _alias_row("biogpt BioGptForCausalLM", "", module="older_decoders"),
    "codegen": _alias_row("codegen CodeGenForCausalLM", "", module="older_decoders"),
    "qwen3_next": _alias_row(
        "qwen3_next Qwen3NextForCausalLM", "qwen3next", "qwen3_next qwen3next"
    ),
    "qwen3_5": _alias_row(
        "qwen3_5_text Qwen3_5ForCausalLM qwen3_5 Qwen3_5ForConditionalGeneration",
        "qwen35",
        "qwen3_5 qwen35",
    ),
    "qwen3_5_moe": _alias_row(
        "qwen3_5_moe_text Qwen3_5MoeForCausalLM qwen3_5_moe Qwen3_5MoeForConditionalGeneration",
        "qwen35moe",
        "qwen3_5_moe qwen35moe",
        module="qwen3_5",
    ),
    "qwen2_vl": _alias_row(
        "qwen2_vl_text Qwen2VLTextModel qwen2_vl Qwen2VLForConditionalGeneration",
        "qwen2vl",
        "qwen2_vl qwen2vl",
        module="qwen_vl",
    ),
    "qwen2_5_vl": _alias_row(
        "qwen2_5_vl_text Qwen2_5_VLTextModel qwen2_5_vl Qwen2_5_VLForConditionalGeneration",
        "qwen2vl",
        "qwen2_5_vl",
        module="qwen_vl",
    ),
    "qwen3_vl": _alias_row(
        "qwen3_vl_text Qwen3VLTextModel qwen3_vl Qwen3VLForConditionalGeneration",
        "qwen3vl",
        "qwen3_vl qwen3vl",
        module="qwen_vl",
    ),
    "qwen3_vl_moe": _alias_row(
        "qwen3_vl_moe_text Qwen3VLMoeTextModel qwen3_vl_moe Qwen3VLMoeForConditionalGeneration",
        "qwen3vlmoe",
        "qwen3_vl_moe qwen3vlmoe",
        module="qwen_vl",
    ),
    "rwkv": _alias_row("rwkv RwkvForCausalLM", ""),
    "mamba": _alias_row("mamba MambaForCausalLM MambaLMHeadModel", "mamba"),
    "falcon_mamba": _alias_row("falcon_mamba FalconMambaForCausalLM", "mamba", module="mamba"),
    "mamba2": _alias_row("mamba2 Mamba2ForCausalLM", "mamba2", module="mamba"),
    "jamba": _alias_row("jamba JambaForCausalLM", "jamba"),
    "bamba": _alias_row("bamba BambaForCausalLM", "granitehybrid", module="granite_hybrid"),
    "granite_hybrid": _alias_row(
        "granitemoehybrid GraniteMoeHybridForCausalLM", "granitehybrid", "granite_hybrid"
    ),
    "granite_hybrid_moe": _alias_row(
        "granitemoehybrid GraniteMoeHybridForCausalLM",
        "granitehybrid",
        "granite_hybrid_moe",
        module="granite_hybrid",
    ),
    "falcon_h1": _alias_row("falcon_h1 FalconH1ForCausalLM", "falcon-h1"),
    "lfm2": _alias_row("lfm2 Lfm2ForCausalLM", "lfm2"),
    "lfm3": _alias_row("lfm3 Lfm3ForCausalLM", ""),
    "lfm2_moe": _alias_row("lfm2_moe Lfm2MoeForCausalLM", "lfm2moe", module="lfm2"),
    "nemotron_h": _alias_row("nemotron_h NemotronHForCausalLM", "nemotron_h"),
    "nemotron_h_moe": _alias_row(
        "nemotron_h NemotronHForCausalLM", "nemotron_h_moe", "nemotron_h_moe", module="nemotron_h"
    ),
    "t5": _alias_row("t5 T5ForConditionalGeneration T5WithLMHeadModel", "t5"),
    "t5_gated": _alias_row(
        "t5 T5ForConditionalGeneration mt5 MT5ForConditionalGeneration",
        "t5",
        "t5_gated",
        module="t5",
    ),
    "umt5": _alias_row("umt5 UMT5ForConditionalGeneration UMT5Model", "t5", module="t5"),
    "t5_encoder": _alias_row("t5 T5EncoderModel", "t5encoder", "t5_encoder", module="t5"),
    "t5_gated_encoder": _alias_row(
        "t5 T5EncoderModel mt5 MT5EncoderModel", "t5encoder", "t5_gated_encoder", module="t5"
    ),
    "umt5_encoder": _alias_row("umt5 UMT5EncoderModel", "t5encoder", "umt5_encoder", module="t5"),
    "whisper": _alias_row("whisper WhisperForConditionalGeneration WhisperModel", ""),
    "clip_vision": _alias_row(
        "clip_vision_model CLIPVisionModel", "clip", "clip_vision", module="vision_towers"
    ),
    "siglip_vision": _alias_row(
        "siglip_vision_model SiglipVisionModel", "clip", "siglip_vision", module="vision_towers"
    ),
    "gemma3_vision": _alias_row("gemma3_vision", "clip"),
    "pixtral_vision": _alias_row("pixtral_vision", "clip"),
    "qwen2_vl_vision": _alias_row("qwen2_vl_vision", "clip", module="qwen_vl_vision"),
    "qwen2_5_vl_vision": _alias_row("qwen2_5_vl_vision", "clip", module="qwen_vl_vision"),
    "qwen3_vl_vision": _alias_row(
        "qwen3_vl_vision qwen3_vl_moe_vision", "clip", module="qwen_vl_vision"
    ),
    "qwen2_audio_tower": _alias_row("qwen2_audio_tower", "clip", module="audio_towers"),
    "voxtral_tower": _alias_row("voxtral_tower", "clip", module="audio_towers"),
    "gemma3n": _alias_row(
        "gemma3n_text Gemma3nForCausalLM gemma3n Gemma3nForConditionalGeneration",
        "gemma3n",
        "gemma3n",
    ),
    "gemma4": _alias_row(
        "gemma4_text Gemma4ForCausalLM gemma4 Gemma4ForConditionalGeneration", "gemma4", "gemma4"
    ),
    "gemma4_unified": _alias_row(
        "gemma4_unified_text Gemma4UnifiedForCausalLM gemma4_unified "
        "Gemma4UnifiedForConditionalGeneration",
        "gemma4",
        "gemma4_unified",
        module="gemma4",
    ),
    "ministral3": _alias_row(
        "ministral3 Ministral3ForCausalLM mistral3 Mistral3ForConditionalGeneration",
        "mistral3",
        "ministral3 mistral3",
    ),
    "mimo": _alias_row("mimo MiMoForCausalLM", "qwen2"),
    "mimo_v2": _alias_row(
        "mimo_v2_flash MiMoV2FlashForCausalLM mimo_v2 MiMoV2ForCausalLM",
        "mimo2",
        "mimo_v2",
        module="mimo",
    ),
}
CALLED = {name: row.called for name, row in ROWS.items()}
