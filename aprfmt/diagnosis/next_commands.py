"""The next command for each finding, and what a trace should record where it lacks points.

A and B are the two models, runs or traces that are compared; a *side* is one of them.

A cause's row names the step; without a name it goes by the *level*, the stage of a comparison that
shows the cause first: configuration, tensors, forward pass and so on.
"""

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from aprfmt.causes import CAUSES
from aprfmt.causes.remedies import (
    has_weights,
    is_lost,
    is_repaired_by_rewriting,
    is_trained_part,
    trained_command,
)
from aprfmt.causes.restored_keys import refusal_reason
from aprfmt.diagnosis.sides import Side
from aprfmt.diagnosis.tokenizer_findings import has_more_tokens, tokenizer_set_arguments
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import (
    MENDS,
    join_set_commands,
    matrix_encodings,
    overflows_encoding,
    rewrite_command,
    set_command,
)
from aprfmt.model import missing_shards
from aprfmt.model.own_keys import contradicted_values
from aprfmt.model.packing import input_scale_endings
from aprfmt.model.towers import tower_options

if TYPE_CHECKING:
    from aprfmt.inference.replay.shadow import ShadowPoint

MOST_POINTS = 12  # points that are asked for
MOST_IDS = 64  # ids of a command that the reference has as well


@dataclass(frozen=True)
class StepParts:
    """The inputs from which the next command of a finding is made.

    `length` is the number of tokens that reaches the difference, or 0. `trained` says that B is
    derived from A: its weights are not to be replaced by A's. `differing` are the hyperparameters
    in which B differs from A. `recorded` are the labels of the sides whose trace holds the ids.
    """

    a: Side
    b: Side
    ids: Sequence[int]
    length: int = 0
    trained: bool = False
    differing: Sequence[str] = ()
    recorded: Collection[str] = ()

    @property
    def pair(self) -> str:
        """A and B as arguments of a command, quoted for a shell."""
        return f"{shlex.quote(self.a.text)} {shlex.quote(self.b.text)}"


StepText = Callable[[StepParts, Finding], str]


def rewrite_b_command(parts: StepParts, finding: Finding) -> str:
    """Return the command that repairs B: it writes B again from A. "" if A is a trace.

    If B is a trace, it is the command that records the finding's layer instead. If B was trained
    further, or A is damaged or the wrong side, it is the one that compares the tensors.
    """
    if parts.a.kind == "trace":
        return ""
    if parts.b.kind == "trace":
        return trace_layer_command(parts, finding)
    a, b = parts.a.model, parts.b.model
    wrong_in_a = finding.side == "A" and finding.level == "tensor"
    wrong_in_a |= a is not None and bool(a.damage or missing_shards(a))
    # Where either side may be wrong, A is no source; of a training only B has its values.
    if (
        wrong_in_a
        or finding.leaves_side_open
        or parts.trained
        or is_trained_part(finding.cause, a, b)
    ):
        return diff_tensors_command(parts, finding)
    if a is None or b is None:
        return rewrite_command(parts.a.path, parts.b.path, {}, {})
    mine = matrix_encodings(a)
    theirs = {} if has_weights(finding.cause, "mislabelled") else matrix_encodings(b)
    if overflows_encoding(finding.values, theirs):
        theirs = {}
    stated = b.metadata.get("general.file_type")
    return rewrite_command(
        parts.a.path,
        parts.b.path,
        mine,
        theirs,
        stated,
        input_scale_endings(a),
        tower_options(a, b),
    ) or diff_tensors_command(parts, finding)


def set_keys_command(parts: StepParts, finding: Finding) -> str:
    """Return the `set` command that gives B A's values, else the one that writes B again from A.

    One command sets the keys of all findings where that works, else the keys of this finding. If
    B is a trace it is the `trace` command that records the layer.
    """
    a, b = parts.a.model, parts.b.model
    if a is None or b is None or parts.b.kind == "trace":
        return trace_layer_command(parts, finding)
    if refusal_reason(a) or refusal_reason(b):
        return rewrite_b_command(parts, finding)
    from aprfmt.diagnosis.configuration_keys import repair_arguments

    own = [name for name in finding.values if name in b.hyper]
    for names in (dict.fromkeys((*own, *parts.differing)), own):
        words = repair_arguments(a, b, list(names)) if own else []
        if words:
            return set_command(parts.b.path, words)
    return rewrite_b_command(parts, finding)


