"""`aprfmt explain`: one paragraph on an error kind, role, encoding, exit code or verdict."""

import json
from typing import TYPE_CHECKING

import click

from aprfmt import errors
from aprfmt.cli import options, render, shell_completion
from aprfmt.errors import UsageError

if TYPE_CHECKING:
    from aprfmt.cli.glossary import GlossaryEntry

VERDICT_TEXTS: dict[str, str] = {
    "SAME_BYTES": "equal bytes, equal encoding and equal logical shape; nothing was decoded.",
    "SAME_VALUES": "every value equal, stored in another encoding or layout, which is named "
    "(rows permuted for GGUF's rope pairing, norms widened to F32 or stored with one added, ...).",
    "WITHIN": "the values differ by no more than rounding to the coarser encoding explains: one "
    "step of its block (superblock for K-quants); with an importance matrix, the mean square "
    "error usual for the encoding. Exit code 1 unless --accept within.",
    "DIFFERENT": "the values differ by more than any rounding explains, or equal bytes carry "
    "another 16-bit label (cause dtype_mislabel).",
    "SHAPE_DIFFERS": "the logical shapes differ after both files' layout steps are undone.",
    "ONLY_IN_A": "only the first file has it.",
    "ONLY_IN_B": "only the second file has it.",
    "UNREADABLE": "a tensor could not be read or decoded; the comparison exits with 2.",
}
OUTCOME_TEXTS: dict[str, str] = {
    "PASS": "the check ran and found what it expects.",
    "FAIL": "the check ran and found something else. Exit code 1.",
    "NOT-RUN": "the check did not run, and says why: it never counts as a pass. Where every check "
    "is NOT-RUN, the exit code is 2. NOT_RUN in JSON.",
}
DIAGNOSIS_TEXTS: dict[str, str] = {
    "derived": "B was made from A: trained further, or an adapter was merged into it. Exit code 1. "
    "Of `attest` it is the answer yes: every tensor is what the base gives. Exit code 0.",
    "not_exercised": "differs, not exercised: a difference that no probe reached; the report says "
    "how to reach it. Exit code 1.",
}
ATTEST_TEXTS: dict[str, str] = {
    "not derived": "a tensor was not reproduced, or hyperparameters or tokenizer are not the "
    "base's. Exit code 1.",
    "reproduced": "quantizing the base's weight again gives every stored byte of the tensor.",
    "not reproduced": "quantizing the base's weight again gives other bytes. Exit code 1.",
    "not tried": "the tensor could not be made again, and the reason is named: it is no pass. "
    "Exit code 2 unless another tensor is not reproduced.",
    "not reached": "--budget ended before the tensor: it is no pass. Exit code 2 unless another "
    "tensor is not reproduced.",
}
ROLE_TEXTS: dict[str, str] = {
    "token_embd": "the token embedding: one row a token, read at the input; with tied embeddings "
    "it is also the head.",
    "position_embd": "learned position embedding, added to the token embedding (gpt2).",
    "output": "the head: projects the final norm onto the vocabulary. Absent when tied.",
    "output_norm": "the norm after the last layer.",
    "attn_norm": "the norm before attention (llama: input_layernorm).",
    "attn_q": "query projection, [n_heads*head_dim, hidden]. GGUF of llama-like models stores its "
    "rows permuted inside each head.",
    "attn_k": "key projection, [n_kv_heads*head_dim, hidden]; permuted in GGUF like attn_q, with "
    "the KV head count.",
    "attn_v": "value projection, [n_kv_heads*head_dim, hidden]; never permuted.",
    "attn_output": "attention output projection (o_proj), [hidden, n_heads*head_dim].",
    "attn_q_norm": "norm on the query before rope: one weight a head element, or the whole width.",
    "attn_k_norm": "norm on the key before rope.",
    "post_attention_norm": "norm on attention's output before it is added (gemma2/3, olmo2); "
    "gpt-oss keeps its pre-MLP norm under this GGUF name.",
    "ffn_norm": "the norm before the MLP (llama: post_attention_layernorm).",
    "ffn_gate": "MLP gate projection, before the activation, [ffn, hidden].",
    "ffn_up": "MLP up projection, [ffn, hidden].",
    "ffn_down": "MLP down projection, [hidden, ffn].",
    "post_ffw_norm": "norm on the MLP's output before it is added (gemma2/3, olmo2).",
    "attn_sinks": "one learned logit a head that joins the softmax and is dropped (gpt-oss).",
    "ffn_gate_inp": "expert router, [n_experts, hidden].",
    "ffn_gate_exps": "gate projections of all experts, [n_experts, ffn, hidden].",
    "ffn_up_exps": "up projections of all experts, [n_experts, ffn, hidden].",
    "ffn_down_exps": "down projections of all experts, [n_experts, hidden, ffn].",
}


