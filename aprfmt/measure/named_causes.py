"""The NamedCause record, which `diff` and `diagnose` print and give as JSON, and its remedy.

A *place* is a tensor, a configuration key, an operation or a capture point. A and B are the two
models that are compared; a *side* is one of them.
"""

import math
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.sequences import NAMED
from aprfmt.errors import AprfmtError
from aprfmt.formats import suffix_to_write
from aprfmt.measure.verdicts import CERTAINTIES, Certainty
from aprfmt.model.hf_folder import INDEX, PICKLED_INDEX, WEIGHTS
from aprfmt.model.relations import opening_path
from aprfmt.model.sidecar_files import ADAPTER_CONFIG

if TYPE_CHECKING:
    from aprfmt.model import Model

# Commands that write a model.
MENDS = ("aprfmt convert ", "aprfmt quantize ", "aprfmt set ", "aprfmt repair ", "mv ")
REWRITES = ("convert", "quantize")  # verbs of those that read a whole model
_NAMED = 4  # tensors that a command names, at most


@dataclass(frozen=True, slots=True)
class Effect:
    """How far apart the two sides are: relative L2, and KL of the next token in nats.

    They are of logits where passes were made, else of stored values; None where not measured.
    """

    rel_l2: float | None = None
    kl: float | None = None

    @property
    def text(self) -> str:
        """The distances as words, such as "0.012 apart, KL 0.3"; "" where neither is known."""
        known = self.rel_l2 is not None and math.isfinite(self.rel_l2)
        words = [f"{self.rel_l2:.3g} apart"] if known else []
        return ", ".join([*words, *([] if self.kl is None else [f"KL {self.kl:.3g}"])])


@dataclass(frozen=True, slots=True)
class Remedy:
    """The command that repairs B, filled in."""

    command: str


@dataclass(frozen=True, slots=True)
class NamedCause:
    """A cause with all its places under the file's own names.

    `where` are stored names, keys of the file, or capture points, `roles` aprfmt's names of the
    same things. `share` is the fraction of elements that the stated change reproduces, None where
    no change was made. `remedy` is None where no command repairs B.
    """

    cause: str
    level: Certainty
    share: float | None
    says: str
    where: tuple[str, ...]
    roles: tuple[str, ...]
    effect: Effect
    remedy: Remedy | None

    def places_text(self, most: int = NAMED) -> str:
        """Return the first `most` places, the first with its role, and the number of others."""
        shown = list(self.where[:most])
        if shown and self.roles and self.roles[0] != shown[0]:
            shown[0] += f" ({self.roles[0]})"
        more = len(self.where) - len(shown)
        return ", ".join(shown) + (f", ... {more} more" if more > 0 else "")

    @property
    def certainty_text(self) -> str:
        """The certainty in words, with the fraction of values that the change reproduces.

        The fraction is left out if it is 1.
        """
        return self.level + share_text(self.share)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def share_text(share: float | None) -> str:
    """Return ", 98.5 % of the values come out"; "" for None or for all.

    Rounded down: only all of them are 100 %.
    """
    if share is None or share >= 1.0:
        return ""
    return f", {math.floor(1000 * share) / 10:g} % of the values come out"


def name_cause(
    cause: str,
    says: str,
    roles: Iterable[str],
    stored: Mapping[str, Sequence[str]],
    *,
    level: Certainty,
    share: float | None = None,
    effect: Effect | None = None,
    command: str = "",
    detail: str = "",
) -> NamedCause:
    """Return the NamedCause of a finding; `stored` maps its `roles` to the file's own names.

    A place without a stored name (an operation, a capture point) keeps its name. `command` becomes
    the remedy if it writes a model; a command that only compares more is none.
    """
    assert level in CERTAINTIES
    keys = tuple(dict.fromkeys(roles))
    where = tuple(dict.fromkeys(name for key in keys for name in stored.get(key, (key,))))
    if level == "located":
        share = None
    elif share is None:
        share = 1.0
    says = insert_stored_names(says, keys, stored)
    says += f"; {detail}" if detail else ""
    remedy = Remedy(command) if command.startswith(MENDS) else None
    return NamedCause(cause, level, share, says, where, keys, effect or Effect(), remedy)


