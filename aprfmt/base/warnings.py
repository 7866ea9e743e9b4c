"""The warnings by key: what `aprfmt explain KEY` says about a line that names the key.

Each remark of level "warning" carries one of these keys; a test holds the code to the table.
"""

from collections.abc import Mapping

WARNINGS: Mapping[str, str] = {
    # --- files -----------------------------------------------------------------------------------
    "checksum": "the file ends with a checksum of its bytes, and the bytes give another one: some "
    "byte changed after the file was written. Get it again; `aprfmt validate` reads the rest.",
    "no_checksum": "nothing in the file can show a changed byte. `aprfmt hash FILE --write` makes "
    "a manifest next to it that can.",
    "truncated": "the file ends before its last tensor does, so tensors at the end are cut. Get "
    "it again; what is whole can be read with --partial.",
    "trailing_bytes": "bytes follow the last part of the file. Another file may have been joined "
    "on, or a download went on too long; `aprfmt hex FILE --offset N` shows them.",
    "holes": "bytes between two parts belong to neither. aprfmt reads such a file; llama.cpp "
    "refuses it. `aprfmt convert FILE OUT` writes it without holes.",
    "missing_shard": "a file of a sharded model is not next to the others; its tensors are left "
    "out. Get the missing file.",
    "shard_size": "a shard has another size than its manifest says: it may be of another version "
    "of the model.",
    "shard_metadata": "the shards of one model say different things under one metadata key; the "
    "first shard's value is used.",
    "index_size": "the index states a total size that the tensors of all shards do not have: "
    "index and shards may be of different versions, or types or ties were changed since. "
    "Loaders read the set; `aprfmt repair --index FOLDER` makes the index anew.",
    "legacy_format": "the file is of an older version of its format. aprfmt reads it, today's "
    "loaders may not; `aprfmt convert FILE OUT` writes the present one.",
    "unknown_version": "the file states a version of its format that this reader does not know; "
    "it is read as the newest known one.",
    "odd_flags": "the header sets a flag that this format does not define, or that no writer uses.",
    "remark": "the file is unusual in a way that harms no reader.",
    "duplicate_keys": "one metadata key occurs twice; the last value is used, as the reference "
    "reader does.",
    "metadata_type": "a metadata value has another type than its key has in this format; the "
    "reference reader refuses the file. `aprfmt set` writes a right one.",
    "unsorted_index": "the tensor index is not sorted by name, which a reader that searches it "
    "needs; `aprfmt convert FILE OUT` sorts it.",
    "cut_name": "a tensor's name was cut by the writer, so it may not be found under its own.",
    "long_name": "a tensor's name is longer than llama.cpp accepts; it refuses the file.",
    "tensor_order": "tensor data lies in another order than the table of tensors; llama.cpp "
    "refuses such a file, aprfmt reads it. `aprfmt convert FILE OUT` puts it right.",
    "unknown_type": "tensors are of a ggml type that this version cannot decode: a fork's, or one "
    "that was removed. Their bytes are kept as they are.",
    "contested_type": "two forks gave one ggml type id to different types. The line says which the "
    "bytes between tensors, or a key of the file, speak for; what is not upstream's is copied as "
    "it is.",
    "carried_tensors": "the file's table of tensors in encodings of other formats does not fit "
    "what is stored; those tensors stay under their stored names.",
    "unproven": "the repaired file has bytes of the broken one that neither a digest nor a "
    "comparison speaks of. `aprfmt repair --compare` compares every byte; so does a manifest that "
    "`aprfmt hash --write` made of the good file.",
    "salvaged": "the file has only those tensors of a damaged one that were sound; the metadata "
    "key aprfmt.repair.missing lists the others. `aprfmt repair --from` a good copy gives all.",
    "misshapen": "tensors have shapes that the hyperparameters exclude, such as [0] for a matrix. "
    "`aprfmt validate` lists them; convert, quantize, import, merge and split refuse them.",
    # --- models ----------------------------------------------------------------------------------
    "contradiction": "two places state one value of the forward pass differently (a key and the "
    "tensors, or a key and the carried config.json). The line says which is used; "
    "`aprfmt diagnose` against the source shows whether it is the right one.",
    "assumed": "no key of the file says this value, because its format has none; it is what the "
    "format's readers take. A note, no warning: the released models of the architecture have it. "
    "`aprfmt diagnose` against the source shows whether this one has.",
    "missing_tensors": "the configuration demands tensors that the file does not have. It cannot "
    "run or be converted, unless --allow-missing accepts each.",
    "two_packings": "config.json and a library's own file (hf_quant_config.json, "
    "quantize_config.json, quant_config.json) state different packings of the weights. "
    "config.json's is used here; a loader that reads the other file "
    "decodes the same bytes as something else. Make both say what the weights are.",
    "accepted_missing": "required tensors are missing, and were accepted with --allow-missing or "
    "when the file was written: the model computes something else than its source.",
    "unknown_architecture": "no table here describes this architecture, so the file is read as "
    "stored tensors: looking, hashing and comparing by name work; converting between naming styles "
    "and running do not. `aprfmt doctor` and docs/reference/architectures.md list what is known.",
    "not_expressible": "the target format has no key for a value of this model, and its readers "
    "assume another: the output computes something else there than the source.",
    "unread_weights": "config.json names a quantization that is not decoded here, or says nothing "
    "of weights that stand there with their scales. The tensors are "
    "kept byte for byte; what needs their numbers is refused.",
    "lone_codes": "weights are codes of eight bits, as large as the type goes, and no scale for "
    "them is in the file: what they count for is lost. They are copied as they are stored; what "
    "needs their values is refused. Convert again from the source, with its scales.",
    "vocabulary_rows": "the adapter was trained on a table of tokens of another size than the "
    "base's, and no tokenizer of that size is at hand; put the tokenizer of the training next to "
    "the adapter and merge again, or copy it into the output",
    "merge_rounding": "an adapter's change is smaller than the steps of the type that the merge is "
    "stored in, or not much larger, so that rounding takes a part of it. Keep the adapter apart, "
    "or store the merge in F32.",
    "zero_pairs": "a factor of an adapter's pairs, or its scale, is zero, so that they change "
    "nothing of the base: nothing was trained, or the file was written before its values were "
    "gathered (ZeRO stage 3, FSDP). Save it again from the run that trained it.",
    "assumed_alpha": "an adapter's configuration does not state lora_alpha, so that each loader "
    "takes a default of its own for the scale of the change. PEFT's is merged here. State the "
    "number of the training in adapter_config.json.",
    "stray_tensor": "an adapter's file holds a tensor that is no part of an adapter, such as the "
    "rope frequencies that a converter adds to a model. llama.cpp refuses such a file. It is left "
    "out of a merge and of an adapter that is written.",
    "partial_input_scales": "some packed weights have a scale of what goes into their layer, and "
    "others of the same kind have none. Engines then take 1.0, which clips or flattens what the "
    "layer gets, or 0, which makes NaN of it. Calibrate again with texts that reach those layers "
    "(experts that were never chosen have none), or leave those layers unquantized.",
    "promised_parts": "config.json promises a part of packed weights that the file does not have: "
    "the group of each input (g_idx), or a scale of inputs. The weights "
    "decode to other values than were packed, or layers run with a scale that nobody measured.",
    "partly_packed": "the groups of a layout do not fit some matrices, which stay as they are: the "
    "file is larger than its type says. A type with smaller groups packs more.",
    "index": "a file next to a sharded model holds tensors that its index does not name, so no "
    "loader reads them; `aprfmt repair --index FOLDER` makes the index anew.",
    "unread_configuration": "the architecture is known, but a key of the configuration has "
    "no value that it can have, or the tensors do not fit; the line says which. Tensors are "
    "listed and compared by their stored names; what needs the architecture is left out.",
    "relation": "what the file holds is what its readers look for after one change: other names of "
    "tensors, another index, other axes, another key. The values are read under that change; the "
    "command that ends the line writes it back, so that other readers find them too.",
    "meta_tensors": "a checkpoint of PyTorch names tensors whose values were never saved (device "
    "meta); reading one is an error.",
    "rowless_tokens": "tokens of tokenizer.json have ids after the rows of the embedding. The "
    "lists of a GGUF or APR end with the rows, so that the copy splits texts with these tokens "
    "otherwise. Resize the embedding, or take the tokens out of tokenizer.json.",
    "dropped": "a tensor was left out because --drop asks for it.",
    "imatrix_gaps": "the importance matrix says nothing about some tensors, which are quantized "
    "without it: it was made for another model, or on too little text.",
    "resume_left": "next to the output lies what a stopped run with --resume had written. Run it "
    "with --resume again to go on, or remove the folder.",
    "completed_write": "an earlier run was ended (killed, or by a power cut) while it put files in "
    "place or changed one. What it had left was signed by your own key and was completed first.",
    "foreign_journal": "a hidden file looks like what an ended run of aprfmt leaves, and is not "
    "signed by the key in your state folder: it came with the folder, or another user, another "
    "machine or a run without a home folder left it. It is never acted upon. Its writer can "
    "complete it; otherwise check the files that it names, and remove it.",
    "turn_end": "the chat template ends turns with a token that no eos id is: chats run on after "
    "their answers. Set it in generation_config.json, or tokenizer.ggml.eot_token_id in a GGUF.",
    "absent_key": "a GGUF does not state the id of a special token, and llama.cpp has one of its "
    "own for it, which is another token here: texts begin or end with a word of the text. The line "
    "says which; the command that ends it sets the right one.",
    "no_tokenizer": "the model carries no tokenizer, so only token ids can be shown.",
    "context_length": "there are more tokens than the model was made for; it runs all the same, "
    "and what it says beyond is not what it was trained for.",
    "double_bos": "the text begins with the token that the tokenizer puts there anyway, so the "
    "model sees it twice. Leave it out of the text.",
    "no_bos": "the model puts a token before every text, and these ids do not begin with it.",
    "unknown_ids": "ids that no token has are left out of the decoded text.",
    "template": "the chat template does something that a template need not do; it is rendered in "
    "a sandbox. `aprfmt template MODEL` shows it.",
    "unknown_key": "no reader of this format knows this metadata key, and the file did not have "
    "it before: it may be misspelled.",
    "unreadable_output": "after the change the file cannot be opened as a model any more.",
    "nested_names": "names have a prefix that the class in config.json does not have; some loaders "
    "take it off, others find no tensor. `aprfmt convert --rename` writes the names without it.",
    "doubtful_value": "after the change a check of `validate` finds what it did not find before: a "
    "value lies outside its range, or contradicts the tensors or another file.",
    "comparison": "a remark of the comparison: something of one file could not be compared, or was "
    "compared in another way than usual, as the line says.",
    # --- runs ------------------------------------------------------------------------------------
    "fallback": "--device auto found no GPU that can be used, and says why.",
    "skipped_sample": "a sample has no token whose loss could be measured, and is left out of it.",
    "budget": "the time or bytes of --budget ended before everything was recorded; what is left is "
    "named, and the exit code is 2.",
    "ignored_option": "an option has no meaning for this engine and was ignored.",
    "few_logits": "logits of all tokens take more room than is used for them, so that the last "
    "token's alone are recorded. `--positions 0,5,9` records those of chosen tokens.",
    "unknown_point": "an array or a node of another engine's run is no capture point that is known "
    "here, so it is not compared.",
}
