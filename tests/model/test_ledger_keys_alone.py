"""Keys of config.json in a model's ledger: what each says, by the sections that they stand in."""

from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.arch import other_keys
from aprfmt.model import ledger


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function from a configuration to {path: (reading, what for)} of its keys."""
    row = SimpleNamespace(reading="known", source="another program", as_stored=True, needed=True)
    monkeypatch.setattr(other_keys, "known_rows", lambda style: {"known": row})

    def reading(report: Any, path: str, spec: Any, style: str, prefix: str) -> Any:
        assert (style, prefix) == ("hf", "")
        if path.endswith("hidden_size"):
            return "hyperparameter", "hidden_size"
        return ("unread", "") if path.endswith("odd") else None

    monkeypatch.setattr(ledger, "_key_reading", reading)

    def told(
        config: Any, *, section: str = "", attends: str = "causal", spec: bool = True, **more: Any
    ) -> dict[str, tuple[str, str]]:
        block = SimpleNamespace(attends=attends)
        self: Any = SimpleNamespace(
            _is_adapter=False,
            _is_claim_false=more.get("false_claim", False),
            model=SimpleNamespace(config=config),
            spec=SimpleNamespace(block=block, section=section) if spec else None,
            of_config=None,
            _tower_key_reading=lambda path: more.get("towers", {}).get(path),
            _meaning=lambda part, value: None,
        )
        items = list(ledger._LedgerBuilder.config_keys(self))
        assert all(item.kind == "config key" for item in items)
        for item in items:
            known = item.name.removeprefix(f"{section}.").startswith("known")
            assert item.needed is item.as_stored is (known or item.reading == "contradicted")
        return {item.name: (item.reading, item.of) for item in items}

    return told


OUTSIDE = "without effect", "of the whole model, of which this is a tower"


@pytest.mark.parametrize("section", ["vision_config", "audio_config"])
def test_keys_outside_of_a_towers_section_are_the_whole_models(keys: Any, section: str) -> None:
    """Where the section is there: a tower's own configuration has none."""
    config = {section: {"hidden_size": 8, "odd": 1}, "odd": 2, "known": 3, "other": {"odd": 4}}
    assert keys(config, section=section) == {
        f"{section}.hidden_size": ("hyperparameter", "hidden_size"),
        f"{section}.odd": ("unread", ""),
        "odd": OUTSIDE,
        "known": ("known", "another program"),
        "other.odd": OUTSIDE,
    }
    alone = {"hidden_size": 8, "odd": 2}
    assert keys(alone, section=section)["odd"] == ("unread", "")
    assert keys({section: 3, "odd": 2}, section=section)["odd"] == ("unread", "")


def test_keys_beside_a_text_models_section_are_read_or_not(keys: Any) -> None:
    config = {"text_config": {"odd": 1, "known": 2}, "odd": 2, "empty": {}}
    assert keys(config, section="text_config") == {
        "text_config.odd": ("unread", ""),
        "text_config.known": ("known", "another program"),
        "odd": ("unread", ""),
        "empty": ("without effect", "an empty object"),
    }
    assert keys({"odd": 1}, spec=False) == {"odd": ("unread", "")}
    assert keys(None) == {}
    towers = {"vision_config.odd": ("hyperparameter", "of the tower")}
    found = keys({"vision_config": {"odd": 1, "new": 2}}, towers=towers)
    assert found == {
        "vision_config.odd": ("hyperparameter", "of the tower"),
        "vision_config.new": ("unread", ""),
    }


def test_a_claim_of_packed_weights_is_a_part_or_is_false(keys: Any) -> None:
    config = {"quantization_config": {"bits": 4}, "odd": 1}
    assert keys(config)["quantization_config.bits"] == ("part of", "the claim of packed weights")
    found = keys(config, false_claim=True)
    assert found["quantization_config.bits"] == ("contradicted", ledger._NOT_PACKED)
    assert found["odd"] == ("unread", "")


def test_attention_that_is_not_causal_is_read_where_a_model_attends_both_ways(keys: Any) -> None:
    key = other_keys.CAUSAL_KEY
    unread = "unread", "attention that is not causal"
    for spec in (True, False):
        assert keys({key: False}, spec=spec)[key] == unread
        assert keys({key: True}, spec=spec)[key] == ("unread", "")
    assert keys({key: False}, attends="both")[key] == ("unread", "")


def test_a_nested_key_is_not_known_by_its_last_part(keys: Any) -> None:
    """Seen red: `other.known` was what `known` is; below `known` a row speaks for all."""
    said = keys({"other": {"known": 1}, "known": {"part": 2}})
    assert said["other.known"] == ("unread", "")
    assert said["known.part"] == ("known", "another program")
