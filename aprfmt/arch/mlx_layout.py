"""What MLX's converters store differently from Hugging Face: the one table of their conventions.

| what | Hugging Face | MLX |
| --- | --- | --- |
| experts | one tensor each, or gate and up joined | stacked, gate, up and down apart, other names |
| w1, w3, w2 of lfm2's MLPs | as they are called | gate_proj, up_proj, down_proj |
| shared_mlp of a dense granite hybrid | gate and up joined | mlp, gate, up and down apart |
| MLA's kv_b | one matrix | cut by head: embed_q, transposed, and unembed_out |
| kernels of convolutions | [channels, 1, taps] | [channels, taps, 1] (`Depthwise` reads both) |
| norms of (1 + w) in files with such kernels | w | 1 + w, where the kernels are MLX's |

Gemma's norms are w in both. MLX's names are read as well as those of Hugging Face and never
written, and the norms go by the kernels, as they do in mlx-lm itself. Source: mlx-lm at d78bf58,
`sanitize` of models/*.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from aprfmt.arch.joining_steps import KvB
from aprfmt.arch.layout_steps import Added
from aprfmt.arch.name_templates import strip_prefix
from aprfmt.arch.recurrent_steps import Depthwise
from aprfmt.arch.spec import ArchSpec, Binding

if TYPE_CHECKING:
    from aprfmt.arch.binding import BoundNames

STYLE = "hf"  # the naming style that MLX's names belong to
_PROJECTIONS: Mapping[str, tuple[str, ...]] = {  # fc1 and fc2 of experts without a gate
    "gate": ("gate_proj",),
    "up": ("up_proj", "fc1"),
    "down": ("down_proj", "fc2"),
}
_STACKS = ("switch_mlp", "experts", "experts.switch_glu")
# The component of Hugging Face's names after which the experts of a block begin.
_EXPERTS = ("experts", "input_linear", "output_linear")
_RENAMED = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_SHARED = "shared_mlp"


def mlx_bindings(spec: ArchSpec, style: str) -> tuple[Binding, ...]:
    """Return the bindings under MLX's names, without those that the tables of `spec` have.

    Empty for another style than "hf".
    """
    if style != STYLE:
        return ()
    known = {
        strip_prefix(name, style) for row in spec.bindings.get(style, ()) for name in row.stored
    }
    found: list[Binding] = []
    for row in (
        *_stacked_expert_bindings(spec),
        *_renamed_mlp_bindings(spec),
        *_mla_bindings(spec),
    ):
        names = {strip_prefix(name, style) for name in row.stored}
        if known.isdisjoint(names):
            known |= names
            found.append(row)
    return tuple(found)


def _stacked_expert_bindings(spec: ArchSpec) -> Iterator[Binding]:
    """Yield bindings of stacked experts for each block that has experts."""
    roles = {rule.role for rule in spec.tensors if "_exps." in rule.role}
    blocks: dict[str, None] = {}
    for row in spec.bindings.get(STYLE, ()):
        if roles.isdisjoint(row.roles):
            continue
        for name in row.stored:
            parts = name.split(".")
            at = next((k for k, part in enumerate(parts) if part in _EXPERTS), None)
            if at is not None:
                blocks[".".join(parts[:at])] = None
    # MLX names the stack in one of three ways, and its projections in several.
    for block in blocks:
        for role in sorted(roles):
            base, _, kind = role.rpartition(".")
            own = _PROJECTIONS.get(base.removeprefix("ffn_").removesuffix("_exps"), ())
            for stack in _STACKS if kind in ("weight", "bias") else ():
                for name in own:
                    yield Binding((f"{block}.{stack}.{name}.{kind}",), (role,))


def _renamed_mlp_bindings(spec: ArchSpec) -> Iterator[Binding]:
    """Yield bindings of MLPs without experts under MLX's names."""
    for row in spec.bindings.get(STYLE, ()):
        parts = row.stored[0].split(".")
        if len(row.stored) > 1 or len(parts) < 3 or "experts" in parts:
            continue
        if parts[-2] in _RENAMED:
            made = (*parts[:-2], _RENAMED[parts[-2]], parts[-1])
            yield replace(row, stored=(".".join(made),))
        if parts[-3] == _SHARED and not any("_shexp" in role for role in row.roles):
            above = ".".join(parts[:-3])
            names = ("gate_proj", "up_proj") if len(row.roles) > 1 else ("down_proj",)
            for name, role in zip(names, row.roles, strict=True):
                yield Binding((f"{above}.mlp.{name}.{parts[-1]}",), (role,))


def _mla_bindings(spec: ArchSpec) -> Iterator[Binding]:
    """Yield bindings of MLA's key and value matrices, which have the layout of GGUF's."""
    for row in spec.bindings.get("gguf", ()):
        if any(isinstance(step, KvB) for step in row.steps):
            below = "model.layers.{L}.self_attn."
            yield replace(row, stored=(f"{below}embed_q.weight", f"{below}unembed_out.weight"))


def with_mlx_norms(
    spec: ArchSpec, style: str, bound: "BoundNames", shapes: Mapping[str, tuple[int, ...]]
) -> "BoundNames":
    """Return `bound`, the norms of a file of MLX's with the layout step 1 + w added.

    Other files' are returned unchanged. `style` is the naming style of `bound`, `shapes` are the
    stored shapes by name. A file is MLX's if all its convolution kernels have MLX's shape: mlx-lm
    adds the 1 to all norms of a file in which a single kernel has another shape.
    """
    if style != STYLE:
        return bound
    kernels = [
        shapes.get(name, ())
        for group in bound.groups
        if any(isinstance(step, Depthwise) for step in group.binding.steps)
        for name in group.stored
    ]
    if not kernels or not all(len(at) == 3 and at[2] == 1 < at[1] for at in kernels):
        return bound
    added = {
        role: step
        for row in spec.bindings.get("gguf", ())
        for role in row.roles
        for step in row.steps
        if isinstance(step, Added)
    }
    groups = []
    for group in bound.groups:
        step = added.get(group.binding.roles[0])
        if step is not None and len(group.roles) == 1:
            steps = (step, *group.binding.steps)
            group = replace(group, binding=replace(group.binding, steps=steps))
        groups.append(group)
    return replace(bound, groups=tuple(groups))
