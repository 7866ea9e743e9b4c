"""When a change of names or of a key is taken for the reason of what misses, rule by rule.

Seen red: renames that find one of ten tensors, names that a third of a file has, one wrong shape
taken for a wrong key.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from aprfmt.model import relation_search
from aprfmt.model.renames import Rename


def resolution(missing: int = 0, misshapen: int = 0, **fields: Any) -> Any:
    """Return a resolution that lacks so many of ten roles, with so many wrong shapes."""
    coverage = SimpleNamespace(
        missing=tuple(f"L{i}.ffn_up.weight" for i in range(missing)), accepted=(),
        misshapen=("x",) * misshapen, required=("x",) * 10,
    )  # fmt: skip
    given = {
        "unread_roles": (),
        "unclaimed": (),
        "draft": (),
        "roles": {},
        "hyper": {"n_layers": 2},
    }
    return SimpleNamespace(coverage=coverage, **{**given, **fields})


@pytest.mark.parametrize(
    ("before", "after", "better"),
    [
        ((10, 0), (5, 0), True), ((10, 0), (6, 0), False), ((1, 0), (0, 0), True),
        ((2, 0), (2, 0), False), ((10, 1), (0, 1), True), ((10, 1), (0, 2), False),
        (None, (5, 0), True), (None, (6, 0), False),
    ],
)  # fmt: skip
def test_renames_find_half_of_what_misses_and_spoil_no_shape(
    before: tuple[int, int] | None, after: tuple[int, int], better: bool
) -> None:
    best = None if before is None else resolution(*before)
    assert relation_search._is_better_reading(resolution(*after), best) is better


def test_one_wrong_shape_is_no_wrong_key() -> None:
    contradicts = relation_search._contradicts_config
    assert not contradicts(resolution(misshapen=1)) and contradicts(resolution(misshapen=2))
    more = {"L2.ffn_up.weight": None}
    assert contradicts(resolution(roles=more))
    assert not contradicts(resolution(roles=more, draft=("d",)))
    assert not contradicts(resolution(roles=more, unclaimed=("u",)))


@pytest.mark.parametrize("said", [None, SimpleNamespace(value=False)])
def test_a_head_is_no_table_where_no_key_ties_them(said: Any) -> None:
    found = resolution(roles={"output.weight": SimpleNamespace(names=("lm_head.weight",))})
    found.coverage.missing = ("token_embd.weight",)
    overruled = {} if said is None else {"tied_embeddings": said}
    found.report = SimpleNamespace(overruled=overruled)
    model: Any = object()  # of which nothing is read
    assert relation_search._resolve_shared_table(model, model, found) is None


class _Names(list[str]):
    """The stored names of a model, which has a configuration and a path."""

    config: ClassVar[dict[str, Any]] = {"model_type": "qwen2"}
    metadata: ClassVar[dict[str, str]] = {}
    path = "m"


@pytest.mark.parametrize(("below", "told"), [(1, False), (2, False), (3, True), (4, True)])
def test_a_prefix_is_that_of_most_names(
    below: int, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"model.language_model.layers.{i}.x" if i < below else f"model.y{i}" for i in range(4)]
    found = _nested(names)
    monkeypatch.setattr(relation_search, "replace", lambda old, **fields: fields["relations"])
    monkeypatch.setattr(relation_search, "rename_relation", lambda path, rules, *_: rules)
    said: Any = relation_search._note_nested_names(_Names(names), found)  # type: ignore[arg-type]
    assert (said is not found) is told
    if told:
        assert said == ([Rename("model.language_model.", "model.")],)


def _nested(names: Sequence[str]) -> Any:
    views = {name: SimpleNamespace(names=(name,)) for name in names}
    spec = SimpleNamespace(section="", name="qwen2")
    return SimpleNamespace(style="hf", roles=views, relations=(), spec=spec)


@pytest.mark.parametrize(("left", "helps"), [(2, False), (1, True), (0, True)])
def test_a_towers_names_are_changed_where_that_finds_more(
    left: int, helps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = _Names(["visual.a", "visual.b"])
    monkeypatch.setattr(relation_search, "has_towers", lambda config: True)
    monkeypatch.setattr(relation_search, "tower_rule", lambda *_: Rename("visual.", "vision."))
    monkeypatch.setattr(relation_search, "replace", lambda old, **fields: fields["relations"])
    monkeypatch.setattr(relation_search, "rename_relation", lambda path, rules, *_: rules)
    found: Any = SimpleNamespace(unclaimed=["x", "y"], style="hf", relations=())
    made: Any = SimpleNamespace(unclaimed=["x"] * left, relations=())
    said: Any = relation_search._resolve_towers(names, lambda *_: made, found)  # type: ignore[arg-type]
    assert (said is not found) is helps