def diff_tensors_command(parts: StepParts, finding: Finding) -> str:
    """Return the `diff` command for up to four tensors of the finding.

    If a side is a trace it is the `trace` command that records the layer.
    """
    if "trace" in (parts.a.kind, parts.b.kind):
        return trace_layer_command(parts, finding)
    names = [name for name in finding.where if "." in name][:4]
    picked = "".join(f" --tensor {shlex.quote(name)}" for name in names)
    return f"aprfmt diff {shlex.quote(str(parts.a.path))} {shlex.quote(str(parts.b.path))}{picked}"


def repair_command(parts: StepParts, finding: Finding) -> str:
    """Return the command that repairs B: it sets a key, or writes B again.

    B is only written again where the cause is proven or bytes are damaged; else the command
    compares the tensors.
    """
    a, b = parts.a.model, parts.b.model
    if a is not None and b is not None and parts.b.kind != "trace":
        from aprfmt.diagnosis.packing_keys import repair_packing_command

        mended = repair_packing_command(a, b, finding)
        if mended:
            return mended
    anew = is_repaired_by_rewriting(finding.cause, finding.confirmed, finding.values)
    return (rewrite_b_command if anew else diff_tensors_command)(parts, finding)


def trace_layer_command(parts: StepParts, finding: Finding) -> str:
    """Return the `trace` command that records every point of the layer where the two diverge.

    Without a model it is `diagnose` again with --model, without token ids with --ids. "" where an
    adapter is served: `trace` takes none.
    """
    traces = [one for one in (parts.b, parts.a) if one.kind == "trace"]
    departs = next((one for one in traces if one.label == finding.side), None)
    side = departs or (traces[0] if traces else parts.b)
    if parts.a.adapter is not None or parts.b.adapter is not None:
        return ""  # a trace of the base alone would lack the adapter
    model = side.model or parts.a.model or parts.b.model
    if model is None:
        return f"aprfmt diagnose {parts.pair} --model MODEL{'' if parts.ids else ' --ids IDS'}"
    if not parts.ids and "trace" in (parts.a.kind, parts.b.kind):
        given = f" --model {shlex.quote(str(model.path))}" if parts.a.kind == parts.b.kind else ""
        return f"aprfmt diagnose {parts.pair}{given} --ids IDS"
    layer = finding.first[1:].partition(".")[0] if finding.first.startswith("L") else ""
    only = f" --layers {layer}" if layer.isdigit() else ""
    held = side.label in parts.recorded  # `trace` takes those of its reference
    few = 0 < len(parts.ids) <= MOST_IDS
    shown = f" --ids {','.join(map(str, parts.ids))}" if parts.ids and (few or not held) else ""
    return (
        f"aprfmt trace {shlex.quote(str(model.path))} --payload --points all{only}{shown} "
        f"--reference {shlex.quote(side.text)}"
    )


def repair_tokenizer_command(parts: StepParts, finding: Finding) -> str:
    """Return the command that gives B the tokenizer of A, or the diff that shows how they differ.

    It sets keys in B where that is enough, else rewrites B. Where the cause is only located, or
    where a rewrite would discard tokens of B or weights that were trained with them, it is the
    diff.
    """
    a, b = parts.a.model, parts.b.model
    seen = f"aprfmt diff {parts.pair} --only tokenizer"
    if a is None or b is None or finding.certainty == "located":
        return seen
    words = tokenizer_set_arguments(a, b, finding.where)
    if words:
        return set_command(parts.b.path, words)
    if words is None:
        return seen
    made = "" if has_more_tokens(a, b) else rewrite_b_command(parts, finding)
    return made if made.startswith(MENDS) else seen


def distances_command(parts: StepParts, finding: Finding) -> str:
    """Return the `diff` command that lists the 20 tensors with the largest distances.

    `finding` is not used: the parameters are those of all functions that return a command.
    """
    return f"aprfmt diff {parts.pair} --top 20"


