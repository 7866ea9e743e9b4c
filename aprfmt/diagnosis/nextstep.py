"""Next steps, as commands: of each finding by one table, and what to record of missing points.

A cause's row names the step; without a name it goes by the level of evidence.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aprfmt.arch.value_checks import same_value
from aprfmt.causes import CAUSES
from aprfmt.diagnosis.packing_keys import mending_key
from aprfmt.diagnosis.sides import Side
from aprfmt.diagnosis.unread import refused
from aprfmt.inference.points import POINTS
from aprfmt.inference.replay.shadow import ShadowPoint
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import (
    MISLABELLED,
    TRAINED,
    convert_again,
    fixed_name,
    matrix_encodings,
    own_part,
    own_values,
    set_values,
    written_anew,
)
from aprfmt.model import Model
from aprfmt.model.draft import in_head

FOLDER = "safetensors"  # the format whose keys stand in a config.json
MOST_POINTS = 12  # points that are asked for
MOST_IDS = 64  # ids of a command; longer ones are in a file


@dataclass(frozen=True)
class StepParts:
    """What a step is made of. `length` is the number of tokens that reaches a difference, or 0.

    `trained` says that B is derived from A: its weights are not to be replaced by A's.
    """

    a: Side
    b: Side
    ids: Sequence[int]
    length: int = 0
    trained: bool = False

    @property
    def pair(self) -> str:
        """Both sides as words of a command."""
        return f"{shlex.quote(self.a.text)} {shlex.quote(self.b.text)}"

    @property
    def fixed(self) -> str:
        """The name of a repaired copy."""
        return fixed_name(Path(self.b.path))


StepText = Callable[[StepParts, Finding], str]


def again(asked: StepParts, finding: Finding) -> str:
    """Write B anew from A."""
    if asked.a.kind == "trace":
        return ""
    a, b = asked.a.model, asked.b.model
    if asked.trained or own_part(finding.cause, b):  # what B was taught stands in no other file
        return look(asked, finding)
    if a is None or b is None:
        return convert_again(asked.a.path, asked.b.path, {}, {})
    mine = matrix_encodings(a)
    theirs = {} if finding.cause in MISLABELLED else matrix_encodings(b)
    stated = b.metadata.get("general.file_type")
    return convert_again(asked.a.path, asked.b.path, mine, theirs, stated) or look(asked, finding)


def settings(asked: StepParts, finding: Finding) -> str:
    """Set A's values in a copy of B, where single keys hold them; else write B anew."""
    a, b = asked.a.model, asked.b.model
    if a is None or b is None or asked.b.kind == "trace":
        return closer(asked, finding)
    if refused(a) or refused(b):
        return again(asked, finding)
    words = [_assigned(a, b, name) for name in finding.values if name in b.hyper]
    if not words or "" in words:
        return again(asked, finding)
    return set_values(asked.b.path, words)


def _assigned(a: Model, b: Model, name: str) -> str:
    """Return KEY=VALUE, or the option that removes a key; "" if no one key holds just this value.

    A key that a folder's config.json lacks has the name that A's has.
    """
    row, value = b.hyper.of(name), a.hyper[name] if name in a.hyper else None
    key = row.key
    if b.format == FOLDER:
        return _configured(a, b, name)
    stored = b.metadata.get(key) if key else None
    if stored is None or not same_value(stored, row.value):
        return ""
    if value is None:
        return f"--remove {shlex.quote(key)}"
    return shlex.quote(f"{key}={json.dumps(value, default=list)}")


def _configured(a: Model, b: Model, name: str) -> str:
    """Return KEY=VALUE of a folder's config.json, for a number or a flag; else ""."""
    row, value = b.hyper.of(name), a.hyper[name] if name in a.hyper else None
    if not isinstance(value, int | float):
        return ""
    stored = _at(b.config, row.key)
    if stored is not None and same_value(stored, row.value):
        return shlex.quote(f"{row.key}={json.dumps(value)}")
    key = a.hyper.of(name).key
    if a.format != FOLDER or not same_value(_at(a.config, key), value):
        return ""
    return shlex.quote(f"config.json:{key}={json.dumps(value)}")


def _at(config: object, path: str) -> object:
    """Return the value at a path of keys, None where there is none."""
    for part in path.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config


def look(asked: StepParts, finding: Finding) -> str:
    """Look at the tensors."""
    if "trace" in (asked.a.kind, asked.b.kind):
        return closer(asked, finding)
    names = [name for name in finding.where if "." in name][:4]
    picked = "".join(f" --tensor {shlex.quote(name)}" for name in names)
    return f"aprfmt diff {shlex.quote(str(asked.a.path))} {shlex.quote(str(asked.b.path))}{picked}"


def stored(asked: StepParts, finding: Finding) -> str:
    """Set the key that mends B; else write B anew where the cause is proven, or bytes are damaged.

    Without either, look at the tensors.
    """
    a, b = asked.a.model, asked.b.model
    if a is not None and b is not None and asked.b.kind != "trace":
        mended = mending_key(a, b, finding, asked.fixed)
        if mended:
            return mended
    anew = written_anew(finding.cause, finding.confirmed)
    return (again if anew else look)(asked, finding)


