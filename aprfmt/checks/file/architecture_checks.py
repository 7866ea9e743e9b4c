"""Checks against the architecture: whether every tensor is there, of its shape, and plausible.

An *item* is one thing that a model is made of: a file, a tensor, a key, a text.
"""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aprfmt.arch.draft_head import DRAFT_LAYER_KEYS
from aprfmt.arch.layout_steps import Added
from aprfmt.arch.spec import ArchSpec, split_key
from aprfmt.base.protocols import tensor_damage
from aprfmt.base.shapes import matrix_shape
from aprfmt.causes.contradicted_flags import has_own_head, held_conflicts
from aprfmt.causes.tensor.stored_bytes import SIXTEEN
from aprfmt.checks import bounds
from aprfmt.checks.context import CheckContext
from aprfmt.checks.file.recurrent_values import CONSTANT, RATES, check_recurrent
from aprfmt.checks.file.zero_matrices import find_zero_matrices
from aprfmt.checks.records import CheckFinding, Level, NotRun, Result
from aprfmt.codecs import decode
from aprfmt.errors import AprfmtError, ArchError
from aprfmt.formats.safetensors.index_check import index_repair_text
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.measure.named_causes import set_command
from aprfmt.model import Model
from aprfmt.model.adapter_description import drop_stray_command
from aprfmt.model.adapter_parts import (
    adapter_parts,
    assumed_alpha_text,
    pair_faults_text,
    peft_config,
    whole_in_gguf,
)
from aprfmt.model.completeness import vector_text, vector_todo
from aprfmt.model.config_paths import path_of_name, value_at_path
from aprfmt.model.draft import contradicted_draft, draft_head
from aprfmt.model.ledger import OF_TENSORS, Surplus
from aprfmt.model.own_keys import misleading_keys
from aprfmt.model.packing_sizes import lost_settings_text
from aprfmt.model.relations import opening_path
from aprfmt.model.renames import command_line
from aprfmt.model.resolve import ARCH_KEYS, Resolution, stated_architecture
from aprfmt.tensors.companions import constant_codes
from aprfmt.tensors.stats import Stats
from aprfmt.tensors.view import View

# What is said of a weight whose last two axes are exchanged.
_TURNED = ": the last two axes are exchanged"
_TURN_IT = (
    "write it again with its axes in order: aprfmt diff SOURCE FILE shows whether values turned"
)


def check_architecture(ctx: CheckContext) -> Result:
    """Return a Result that fails unless names and keys fit the architecture that the file names."""
    kind = ctx.model.kind
    if kind is not None and kind.foreign:
        found = f"is {kind.says(ctx.model)}"
        return Result("", [CheckFinding(ctx.where, found, "Hugging Face's", kind.todo(ctx.model))])
    parts = adapter_parts(ctx.model) if kind is not None and kind.name == "adapter" else None
    fault = "" if parts is None else pair_faults_text(peft_config(ctx.model), parts, ctx.model)
    if fault:
        todo = "save the adapter again"
        return Result("", [CheckFinding(ctx.where, fault, "pairs of factors", todo)])
    if parts is not None and parts.named:
        found = f"its names have the adapter's own, {parts.named!r}, in them"
        todo = "save it by PEFT's save_pretrained, which leaves it out; loaders find no factors"
        return Result("", [CheckFinding(ctx.where, found, "names that PEFT loads", todo)])
    stray = () if parts is None else parts.stray
    if stray:
        found = f"{', '.join(stray)}: no part of an adapter; loaders that know factors refuse it"
        todo = f"leave it out: {drop_stray_command(ctx.model, stray)}"
        return Result("", [CheckFinding(ctx.where, found, "factors of a LoRA", todo)])
    whole = () if parts is None else whole_in_gguf(parts)
    if whole:
        found = f"{', '.join(whole)}: whole, and llama.cpp refuses an adapter with such a tensor"
        todo = f"leave it out if it is the base's own: {drop_stray_command(ctx.model, whole)}"
        return Result("", [CheckFinding(ctx.where, found, "factors of a LoRA", todo)])
    assumed = "" if parts is None else assumed_alpha_text(peft_config(ctx.model), parts, ctx.model)
    if assumed:
        todo = "state lora_alpha in adapter_config.json, as the training had it"
        return Result(
            "", [CheckFinding(ctx.where, assumed, "the scale of its pairs", todo, "warning")]
        )
    name = ctx.spec.name
    try:
        resolution = ctx.model.resolution
    except ArchError as error:
        found = str(error).removeprefix(f"{ctx.where}: ")
        todo = "see --arch" if len(ctx.model) else "write it again, with its tensors"
        finding = CheckFinding(ctx.where, found, f"tensors and keys of {name}", todo)
        return Result(name, [finding])
    findings = [
        CheckFinding(
            ctx.where,
            relation.says + relation.examples_text,
            "what readers look for",
            relation.remedy or "write it again with what made it",
        )
        for relation in resolution.relations
    ]
    stated = stated_architecture(ctx.model)
    if stated != name:
        key = ARCH_KEYS[ctx.model.key_style][0][1]
        said = f"says {stated!r}" if stated else "is not there"
        right = ctx.model.spec.called[ctx.model.key_style][0]
        findings.append(
            CheckFinding(
                ctx.where,
                f"{key} {said}: other programs read that key alone",
                f"{right}, the architecture of the carried config.json and the tensors",
                set_command(ctx.model.path, [f"{key}={right}"]),
            )
        )
    return Result(f"{name}, {len(resolution.roles)} roles", findings)