def reach_difference_command(parts: StepParts, finding: Finding) -> str:
    """Return the command that runs enough tokens to reach a difference that no probe reached.

    For a draft head it is `eval --draft`.
    """
    from aprfmt.model.draft import is_draft_head

    if parts.b.model is not None and is_draft_head(parts.b.model, finding.where):
        return f"aprfmt eval {shlex.quote(parts.b.text)} --draft --text TEXT"
    if parts.length:
        vocab = min(
            int(side.model.hyper["vocab_size"])
            for side in (parts.a, parts.b)
            if side.model is not None
        )
        code = f"import numpy as n; n.save('ids.npy', n.arange({parts.length}) % {vocab})"
        return f'python -c "{code}" && aprfmt diagnose {parts.pair} --ids ids.npy'
    return f'aprfmt diagnose {parts.pair} --prompt "$(cat TEXT)"'


def no_command(parts: StepParts, finding: Finding) -> str:
    """Return "", the command for findings that leave nothing to be done.

    The parameters are those of all functions that return a command.
    """
    return ""


# By the name that a cause's row has as `next`; what has none goes by its level.
STEPS: Mapping[str, StepText] = {
    "nothing": no_command,
    "stored": repair_command,
    "again": rewrite_b_command,
    "distances": distances_command,
    "look": diff_tensors_command,
}
LEVELS: Mapping[str, StepText] = {
    "identity": repair_tokenizer_command,
    "config": set_keys_command,
    "tensor": repair_command,
    "forward": trace_layer_command,
    "capture": no_command,
    "gradient": no_command,
    "update": no_command,
}


def next_command(parts: StepParts, finding: Finding) -> str:
    """Return the command for a finding, "" where nothing is to be done.

    For a difference that no probe reached it is the command that repairs it, else the one that
    runs a pass which reaches it.
    """
    if finding.next or finding.verdict in ("same", "precision"):
        return finding.next
    if finding.exercised == "not_exercised":
        made = _usual_step(parts, finding)
        return made if made.startswith(MENDS) else reach_difference_command(parts, finding)
    return _usual_step(parts, finding)


def _usual_step(parts: StepParts, finding: Finding) -> str:
    """Return the command for a finding by its cause, else by its level.

    Where B's own tensors contradict its keys, it is the `set` command with what they say.
    """
    shown = {} if parts.b.model is None else contradicted_values(parts.b.model)
    own = [shown.get(name, "") for name in finding.values]
    # Then B is read as it was made. What B lost is A's.
    if own and "" not in own and not is_lost(finding.cause, finding.values):
        return set_command(parts.b.path, own)
    named = CAUSES[finding.cause].next if finding.cause else ""
    made = STEPS[named] if named else LEVELS[finding.level]
    if made is rewrite_b_command and finding.level == "forward":
        made = trace_layer_command
    return made(parts, finding)


def with_next_commands(
    a: Side,
    b: Side,
    ids: Sequence[int],
    findings: Sequence[Finding],
    lengths: Mapping[int, int],
    recorded: Collection[str] = (),
) -> list[Finding]:
    """Return the findings with their next commands filled in.

    `lengths` are {finding number: tokens that reach its difference}, `recorded` the labels of the
    sides whose trace holds the ids. A command that writes B again replaces single `set` commands,
    and several `set` commands become one.
    """
    trained = any(has_weights(finding.cause, "trained") for finding in findings)
    apart = tuple(
        name for one in findings if one.level == "config" and _is_fault(one) for name in one.values
    )
    asked = [
        StepParts(a, b, ids, lengths.get(i, 0), trained, apart, recorded)
        for i in range(len(findings))
    ]
    made = [
        replace(one, next=_kept_command(parts, one) or one.next or next_command(parts, one))
        for one, parts in zip(findings, asked, strict=True)
    ]
    # Renames mend names alone: with another fault B is written again.
    apart_from_names = [
        one for one in made if _is_fault(one) and not has_weights(one.cause, "exchanged")
    ]
    if any(one.next for one in apart_from_names):
        made = [
            replace(one, next=next_command(parts, replace(one, next="")))
            if has_weights(one.cause, "exchanged") and one.next
            else one
            for one, parts in zip(made, asked, strict=True)
        ]
    anew = {one.next for one in made if _is_fault(one) and _makes_model_of(a, one.next)}
    keys = [one.next for one in made if _is_fault(one) and one.next.startswith("aprfmt set ")]
    command = anew.pop() if len(anew) == 1 else join_set_commands(keys)
    return [
        replace(one, next=command) if command and _is_fault(one) and one.next in keys else one
        for one in made
    ]