def _error_texts() -> dict[str, str]:
    """Return {kind: paragraph} of the error classes, made of their docstrings."""
    found = {}
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, errors.AprfmtError):
            kind = value.__name__.removesuffix("Error").lower()
            parents = [p.__name__ for p in value.__mro__[1:3]]
            found[kind] = f"{value.__name__} ({', '.join(parents)}): {value.__doc__}"
    return found


def _packed_encoding_text(name: str) -> str:
    """Return the paragraph of an encoding whose weights are several tensors of a file."""
    from aprfmt.quantizing.mixture import SCHEMES

    types = [kind for kind, row in SCHEMES.items() if row.dialect and row.base == name]
    written = f"written by `quantize --type` {', '.join(types)}" if types else "never written"
    return (
        "several tensors of a safetensors file are one weight, as config.json says "
        f"(quantization_config): read, decoded and compared, {written}."
    )


def _type_texts() -> dict[str, str]:
    """Return {name: paragraph} of the types of `quantize --type`, GGUF's file types included."""
    from aprfmt.quantizing.mixture import SCHEMES, offered_schemes

    found = {
        name: "a type of `quantize`: every weight whose rows fit is it."
        for name in offered_schemes()
    }
    for name, scheme in SCHEMES.items():
        number = "" if scheme.file_type is None else f" general.file_type {scheme.file_type}."
        found[name] = (
            f"a type of `quantize`: most weights are {scheme.base}, and each other tensor has the "
            f"encoding its role asks for.{number}"
        )
    return found


def _encoding_texts() -> dict[str, str]:
    """Return {name: paragraph} of all encodings: block size, bits, container codes, layout."""
    from aprfmt.base.encodings import all_encodings

    found = {}
    for name, row in all_encodings().items():
        if not row.known:
            size = f" {row.measure}." if row.measure else ""
            found[name] = (
                f"ggml id {row.ggml}.{size} {row.removed}."
                if row.removed
                else _packed_encoding_text(name)
            )
            continue
        codes = [
            f"{label} {code}"
            for label, code in (
                ("ggml id", row.ggml),
                ("safetensors", row.safetensors or None),
                ("APR", row.apr),
            )
            if code is not None
        ]
        found[name] = (
            f"{row.block_size} elements in {row.type_size} bytes, {row.bits_per_weight:g} bits a "
            f"weight; {', '.join(codes) or 'no code of its own in any container'}."
            + (" Blocks run over the flattened tensor." if row.flat else "")
            + (f" In front of each row stands {row.row_layout}." * bool(row.row_layout))
            + (f" A block is {row.layout} (numbers and their bytes, in order)." * bool(row.layout))
        )
    return found


def all_topics() -> dict[str, dict[str, str]]:
    """Return {section: {name: text}} of everything that can be explained.

    The texts come from the tables that the code itself uses.
    """
    from aprfmt.arch.spec import HYPER_NAMES, SPECIAL_NAMES
    from aprfmt.base.exit_codes import EXIT_CODES
    from aprfmt.base.warnings import WARNINGS
    from aprfmt.causes import CAUSES, describe
    from aprfmt.checks.table import file_checks, gates
    from aprfmt.cli.glossary import GLOSSARY
    from aprfmt.inference.capture import POINTS
    from aprfmt.inference.reported_loss import MISTAKES
    from aprfmt.measure.verdicts import CERTAINTIES, LEVELS, VERDICTS

    return {
        "error": _error_texts(),
        "warning": dict(WARNINGS),
        "verdict": VERDICT_TEXTS,
        "outcome": OUTCOME_TEXTS,
        "verdict of diagnose": dict[str, str](VERDICTS.items()) | DIAGNOSIS_TEXTS,
        "certainty": dict[str, str](CERTAINTIES.items()),
        "level of evidence": dict[str, str](LEVELS.items()),
        "verdict of attest": ATTEST_TEXTS,
        "check": {
            row.name: f"a check of `validate`: {row.proves}."
            for row in file_checks(source=True, second_reader=True)
        },
        "gate": {row.name: f"a gate of `qa`: {row.proves}." for row in gates()},
        "cause": {name: describe(name) for name in CAUSES},
        "loss mistake": {row.name: f"{row.says}. To do: {row.todo}." for row in MISTAKES.values()},
        "role": ROLE_TEXTS,
        "encoding": _encoding_texts(),
        "type": _type_texts(),
        "hyperparameter": HYPER_NAMES | SPECIAL_NAMES,
        "capture point": {name: point.sentence for name, point in POINTS.items()},
        "exit code": {str(code): text for code, text in EXIT_CODES.items()},
        "word": {
            name: _entry_text(entry) for rows in GLOSSARY.values() for name, entry in rows.items()
        },
    }


