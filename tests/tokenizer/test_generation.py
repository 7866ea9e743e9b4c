"""Settings of sampling: generation_config.json, and the keys that a GGUF has for them.

Oracle: gguf-py, which writes those keys from a folder's file, and reads them.
"""

import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.metadata import Metadata

from aprfmt.model import open_model
from aprfmt.tokenizer.generation import generation_settings
from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder

PREFIX = "general.sampling."
FULL: dict[str, Any] = {
    "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05,
}  # fmt: skip
OTHERS: dict[str, Any] = {
    "temperature": 0.6, "mirostat": 2, "mirostat_tau": 4.5, "mirostat_eta": 0.2,
    "penalty_last_n": 64, "xtc_probability": 0.25, "xtc_threshold": 0.1, "sequence": "kpm",
}  # fmt: skip
Make = Callable[[Mapping[str, Any] | None], Path]


@pytest.fixture
def make(demo_model: Path, tmp_path: Path) -> Make:
    """Return a function that makes a folder with a generation_config.json, or without one."""

    def made(settings: Mapping[str, Any] | None) -> Path:
        folder = tmp_path / f"folder{len(list(tmp_path.iterdir()))}"
        shutil.copytree(demo_model, folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        if settings is not None:
            (folder / "generation_config.json").write_text(json.dumps(settings))
        return folder

    return made


def sampling(path: Path) -> dict[str, Any]:
    """Return {key: value} of a GGUF's settings, by gguf-py."""
    fields = gguf.GGUFReader(path).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith(PREFIX)}


def by_gguf_py(folder: Path, path: Path) -> Path:
    """Write a folder as a GGUF whose keys of sampling are those that gguf-py takes from it."""
    ours = path.with_suffix(".ours.gguf")
    assert aprfmt("convert", folder, ours, "--quiet").code == 0
    read = gguf.GGUFReader(ours)
    writer = gguf.GGUFWriter(path, str(read.fields["general.architecture"].contents()))
    for field in read.fields.values():
        kind = field.types[0] if field.types else None
        if kind is None or field.name.startswith(("GGUF.", "general.", "aprfmt.")):
            continue
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    Metadata.load(None, folder, "m").set_gguf_meta_model(writer)
    for tensor in read.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours.unlink()
    return path


@pytest.mark.parametrize("settings", [FULL, OTHERS, {"top_k": 7}, {"do_sample": False}, None])
def test_a_gguf_has_the_keys_that_gguf_py_writes(
    settings: dict[str, Any] | None, make: Make, tmp_path: Path
) -> None:
    """From a folder, through an APR too, and no way changes a setting."""
    folder, apr, made, again = (
        make(settings),
        *(tmp_path / n for n in ("a.apr", "g.gguf", "b.gguf")),
    )
    for source, copy in ((folder, apr), (folder, made), (apr, again)):
        assert aprfmt("convert", source, copy, "--quiet").code == 0
        assert aprfmt("diff", source, copy).code == 0
    theirs = sampling(by_gguf_py(folder, tmp_path / "theirs.gguf"))
    assert sampling(made) == sampling(again) == theirs
    assert len(theirs) == sum(name != "do_sample" for name in settings or {})


@pytest.mark.parametrize("settings", [FULL, OTHERS, {"temperature": 0.0, "top_k": 3}])
def test_a_folder_made_of_a_gguf_has_its_settings(
    settings: dict[str, Any], make: Make, tmp_path: Path
) -> None:
    """Seen red: the folder had no generation_config.json, and a changed one did not come back."""
    theirs = by_gguf_py(make(settings), tmp_path / "theirs.gguf")
    folder, apr = tmp_path / "back", tmp_path / "b.apr"
    for source, copy in ((theirs, folder), (theirs, apr), (apr, tmp_path / "far")):
        to = ("--to", "safetensors") if copy.suffix == "" else ()
        assert aprfmt("convert", source, copy, *to, "--quiet").code == 0
        assert aprfmt("diff", source, copy).out.startswith("equal, ")
    for each in (folder, tmp_path / "far"):
        said = json.loads((each / "generation_config.json").read_text())
        del said["eos_token_id"]  # of the vocabulary's lists
        assert said == {"do_sample": settings["temperature"] > 0, **settings}
    assert aprfmt("set", folder, "temperature=0.25", "-o", tmp_path / "set").code == 0
    assert aprfmt("convert", tmp_path / "set", tmp_path / "set.gguf", "--quiet").code == 0
    assert sampling(tmp_path / "set.gguf")[f"{PREFIX}temp"] == 0.25


def of_theirs(folder: Path, path: Path) -> Path:
    """Write a folder as an APR that embeds the keys of gguf-py, and no generation_config.json."""
    assert aprfmt("convert", by_gguf_py(folder, path.with_suffix(".gguf")), path).code == 0
    return path


@pytest.mark.parametrize("form", ["folder", "gguf", "theirs", "apr", "apr of theirs"])
@pytest.mark.parametrize("swapped", [False, True])
def test_another_setting_is_a_cause_that_a_command_mends(
    form: str, swapped: bool, make: Make, tmp_path: Path
) -> None:
    """Seen red: equal, exit 0, between a folder and any file that embeds or states its settings."""
    good, bad = make(FULL), make({**FULL, "temperature": 0.5})
    forms = {
        "folder": lambda: bad,
        "theirs": lambda: by_gguf_py(bad, tmp_path / "t.gguf"),
        "apr of theirs": lambda: of_theirs(bad, tmp_path / "t.apr"),
    }
    other = forms.get(form, lambda: tmp_path / f"o.{form}")()
    if not other.exists():
        assert aprfmt("convert", bad, other, "--quiet").code == 0
    a, b = (other, good) if swapped else (good, other)
    said = aprfmt("diff", a, b, "--json").json
    assert said["exit"] == 1
    assert [row["name"] for row in said["generation"]] == ["temperature"]
    found = aprfmt("diagnose", a, b, "--json").json
    (cause,) = found["causes"]
    assert (found["exit"], cause["cause"]) == (1, "generation_config")
    words = shlex.split(cause["remedy"]["command"])
    assert words[:2] == ["aprfmt", "set"]
    words[words.index("-o") + 1] = str(tmp_path / f"mended{b.suffix}")
    assert aprfmt(*words[1:]).code == 0
    assert aprfmt("diagnose", a, words[-1]).code == 0


