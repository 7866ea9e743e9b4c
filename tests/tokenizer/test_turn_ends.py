"""The end of a turn against the ids at which a generation stops; transformers is the judge."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aprfmt.arch.aliases import CALLED
from aprfmt.errors import FormatError
from aprfmt.model import open_model
from aprfmt.tokenizer.carriers import to_gguf
from aprfmt.tokenizer.engine_defaults import CLASS_EOS
from aprfmt.tokenizer.identity import tokenizer_facts
from aprfmt.tokenizer.keys import TOKENS
from aprfmt.tokenizer.loading import load_tokenizer, metadata_stop_ids
from aprfmt.tokenizer.turn_ends import NOWHERE, UnstoppedTurn, find_unstopped_turn
from tests.cli.run import aprfmt
from tests.tokenizer.fake import added_ids, fake, folder_model, without_json

END, TEXT_END = "<|im_end|>", "<|endoftext|>"


def edit(folder: Path, name: str, **values: Any) -> None:
    """Set keys of a JSON file of a folder; None takes one out."""
    said = json.loads((folder / name).read_text()) | values
    (folder / name).write_text(json.dumps({k: v for k, v in said.items() if v is not None}))


def stops(folder: Path, value: Any) -> None:
    edit(folder, "generation_config.json", eos_token_id=value)


def of_config(folder: Path, value: Any) -> None:
    (folder / "generation_config.json").unlink()
    edit(folder, "config.json", eos_token_id=value)


def base_model(folder: Path, value: Any) -> None:
    stops(folder, value)
    edit(folder, "tokenizer_config.json", eos_token=TEXT_END)


# What stops a generation elsewhere than the template ends a turn -> (edit, the file it names).
WRONG: dict[str, tuple[Callable[[Path, Any], None], str, bool]] = {
    "one id": (stops, "generation_config.json", False),
    "a list": (lambda folder, i: stops(folder, [i]), "generation_config.json", False),
    "config.json alone": (of_config, "config.json", False),
    "a base model's": (base_model, "generation_config.json", True),
}


@pytest.fixture
def folder(demo_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_model, tmp_path / "m"))


@pytest.mark.parametrize("case", WRONG)
def test_a_turn_that_nothing_stops_is_named_everywhere(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, file, base = WRONG[case]
    ids = added_ids(folder)
    change(folder, ids[TEXT_END])
    with open_model(folder) as model:
        found = find_unstopped_turn(model.carried)
    assert found is not None and (found.text, found.id) == (END, ids[END])
    assert found.place == f"{file}: eos_token_id" and found.stops == (ids[TEXT_END],)
    assert found.contradicted is not base
    says = f"{END!r} ({ids[END]})"
    (line,) = aprfmt("inspect", folder, "--json").json["summary"]["unusual"]
    assert says in line and f"set eos_token_id to [{ids[TEXT_END]}, {ids[END]}]" in line
    rows = {row["name"]: row for row in aprfmt("validate", folder, "--json").json["checks"]}
    assert rows["special_ids"]["outcome"] == ("PASS" if base else "FAIL")
    assert says in aprfmt("validate", folder).out
    ran = aprfmt("run", folder, "--chat", "What is 2+2?", "--max-tokens", "2")
    assert ran.code == 0 and says in ran.err
    quiet = aprfmt("run", folder, "--prompt", "What", "--max-tokens", "1")
    assert "chat template" not in quiet.err
    asked = aprfmt("qa", folder, "--only", "metadata")
    assert asked.code == (0 if base else 1), asked.out
    if base:
        return
    # What is said next mends both files: some readers take one, some the other.
    monkeypatch.chdir(folder.parent)
    (said,) = (row for row in aprfmt("validate", "m").out.splitlines() if row.startswith("next: "))
    assert aprfmt(*shlex.split(said)[2:]).code == 0, said
    assert aprfmt("validate", "m-fixed").code == 0
    for path in folder.parent.glob("m-fixed/*config.json"):
        stated = json.loads(path.read_text()).get("eos_token_id", ids[END])
        assert ids[END] in (stated if isinstance(stated, list) else [stated]), path


@pytest.mark.parametrize("wrong", [2, 99999])
def test_an_end_that_is_no_token_or_ordinary_text_does_not_stay(wrong: int, folder: Path) -> None:
    """What mends the end of a turn keeps ids of tokens split off whole alone."""
    ids = added_ids(folder)
    stops(folder, [wrong, ids[TEXT_END]])
    edit(folder, "config.json", eos_token_id=wrong)
    with open_model(folder) as model:
        found = find_unstopped_turn(model.carried)
    assert found is not None and found.stops == (wrong, ids[TEXT_END])[:: 1 if wrong < 9 else -1]
    assert found.remedy.endswith(
        f"set eos_token_id to [{ids[TEXT_END]}, {ids[END]}], in config.json to [{ids[END]}]"
    )
    assert f"config.json:eos_token_id=[{ids[END]}]" in found.assignments


@pytest.mark.parametrize("case", [None, *WRONG])
def test_a_generation_stops_as_in_transformers(case: str | None, folder: Path) -> None:
    """At the ids of generation_config.json, else of config.json, and at no others."""
    from transformers import AutoConfig, GenerationConfig

    if case is not None:
        WRONG[case][0](folder, added_ids(folder)[TEXT_END])
    if (folder / "generation_config.json").is_file():
        theirs = GenerationConfig.from_pretrained(folder).eos_token_id
    else:
        theirs = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder)).eos_token_id
    wanted = frozenset(theirs if isinstance(theirs, list) else [theirs])
    with open_model(folder) as model:
        assert load_tokenizer(model).stop_ids == metadata_stop_ids(model) == wanted


@pytest.mark.parametrize(
    "name", sorted({name for row in CALLED.values() for name in row.get("hf", ())})
)
def test_the_class_of_a_configuration_has_its_end(name: str) -> None:
    """Of every model type that is known here. Seen red: a type that has no row."""
    from transformers import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        assert name not in CLASS_EOS
        return
    theirs = getattr(CONFIG_MAPPING[name]().get_text_config(), "eos_token_id", None)
    wanted = frozenset(theirs if isinstance(theirs, list) else [theirs]) - {None}
    assert CLASS_EOS.get(name, frozenset()) == wanted


TURN = "{%% for m in messages %%}[{{ m['content'] }}%s{%% endfor %%}"


@pytest.mark.parametrize(
    "template",
    [
        None,
        TURN % END,
        TURN % "{{ eos_token }}",
        TURN % ("\\n\\n " + END),
        TURN % "",
        TURN % " the end",
        "{{ raise_exception('no') }}",
        "{% broken",
    ],
)
@pytest.mark.parametrize("quick", [True, False])
def test_a_turn_that_stops_or_has_no_end_is_none(
    template: str | None, quick: bool, folder: Path
) -> None:
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    with open_model(folder) as model:
        assert find_unstopped_turn(model.carried, quick=quick) is None


@pytest.mark.parametrize("quick", [True, False])
def test_lists_stop_at_their_ids_and_at_known_ends(quick: bool, demo_model: Path) -> None:
    """llama.cpp takes eos, eot, eom, and control tokens of texts that it knows."""
    gguf = without_json(to_gguf(folder_model(demo_model)))
    gguf.pop("aprfmt.files", None)
    key = "tokenizer.ggml.eos_token_id"
    ids = added_ids(demo_model)
    gguf[key] = ids[TEXT_END]
    gguf.pop("tokenizer.ggml.eot_token_id", None)
    assert find_unstopped_turn(fake("gguf", gguf).carried, quick=quick) is None
    tokens = fake("gguf", gguf).carried.list_value(TOKENS, str) or []
    renamed = ["<|fin|>" if t == END else t for t in tokens]
    gguf["tokenizer.ggml.tokens"] = renamed
    gguf["tokenizer.chat_template"] = str(fake("gguf", gguf).carried.chat_template()).replace(
        END, "<|fin|>"
    )
    found = find_unstopped_turn(fake("gguf", gguf).carried, quick=quick)
    assert found is not None and found.id == ids[END] and "eot_token_id" in found.remedy
    gguf["tokenizer.ggml.eot_token_id"] = ids[END]
    assert find_unstopped_turn(fake("gguf", gguf).carried, quick=quick) is None


def test_lists_that_cannot_be_read_leave_inspect_whole(demo_model: Path) -> None:
    gguf = without_json(to_gguf(folder_model(demo_model)))
    gguf["tokenizer.chat_template"] = TURN % "<|fin|>"
    gguf["tokenizer.ggml.token_type"] = "no list"
    model = fake("gguf", gguf)
    assert "turn_end" not in tokenizer_facts(model, quick=True)
    with pytest.raises(FormatError, match="token_type"):
        find_unstopped_turn(model.carried)


def test_config_json_is_set_too_where_it_lacks_the_end(folder: Path) -> None:
    ids = added_ids(folder)
    end, other = ids[END], ids[TEXT_END]
    stops(folder, other)
    for said, beside in (
        (None, ()),
        (end, ()),
        ([end, other], ()),
        (other, (other,)),
        ([other, 3], (other, 3)),
    ):
        edit(folder, "config.json", eos_token_id=said)
        with open_model(folder) as model:
            found = find_unstopped_turn(model.carried)
        assert found is not None and found.config_ids == beside, said


def test_what_is_set_follows_from_the_place_that_lacks_the_end() -> None:
    def turn(place: str, stops: tuple[int, ...] = (7,), **more: Any) -> UnstoppedTurn:
        return UnstoppedTurn(5, "<end>", stops, place, False, **more)

    listed = "which is not in {} [7]"
    gguf = turn("tokenizer.ggml.eos_token_id", embedded=True)
    assert gguf.says.endswith(listed.format("tokenizer.ggml.eos_token_id"))
    assert gguf.remedy == "set tokenizer.ggml.eot_token_id to 5"
    assert gguf.assignments == ["tokenizer.ggml.eot_token_id=5"]
    file = "generation_config.json"
    key = f"{file}: eos_token_id"
    assert turn(key).remedy == f"in {file}, set eos_token_id to [5, 7]"
    assert turn(key).assignments == [f"{file}:eos_token_id=[5, 7]"]
    assert turn(key, (2, 7)).says.endswith(f"is not in {key} [2, 7]")
    assert turn(key, embedded=True).assignments == []
    both = turn(key, config_ids=(3,))
    assert both.remedy == f"in {file}, set eos_token_id to [5, 7], in config.json to [3, 5]"
    assert both.assignments == [f"{file}:eos_token_id=[5, 7]", "config.json:eos_token_id=[3, 5]"]
    text = turn("tokenizer_config.json: eos_token")
    assert text.remedy == "in tokenizer_config.json, set eos_token to '<end>'"
    assert text.assignments == ["tokenizer_config.json:eos_token=<end>"]
    nowhere = turn(NOWHERE)
    assert nowhere.says.startswith(f"{NOWHERE}, and transformers takes its class's 7;")
    assert nowhere.says.endswith("the chat template ends turns with '<end>' (5)")
    assert "transformers stops nowhere;" in turn(NOWHERE, ()).says
    assert nowhere.remedy == f"in {file}, set eos_token_id to [5, 7]"
    assert nowhere.assignments == ["config.json:eos_token_id=[5, 7]"]
