"""Sliding-window rules of every family: the window's size, and which layers have one."""

from collections.abc import Callable
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Any

from aprfmt.arch.spec import Facts, Found, HyperRule, Loss, Params, PerLayer
from aprfmt.arch.value_checks import boolean, listed_kinds, sequence, whole_number
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

# What `layer_types` in config.json call a layer with a window, and one without.
KINDS = {"sliding_attention": True, "full_attention": False}
_KEY = "{arch}.attention.sliding_window"


def window_every_layer(facts: Facts | None, hp: Params) -> PerLayer:
    """Return True for every layer: all have a window."""
    layers: PerLayer = (True,) * hp["n_layers"]
    return layers


def window_period(length: int) -> Callable[[Facts | None, Params], PerLayer]:
    """Return a function: one boolean a layer, a window in all but every length-th.

    As llama.cpp's set_swa_pattern does.
    """

    def layers(facts: Facts | None, hp: Params) -> PerLayer:
        """Return one boolean per layer: its attention has a window.

        Every length-th layer has none.
        """
        return tuple(i % length < length - 1 for i in range(hp["n_layers"]))

    return layers


@dataclass(frozen=True)
class Window:
    """What differs between families in how a file gives its windows.

    `hf_default`: window size if config.json gives none; `gguf_default`: if a GGUF or an APR has
    no key (llama.cpp's default; MISSING: the key is required). `layers`: which layers have a
    window if the file does not list them; `gguf_layers`: which ones llama.cpp assumes (None: the
    same). `listed`: config.json may list `layer_types`. `switch`: only with
    `use_sliding_window`. `stated`: a GGUF without windows has the key with the value 0. `hf` and
    `kind` are config.json's key of the size, and what `layer_types` calls a layer with a window.
    `gguf_fixed`: llama.cpp has windows of `gguf_default`, and none only where the key says 0.
    `listed_wins`: layers that `layer_types` lists have windows whatever the switch says.
    """

    hf_default: int | None = None
    gguf_default: Any = None
    layers: Callable[[Facts | None, Params], PerLayer] = window_every_layer
    gguf_layers: Callable[[Facts | None, Params], PerLayer] | None = None
    listed: bool = True
    switch: bool = False
    stated: bool = False
    hf: str = "sliding_window"
    kind: str = next(iter(KINDS))
    gguf_fixed: bool = False
    listed_wins: bool = False