def _kept_command(parts: StepParts, finding: Finding) -> str:
    """Return the command for what a training of B may have changed on purpose, by its cause; or "".

    "" where B was not trained further than A.
    """
    return trained_command(parts.b.model, finding, parts.pair) if parts.trained else ""


def _is_fault(finding: Finding) -> bool:
    """Return whether a finding is a bug or not comparable, so neither "same" nor "precision"."""
    return finding.verdict not in ("same", "precision")


def _makes_model_of(a: Side, command: str) -> bool:
    """Return whether a command converts or quantizes model A."""
    words = shlex.split(command) if command.startswith(MENDS) else []
    return words[1:2] in (["convert"], ["quantize"]) and words[2:3] == [str(a.path)]


# --- what to record ------------------------------------------------------------------------------


def missing_points(view: "ShadowPoint", views: "Mapping[str, ShadowPoint]") -> list[str]:
    """Return the keys that the trace lacks between the last agreeing points and a divergence.

    If they span several layers these are only the layers' outputs, which narrow it down to one
    layer.
    """
    keys = list(views)
    start = max((keys.index(key) for key in view.after if key in views), default=-1)
    between = keys[start + 1 : keys.index(view.key)] if view.key in views else []
    lacking = [key for key in between if views[key].recorded is None and not views[key].base]
    layers = {views[key].layer for key in lacking if views[key].layer >= 0}
    if len(layers) > 1:
        return [key for key in lacking if key.endswith(".out")]
    return lacking


def recording_sentence(
    view: "ShadowPoint", views: "Mapping[str, ShadowPoint]", ids: Sequence[int], model: str
) -> str:
    """Return a sentence on which missing points to record, with commands; "" if none is missing.

    `ids` and `model` go into the commands.
    """
    from aprfmt.inference.points import POINTS

    lacking = missing_points(view, views)
    if not lacking:
        return ""
    points = list(dict.fromkeys(key.rpartition(".")[2] for key in lacking))[:MOST_POINTS]
    layers = sorted({views[key].layer for key in lacking if views[key].layer >= 0})
    chosen = f" --layers {','.join(map(str, layers))}" if layers else ""
    modules = [name.text for point in points for name in POINTS[point].hf[:1]]
    there = f"; transformers calls them {', '.join(modules)}" if modules else ""
    given = ",".join(map(str, ids))
    return (
        f"next: dump {', '.join(points)} of the engine{_layers_text(layers)}{there}; what "
        f"the model has "
        f"there: aprfmt trace {model} --payload --points {','.join(points)}{chosen} --ids {given} "
        f"--save right.safetensors; the engine's arrays become a trace with "
        f"{mapping_command(model)}"
    )


def _layers_text(layers: Sequence[int]) -> str:
    """Return " in layer 3" or " in layers 3-5"; "" for no layers."""
    if not layers:
        return ""
    return f" in layer {layers[0]}" if len(layers) == 1 else f" in layers {layers[0]}-{layers[-1]}"


def mapping_command(
    model: str, ids: str = "", out: str = "engine.safetensors", dump: str = "DUMPS"
) -> str:
    """Return the `trace --map` command that makes a trace from an engine's arrays.

    `ids` are token ids as the option takes them, "" for none; `out` is the file to write; `dump`
    has the arrays, DUMPS where they are still to be dumped. Paths are quoted by the caller.
    """
    given = f" --ids {ids}" if ids else ""
    return f"aprfmt trace {model} --map {dump}{given} -o {out}"
