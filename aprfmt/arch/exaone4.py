"""exaone4: norms after attention and MLP, q/k-norms a head; only windowed layers have rope.

Models without windows (1.2B) have rope in every layer. Source: transformers' modeling_exaone4;
the converter's exaone.py, llama.cpp's exaone4.cpp.
"""

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.qwen3 import QK_NORMS
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.sliding_window import Window, rotated_windows, window_period, window_rules
from aprfmt.arch.spec import ArchSpec, BlockSpec, Facts, Loss, Params, PerLayer
from aprfmt.arch.tensor_rows import FUSED, attention, gated_mlp, make_tables, norm, with_model_rows
from aprfmt.arch.value_checks import whole_number
from aprfmt.errors import ArchError

_WINDOWED = 64  # layers of the model that llama.cpp knows windows of
_PATTERN = "sliding_window_pattern"


def lettered_windows(facts: Facts | None, hp: Params) -> PerLayer:
    """Return one boolean a layer: a window in all but every fourth.

    sliding_window_pattern may give another period, or letters ("LLLG": L has a window). Raises
    ArchError for other letters.
    """
    found = None if facts is None else facts.first(_PATTERN)
    if found is None or not isinstance(found[0], str):
        length = 4 if found is None else whole_number(*found)  # 0: no windows
        return window_period(length)(facts, hp) if length else (False,) * hp["n_layers"]
    letters = found[0]
    if not letters or set(letters) - set("LG"):
        raise ArchError(f"{found[1]}: is {letters!r}; expected a period, or letters L and G")
    return tuple(letters[i % len(letters)] == "L" for i in range(hp["n_layers"]))


_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *attention(bias=None, out_bias=None),
        *QK_NORMS,
        *norm("post_attention_norm", "post_attention_layernorm"),
        *gated_mlp(),
        *norm("post_ffw_norm", "post_feedforward_layernorm"),
    ),
    hf_more=FUSED,
)

EXAONE4 = ArchSpec(
    name="exaone4",
    hyper=hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(32),
        hyper_rules.norm_eps(1e-5),
        hyper_rules.fixed("qk_norm", True),
        *window_rules(
            Window(4096, lambda hp: 4096 if hp["n_layers"] == _WINDOWED else None, lettered_windows)
        ),
        rotated_windows(without=True),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(placement="post", qk_norm="head"),
    lost=(
        *losses.common_losses(),
        Loss(
            "gguf",
            "window_layers",
            lambda hp: any(hp["window_layers"]) and hp["n_layers"] != _WINDOWED,
            f"llama.cpp has windows in exaone4 models of {_WINDOWED} layers only, and rotates in "
            "every layer of others",
        ),
    ),
    derived=ROPE_TENSORS,
)