def check_completeness(ctx: CheckContext) -> Result:
    """Return a Result with a failure for each tensor required by the configuration but absent.

    Biases and the head are required too. A missing tensor that the user accepts is a warning. The
    `found` text counts the tensors that are there.
    """
    found = ctx.resolution.coverage
    expected = f"all {found.expected} tensors of the configuration"
    findings = [
        CheckFinding(
            key,
            "missing",
            expected,
            "get the file again, correct the configuration, or accept it: --allow-missing ROLE",
        )
        for key in found.missing
        if key not in ctx.resolution.unread_roles and not ctx.is_reported_role(key)
    ]
    unread = ctx.resolution.unread
    if unread is not None and ctx.resolution.unread_roles:
        findings.append(
            CheckFinding(ctx.where, unread.text, "weights that can be read", unread.todo)
        )
    findings += [
        CheckFinding(key, "missing, and accepted as such", expected, level="warning")
        for key in found.accepted
    ]
    tied = " (the head is the embedding)" if ctx.resolution.hyper["tied_embeddings"] else ""
    return Result(f"{found.found} of {found.expected}{tied}", findings)


def check_shapes(ctx: CheckContext) -> Result:
    """Return a Result with a failure for each tensor whose shape is not the configuration's.

    Where the architecture is not known, or does not fit, weights without a value fail all the same.
    """
    try:
        resolution = ctx.resolution
    except NotRun:
        if found := list(_empty_weights(ctx.model)):
            return Result("", found)
        raise
    todo = "weights and configuration disagree: aprfmt diff SOURCE FILE says which changed"
    roles = resolution.roles
    fits = ""
    if resolution.coverage.misshapen:
        todo = ctx.sizes_command or todo
        fits = lost_settings_text(ctx.fitting_changes)
    findings = [
        _vector_finding(key, has[0], wanted)
        if len(has) == 1 < len(wanted)
        else CheckFinding(
            key,
            f"shape {list(has)}{_TURNED * _is_turned(has, wanted)}",
            f"{list(wanted)}{f': {fits}' * bool(fits)}",
            _TURN_IT if _is_turned(has, wanted) else todo,
        )
        for key, has, wanted in resolution.coverage.misshapen
        if key not in roles or not ctx.reported_parts.intersection(roles[key].names)
    ]
    return Result(f"{len(roles)} roles", findings)


def _is_turned(has: Sequence[int], wanted: Sequence[int]) -> bool:
    """Return whether a shape is the wanted one with its last two axes exchanged."""
    return len(has) > 1 and tuple(has) == (*wanted[:-2], wanted[-1], wanted[-2])