def insert_stored_names(says: str, keys: Sequence[str], stored: Mapping[str, Sequence[str]]) -> str:
    """Return a sentence with the file's own name put before the first mention of each role.

    A place of several tensors is left unchanged: it names layers, not tensors.
    """
    if len(keys) == 1 and says.startswith(f"{short_keys(keys)} - "):
        says = keys[0] + says.removeprefix(short_keys(keys))
    for key in sorted(keys, key=len, reverse=True):
        own = stored.get(key, ())
        if len(own) == 1 and own[0] != key and own[0] not in says:
            word = rf"(?<![\w.]){re.escape(key)}(?![\w.]*\w)"
            both = f"{own[0]} ({key})".replace("\\", r"\\")
            says = re.sub(word, both, says, count=1)
    return says


def short_keys(keys: Iterable[str]) -> str:
    """Return role keys as one text: each role with its layers as ranges.

    At most four roles are named, the others are counted.
    """
    from aprfmt.base.number_ranges import number_ranges

    roles: dict[str, list[int | None]] = {}
    for key in keys:
        layer, role = split_key(key)
        roles.setdefault(role, []).append(layer)
    said = []
    for role, layers in roles.items():
        numbers = sorted(layer for layer in layers if layer is not None)
        at = (
            f" in layer{'s' if len(numbers) > 1 else ''} {number_ranges(numbers)}"
            if numbers
            else ""
        )
        said.append(role + at)
    shown, more = ", ".join(said[:4]), len(said) - 4
    return shown if more <= 0 else f"{shown} and {more} more role{'s' if more > 1 else ''}"


def fixed_name(path: Path) -> str:
    """Return the file name of a repaired copy (NAME-fixed), quoted for a shell."""
    folder = path.is_dir()
    name = path.name or path.resolve().name  # of "."
    stem, suffix = (name, "") if folder or not path.suffix else (path.stem, suffix_to_write(path))
    return shlex.quote(f"{stem}-fixed{suffix}")


def rewrite_command(
    a: Path | str,
    b: Path | str,
    mine: Mapping[str, str],
    theirs: Mapping[str, str],
    file_type: object = None,
    input_scales: Sequence[str] = (),
    more: Sequence[str] = (),
) -> str:
    """Return the command that writes B again from A in B's encodings; "" where none does.

    `mine` and `theirs` are the encodings of A's and B's matrices by key, `file_type` is B's
    general.file_type, which names the scheme of a mixture. `input_scales` are the name endings of
    A's scales of activations, which no other encoding keeps. `more` are options that the command
    takes whatever the encodings are, such as those for a tower alone. "" too for PEFT's adapters,
    as their configuration is no part of what is written.
    """
    if Path(a).with_name(ADAPTER_CONFIG).is_file() or (Path(a) / ADAPTER_CONFIG).is_file():
        return ""
    words = _encoding_options(mine, theirs, file_type)
    if words is None:
        return ""
    verb, *options = words
    if options:
        options += [f"--drop {shlex.quote(f'*{end}')}" for end in input_scales]
    source, target = _folder_of_weights(a), Path(_folder_of_weights(b))
    if target.is_dir() and Path(source).is_file():  # neither says that a folder is to be written
        options.append("--to safetensors")
    line = f"aprfmt {verb} {shlex.quote(source)} {fixed_name(target)}"
    return " ".join([line, *options, *more])


def written_again_text(commands: Sequence[str], a: Path | str) -> str:
    """Return a sentence saying that the commands only write A again and do not mend B; or "".

    "" where none of `commands` writes A again. `a` is the path of A.
    """
    mends = [command for command in commands if command.startswith(MENDS)]
    copies = [command for command in mends if _is_copy_of(command, a)]
    if not copies:
        return ""
    what = "B" if len(copies) == len(mends) else "all of B"
    return f"no command mends {what}; write it again from A:"


def _is_copy_of(command: str, a: Path | str) -> bool:
    """Return whether a command writes what A holds, and nothing else."""
    words = shlex.split(command)
    copied = words[1:2] in (["convert"], ["quantize"]) and "--adapter" not in words
    return copied and words[2:3] in ([str(a)], [_folder_of_weights(a)])