def closer(asked: StepParts, finding: Finding) -> str:
    """Capture every point of the layer where the two part."""
    side = asked.b if asked.b.kind == "trace" or asked.a.kind != "trace" else asked.a
    model = side.model or asked.a.model or asked.b.model
    if model is None:
        return f"aprfmt diagnose {asked.pair} --model MODEL"
    layer = finding.first[1:].partition(".")[0] if finding.first.startswith("L") else ""
    only = f" --layers {layer}" if layer.isdigit() else ""
    shown = f" --ids {','.join(map(str, asked.ids))}" if 0 < len(asked.ids) <= MOST_IDS else ""
    return (
        f"aprfmt trace {shlex.quote(str(model.path))} --payload --points all{only}{shown} "
        f"--reference {shlex.quote(side.text)}"
    )


def tokens(asked: StepParts, finding: Finding) -> str:
    """Look at the tokenizers."""
    return f"aprfmt diff {asked.pair} --only tokenizer"


def distances(asked: StepParts, finding: Finding) -> str:
    """List how far the tensors are apart."""
    return f"aprfmt diff {asked.pair} --top 20"


def reach(asked: StepParts, finding: Finding) -> str:
    """Run what no probe reached; a draft head, where it is only that."""
    if asked.b.model is not None and in_head(asked.b.model, finding.where):
        return f"aprfmt eval {shlex.quote(asked.b.text)} --draft --text TEXT"
    if asked.length:
        vocab = min(int(side.model.hyper["vocab_size"]) for side in (asked.a, asked.b)
                    if side.model is not None)  # fmt: skip
        code = f"import numpy as n; n.save('ids.npy', n.arange({asked.length}) % {vocab})"
        return f'python -c "{code}" && aprfmt diagnose {asked.pair} --ids ids.npy'
    return f'aprfmt diagnose {asked.pair} --prompt "$(cat TEXT)"'


def nothing(asked: StepParts, finding: Finding) -> str:
    """Nothing is left to do."""
    return ""


# By the name that a cause's row has as `next`; what has none goes by its level.
STEPS: Mapping[str, StepText] = {
    "nothing": nothing, "stored": stored, "again": again, "distances": distances, "look": look,
}  # fmt: skip
LEVELS: Mapping[str, StepText] = {
    "identity": tokens, "config": settings, "tensor": stored, "forward": closer, "capture": nothing,
    "gradient": nothing, "update": nothing,
}  # fmt: skip


def step(asked: StepParts, finding: Finding) -> str:
    """Return the command of a finding, "" where nothing is to be done."""
    if finding.next or finding.verdict in ("same", "precision"):
        return finding.next
    if finding.exercised == "not_exercised":
        return reach(asked, finding)
    shown = {} if asked.b.model is None else own_values(asked.b.model)
    own = [shown.get(name, "") for name in finding.values]
    if own and "" not in own:  # then B is read as it was made
        return set_values(asked.b.path, own)
    named = CAUSES[finding.cause].next if finding.cause else ""
    made = STEPS[named] if named else LEVELS[finding.level]
    if made is again and finding.level == "forward":
        made = closer
    return made(asked, finding)


def with_next(
    a: Side, b: Side, ids: Sequence[int], findings: Sequence[Finding], lengths: Mapping[int, int]
) -> list[Finding]:
    """Return findings with their next steps; `lengths` are tokens that reach one, by its number."""
    trained = any(finding.cause in TRAINED for finding in findings)
    return [
        replace(
            finding,
            next=finding.next or step(StepParts(a, b, ids, lengths.get(i, 0), trained), finding),
        )
        for i, finding in enumerate(findings)
    ]


# --- what to record ------------------------------------------------------------------------------


def missing_points(view: ShadowPoint, views: Mapping[str, ShadowPoint]) -> list[str]:
    """Return the keys that the trace lacks between the last good points and a divergence.

    Of several layers it is their outputs: with these, one layer is left.
    """
    keys = list(views)
    start = max((keys.index(key) for key in view.after if key in views), default=-1)
    between = keys[start + 1 : keys.index(view.key)] if view.key in views else []
    lacking = [key for key in between if views[key].recorded is None and not views[key].base]
    layers = {views[key].layer for key in lacking if views[key].layer >= 0}
    if len(layers) > 1:
        return [key for key in lacking if key.endswith(".out")]
    return lacking


def recording(
    view: ShadowPoint, views: Mapping[str, ShadowPoint], ids: Sequence[int], model: str
) -> str:
    """Say what to record of the missing points, with the engine's names; "" if none is missing."""
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
        f"next: dump {', '.join(points)} of the engine{_of(layers)}{there}; what the model has "
        f"there: aprfmt trace {model} --payload --points {','.join(points)}{chosen} --ids {given} "
        f"--save right.safetensors; the engine's arrays become a trace with {mapping(model)}"
    )


def _of(layers: Sequence[int]) -> str:
    if not layers:
        return ""
    return f" in layer {layers[0]}" if len(layers) == 1 else f" in layers {layers[0]}-{layers[-1]}"


def mapping(model: str, ids: str = "", out: str = "engine.safetensors") -> str:
    """Return the command that makes a trace of an engine's arrays."""
    given = f" --ids {ids}" if ids else ""
    return f"aprfmt trace {model} --map DUMPS{given} -o {out}"