def _empty_weights(model: Model) -> Iterator[CheckFinding]:
    """Yield a failure for each stored tensor that is called a weight and holds no value."""
    for info in model.infos:
        if info.name.endswith(".weight") and 0 in info.shape:
            kind = f": {vector_text(0, (1, 1))}" * (len(info.shape) == 1)
            found = f"shape {list(info.shape)}{kind}"
            yield CheckFinding(info.name, found, "a shape with values", vector_todo(0, (1, 1)))


def _vector_finding(key: str, count: int, wanted: Sequence[int]) -> CheckFinding:
    """Return the failure of a tensor that is stored as a vector where the shape `wanted` is due.

    `count` is the number of its values, `wanted` the shape by the configuration.
    """
    found = f"shape [{count}]: {vector_text(count, wanted)}"
    return CheckFinding(key, found, f"{list(wanted)}", vector_todo(count, wanted))


def check_unexpected(ctx: CheckContext) -> Result:
    """Return a Result with a warning for each tensor that has no role.

    A draft head that cannot run is a warning too.
    """
    findings = [
        CheckFinding(
            item.name,
            item.of or "a tensor of no role",
            f"tensors of {ctx.spec.name} only",
            "is it another model, or a part of another?",
            "warning",
        )
        for item in ctx.unread
        if item.kind == "tensor"
        and item.name not in ctx.reported_parts
        and item.name not in ctx.compared  # of `second_layouts`
    ]
    head = ctx.resolution.draft
    if head:
        try:
            draft_head(ctx.model)
        except ArchError as error:
            says = str(error).removeprefix(f"{ctx.where}: ")
            findings.append(CheckFinding(head[0], says, "a draft head that runs", level="warning"))
    return Result(f"none, and a draft head of {len(head)} tensors" if head else "none", findings)