@pytest.mark.parametrize("embeds", ["file", "keys"])
def test_an_apr_changes_what_it_embeds(embeds: str, make: Make, tmp_path: Path) -> None:
    """Seen red: a key of the APR's own that nothing reads."""
    path = tmp_path / "m.apr"
    if embeds == "keys":
        of_theirs(make(FULL), path)
    else:
        assert aprfmt("convert", make(FULL), path).code == 0
    before = path.read_bytes()
    with open_model(path) as model:
        full = generation_settings(model.carried)
    changes = (
        (("temperature=0.5",), {**full, "temperature": 0.5}),
        (("general.sampling.top_k=3",), {**full, "top_k": 3}),
        (("--remove", "min_p"), {key: full[key] for key in full if key != "min_p"}),
    )
    for at, (words, settings) in enumerate(changes):
        done = aprfmt("set", path, *words, "-o", tmp_path / f"{at}.apr", "--json")
        assert (done.code, len(done.json["changes"]), done.err) == (0, 1, "")
        with open_model(tmp_path / f"{at}.apr") as model:
            assert generation_settings(model.carried) == settings
    for words in (("temperature=hot",), ("temperature=1", "general.sampling.temp=2"),
                  ("--remove", "typical_p")):  # fmt: skip
        assert aprfmt("set", path, *words, "-o", tmp_path / "no.apr").code == 2
    assert path.read_bytes() == before and not (tmp_path / "no.apr").exists()


@pytest.mark.parametrize("key", ["general.sampling.temp", "temperature"])
@pytest.mark.parametrize("form", ["gguf", "folder"])
def test_a_setting_is_set_by_either_name(key: str, form: str, make: Make, tmp_path: Path) -> None:
    """Seen red: `temperature` made a key in a GGUF that no reader knows."""
    model = make(FULL)
    out = tmp_path / ("out.gguf" if form == "gguf" else "out")
    if form == "gguf":
        assert aprfmt("convert", model, tmp_path / "m.gguf", "--quiet").code == 0
        model = tmp_path / "m.gguf"
    done = aprfmt("set", model, f"{key}=0.5", "-o", out)
    assert done.code == 0 and "warning" not in done.err
    if form == "gguf":
        assert sampling(out)[f"{PREFIX}temp"] == 0.5 and len(sampling(out)) == len(FULL) - 1
    else:
        said = json.loads((out / "generation_config.json").read_text())
        assert said == {**FULL, "temperature": 0.5}


@pytest.mark.parametrize(
    ("mine", "theirs", "differs"),
    [
        ({**FULL, "repetition_penalty": 1.1}, FULL, False),  # which gguf-py does not write
        ({**FULL, "max_new_tokens": 9}, FULL, False),
        (FULL, None, False),  # an older writer
        ({"do_sample": True}, {"do_sample": True, "temperature": 1.0}, False),  # a default
        ({"do_sample": True}, FULL, True),
        (FULL, {"temperature": 0.7, "top_k": 20, "top_p": 0.8}, True),
        (None, FULL, True),
    ],
)
def test_what_a_gguf_states_is_compared_and_the_rest_is_named(
    mine: dict[str, Any] | None, theirs: dict[str, Any] | None, differs: bool, make: Make,
    tmp_path: Path,
) -> None:  # fmt: skip
    folder, file = make(mine), by_gguf_py(make(theirs), tmp_path / "b.gguf")
    lost = set(mine or {}) - set(theirs or {})
    for pair in ((folder, file), (file, folder)):
        said = aprfmt("diff", *pair, "--json").json
        assert said["exit"] == differs, said
        if lost and not differs:
            (row,) = said["pronounced"]["not_compared"]
            assert row["state"] == "no counterpart" and row["side"] == "AB"[pair[0] == file]
            assert theirs is None or row["why"].endswith(", ".join(lost))


@pytest.mark.parametrize("value", [0.5, None])
def test_two_ggufs_are_compared_by_their_settings(
    value: float | None, make: Make, tmp_path: Path
) -> None:
    files = [
        by_gguf_py(make(said), tmp_path / f"{at}.gguf")
        for at, said in enumerate((FULL, {"temperature": value} if value else None))
    ]
    for pair in (files, files[::-1]):
        assert aprfmt("diff", *pair).code == aprfmt("diagnose", *pair).code == 1
    assert aprfmt("diff", files[0], files[0]).code == 0


@pytest.mark.parametrize("settings", [{"temperature": 0.5}, {}])
def test_settings_of_models_without_a_tokenizer_are_compared(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Seen red: equal, exit 0."""
    for side, said in (("a", FULL), ("b", {**FULL, **settings})):
        folder = llama_folder(tmp_path / side, "BF16")
        (folder / "generation_config.json").write_text(json.dumps(said))
        assert aprfmt("convert", folder, tmp_path / f"{side}.gguf", "--quiet").code == 0
    for a, b in (("a", "b"), ("b", "a"), ("a", "b.gguf"), ("b.gguf", "a")):
        assert aprfmt("diff", tmp_path / a, tmp_path / b).code == bool(settings)
