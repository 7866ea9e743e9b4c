"""Which modules a quantization section claims as packed, and which its lists leave as they are.

A *section* is the quantization settings in config.json; a *config group* is one entry of its
`config_groups`.

| method | what is claimed | a listed name fits |
| --- | --- | --- |
| compressed-tensors | what a target fits and `ignore` does not | a name, a pattern after `re:` |
| awq, fp8 | projections but those of the lists | what begins (a pattern) or ends so |
| modelopt | projections but those of the lists | wildcards over the whole name |
| gptq | projections, of `modules_in_block_to_quantize` if stated | patterns of `dynamic` |
| bitsandbytes | nothing: plain weights are quantized when loaded | as awq |

Loaders differ in how a list is read, so there are two answers: whether every reader takes a module
for a listed one (`is_listed`), and whether none does (`claims_packed`). Other methods are not
judged. Source: transformers 5.23, quantizers/quantizers_utils.py (should_convert_module) and
utils/quantization_config.py; vLLM takes a listed name anywhere in a module's; compressed-tensors
0.20, utils/match.py.
"""

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from aprfmt.base.bounded_regex import matches_start
from aprfmt.codecs.compressed_scope import MIXED as MIXED_FORMATS
from aprfmt.codecs.compressed_scope import PATTERN, SCOPE, is_named, weight_groups
from aprfmt.codecs.dialect import Config
from aprfmt.codecs.modelopt_scope import MIXED
from aprfmt.codecs.scope import section_mapping, section_names
from aprfmt.errors import CodecError

MORE = "modules_to_convert"  # of FP8: modules besides the projections that are packed
_BLOCK = "modules_in_block_to_quantize"
_PROJECTIONS = ("Linear",)  # the class of module that a projection is

Fits = Callable[[str, str], bool]  # (listed name, module)


def _matches_name_end(entry: str, module: str) -> bool:
    """Return whether a module's name ends in `entry`, or begins with a match of it as a pattern.

    A match must end where a component of the name ends.
    """
    if not entry:
        return False
    if module.endswith(entry):
        return True
    try:
        return matches_start(rf"(?:{entry.rstrip('.')})(?=\.|$)", module)
    except CodecError:
        return False


def _matches_name(entry: str, module: str) -> bool:
    """Return whether a listed name is a module's name, or a pattern ("re:...") that matches it."""
    return is_named(entry, module)


class Method(NamedTuple):
    """How one quantization method lists the modules that it leaves unquantized.

    `keys` are those of its lists, `fits` says whether a name fits a module, `form` is how a list
    spells the name that fits all modules which end in NAME, `all_others` whether modules in no list
    must be packed.
    """

    keys: tuple[str, ...]
    fits: Fits
    form: str = "NAME"
    all_others: bool = True


METHODS: Mapping[str, Method] = {
    "compressed-tensors": Method(("ignore",), _matches_name, "re:.*NAME$"),
    "awq": Method(("modules_to_not_convert",), _matches_name_end),
    "fp8": Method(("modules_to_not_convert", "ignored_layers"), _matches_name_end),
    "modelopt": Method(("exclude_modules", "ignore"), lambda e, m: fnmatchcase(m, e), "*NAME"),
    "gptq": Method((), _matches_name_end),
    "bitsandbytes": Method(("llm_int8_skip_modules",), _matches_name_end, all_others=False),
}


def method_of(section: Config) -> Method | None:
    """Return how the section's method lists modules; None for a method that is not in METHODS."""
    stated = section.get("quant_method")
    return METHODS.get(stated) if isinstance(stated, str) else None


def unquantized_list(section: Config) -> tuple[str, list[str]]:
    """Return (key, names) of the section's list of modules that are not quantized.

    The key is the method's first where the section has no list, "" where the method has no key.
    Raises CodecError for another thing than a list of names.
    """
    method = method_of(section)
    keys = () if method is None else method.keys
    key = next((key for key in keys if section.get(key) is not None), keys[0] if keys else "")
    return key, section_names(section, key) if key else []


def is_listed(section: Config, module: str) -> bool:
    """Return whether a section's list leaves a module unquantized, as every loader reads it."""
    method = method_of(section)
    if method is None:
        return False
    return any(method.fits(entry, module) for entry in unquantized_list(section)[1])


def may_list_any(section: Config, entry: str, modules: Iterable[str]) -> bool:
    """Return whether some loader may take `entry`, a name of the list, for one of the modules.

    A name within a module's name counts too, as loaders differ.
    """
    method = method_of(section)
    return method is not None and any(_may_fit(method, entry, module) for module in modules)


def _may_fit(method: Method, entry: str, module: str) -> bool:
    """Return whether some loader may take the listed name `entry` for the module."""
    if method.fits(entry, module):
        return True
    exact = method is METHODS["compressed-tensors"]
    if exact and entry.startswith(PATTERN):
        return False
    plain = entry.strip("*")
    return f".{plain}." in f".{module}." or (not exact and plain in module)


def claims_packed(section: Config, module: str, spellings: Iterable[str]) -> bool:
    """Return whether every loader expects a projection's weight to be packed.

    `spellings` are the names that loaders may have for the module, `module` included. False where
    loaders may differ. Raises CodecError for a section that cannot be read.
    """
    method = method_of(section)
    if method is None or not method.all_others:
        return False
    every = [*spellings]
    if any(may_list_any(section, entry, every) for entry in unquantized_list(section)[1]):
        return False
    if method is METHODS["compressed-tensors"]:
        return _is_targeted(section, every)
    if method is METHODS["gptq"]:
        if any(
            matches_start(pattern.removeprefix("-:"), module)
            for pattern in section_mapping(section, "dynamic")
            if pattern.startswith("-:")
        ):
            return False
        inner = section.get(_BLOCK)
        if inner is not None:
            return any(module.endswith(f".{name}") for name in _strings_in(inner))
    return section.get("quant_algo") != MIXED


def _strings_in(value: Any) -> list[str]:
    """Return all strings in a value, which may be a string or nested lists.

    [] for other values.
    """
    if isinstance(value, str):
        return [value]
    return [one for each in value for one in _strings_in(each)] if isinstance(value, list) else []


def _is_targeted(section: Config, spellings: Iterable[str]) -> bool:
    """Return whether a projection, by every name it may have, is in a config group of weights.

    With one group it is enough that a target is the class Linear, or fits one of the names.
    """
    every, groups = [*spellings], weight_groups(section)
    if len(groups) > 1 or section.get("format") == MIXED_FORMATS:
        return all(SCOPE.section_of(section, module) is not None for module in every)
    targets = [target for group in groups.values() for target in section_names(group, "targets")]
    return any(
        target in _PROJECTIONS or any(is_named(target, module) for module in every)
        for target in targets
    )


def group_without_modules(section: Config, modules: Iterable[str]) -> str:
    """Return the name of the section's only config group if it targets none of `modules`.

    The result is "" if it targets some, for other methods, for several groups, and for targets that
    are classes.
    """
    if section.get("quant_method") != "compressed-tensors":
        return ""
    groups, every = weight_groups(section), [*modules]
    if len(groups) != 1:
        return ""
    ((name, group),) = groups.items()
    targets = section_names(group, "targets")
    if any(target.isidentifier() and target[:1].isupper() for target in targets):
        return ""
    fits = any(is_named(target, module) for target in targets for module in every)
    return "" if fits or not targets else name