def _folder_of_weights(path: Path | str) -> str:
    """Return the folder of a model's weights or index, where it has a configuration, else the path.

    A copy of weights alone would lack it, and no format is named like an index.
    """
    text = str(path)
    if "://" in text:
        return text.removesuffix(f"/{INDEX}")
    folder = opening_path(Path(path))
    whole = Path(path).name in (INDEX, PICKLED_INDEX) or (folder / "config.json").is_file()
    return str(folder) if whole else text


def _encoding_options(
    mine: Mapping[str, str], theirs: Mapping[str, str], file_type: object
) -> list[str] | None:
    """Return [verb, *options] that write A's matrices in B's encodings; None if none do.

    The verb is "convert" or "quantize". `mine` and `theirs` are the encodings of A's and B's
    matrices by key, `file_type` is B's general.file_type. No options give back the codes of a
    calibrated quantization. Of B's matrices of whole numbers, where A's have others, none is asked
    for: they are codes that were never decoded.
    """
    common = [
        key
        for key in theirs
        if key in mine and (mine[key] == theirs[key] or not _is_of_whole_numbers(theirs[key]))
    ]
    wished = Counter(theirs[key] for key in common)
    if all(mine[key] == theirs[key] for key in common):
        return ["convert"]
    if len(wished) == 1:
        (name,) = wished
        return ["convert", f"--encoding {name}"] if _is_plain(name) else _scheme_options(name)
    if all(_holds_all(theirs[key], mine[key]) for key in common):
        return ["convert"]  # a scheme of B's file type would round what B's encodings hold
    from aprfmt.quantizing.mixture import SCHEMES

    most = max(wished.values(), default=0)
    schemes = [
        name
        for name, scheme in SCHEMES.items()
        if scheme.file_type == file_type and not scheme.options and wished[scheme.base] == most
    ]
    if file_type is not None and schemes:
        return ["quantize", f"--type {schemes[0]}"]
    return _named_encodings({key: theirs[key] for key in common}, wished)


def _named_encodings(encodings: Mapping[str, str], counts: Counter[str]) -> list[str] | None:
    """Return ["convert", *options] that give most matrices one encoding, and name the exceptions.

    `encodings` are by role key, `counts` how many matrices have each. None where there are many
    exceptions, or where an encoding cannot be written without calibration or other tensors.
    """
    (most, _), *_ = counts.most_common(1) or [("", 0)]
    others = {key: name for key, name in encodings.items() if name != most}
    if len(others) > _NAMED or not all(map(_is_plain, counts)):
        return None
    named = (f"--tensor {shlex.quote(f'{key}={name}')}" for key, name in others.items())
    return ["convert", f"--encoding {most}", *named]


def _is_of_whole_numbers(encoding: str) -> bool:
    """Return whether tensors of an encoding hold integers."""
    row = ENCODINGS.get(encoding)
    return row is not None and (row.numpy or "").startswith(("int", "uint"))


def _holds_all(encoding: str, other: str) -> bool:
    """Return whether an encoding is `other`, or holds all numbers of that plain float type."""
    return encoding == other or (encoding in ("F32", "F64") and other in ("F16", "BF16", "F32"))


def _is_plain(encoding: str) -> bool:
    """Return whether aprfmt writes tensors of an encoding as one tensor, without calibration."""
    from aprfmt.codecs import CODECS  # here: `inspect` loads this module and no numpy

    row = ENCODINGS.get(encoding)
    if row is None or encoding not in CODECS or not CODECS[encoding].has_encoder:
        return False
    return bool(row.numpy) or (row.ggml is not None and not row.removed)


def _scheme_options(encoding: str) -> list[str] | None:
    """Return ["quantize", option] for an encoding that needs no calibration; None for others."""
    from aprfmt.quantizing.mixture import SCHEMES

    held = ENCODINGS.get(encoding)
    nearest = held is not None and held.flat and encoding in SCHEMES
    return ["quantize", f"--type {encoding}"] if nearest else None


