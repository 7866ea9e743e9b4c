"""Turns that no generation ends: what is said of them, and what mends them."""

from typing import Any

from aprfmt.tokenizer.turn_ends import NOWHERE, UnstoppedTurn


def turn(place: str, stops: tuple[int, ...] = (2,), **more: Any) -> UnstoppedTurn:
    return UnstoppedTurn(9, "<|end|>", stops, place, False, **more)


GENERATION = "generation_config.json: eos_token_id"
GGUF = "tokenizer.ggml.eos_token_id"
TEXT = "tokenizer_config.json: eos_token"


def test_a_turn_that_does_not_stop_is_told_with_the_ids_that_stop() -> None:
    ends = "the chat template ends turns with '<|end|>' (9)"
    assert turn(GENERATION, (2, 5)).says == f"{ends}, which is not in {GENERATION} [2, 5]"
    assert turn(GGUF).says == f"{ends}, which is not in {GGUF} [2]"
    takes = f"{NOWHERE}, and transformers takes its class's 2, 3; {ends}"
    assert turn(NOWHERE, (2, 3)).says == takes
    assert turn(NOWHERE, ()).says == f"{NOWHERE}, and transformers stops nowhere; {ends}"


def test_what_mends_a_turn_is_set_where_its_readers_look() -> None:
    """With the ids that stopped already; not where the files are embedded in another."""
    for found, remedy, assignments in (
        (turn(GGUF), "set tokenizer.ggml.eot_token_id to 9", ["tokenizer.ggml.eot_token_id=9"]),
        (
            turn(NOWHERE, (12, 3)),
            "in generation_config.json, set eos_token_id to [3, 9, 12]",
            ["config.json:eos_token_id=[3, 9, 12]"],
        ),
        (
            turn(GENERATION, (12,)),
            "in generation_config.json, set eos_token_id to [9, 12]",
            ["generation_config.json:eos_token_id=[9, 12]"],
        ),
        (
            turn(GENERATION, (12,), config_ids=(12, 4)),
            "in generation_config.json, set eos_token_id to [9, 12], in config.json to [4, 9, 12]",
            ["generation_config.json:eos_token_id=[9, 12]", "config.json:eos_token_id=[4, 9, 12]"],
        ),
        (
            turn(TEXT),
            "in tokenizer_config.json, set eos_token to '<|end|>'",
            ["tokenizer_config.json:eos_token=<|end|>"],
        ),
    ):
        assert (found.remedy, found.assignments) == (remedy, assignments)
    assert turn(GENERATION, embedded=True).assignments == []
    assert turn(GGUF, embedded=True).assignments == ["tokenizer.ggml.eot_token_id=9"]