def _entry_text(entry: "GlossaryEntry") -> str:
    """Return the paragraph of a word of the glossary, with its names in other tools."""
    others = (
        ("llama.cpp", entry.llama_cpp), ("transformers", entry.transformers), ("apr", entry.apr)
    )  # fmt: skip
    named = "; ".join(f"{tool}: {name}" for tool, name in others if name != "-")
    return f"{entry.meaning}." + (f" In {named}." if named else "")


def _complete_topics(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the topic names that begin with what was typed, for the shell's completion."""
    return shell_completion.matching_names(
        (key for rows in all_topics().values() for key in rows), incomplete
    )


@click.command("explain")
@click.argument("name", required=False, shell_complete=_complete_topics)
@click.option("--schema", metavar="COMMAND", help="Print the JSON schema of a command's --json.")
@options.common
def command(name: str | None, schema: str | None) -> int:
    """Explain NAME: a warning, error kind, verdict, role, encoding, capture point, exit code.

    A section's name (exit-codes) explains all of it. Without NAME, list every topic.
    """
    if schema is not None:
        return print_schema(name, schema)
    if name is None:
        listed = {section: list(rows) for section, rows in all_topics().items()}

        def show_all() -> None:
            """Print each section of topics with the names of its topics."""
            for section, keys in listed.items():
                render.line(section, style="head")
                render.line("  " + ", ".join(keys))

        return render.emit({"topics": listed}, 0, show_all)
    found = find_topics(name)

    def show() -> None:
        """Print the paragraphs on the topics that the given name means."""
        for section, key, text in found:
            render.line(f"{key} ({section})", style="head")
            render.line(f"  {text}")

    rows = [{"section": s, "name": k, "text": t} for s, k, t in found]
    return render.emit({"found": rows}, 0, show)


def find_topics(name: str) -> list[tuple[str, str, str]]:
    """Return (section, name, text) of each topic that a name means, which may be a section.

    Raises UsageError with near names where there is none.
    """
    from aprfmt.diagnosis.records import KINDS
    from aprfmt.model.patterns import similar_names

    every = all_topics()
    name = {label: kind for kind, label in KINDS.items()}.get(name, name)
    if name not in every:
        name = _usual_spelling(name)
    if name.endswith("Error"):
        name = name.removesuffix("Error").lower()
    wanted = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    whole = name.lower().replace("-", " ").removesuffix("s")
    found = [
        (section, key, text)
        for section, rows in every.items()
        for key, text in rows.items()
        if _normalize_name(key) in (_normalize_name(name), _normalize_name(wanted))
        or section == whole
    ]
    if not found:
        keys = [*every, *(key for rows in every.values() for key in rows)]
        raise UsageError(
            f"nothing to explain about {name!r}; near: {', '.join(similar_names(name, keys))}"
        )
    return found


def _normalize_name(name: str) -> str:
    """Return a name in lower case with blanks for `_` and `-`, since answers print either."""
    return name.lower().replace("_", " ").replace("-", " ")


def _usual_spelling(name: str) -> str:
    """Return the encoding or type that a spelling in use means (`fp16`, `q4km`), else `name`."""
    from aprfmt.base.encoding_names import find_name
    from aprfmt.base.encodings import ENCODINGS
    from aprfmt.quantizing.mixture import type_name

    return find_name(name, ENCODINGS) or type_name(name)


def print_schema(name: str | None, command: str) -> int:
    """Print the JSON schema of a command's `--json`, and return exit code 0.

    With --json the schema is the value of the key `json_schema`. Raises UsageError where a topic
    `name` is given too.
    """
    from aprfmt.schemas import schema

    if name is not None:
        raise UsageError(f"--schema {command} explains one thing, {name!r} another; give one")
    found = schema(command)
    return render.emit({"json_schema": found}, 0, lambda: click.echo(json.dumps(found, indent=1)))