def check_unread(ctx: CheckContext) -> Result:
    """Return a Result with a finding for each file, index entry and key that aprfmt does not read.

    They are warnings, for items in no table or unreadable ones. An index entry whose tensor is not
    in the file it names fails.
    """
    index = {one.kind for one in ctx.model.relations} & {"index"}
    todo = index_repair_text(ctx.model.path) or "make the index anew"
    # An index that does not fit its shards is one finding, of the check `shards`.
    others = [
        item
        for item in ctx.unread
        if item.kind not in OF_TENSORS
        and not isinstance(item.holds, Surplus)  # of `layout`
        and not item.loaded_first  # of `shards`
    ]
    findings = [
        CheckFinding(
            f"{item.kind} {item.name}",
            item.of or "is in no table",
            "something that is read",
            "" if item.of else "is it of another model, or of a newer writer?",
            "warning",
        )
        for item in others
    ]
    findings += [
        CheckFinding(f"index entry {item.name}", item.of, "a tensor of that file", todo)
        for item in ctx.ledger.items
        if item.kind == "index entry" and item.reading == "contradicted" and not index
    ]
    findings += [
        CheckFinding(
            f"{row.kind} {row.name}", row.why, "something that can be read", level="warning"
        )
        for row in ctx.ledger.unreadable
    ]
    return Result(f"{len(ctx.ledger.items)} items", findings)


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A value that a file gives twice and differently: `where` (a file or tensor) and `text`.

    `name` is the hyperparameter whose key the tensors contradict, else "".
    """

    where: str
    text: str
    name: str = ""


def find_disagreements(model: Model, where: str) -> list[Disagreement]:
    """Return each value that keys, configuration and tensors give differently.

    The notes made while the architecture was resolved count too. `where` is the file, as the
    findings name it. An output head that equals the embedding does not contradict tied embeddings.
    """
    resolution = model.resolution
    said = [Disagreement(where, one.text, one.name) for one in held_conflicts(resolution)]
    return [*said, *(Disagreement(note.where, note.text) for note in resolution.notes)]


def check_hyperparameters(ctx: CheckContext) -> Result:
    """Return a Result with a warning for each hyperparameter that two sources state differently."""
    resolution = ctx.resolution
    assumed = len(resolution.report.assumed)
    rule = f", {assumed} of them by a rule of the format's readers" if assumed else ""
    found = f"{len(list(resolution.hyper))} values{rule}"
    findings = [
        CheckFinding(one.where, one.text, "one value from every source", level="warning")
        for one in find_disagreements(ctx.model, ctx.where)
    ]
    more = (
        *_misleading_keys(ctx),
        *_unused_head(ctx),
        *_lists_of_other_lengths(ctx),
        *_claimed_draft(ctx),
    )
    return Result(found, [*findings, *more])


def _misleading_keys(ctx: CheckContext) -> Iterator[CheckFinding]:
    """Yield a finding for each key of a GGUF or APR file by which other programs are misled.

    One that is missing, so that others do not open the file, is a failure.
    """
    for one in misleading_keys(ctx.model).values():
        if one.style == "hf":
            continue  # what its tensors contradict is said with the values that differ
        todo = set_command(ctx.model.path, [shlex.quote(f"{one.key}={json.dumps(one.read)}")])
        level: Level = "fail" if one.says is None else "warning"
        yield CheckFinding(ctx.where, one.text, f"{one.name} = {one.read!r}", todo, level)


def _unused_head(ctx: CheckContext) -> Iterator[CheckFinding]:
    """Yield a failure where a key says that head and embedding are one tensor, and they differ.

    transformers and engines that go by the key take the embedding for the head.
    """
    report, roles = ctx.resolution.report, ctx.resolution.roles
    key = next((k for k, name in report.read.items() if name == "tied_embeddings"), "")
    head, table = roles.get("output.weight"), roles.get("token_embd.weight")
    if key not in report.contradicted or head is None or table is None:
        return
    if not has_own_head(ctx.model):
        return
    name = head.names[0]
    yield CheckFinding(
        name,
        f"{key} says that the head is {table.names[0]}, and {name} is another tensor: loaders that "
        "go by the key leave it unread and give other logits",
        "a key that says what is stored",
        command_line("set", opening_path(ctx.model.path), f"config.json:{key}=false", "--in-place"),
    )


def _claimed_draft(ctx: CheckContext) -> Iterator[CheckFinding]:
    """Yield a warning where a key states other draft layers than are stored.

    transformers reads neither; llama.cpp and vLLM look for as many as the key states.
    """
    claim = contradicted_draft(ctx.model)
    if claim is not None:
        yield CheckFinding(
            ctx.where,
            f"{claim.says}: engines that run a draft head, and llama.cpp's converter, look for it",
            f"{claim.key} = {claim.stored}, or the tensors of the draft layers",
            set_command(ctx.model.path, [shlex.quote(one) for one in claim.setting]),
            "warning",
        )


LISTS_OF_LAYERS = ("layer_types", "mlp_layer_types")  # of config.json, an entry for each layer


def _lists_of_other_lengths(ctx: CheckContext) -> Iterator[CheckFinding]:
    """Yield a failure for each list of layers in config.json that has more entries than layers.

    transformers refuses such a model (`validate_layer_type`); other readers take the first entries,
    which are wrong where layers in the middle were removed. Layers of a draft head may be listed.
    Where the tensors contradict the number that config.json states, their number counts.
    """
    report, config = ctx.resolution.report, ctx.model.config
    stated = next((k for k, name in report.read.items() if name == "n_layers"), "")
    if config is None or not stated:
        return
    *outer, own = path_of_name(config, stated)
    section = value_at_path(config, tuple(outer)) if outer else config
    layers, there = section.get(own), int(ctx.resolution.hyper["n_layers"])
    drafts = [value for key in DRAFT_LAYER_KEYS if isinstance(value := section.get(key), int)]
    for key in LISTS_OF_LAYERS:
        listed = section.get(key)
        if not isinstance(listed, list | tuple) or not isinstance(layers, int):
            continue
        if len(listed) <= max(layers, there) or len(listed) - layers in drafts:
            continue
        yield CheckFinding(
            ctx.where,
            f"{'.'.join((*outer, key))} lists {len(listed)} layers, {stated} is {layers}: "
            "transformers refuses the model, other readers take the first entries",
            f"a list of {layers}",
            f"in {key}, keep the entries of the layers that are stored",
        )


FAR = 100.0  # beyond a bound by this factor it is no matter of training any more
FEW_ROWS = 8  # of a packed matrix that are decoded
MOST = 1 << 20  # values of a packed matrix that may all be decoded for its first rows
KINDS = 16  # different whole numbers from which a matrix holds codes: fewer may be a mask


_WORDS = {"std": "standard deviation", "rms": "root mean square"}


def check_role_bounds(ctx: CheckContext) -> Result:
    """Return a Result with a finding for each embedding and norm with values of unusual size.

    Unusual is a standard deviation, or a norm's root mean square, that trained weights do not have;
    it fails if it is off by more than a factor of FAR, else it is a warning. Matrices are judged
    too, and only fail; of packed ones the first FEW_ROWS rows are decoded. A matrix of whole
    numbers only fails: it holds codes. One without a negative value is a warning. Biases may have
    any size; rates of recurrent layers have a sign. Raises NotRun where no such tensor can be read.
    """
    resolution = ctx.resolution
    findings, seen = [], 0
    far_off: dict[str, float] = {}
    positive: list[str] = []
    recurrent: dict[str, tuple[View, Stats]] = {}
    for key, logical in resolution.roles.items():
        role = split_key(key)[1]
        held = _stored_stats(ctx, logical) if role in (RATES, *CONSTANT) else None
        if held is not None:
            recurrent[key] = logical, held
            seen += 1
            continue
        limits = bounds.tensor_bounds(resolution.spec.name, role, logical.shape)
        if limits is bounds.LINEAR:
            size = _matrix_size(ctx, logical)
            seen += size is not None
            stats = _stored_stats(ctx, logical)
            if stats is not None and (stats.min or 0.0) >= 0 < (stats.std or 0.0):
                positive.append(key)
            if size is not None and _is_far(limits["std"], size):
                far_off[key] = size
            continue
        name = "std" if limits is bounds.EMBEDDING else "rms"
        stats = _stored_stats(ctx, logical) if name in limits else None
        if stats is None:
            continue
        seen += 1
        offset = _norm_offset(logical, resolution.spec) if name == "rms" else 0.0
        bound, value = limits[name], bounds.bounded_numbers(stats, offset)[name]
        if not bound.holds(value):
            findings.append(
                CheckFinding(
                    f"{key} ({logical.stored[0].info.name})",
                    f"{_WORDS[name]} {value:.4g}{_reread_text(logical) * (name == 'std')}",
                    f"{bound}: {bound.reason}",
                    "is the encoding's tag right, and was the file converted correctly?",
                    "fail" if _is_far(bound, value) else "warning",
                )
            )
    if not seen:
        raise NotRun("no embedding, norm or matrix can be read as numbers")
    findings += check_recurrent(recurrent)
    if far_off:
        findings.append(_far_matrices(resolution, far_off))
    least = {key: _least_whole_number(ctx, view) for key, view in resolution.roles.items()}
    whole = {key: value for key, value in least.items() if value is not None}
    if whole:
        findings.append(_whole_matrices(resolution, whole))
    positive = [key for key in positive if key not in whole]
    if positive:
        name = resolution.roles[positive[0]].stored[0].info.name
        findings.append(
            CheckFinding(
                f"{positive[0]} ({name}){_and_more(positive)}",
                "no negative value",
                "values of both signs, as training leaves in a matrix",
                "was the sign of its codes lost?",
                "warning",
            )
        )
    return Result(f"{seen} tensors", findings)


def _and_more(keys: Sequence[str]) -> str:
    """Return " and N more" for the keys after the first; "" for a single key."""
    return f" and {len(keys) - 1} more" if len(keys) > 1 else ""


def _least_whole_number(ctx: CheckContext, view: View) -> float | None:
    """Return the smallest value of a float matrix that holds whole numbers only, as codes are.

    They have to be at least KINDS different numbers. None for any other matrix, and for one that
    cannot be read or is too large to decode for its first rows.
    """
    shape = [n for n in view.shape if n > 1]
    if len(shape) < 2 or view.damage or any(name not in UNIT for name in view.encodings):
        return None
    if view.stored_row_bytes is None and math.prod(view.shape) > MOST:
        return None  # all of it would be decoded for its first rows
    if _stored_span(ctx, view) < KINDS - 1:
        return None  # so many whole numbers have no room there
    try:
        first = view.rows(0, min(FEW_ROWS, matrix_shape(view.shape)[0]))
        if (first != first.round()).any():
            return None
        kinds, least = set(), math.inf
        for _, _, values in view.chunks(MOST):
            if (values != values.round()).any():  # NaN is no whole number
                return None
            kinds.update(values.reshape(-1)[: MOST >> 4].tolist())
            least = min(least, float(values.min()))
    except AprfmtError:
        return None
    finally:
        view.drop()
    return least if len(kinds) >= KINDS else None


def _stored_span(ctx: CheckContext, view: View) -> float:
    """Return the largest less the smallest value of a view's stored tensors; inf if not known."""
    rows = [ctx.census.get(one.info.name) for one in view.stored]
    found = [row.stats for row in rows if row is not None and row.stats is not None]
    if len(found) < len(rows) or any(one.inf for one in found):
        return math.inf
    return max((one.max or 0.0) for one in found) - min((one.min or 0.0) for one in found)


