"""The words of answers and pages: what each means, and what other tools call the same thing."""

from collections.abc import Mapping
from typing import NamedTuple


class GlossaryEntry(NamedTuple):
    """What a word means, and its names in llama.cpp, transformers and `apr`; "-" for none."""

    meaning: str
    llama_cpp: str = "-"
    transformers: str = "-"
    apr: str = "-"


# {section of the page: {word: its entry}}, in the order of the page.
GLOSSARY: Mapping[str, Mapping[str, GlossaryEntry]] = {
    "Files": {
        "container": GlossaryEntry(
            "a file format that holds tensors and metadata: APR v2, GGUF, safetensors",
            "GGUF",
            "safetensors, `.bin`",
            "`.apr`",
        ),
        "header": GlossaryEntry(
            "what stands before the tensor data: magic, version, offsets",
            "`gguf_context`",
            "JSON after eight bytes of length",
            "64 bytes, magic `APR\\0`",
        ),
        "metadata": GlossaryEntry(
            "keys and values of a container",
            "`general.*`, `ARCH.*` key-value pairs",
            "`__metadata__`, `config.json`",
            "JSON metadata",
        ),
        "tensor index": GlossaryEntry(
            "where each tensor lies: name, dtype, shape, offset, size",
            "tensor infos",
            "the header's entries",
            "tensor index, sorted by name",
        ),
        "shard": GlossaryEntry(
            "one of several files that hold one model",
            "split, `-00001-of-00003.gguf`",
            "shard",
            "shard, `sharding`",
        ),
        "shard index": GlossaryEntry(
            "the file that says which shard holds which tensor",
            "none: `split.*` keys in each file",
            "`model.safetensors.index.json`, `weight_map`",
        ),
        "folder": GlossaryEntry(
            "a model with its config.json, tokenizer and shards",
            "converter input",
            "checkpoint, `from_pretrained` path",
            "SafeTensors directory",
        ),
        "sidecar file": GlossaryEntry(
            "a file of the folder that holds no tensors: config, tokenizer, template, licence",
            "-",
            "`tokenizer.json`, `generation_config.json`",
            "embedded as metadata",
        ),
        "checksum": GlossaryEntry(
            "a number that a changed byte changes", "-", "-", "CRC-32 of the header and of the file"
        ),
        "manifest": GlossaryEntry(
            "the SHA-256 digests of a file and its tensors, as `hash --write` saves them"
        ),
        "ledger": GlossaryEntry("the list of every item that a model is made of, with its reading"),
        "reading": GlossaryEntry(
            "what a loader takes an item of a model for: a role, a setting, a text, unread, ..."
        ),
        "unread": GlossaryEntry(
            "an item that no table lists: what a loader does with it is not known"
        ),
        "mapped file": GlossaryEntry(
            "a file read through the system's memory mapping", "`--mmap`", "`safe_open`", "mmap"
        ),
    },
    "Tensors and encodings": {
        "tensor": GlossaryEntry(
            "an array of numbers with a name", "`ggml_tensor`", "parameter or buffer", "tensor"
        ),
        "stored tensor": GlossaryEntry(
            "a tensor as a file has it, under the file's own name",
            "tensor",
            "entry of the state dict",
            "index entry",
        ),
        "role": GlossaryEntry(
            "what a tensor is for, by one name in all formats: `L3.attn_q.weight`",
            "`blk.3.attn_q.weight`",
            "`model.layers.3.self_attn.q_proj.weight`",
            "the source's name",
        ),
        "shape": GlossaryEntry(
            "sizes of the axes, outermost first",
            "`ne`, innermost first",
            "`shape`",
            "dims, outermost first",
        ),
        "layout step": GlossaryEntry(
            "what a writer did to a weight's elements: a transpose, permuted rows, one added",
            "`permute`, `modify_tensors`",
            "weight conversion",
        ),
        "encoding": GlossaryEntry(
            "how numbers are stored as bytes",
            "`ggml_type`",
            "`torch_dtype`, quantization method",
            "dtype code",
        ),
        "float type": GlossaryEntry(
            "F32, F16, BF16, F64",
            "`F32`, `F16`, `BF16`",
            "`float32`, `float16`, `bfloat16`",
            "codes 0, 1, 30, 3",
        ),
        "block": GlossaryEntry(
            "a run of elements that share scales",
            "block, `QK_K`",
            "group, `group_size`",
            "block of 32 or 256",
        ),
        "superblock": GlossaryEntry(
            "a K-quant's block of 256 with scales for parts of it",
            "`block_q4_K`",
            "-",
            "`q4_k`, `q6_k`",
        ),
        "scale": GlossaryEntry(
            "the factor of a block's codes", "`d`, `scales`", "`scales`, `weight_scale`", "scale"
        ),
        "zero point": GlossaryEntry(
            "the code that stands for zero", "`dmin`, `m`", "`qzeros`, `zero_point`"
        ),
        "step": GlossaryEntry("the distance of two neighbouring values of a block: its scale"),
        "K-quant": GlossaryEntry(
            "an encoding of superblocks", "`Q4_K`, `Q6_K`", "-", "`q4_k`, `q6_k`"
        ),
        "packed weight": GlossaryEntry(
            "one weight stored as several tensors: codes, scales, zero points",
            "-",
            "`qweight`, `qzeros`, `g_idx`",
        ),
        "dialect": GlossaryEntry(
            "a library's layout of packed weights: names, order of codes, keys of config.json",
            "-",
            "`quant_method`",
        ),
        "companion": GlossaryEntry(
            "one of the stored tensors of a packed weight, other than its codes",
            "-",
            "`scales`, `absmax`, `quant_map`",
        ),
        "mixture": GlossaryEntry("an encoding for each kind of tensor under one name", "`Q4_K_M`"),
        "importance matrix": GlossaryEntry(
            "mean squares of inputs by column, which weight the rounding", "imatrix"
        ),
        "dequantize": GlossaryEntry(
            "give the numbers that codes stand for",
            "`dequantize_row`",
            "`dequantize`",
            "dequantize",
        ),
        "requantized": GlossaryEntry(
            "encoded a second time, from the values of an encoding", "`--allow-requantize`"
        ),
    },
    "Architecture": {
        "architecture": GlossaryEntry(
            "the family that says which tensors exist and how they are computed with",
            "`general.architecture`",
            "`model_type`",
            "`architecture`",
        ),
        "hyperparameter": GlossaryEntry(
            "a number that the pass depends on",
            "hparam, `n_embd`",
            "key of `config.json`",
            "metadata key, `hidden_size`",
        ),
        "layer": GlossaryEntry("one decoder block", "`blk.N`, layer", "`layers.N`", "layer"),
        "hidden size": GlossaryEntry(
            "width of the residual stream",
            "`n_embd`, `embedding_length`",
            "`hidden_size`",
            "`hidden_size`",
        ),
        "head": GlossaryEntry(
            "one of the parallel parts of attention",
            "`n_head`",
            "`num_attention_heads`",
            "`num_heads`",
        ),
        "key-value head": GlossaryEntry(
            "a head of keys and values that several query heads share (GQA)",
            "`n_head_kv`",
            "`num_key_value_heads`",
            "`num_kv_heads`",
        ),
        "head dim": GlossaryEntry(
            "width of a head", "`key_length`, `value_length`", "`head_dim`", "`head_dim`"
        ),
        "ffn size": GlossaryEntry(
            "width inside the MLP",
            "`n_ff`, `feed_forward_length`",
            "`intermediate_size`",
            "`intermediate_size`",
        ),
        "context length": GlossaryEntry(
            "the tokens a model was trained on",
            "`n_ctx_train`, `context_length`",
            "`max_position_embeddings`",
            "`max_position_embeddings`",
        ),
        "norm eps": GlossaryEntry(
            "the constant below the root of a norm",
            "`f_norm_rms_eps`",
            "`rms_norm_eps`, `layer_norm_eps`",
            "`rms_norm_eps`",
        ),
        "rope": GlossaryEntry(
            "rotation of queries and keys by position", "`rope`", "rotary embedding", "RoPE"
        ),
        "rope base": GlossaryEntry(
            "the base of its frequencies", "`rope.freq_base`", "`rope_theta`", "`rope_theta`"
        ),
        "rope scaling": GlossaryEntry(
            "a change of its frequencies for longer contexts",
            "`rope.scaling.*`",
            "`rope_scaling`, `rope_parameters`",
        ),
        "rope pairing": GlossaryEntry(
            "which elements are rotated together: split halves or adjacent",
            "`NEOX`, `NORM`",
            "`rotate_half`",
            "`rope_type` 2, 0",
        ),
        "partial rotary": GlossaryEntry(
            "rotation of a head's first part only",
            "`rope.dimension_count`",
            "`partial_rotary_factor`",
        ),
        "sliding window": GlossaryEntry(
            "how far back a layer's attention sees", "`n_swa`", "`sliding_window`"
        ),
        "softcap": GlossaryEntry(
            "a limit by tanh of scores or logits",
            "`attn_logit_softcapping`",
            "`final_logit_softcapping`",
        ),
        "attention scale": GlossaryEntry(
            "the factor of the scores", "`f_attention_scale`", "`scaling`, `query_pre_attn_scalar`"
        ),
        "sink": GlossaryEntry(
            "a learned score that takes part in the softmax and is dropped",
            "`attn_sinks`",
            "`sinks`",
        ),
        "tied embedding": GlossaryEntry(
            "the head reads the embedding's weight",
            "missing `output.weight`",
            "`tie_word_embeddings`",
            "`tied_embeddings`",
        ),
        "expert": GlossaryEntry(
            "one of several MLPs of a layer, chosen by token",
            "`n_expert`, `ffn_*_exps`",
            "`num_experts`, `experts`",
            "`num_experts`",
        ),
        "router": GlossaryEntry(
            "the product that scores experts", "`ffn_gate_inp`", "`gate`, `router`"
        ),
        "shared expert": GlossaryEntry(
            "an expert that every token uses", "`ffn_*_shexp`", "`shared_expert`"
        ),
        "latent attention": GlossaryEntry(
            "queries, keys and values from a compressed form (MLA)",
            "`attn_kv_a_mqa`",
            "`kv_a_proj_with_mqa`",
        ),
        "delta net": GlossaryEntry(
            "a layer that keeps a state in place of keys",
            "`ssm_*`",
            "`linear_attn`",
            "`linear_attn_hparams`",
        ),
        "state space scan": GlossaryEntry(
            "a layer whose state decays by its tokens' own time steps",
            "`ssm_*`",
            "`mamba`, `mixer`",
        ),
        "time step": GlossaryEntry(
            "how long a token's step in a scan is: `dt`", "`ssm_dt`", "`dt_bias`, `dt_proj`"
        ),
        "draft head": GlossaryEntry(
            "a layer that predicts the token after the next (MTP)", "`nextn`", "`mtp`"
        ),
        "tower": GlossaryEntry(
            "the part of a model that reads images or sound, with its projector",
            "`mmproj`",
            "`vision_tower`, `audio_tower`",
        ),
        "adapter": GlossaryEntry(
            "low-rank matrices to be added to weights", "LoRA GGUF", "peft adapter", "LoRA adapter"
        ),
    },
    "Tokenizer": {
        "piece": GlossaryEntry(
            "the text of one token",
            "`tokenizer.ggml.tokens`",
            "vocab entry",
            "`tokenizer.vocabulary`",
        ),
        "merge": GlossaryEntry(
            "two pieces that BPE joins, by rank",
            "`tokenizer.ggml.merges`",
            "`merges`",
            "`tokenizer.merges`",
        ),
        "score": GlossaryEntry(
            "a piece's weight in a unigram model",
            "`tokenizer.ggml.scores`",
            "`vocab` pairs",
            "`tokenizer.scores`",
        ),
        "token type": GlossaryEntry(
            "normal, control, user defined, byte, unknown",
            "`tokenizer.ggml.token_type`",
            "`AddedToken(special=...)`",
            "`tokenizer.token_type`",
        ),
        "pre-tokenizer": GlossaryEntry(
            "how text is split before merges",
            "`tokenizer.ggml.pre`",
            "`pre_tokenizer`",
            "`tokenizer.pre_type`",
        ),
        "normalizer": GlossaryEntry(
            "how text is changed before it is split", "`precompiled_charsmap`", "`normalizer`"
        ),
        "added token": GlossaryEntry(
            "a token that is found in the text before splitting",
            "user-defined token",
            "`added_tokens`",
        ),
        "special id": GlossaryEntry(
            "the id of BOS, EOS, PAD and the like",
            "`bos_token_id`",
            "`bos_token_id`",
            "`tokenizer.bos_token_id`",
        ),
        "chat template": GlossaryEntry(
            "a jinja2 program that writes a conversation as text",
            "`tokenizer.chat_template`",
            "`chat_template`",
            "`chat_template`",
        ),
        "generation config": GlossaryEntry(
            "settings of sampling that come with a model",
            "sampler flags",
            "`generation_config.json`",
        ),
    },
    "Passes and traces": {
        "forward pass": GlossaryEntry(
            "the computation from token ids to logits", "`llama_decode`", "`forward`", "forward"
        ),
        "operation": GlossaryEntry(
            "one step of it: a product, a norm, rope, a softmax",
            "graph node, op",
            "module or function",
            "step",
        ),
        "capture point": GlossaryEntry(
            "a named place in the pass, with the tensor that the next operation reads",
            "node name",
            "module output, hook",
            "stage",
        ),
        "trace": GlossaryEntry(
            "the values or statistics of capture points of one run",
            "`llama-eval-callback`",
            "`output_hidden_states`",
            "`apr trace --payload`",
        ),
        "dump": GlossaryEntry(
            "arrays that an engine or hooks saved of a run",
            "`llama-eval-callback`",
            "forward hooks",
        ),
        "rank": GlossaryEntry("one process of a run that several devices share, and its number"),
        "APRT": GlossaryEntry(
            "a trace as a folder with a file for each stage", "-", "-", "`apr trace --save-tensor`"
        ),
        "residual stream": GlossaryEntry(
            "what a layer reads, and adds its result to",
            "`inpL`, `l_out`",
            "hidden states",
            "`post_ffn_residual`",
        ),
        "logits": GlossaryEntry(
            "a number for each token of the vocabulary", "logits", "`logits`", "`lm_head`"
        ),
        "key-value cache": GlossaryEntry(
            "keys and values of earlier tokens", "KV cache", "`past_key_values`", "KV cache"
        ),
        "token number": GlossaryEntry(
            "the place of a token in the run, from 0; `from token N on` begins with N"
        ),
        "prefill": GlossaryEntry(
            "the pass over the prompt", "prompt processing", "first `forward`", "prefill"
        ),
        "decoding": GlossaryEntry(
            "passes of one token that continue a cache", "token generation", "`generate`", "decode"
        ),
        "fused operation": GlossaryEntry(
            "several operations run as one",
            "`flash_attn`",
            "`sdpa`, `flash_attention_2`",
            "fused kernel",
        ),
        "backend": GlossaryEntry(
            "what computes the operations",
            "CPU, CUDA, Metal backend",
            "torch device",
            "CPU, GPU path",
        ),
        "engine": GlossaryEntry(
            "another program that runs the model", "llama.cpp", "transformers", "realizar"
        ),
        "patched model": GlossaryEntry(
            "a model with hyperparameters, weights, operations or point values replaced for "
            "one pass",
            "-",
            "forward hook, patching",
        ),
        "shadow pass": GlossaryEntry(
            "a pass of the reference in which every operation reads the other run's "
            "recorded input (torch.ao.ns: shadow activations)"
        ),
        "pass location": GlossaryEntry("the last capture point a pass came by, and its layer"),
        "recorded value": GlossaryEntry(
            "what a trace holds at a point, on the rows that both runs have"
        ),
        "cell": GlossaryEntry("one operation cut out of a model with its inputs and weights"),
    },
    "Comparing": {
        "reference": GlossaryEntry(
            "the side that is right by agreement: A, or the model of a trace",
            "base model",
            "reference model",
            "reference",
        ),
        "actual": GlossaryEntry("the side that is judged: B, or the trace"),
        "relL2": GlossaryEntry(
            "relative L2: 0.01 is a difference whose norm is one hundredth of the reference's"
        ),
        "apart": GlossaryEntry(
            "in an answer (`0.179 apart`): the residual before the cause is removed"
        ),
        "unconfirmed": GlossaryEntry(
            "a confidence: no cause was confirmed, and the named one is explained or located"
        ),
        "ambiguous": GlossaryEntry("several causes or mistakes fit equally well"),
        "residual": GlossaryEntry(
            "the relative L2 distance of A and B at the cause's place, before and after the "
            "cause is removed: what is left after is what the cause does not explain"
        ),
        "max abs": GlossaryEntry("the largest absolute difference of two values"),
        "max/rms": GlossaryEntry(
            "the largest absolute difference over the root mean square of the reference"
        ),
        "ulp": GlossaryEntry(
            "units in the last place: the number of steps from one value to the other in a float "
            "type, that of both tensors where it is one, else float32"
        ),
        "count": GlossaryEntry("the number of elements that a row of statistics is of"),
        "mean": GlossaryEntry("the sum of the elements over their number"),
        "std": GlossaryEntry(
            "the standard deviation, divided by the number of elements, not by n - 1"
        ),
        "min": GlossaryEntry("the smallest element"),
        "max": GlossaryEntry("the largest element"),
        "absmax": GlossaryEntry("the largest absolute value"),
        "l2": GlossaryEntry("the norm: the root of the sum of squares"),
        "zeros": GlossaryEntry("the number of elements that are exactly zero"),
        "nan": GlossaryEntry("the number of elements that are NaN"),
        "inf": GlossaryEntry("the number of elements that are infinite"),
        "cosine": GlossaryEntry("the cosine of the angle of two tensors as vectors: 1 if parallel"),
        "nats": GlossaryEntry("the unit of losses and KL: one nat is 1.4427 bits"),
        "argmax": GlossaryEntry("the likeliest next token: the index of the largest logit"),
        "complete": GlossaryEntry(
            "without the named causes nothing but rounding is left between the two sides"
        ),
        "first seen at": GlossaryEntry(
            "the first capture point, in execution order, that differs by more than rounding"
        ),
        "relative L2": GlossaryEntry(
            "the norm of actual minus reference, over the norm of the reference",
            "NMSE is its square",
            "-",
            "relative error",
        ),
        "KL": GlossaryEntry(
            "short for KL divergence: how far the next token's probabilities are apart"
        ),
        "KL divergence": GlossaryEntry(
            "how far the next token's probabilities are apart, in nats", "`--kl-divergence`"
        ),
        "tolerance": GlossaryEntry(
            "the distance that right computations may have, with its reason",
            "-",
            "`atol`, `rtol`",
            "`abs`, `rel`",
        ),
        "rounding": GlossaryEntry("the difference that another order or type of arithmetic makes"),
        "bound": GlossaryEntry("the largest error that an encoding makes, from its step"),
        "finding": GlossaryEntry("one thing that differs, where, and how sure it is"),
        "cause": GlossaryEntry("why it differs, by a name of the table of causes"),
        "verdict": GlossaryEntry(
            "`same`, `precision`, `bug` or `not_comparable`", "-", "-", "PASS or FAIL"
        ),
        "probe": GlossaryEntry("token ids chosen to show what differs"),
        "parity": GlossaryEntry(
            "one model in several runs, point by point", "-", "-", "`apr parity`"
        ),
        "gate": GlossaryEntry(
            "a check that must pass before a model is used", "-", "-", "`apr qa` gate"
        ),
        "baseline": GlossaryEntry(
            "the outcomes and numbers of a run of `qa`, saved to compare later runs with"
        ),
        "golden file": GlossaryEntry(
            "prompts with the answers, and texts with the losses, that a model must give"
        ),
        "perplexity": GlossaryEntry(
            "exp of the mean loss of a text", "`llama-perplexity`", "-", "`apr eval`"
        ),
    },
}