def window_rules(window: Window) -> tuple[HyperRule, HyperRule]:
    """Return the rules for `sliding_window` (positions, None for none) and `window_layers`."""
    assumed = window.gguf_layers or window.layers
    names = {window.kind: True, "full_attention": False}

    def read_hf_size(facts: Facts, hp: Params) -> Found:
        """Return (window in positions, key) of config.json, (None, key) for no window.

        None without the key.
        """
        on = facts.first("use_sliding_window") if window.switch else None
        listed = facts.first("layer_types") if window.listed_wins else None
        if window.switch and not (listed and window.kind in sequence(*listed)):
            if on is None or not boolean(*on):
                facts.first(window.hf)  # a known key, but the window is switched off
                return None if on is None else (None, on[1])
        return _window_size(facts.first(window.hf, null=True))

    def unused_size_text(value: Value, facts: Facts, hp: Params) -> str:
        """Return a remark on a config.json that states a window and no switch for it, else "".

        transformers takes the switch for off where it is not there. A switch that is stated says
        that somebody decided it.
        """
        if facts.style != "hf" or not window.switch or value is not None:
            return ""
        found = facts.first(window.hf)
        if found is None or not found[0] or facts.first("use_sliding_window") is not None:
            return ""
        return (
            f"{found[1]} is {short_repr(found[0])} and use_sliding_window is not there: "
            "transformers attends to all earlier tokens"
        )

    def read_gguf_size(facts: Facts, hp: Params) -> Found:
        """Return (window in positions, key) of a GGUF, (None, key) for no window.

        None without the key. Families whose window llama.cpp fixes get that one.
        """
        found = _window_size(facts.first(_KEY))
        fixed = window.gguf_fixed and found is not None and found[0] is not None
        return (window.gguf_default, found[1]) if fixed and found is not None else found

    def write_hf_size(value: Value, hp: Params) -> Params:
        """Return config.json's {key: window in positions}, and the switch if there is one."""
        switch = {"use_sliding_window": value is not None} if window.switch else {}
        return {window.hf: value, **switch}

    def write_gguf_size(value: Value, hp: Params) -> Params:
        """Return {GGUF key: window in positions, 0 for none}.

        {} where llama.cpp assumes the same.
        """
        if window.gguf_fixed:
            return {} if any(hp["window_layers"]) else {_KEY: 0}
        return {} if value is None and not window.stated else {_KEY: value or 0}

    def read_hf_layers(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: it has a window, key) of config.json.

        None without windows. Raises ArchError for an unknown kind of layer, with or without
        windows.
        """
        kinds = facts.first("layer_types") if window.listed else None
        default = window.layers(facts, hp)
        listed = [] if kinds is None else listed_kinds(*kinds, hp["n_layers"], names)
        if hp["sliding_window"] is None:
            return None
        if kinds is None:
            return default, window.hf
        return tuple(names[kind] for kind in listed), kinds[1]

    def read_gguf_layers(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: it has a window, key) of a GGUF's period or list.

        None without the key, and for a model without windows. Raises ArchError for other values
        than true and false.
        """
        found = facts.first(_KEY + "_pattern")
        if hp["sliding_window"] is None or found is None:
            return None
        value, key = found
        if isinstance(value, int) and not isinstance(value, bool):
            return window_period(whole_number(value, key, 1))(None, hp), key
        listed = sequence(value, key, hp["n_layers"])[: hp["n_layers"]]
        if not all(item in (0, 1) for item in listed):
            raise ArchError(f"{key}: holds other values than true and false")
        return tuple(bool(item) for item in listed), key

    def default_layers(hp: Params) -> PerLayer:
        """Return one boolean per layer: it has a window where no key says so.

        All False without windows.
        """
        on = hp["sliding_window"] is not None
        return window.layers(None, hp) if on else (False,) * hp["n_layers"]

    def assumed_layers(hp: Params) -> PerLayer:
        """Return one boolean per layer: llama.cpp assumes a window without a key.

        All False without windows.
        """
        on = hp["sliding_window"] is not None
        return assumed(None, hp) if on else (False,) * hp["n_layers"]

    def write_hf_layers(value: Value, hp: Params) -> Params:
        """Return config.json's {key: value} for the layers with windows, where it has such keys.

        These are the layers' types, and the older number of first layers without windows. `value`
        has one boolean per layer.
        """
        spelled = {on: name for name, on in names.items()}
        listed = {"layer_types": [spelled[on] for on in value]} if window.listed else {}
        if not (window.switch and window.listed):
            return listed
        return {"max_window_layers": (*value, True).index(True), **listed}

    def write_gguf_layers(value: Value, hp: Params) -> Params:
        """Return {GGUF key: period, or one boolean per layer: a window}.

        {} where llama.cpp assumes the same.
        """
        if value == assumed_layers(hp):
            return {}
        length = (*value, False).index(False) + 1
        if 2 <= length <= len(value) and value == window_period(length)(None, hp):
            return {_KEY + "_pattern": length}
        return {_KEY + "_pattern": list(value)}

    return (
        HyperRule(
            "sliding_window",
            {"hf": (window.hf,), "gguf": (_KEY,)},
            "int",
            read={"hf": read_hf_size, "gguf": read_gguf_size},
            write={"hf": write_hf_size, "gguf": write_gguf_size},
            default=window.hf_default,
            default_in=dict.fromkeys(("gguf", "apr"), window.gguf_default),
            check=unused_size_text,
        ),
        HyperRule(
            "window_layers",
            read={"hf": read_hf_layers, "gguf": read_gguf_layers},
            write={"hf": write_hf_layers, "gguf": write_gguf_layers},
            default=default_layers,
            default_in={"gguf": assumed_layers},
            check=require_causal,
        ),
    )


def _window_size(found: Found) -> Found:
    """Return (window size, key), the size None for null and for 0; None for None."""
    if found is None:
        return None
    value, key = found
    return (whole_number(value, key) or None) if value is not None else None, key


def require_causal(value: Value, facts: Facts, hp: Params) -> str:
    """Return ""; ArchError for embedding models, which attend to later positions too.

    "vision" (gemma4) means the tokens of an image alone.
    """
    found = facts.first("use_bidirectional_attention")
    if found is not None and found[0] and found[0] != "vision":
        raise ArchError(f"{found[1]}: attention is bidirectional; expected a causal model")
    return ""


def rotated_windows(without: bool) -> HyperRule:
    """Return the rule for `rope_layers` where only layers with a window are rotated.

    `without`: whether the layers of a model without windows are rotated.
    """

    def default(hp: Params) -> PerLayer:
        """Return one boolean per layer: it has rope, which are the layers with a window.

        In a model without windows every layer is `without`.
        """
        on = hp["sliding_window"] is not None
        layers: PerLayer = hp["window_layers"] if on else (without,) * hp["n_layers"]
        return layers

    return HyperRule("rope_layers", default=default)


IGNORED_WINDOW = Loss(
    "gguf",
    "sliding_window",
    lambda hp: any(hp["window_layers"]),
    "llama.cpp attends to all earlier positions here: its logits differ beyond the window",
)