def _whole_matrices(resolution: Resolution, found: Mapping[str, float]) -> CheckFinding:
    """Return the finding on matrices of whole numbers; `found` is {key: smallest value}."""
    keys = list(found)
    sign = ", none of them negative" * (found[keys[0]] >= 0)
    return CheckFinding(
        f"{keys[0]} ({resolution.roles[keys[0]].stored[0].info.name}){_and_more(keys)}",
        f"whole numbers only{sign}",
        "fractions: training leaves no matrix of whole numbers",
        "were the codes of a packed file taken for its values?",
    )


def _is_far(bound: bounds.UsualRange, value: float) -> bool:
    """Return whether a value is outside a range by more than a factor of FAR."""
    return not bound.low / FAR <= value <= bound.high * FAR


def _matrix_size(ctx: CheckContext, logical: View) -> float | None:
    """Return the standard deviation of a matrix; of a packed or joined one only its first rows'.

    None for a matrix of one value and for what cannot be read: other checks report these.
    """
    stored = logical.stored[0]
    if len(stored.parts) < 2 and len(logical.stored) == 1:
        stats = _stored_stats(ctx, logical)
        return (stats.std or None) if stats is not None else None
    if any(tensor_damage(one) for one in logical.stored):
        return None
    try:
        if logical.by_rows is None and math.prod(logical.shape) > MOST:
            return None  # all of it would be decoded for its first rows
        values = logical.rows(0, min(FEW_ROWS, matrix_shape(logical.shape)[0]))
    except AprfmtError:
        return None
    size = float(values.std(dtype="float64"))
    return size if math.isfinite(size) and size else None