def overflows_encoding(values: Mapping[str, Any], encodings: Mapping[str, str]) -> bool:
    """Return whether a value of A is larger than B's encoding of its tensor can hold.

    A copy of A in B's encodings would have the same infinities. `values` are a finding's, with the
    counts of "nonfinite" by key; `encodings` are B's by key.
    """
    import ml_dtypes  # here: `inspect` loads this module and no numpy
    import numpy as np

    limits: Any = ml_dtypes.finfo
    for key, odd in (values.get("nonfinite") or {}).items():
        row = ENCODINGS.get(encodings.get(key, ""))
        right, wrong = odd.get("values") or ("", "")
        if row is None or not row.numpy or "inf" not in str(wrong).lower():
            continue
        if abs(_number(right)) > float(limits(np.dtype(row.numpy)).max):
            return True
    return False


def _number(text: object) -> float:
    """Return the finite number that a text says; 0.0 for any other text."""
    try:
        found = float(str(text))
    except ValueError:
        return 0.0
    return found if math.isfinite(found) else 0.0


def matrix_encodings(model: "Model") -> dict[str, str]:
    """Return {role key: encoding} of a model's matrices; {} where roles are not known."""
    try:
        roles = model.roles
    except AprfmtError:
        return {}
    return {key: view.encoding for key, view in roles.items() if len(view.shape) > 1}


def set_command(b: Path | str, values: Sequence[str], *, in_place: bool = False) -> str:
    """Return the command that sets KEY=VALUE arguments, already quoted, in a copy of B.

    With `in_place` it sets them in B itself: no copy can be made of weights that do not decode.
    """
    place = opening_path(Path(b))
    target = "--in-place" if in_place else f"-o {fixed_name(place)}"
    return f"aprfmt set {shlex.quote(str(place))} {' '.join(values)} {target}"


def join_set_commands(commands: Sequence[str]) -> str:
    """Return several `set` commands for one B as one command; "" where that is impossible.

    Of two values for one key the first command's counts: `set` refuses a key that is named twice.
    """
    parts = [re.fullmatch(r"(aprfmt set \S+) (.*) (-o \S+|--in-place)", each) for each in commands]
    found = [part.groups() for part in parts if part is not None]
    if len(found) < len(commands) or len({(begin, end) for begin, _, end in found}) != 1:
        return ""
    words: dict[str, str] = {}
    given = iter([word for _, text, _ in found for word in shlex.split(text)])
    for word in given:
        key, option = (next(given), f"{word} ") if word == "--remove" else (word, "")
        words.setdefault(key.partition("=")[0], option + shlex.quote(key))
    return f"{found[0][0]} {' '.join(words.values())} {found[0][2]}"


def completed_command(files: Collection[str], a: Path | str, b: Path | str) -> str:
    """Return the command that completes the one damaged file of B from the same file of A, or "".

    `files` are the damaged ones. "" if there are several, or A's file is of another kind or no
    longer than B's. In a folder the file is replaced: the others belong to it.
    """
    damaged, mine, theirs = Path(next(iter(files))), Path(a), Path(b)
    if len(files) != 1:
        return ""
    alone = damaged == theirs and damaged.name != WEIGHTS
    good = mine if mine.is_file() else mine / damaged.name
    if not alone and good.name != damaged.name:
        return ""
    if damaged.parent != (theirs if theirs.is_dir() else theirs.parent) or not good.is_file():
        return ""
    if good.suffix != damaged.suffix or good.stat().st_size <= damaged.stat().st_size:
        return ""
    target = fixed_name(damaged) if alone else f"{shlex.quote(str(damaged))} --force"
    source = shlex.quote(str(good))
    return f"aprfmt repair {shlex.quote(str(damaged))} --from {source} -o {target}"


def surplus_command(file: Path | str, b: Path | str) -> str:
    """Return the command that writes a file of B without the bytes that belong to no tensor.

    In a folder the file is replaced: the other files of the folder belong to it.
    """
    there = Path(file)
    alone = there == Path(b) and there.name != WEIGHTS
    target = fixed_name(there) if alone else f"{shlex.quote(str(file))} --force"
    return f"aprfmt repair {shlex.quote(str(file))} --partial -o {target}"
