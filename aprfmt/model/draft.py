"""The draft head (MTP) of a model: finds its tensors and reads them as a one-layer model."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aprfmt.arch import ARCHS
from aprfmt.arch.binding import groups_for
from aprfmt.arch.draft_head import HeadNames, head_hyper, head_role, head_spec
from aprfmt.arch.required_roles import compare_roles
from aprfmt.arch.spec import ArchSpec, HyperParams, split_key
from aprfmt.errors import ArchError
from aprfmt.model.completeness import list_keys
from aprfmt.tensors.view import View

if TYPE_CHECKING:
    from aprfmt.model import Model

EMBED, OUTPUT = "token_embd.weight", "output.weight"
TODO = "take them from the model's source: some tools leave a draft head out by its name"


@dataclass(frozen=True)
class DraftHead:
    """The spec, hyperparameters and tensors of a draft head.

    `roles`: {role key of a one-layer model: View}. `shared`: {role key of the head: role key of
    the model} of tensors that the head does not store but takes from the model.
    """

    spec: ArchSpec
    hyper: HyperParams
    roles: Mapping[str, View]
    shared: Mapping[str, str]


def draft_head(model: "Model") -> DraftHead:
    """Return the model's draft head.

    Raises ArchError if there is none, or if tensors are missing or misshapen.
    """
    style = model.style or ""
    if style not in model.spec.draft:
        raise ArchError(
            f"{model.path}: no draft head of {model.spec.name} is known in {style or 'any'} names; "
            f"expected one of {', '.join(_architectures_with_draft_head())}"
        )
    # The head's tensors: those of the layer after the model's last one.
    spec, hyper = head_spec(model.spec), head_hyper(model.spec, model.hyper)
    count = int(model.hyper["n_layers"])
    renamed = HeadNames(spec, style, count)
    roles = {
        head_role(key): view for key, view in model.roles.items() if split_key(key)[0] == count
    }
    if not roles:
        raise ArchError(f"{model.path}: {_no_draft_head_text(model, spec, renamed)}")
    # With tensors shared with the model, every required one must be there.
    shared = _shared_roles(model, roles)
    found = {key: role.shape for key, role in roles.items()}
    found |= {key: model.roles[theirs].shape for key, theirs in shared.items()}
    judged = compare_roles(spec, hyper, found)
    if judged.missing:
        names = _stored_names_of_roles(spec, style, renamed, judged.missing, hyper)
        raise ArchError(
            f"{model.path}: the draft head lacks {len(judged.missing)} of {judged.expected} "
            f"tensors: {list_keys(names)}; {TODO}"
        )
    for key, shape, wanted in judged.misshapen:
        raise ArchError(
            f"{model.path}: {key} of the draft head has shape {list(shape)}; expected "
            f"{list(wanted)}"
        )
    return DraftHead(spec, hyper, roles, shared)


def is_draft_head(model: "Model", names: Collection[str]) -> bool:
    """Return whether all these names (stored names or role keys) belong to the draft head."""
    if not model.spec.draft or not names:
        return False
    count, draft = int(model.hyper["n_layers"]), {*model.resolution.draft}
    return all(name in draft or (split_key(name)[0] or 0) >= count for name in names)


def _architectures_with_draft_head() -> list[str]:
    """Return the names of the architectures whose draft heads are known."""
    return [name for name in ARCHS if ARCHS[name].draft]


def _shared_roles(model: "Model", roles: Mapping[str, View]) -> dict[str, str]:
    """Return {role key in the draft head: role key in the model} of tensors that both use.

    These are embedding and output head, unless the draft head stores its own. `roles` are those
    that it stores.
    """
    shared = {} if EMBED in roles else {EMBED: EMBED}
    if OUTPUT in roles:
        return shared
    if OUTPUT in model.roles:
        return {**shared, OUTPUT: OUTPUT}
    return shared if shared else {OUTPUT: EMBED}  # tied to the model's embedding, not to its own


def _stored_names_of_roles(
    spec: ArchSpec, style: str, renamed: HeadNames, keys: Sequence[str], hyper: HyperParams
) -> tuple[str, ...]:
    """Return the stored names of the head's tensors with these role keys."""
    groups = groups_for(spec, style, keys, hyper)
    return tuple(renamed.stored_name(name) for group in groups for name in group.stored)


def _no_draft_head_text(model: "Model", spec: ArchSpec, renamed: HeadNames) -> str:
    """Return why a model has no draft head, as a clause.

    It names the key that declares one, or the tensors that a draft head would have.
    """
    own = renamed.own_stored
    stated = _stated_draft_layers(model, spec)
    if stated is None or not stated[1]:
        return f"has no draft head: no tensor such as {own[0]}, and no key that says it has one"
    says = f"{stated[0]} = {stated[1]!r} is said"
    return f"{says}, but no tensor of the draft head is there ({list_keys(own)}); {TODO}"


@dataclass(frozen=True)
class DraftClaim:
    """How many draft layers a key states, and how many are stored; `setting` puts it right.

    `setting` are KEY=VALUE arguments of `aprfmt set`.
    """

    key: str
    stated: int
    stored: int
    setting: tuple[str, ...]

    @property
    def says(self) -> str:
        """Return the contradiction as a clause."""
        many = "s" if self.stated != 1 else ""
        there = str(self.stored) if self.stored else "no tensor of one"
        return f"{self.key} states {self.stated} draft layer{many}, and {there} is stored"


def contradicted_draft(model: "Model") -> DraftClaim | None:
    """Return the claim of draft layers that the stored tensors contradict; None without one.

    Engines that run a draft head look for as many as the key states. A head that no key states is
    no contradiction.
    """
    stated = _stated_draft_layers(model, model.spec) if model.style in model.spec.draft else None
    if stated is None or not isinstance(stated[1], int):
        return None
    (key, value), count = stated, int(model.hyper["n_layers"])
    layers = {split_key(role)[0] for role in model.roles} | {count - 1}
    stored = sum(layer is not None and layer >= count for layer in layers)
    if int(value) == stored:
        return None
    if model.style == "gguf":  # which counts a head among the blocks
        blocks = key.replace("nextn_predict_layers", "block_count")
        setting: tuple[str, ...] = (f"{key}={stored}", f"{blocks}={count + stored}")
    else:
        setting = (f"config.json:{key}={stored}",)
    return DraftClaim(key, int(value), stored, setting)


def _stated_draft_layers(model: "Model", spec: ArchSpec) -> tuple[str, Any] | None:
    """Return (key, value) of the metadata key that states the draft layers; None without one.

    A key of a section is written with its path.
    """
    config = model.config or {}
    inner = config.get("text_config")
    places: list[tuple[str, str, Mapping[str, Any]]] = [
        ("gguf", "", model.metadata),
        ("hf", "", config),
    ]
    if isinstance(inner, Mapping):
        places.append(("hf", "text_config.", inner))
    arch = str(model.metadata.get("general.architecture", ""))
    for style, path, values in places:
        for key in spec.draft[style].counts if style in spec.draft else ():
            name = key.replace("{arch}", arch)
            if values.get(name) is not None:
                return path + name, values[name]
    return None