def _far_matrices(resolution: Resolution, sizes: Mapping[str, float]) -> CheckFinding:
    """Return the finding on matrices far larger or smaller than any trained one.

    `sizes` is {key: standard deviation}.
    """
    first = max(sizes, key=lambda key: abs(math.log(sizes[key])))
    view = resolution.roles[first]
    stored = view.stored[0]
    more = _and_more(list(sizes))
    packed = len(stored.parts) > 1
    rows = f" in its first {FEW_ROWS} rows" * (packed or len(view.stored) > 1)
    what = "were its scales inverted or lost?" if packed else "was it converted correctly?"
    bound = bounds.LINEAR["std"]
    return CheckFinding(
        f"{first} ({stored.info.name}){more}",
        f"{_WORDS['std']} {sizes[first]:.4g}{rows}{_reread_text(view)}",
        f"{bound}: {bound.reason}",
        what,
    )


REREAD = 1 << 16  # bytes of a tensor that are read as the other 16-bit type


def _reread_text(view: View) -> str:
    """Return a clause with the standard deviation of a BF16 tensor read as F16, or of F16 as BF16.

    "" for other encodings, and where that deviation is no usual one of weights.
    """
    stored = view.stored[0]
    kind, raw = stored.info.encoding, min(REREAD, stored.info.nbytes) // 2 * 2
    if kind not in SIXTEEN or len(view.stored) > 1 or tensor_damage(stored) or not raw:
        return ""
    other = SIXTEEN[1 - SIXTEEN.index(kind)]
    with np.errstate(all="ignore"):
        values = decode(other, stored.raw(0, raw), (raw // 2,)).astype(np.float64)
        size = float(np.std(values))
    usual = bounds.LINEAR["std"].low <= size <= bounds.EMBEDDING["std"].high
    return f", and {size:.4g} in its first {raw // 2} values if these are {other}" if usual else ""


def check_filled(ctx: CheckContext) -> Result:
    """Return a Result with a finding for each matrix that holds one value throughout.

    Such a matrix was never filled. A layer whose two output matrices are both zeros adds nothing.
    Such layers are inserted on purpose (LLaMA Pro), so that is a warning. Of tensors without a
    role, and of a model whose architecture is not known, only matrices of zeros are found. Raises
    NotRun where no matrix is stored as numbers.
    """
    resolution: Resolution | None = None
    why = "no matrix is stored as numbers"
    try:
        resolution = ctx.resolution
    except NotRun as stop:
        why = str(stop)
    seen, findings = (0, []) if resolution is None else _check_filled_roles(ctx, resolution)
    others, zeros = find_zero_matrices(ctx, resolution)
    if not seen + others:
        raise NotRun(why)
    return Result(f"{seen + others} matrices", [*findings, *zeros])


def _check_filled_roles(
    ctx: CheckContext, resolution: Resolution
) -> tuple[int, list[CheckFinding]]:
    """Return (how many matrices of a role were read, a finding for each of one value throughout).

    `resolution` has the roles.
    """
    seen, flat, codes = 0, dict[str, float](), dict[str, str]()
    for key, logical in resolution.roles.items():
        if bounds.role_bounds(resolution.spec.name, split_key(key)[1]) not in _FILLED:
            continue
        matrix = len([n for n in logical.shape if n > 1]) > 1
        packed = logical.stored[0] if matrix and len(logical.stored) == 1 else None
        if packed is not None and len(packed.parts) > 1 and not tensor_damage(packed):
            seen += 1
            code = constant_codes(packed)
            if code is not None:
                codes[key] = f"every byte of {packed.parts[''].info.name} is {code:#04x}"
            continue
        stats = _stored_stats(ctx, logical) if matrix else None
        if stats is None or not stats.count:
            continue
        seen += 1
        if stats.zeros == stats.count or stats.std == 0:
            flat[key] = 0.0 if stats.zeros == stats.count else stats.mean or 0.0
    findings = [
        CheckFinding(
            key, says, "codes that were filled", "get the file again, or quantize it again"
        )
        for key, says in codes.items()
    ]
    # Zeros in both output matrices of a layer are on purpose; anything else was lost.
    for key, value in flat.items():
        layer, role = split_key(key)
        outputs = {f"{key.removesuffix(role)}{one}" for one in _ADDED_TO_STREAM}
        idle = layer is not None and role in _ADDED_TO_STREAM and outputs <= flat.keys()
        findings.append(
            CheckFinding(
                f"{key} ({resolution.roles[key].stored[0].info.name})",
                f"every value is {value:g}" + "; the layer adds nothing" * idle,
                "a matrix that was filled",
                "get the file again, or convert it again",
                "warning" if idle else "fail",
            )
        )
    return seen, findings


_FILLED = (bounds.EMBEDDING, bounds.LINEAR)
_ADDED_TO_STREAM = ("attn_output.weight", "ffn_down.weight")


def _stored_stats(ctx: CheckContext, logical: View) -> Stats | None:
    """Return the statistics of a weight that is stored as one tensor of finite numbers.

    Else None: NaN, infinities and bad scales are reported by other checks.
    """
    if len(logical.stored) != 1:
        return None
    row = ctx.census.get(logical.stored[0].info.name)
    if row is None or row.scale or row.stats is None or row.stats.nan or row.stats.inf:
        return None  # reported by another check
    return row.stats if row.stats.finite else None


def _norm_offset(logical: View, spec: ArchSpec) -> float:
    """Return what the forward pass adds to a norm's stored weight: 1 for gemma's, 0 for most."""
    steps = logical.layout
    return spec.block.norm_offset - sum(step.amount for step in steps if isinstance(step, Added))
