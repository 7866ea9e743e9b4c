"""The one table of commands: module, group, summary, and one example each.

`--help` prints the groups and imports no command; a command's own help ends with its example,
which a test runs. The examples are of one folder: `model/` and `model.gguf` are the demo model
(`aprfmt demo --into model`), `q4.gguf` is a quantized copy of it, `model.gguf.part` the
first half of `model.gguf`, `text.txt` some text.
"""

from collections.abc import Mapping
from typing import NamedTuple


class CommandRow(NamedTuple):
    """One command: its module in aprfmt.cli, what it does in a line, and an example."""

    module: str
    summary: str
    example: str


GROUPS: Mapping[str, Mapping[str, CommandRow]] = {
    "Look": {
        "inspect": CommandRow(
            "inspect", "Say what a file is; `aprfmt FILE` is the same.",
            "aprfmt inspect model.gguf",
        ),
        "tensors": CommandRow(
            "tensors", "List tensors: name, role, shape, encoding, bytes, offset.",
            "aprfmt tensors model.gguf blk.0 --stats",
        ),
        "tree": CommandRow(
            "tree", "Show the tensors as a tree of name components.",
            "aprfmt tree model.gguf --depth 2",
        ),
        "hex": CommandRow(
            "hex", "Show header fields or decoded blocks next to their bytes.",
            "aprfmt hex q4.gguf blk.0.ffn_up --blocks 1",
        ),
        "cat": CommandRow(
            "cat", "Print the values of one tensor.",
            "aprfmt cat model.gguf output_norm.weight",
        ),
        "explain": CommandRow(
            "explain", "Explain a warning, an error, a role, an exit code, an encoding.",
            "aprfmt explain Q4_K",
        ),
        "demo": CommandRow(
            "demo", "Run the main job on the model that ships with the package.",
            "aprfmt demo",
        ),
    },
    "Convert": {
        "convert": CommandRow(
            "convert", "Convert any format to any, keeping every bit it can.",
            "aprfmt convert model out.gguf",
        ),
        "import": CommandRow(
            "import_", "Shorthand: convert SRC to ./STEM.apr.",
            "aprfmt import model",
        ),
        "export": CommandRow(
            "export", "Shorthand: convert MODEL to ./STEM.gguf or the folder ./STEM-hf/.",
            "aprfmt export model.gguf --to safetensors",
        ),
        "quantize": CommandRow(
            "quantize", "Quantize as llama.cpp does, or round into other layouts.",
            "aprfmt quantize model small.gguf --type Q4_K_M",
        ),
        "set": CommandRow(
            "set_", "Change metadata without touching tensors.",
            "aprfmt set model.gguf general.name=Mine -o renamed.gguf",
        ),
        "split": CommandRow(
            "split", "Write a model as several shards.",
            "aprfmt split model.gguf parts/model.gguf --max-shard-size 3M",
        ),
        "merge": CommandRow(
            "merge", "Write a sharded model as one file.",
            "aprfmt merge model.gguf one.gguf",
        ),
        "repair": CommandRow(
            "repair", "Complete a cut or damaged file from a good copy.",
            "aprfmt repair model.gguf.part --from model.gguf -o whole.gguf",
        ),
    },
    "Compare": {
        "diff": CommandRow(
            "diff", "Say which tensors of two files differ, by how much, and why.",
            "aprfmt diff model q4.gguf --accept within",
        ),
        "diagnose": CommandRow(
            "diagnose", "Find where two models, traces or runs first differ, and why.",
            "aprfmt diagnose model model.gguf",
        ),
        "parity": CommandRow(
            "parity", "Compare runs of one model point by point, and say which is wrong.",
            "aprfmt parity model.gguf --between numpy numpy:float64 --prompt 'Once upon a time'",
        ),
        "attest": CommandRow(
            "attest", "Quantize a base again, and say whether it gives a model's bytes.",
            "aprfmt attest q4.gguf --from model",
        ),
        "step": CommandRow(
            "step", "Say what a training step did, and whether it is right.",
            "aprfmt step before --after after --optimizer adamw:lr=2e-4,wd=0.1,step=1",
        ),
        "hash": CommandRow(
            "hash_", "SHA-256 of every tensor, stored and decoded.",
            "aprfmt hash model.gguf --write",
        ),
    },
    "Run": {
        "run": CommandRow(
            "run", "Generate text from a prompt.",
            "aprfmt run model --prompt 'Once upon a time' --max-tokens 8",
        ),
        "trace": CommandRow(
            "trace", "Show activations at named capture points.",
            "aprfmt trace model --payload --prompt 'Once upon a time' --layers 0",
        ),
        "logits": CommandRow(
            "logits", "Compute the logits of every token, and judge the last row.",
            "aprfmt logits model --ids 5,80,300 --out logits.npy",
        ),
        "eval": CommandRow(
            "eval", "Measure the loss on a text in nats, and the distance from a model.",
            "aprfmt eval q4.gguf --text text.txt --against model",
        ),
        "tokenize": CommandRow(
            "tokenize", "Turn text into token ids.",
            "aprfmt tokenize model 'Once upon a time'",
        ),
        "template": CommandRow(
            "template", "Render the model's chat template.",
            "aprfmt template model --user 'Who are you?'",
        ),
    },
    "Check": {
        "validate": CommandRow(
            "validate", "Check every byte: PASS, FAIL or NOT-RUN for each check.",
            "aprfmt validate model.gguf",
        ),
        "scan": CommandRow(
            "scan", "Check many models: damage, copies, families, templates.",
            "aprfmt scan . --checks layout --checks encodings",
        ),
        "qa": CommandRow(
            "qa", "Put a model through the gates: can this file be trusted?",
            "aprfmt qa model --only tensor-contract --only metadata",
        ),
        "doctor": CommandRow(
            "doctor", "Say what works on this machine and why the rest does not.",
            "aprfmt doctor",
        ),
    },
}  # fmt: skip
COMMANDS: Mapping[str, CommandRow] = {
    name: row for group in GROUPS.values() for name, row in group.items()
}
