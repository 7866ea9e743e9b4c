"""Merging an adapter, held to PEFT's own merge; and whether a model is such a merge."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import aprfmt
from aprfmt.adapters import answer_merge, convert_adapter, convert_merged, place_pairs, read_adapter
from aprfmt.errors import ConversionError, FormatError, UnsupportedError
from tests.adapters.golden import CASES, write
from tests.cli.run import aprfmt as command
from tests.conftest import ROOT
from tests.conversion.folders import tensors_of, write_mixed


@pytest.mark.parametrize("case", CASES)
def test_merged_as_peft_merges(case: str, tmp_path: Path) -> None:
    """Each weight that PEFT changes, and no other; apart by the order of its float32 sums."""
    base, adapter, expected = write(tmp_path, case)
    done = command(
        "convert", base, tmp_path / "out", "--to", "safetensors", "--adapter", adapter, "--json"
    )
    assert done.code == 0, done.err
    with aprfmt.open(tmp_path / "out") as merged, aprfmt.open(base) as before:
        changed = {n for n in before if bytes(before[n].raw()) != bytes(merged[n].raw())}
        assert changed == set(expected)
        for name, values in expected.items():
            found = merged[name].numpy()
            unit = 2.0**-7 if case == "half" else 2.0**-21
            large = float(np.abs(found).max()) * unit
            np.testing.assert_allclose(found, values.astype(np.float32), rtol=0, atol=large)


@pytest.mark.parametrize("case", ["plain", "rank_stabilised", "dora", "half"])
def test_in_float64_the_merge_is_the_formula_rounded_once(case: str, tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, case)
    opened, found = read_adapter(adapter)
    convert_merged(base, tmp_path / "out", adapter, to="safetensors")
    with opened, aprfmt.open(base) as before, aprfmt.open(tmp_path / "out") as merged:
        pairs = place_pairs(found, before)
        assert len(pairs) == len(found.pairs) > 1
        for name, pair in pairs.items():
            exact = before[name].numpy().astype(np.float64) + pair.scale * (pair.b @ pair.a)
            if pair.magnitude is not None:
                exact *= (pair.magnitude / np.linalg.norm(exact, axis=1))[:, None]
            unit = 2.0**-8 if case == "half" else 2.0**-22
            np.testing.assert_allclose(merged[name].numpy(), exact, rtol=unit, atol=unit / 16)


def _merge(base: Path, out: Path, adapter: Path) -> None:
    convert_merged(base, out, adapter, to="safetensors")


def test_once_twice_and_not_at_all_are_told_apart(tmp_path: Path) -> None:
    base, adapter, expected = write(tmp_path, "plain")
    once, twice = tmp_path / "once", tmp_path / "twice"
    _merge(base, once, adapter)
    with pytest.raises(ConversionError, match="is merged into it"):
        _merge(once, twice, adapter)
    rows = tensors_of(once)
    write_mixed(once / "model.safetensors", rows)  # without the record of what was merged
    _merge(once, twice, adapter)
    for copy, word, code in ((once, "once", 0), (twice, "twice", 1), (base, "not at all", 1)):
        done = command("diff", base, copy, "--adapter", adapter, "--json")
        said = done.json["adapter"]
        assert (done.code, said["found"], said["merged"]) == (code, word, not code)
        assert len(said["weights"]) == len(expected) and not said["others"]
        assert word in command("diff", base, copy, "--adapter", adapter).out


@pytest.mark.parametrize("encoding", ["", "F32", "F16", "BF16"])
@pytest.mark.parametrize("case", ["plain", "half"])
def test_what_the_written_type_takes_of_a_merge_is_said(
    case: str, encoding: str, tmp_path: Path
) -> None:
    """The oracle is float64: the sum, against what was written. In F32 nothing is taken."""
    base, adapter, _ = write(tmp_path, case)
    held = {"encoding": encoding} if encoding else {}
    made = convert_merged(base, tmp_path / "out.gguf", adapter, **held)
    opened, found = read_adapter(adapter)
    lost = size = 0.0
    with opened, aprfmt.open(base) as before, aprfmt.open(tmp_path / "out.gguf") as merged:
        types = set()
        for name, pair in place_pairs(found, before).items():
            (key,) = before.roles_of[name]
            plain, written = (one.roles[key].numpy().astype(np.float64) for one in (before, merged))
            change = pair.scale * (pair.b @ pair.a)
            lost += float(np.square(written - plain - change).sum())
            size += float(np.square(change).sum())
            types.add(merged.roles[key].encoding)
    said = [note.text for note in made.notes if note.key == "merge_rounding"]
    if types == {"F32"}:  # the sum itself, whatever the base's type
        assert not said and made.lossless and lost <= 1e-9 * size
        return
    (text,) = said
    (kind,) = types
    assert float(text.split()[2]) == pytest.approx(np.sqrt(lost / size), rel=0.1), text
    assert text.startswith(f"{kind} takes ") and not made.lossless
    assert made.count("lossy") >= len(found.pairs)
    done = command("diff", base, tmp_path / "out.gguf", "--adapter", adapter)
    assert done.code == 0 and ": once (" in done.out


@pytest.mark.parametrize("share", [0.0, 1e-9])
def test_an_adapter_of_which_nothing_is_left_is_not_decided(share: float, tmp_path: Path) -> None:
    """Seen red: a change of zero in float32 taken for a merge that was made."""
    from safetensors.numpy import load_file, save_file

    base, adapter, _ = write(tmp_path, "half")
    path = adapter / "adapter_model.safetensors"
    held = load_file(path)
    save_file({n: v * np.float32(share if "lora_B" in n else 1) for n, v in held.items()}, path)
    done = command("diff", base, base, "--adapter", adapter, "--json")
    said = done.json["adapter"]
    word = "once or not at all" if share else "nothing to merge"
    assert (done.code, said["found"], said["merged"]) == (2, word, False)


def test_the_checksum_of_the_base_is_asked_for_through_the_merge(tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, "plain")
    stored = tmp_path / "base.apr"
    aprfmt.convert(base, stored)

    def said(name: str) -> list[str]:
        made = convert_merged(stored, tmp_path / name, adapter, to="safetensors")
        return [note.text for note in made.notes if note.key == "checksum"]

    assert not said("sound")
    data = bytearray(stored.read_bytes())
    data[-1] ^= 1
    stored.write_bytes(data)
    (text,) = said("spoilt")
    assert "the file is damaged" in text


@pytest.mark.parametrize("case", CASES)
def test_what_peft_merged_is_once_and_one_bit_of_it_is_noticed(case: str, tmp_path: Path) -> None:
    """PEFT's sums end elsewhere than ours; where they lie halfway, its rounding takes the other."""
    base, adapter, expected = write(tmp_path, case)
    rows = tensors_of(base)
    for name, values in expected.items():
        rows[name] = (*rows[name][:2], values.tobytes())
    shutil.copytree(base, tmp_path / "b")
    write_mixed(tmp_path / "b" / "model.safetensors", rows)
    done = command("diff", base, tmp_path / "b", "--adapter", adapter, "--json")
    assert (done.code, done.json["adapter"]["found"]) == (0, "once")
    name = "model.layers.0.self_attn.q_proj.weight"
    if name not in expected:
        return
    raw = bytearray(rows[name][2])
    raw[2 if case == "half" else 1] ^= 0x10  # of the first value; in F32 above what sums are off by
    rows[name] = (*rows[name][:2], bytes(raw))
    write_mixed(tmp_path / "b" / "model.safetensors", rows)
    assert command("diff", base, tmp_path / "b", "--adapter", adapter).code == 1


def test_a_shard_that_was_left_out_is_named(tmp_path: Path) -> None:
    base, adapter, expected = write(tmp_path, "plain")
    _merge(base, tmp_path / "once", adapter)
    mixed = tensors_of(tmp_path / "once")
    left = "model.layers.0.mlp.down_proj.weight"
    assert left in expected
    mixed[left] = tensors_of(base)[left]
    shutil.copytree(base, tmp_path / "b")
    write_mixed(tmp_path / "b" / "model.safetensors", mixed)
    aprfmt.convert(tmp_path / "b", tmp_path / "shards", to="safetensors", max_shard_size=6000)
    done = command("diff", base, tmp_path / "shards", "--adapter", adapter, "--json")
    said = done.json["adapter"]
    assert done.code == 1 and said["found"].startswith("in part: once in 2, not at all in 1 of 3")
    wrong = [row for row in said["weights"] if row["found"] != "once"]
    assert [row["key"] for row in wrong] == ["L0.ffn_down.weight"]
    assert wrong[0]["file"].startswith("model-0") and wrong[0]["file"] in said["found"]


def test_other_changes_are_named(tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, "plain")
    _merge(base, tmp_path / "out", adapter)
    rows = tensors_of(tmp_path / "out")
    name = "model.norm.weight"
    rows[name] = (*rows[name][:2], b"\x01" + rows[name][2][1:])
    write_mixed(tmp_path / "out" / "model.safetensors", rows)
    with aprfmt.open(base) as a, aprfmt.open(tmp_path / "out") as b:
        found, _ = answer_merge(a, b, adapter)
    assert (found.found, found.others, found.is_merged_once) == (
        "once",
        ("output_norm.weight",),
        False,
    )


@pytest.mark.parametrize("case", ["plain", "rank_stabilised"])
def test_peft_to_gguf_and_back(case: str, tmp_path: Path) -> None:
    """llama.cpp's names, factors and alpha; rows of q and k in the order of GGUF."""
    import gguf

    base, adapter, _ = write(tmp_path, case)
    out = tmp_path / "lora.gguf"
    done = command("convert", adapter, out, "--base", base, "--json")
    assert done.code == 0 and done.json["counts"]["lossy"] == 0
    reader = gguf.GGUFReader(out)
    keys = {key: field.contents() for key, field in reader.fields.items()}
    assert (keys["general.type"], keys["adapter.type"]) == ("adapter", "lora")
    assert keys["general.architecture"] == "llama"
    scale = 6 / 2 if case == "rank_stabilised" else 6 / 4
    assert keys["adapter.lora.alpha"] == scale * 4
    tensors = {t.name: t.data for t in reader.tensors}
    stored = tensors_of(adapter)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    a = np.frombuffer(stored[f"{prefix}.lora_A.weight"][2], "<f4").reshape(4, 32)
    b = np.frombuffer(stored[f"{prefix}.lora_B.weight"][2], "<f4").reshape(32, 4)
    np.testing.assert_array_equal(tensors["blk.0.attn_q.weight.lora_a"], a)
    pairs = b.reshape(4, 2, 4, 4).swapaxes(1, 2).reshape(32, 4)
    np.testing.assert_array_equal(tensors["blk.0.attn_q.weight.lora_b"], pairs)
    convert_adapter(out, tmp_path / "back", base)
    back = tensors_of(tmp_path / "back")
    assert {n: r[2] for n, r in back.items()} == {n: r[2] for n, r in stored.items()}
    aprfmt.convert(base, tmp_path / "base.gguf")
    aprfmt.convert(base, tmp_path / "base.apr")
    convert_merged(tmp_path / "base.apr", tmp_path / "merged.apr", adapter)
    convert_merged(base, tmp_path / "peft.gguf", adapter)
    assert aprfmt.diff(tmp_path / "peft.gguf", tmp_path / "merged.apr").equal
    ways = {
        "peft": (base, adapter),
        "gguf": (base, out),
        "back": (base, tmp_path / "back"),
        "gguf_base": (tmp_path / "base.gguf", adapter),
        "both": (tmp_path / "base.gguf", out),
    }
    for name, (into, one) in ways.items():
        convert_merged(into, tmp_path / f"{name}.gguf", one, force=True)
        assert aprfmt.diff(tmp_path / "peft.gguf", tmp_path / f"{name}.gguf").equal


def test_kohya_names_are_found_in_the_base(tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, "plain")
    rows = {}
    ends = {".lora_A.weight": ".lora_down.weight", ".lora_B.weight": ".lora_up.weight"}
    for name, row in tensors_of(adapter).items():
        end = next(end for end in ends if name.endswith(end))
        module = name.removeprefix("base_model.model.").removesuffix(end).replace(".", "_")
        rows[f"lora_te_{module}{ends[end]}"] = row
        rows[f"lora_te_{module}.alpha"] = ("F32", (), np.float32(6).tobytes())
    (tmp_path / "kohya").mkdir()
    write_mixed(tmp_path / "kohya" / "lora.safetensors", rows)
    said = command("inspect", tmp_path / "kohya" / "lora.safetensors")
    assert said.code == 0 and "LoRA adapter of rank 4" in said.out
    convert_merged(base, tmp_path / "k", tmp_path / "kohya" / "lora.safetensors", to="safetensors")
    _merge(base, tmp_path / "p", adapter)
    assert aprfmt.diff(tmp_path / "k", tmp_path / "p").equal
    done = convert_adapter(tmp_path / "kohya" / "lora.safetensors", tmp_path / "k.gguf", base)
    assert len(done.tensors) == 6


def _config(adapter: Path, **changes: object) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, "plain")
    other, _, _ = write(tmp_path / "x", "dora")
    _config(adapter, r=8)
    with pytest.raises(FormatError, match="says rank 8, its factors have 4"):
        _merge(base, tmp_path / "out", adapter)
    _config(adapter, r=4, peft_type="LOHA")
    with pytest.raises(UnsupportedError, match="peft_type is 'LOHA'"):
        _merge(base, tmp_path / "out", adapter)
    _config(adapter, peft_type="LORA", lora_alpha="six")
    with pytest.raises(FormatError, match="alpha is 'six'"):
        _merge(base, tmp_path / "out", adapter)
    _config(adapter, lora_alpha=6, init_lora_weights="pissa_niter_4")
    with pytest.raises(UnsupportedError, match="'pissa_niter_4', which changed the base as well"):
        _merge(base, tmp_path / "out", adapter)
    _config(adapter, init_lora_weights=True)
    shutil.copytree(adapter, tmp_path / "nan")
    stored = tensors_of(adapter)
    encoding, shape, raw = stored[name := next(each for each in stored if "lora_B" in each)]
    stored[name] = (encoding, shape, raw[:-4] + b"\x00\x00\xc0\x7f")
    write_mixed(tmp_path / "nan" / "adapter_model.safetensors", stored)
    with pytest.raises(FormatError, match=f"{name}: holds 1 NaN or infinite numbers of"):
        _merge(base, tmp_path / "out", tmp_path / "nan")
    aprfmt.convert(base, tmp_path / "q.gguf", tensor_encodings=[("attn_q.weight", "Q8_0")])
    with pytest.raises(ConversionError, match="is Q8_0; an adapter is merged into floats"):
        convert_merged(tmp_path / "q.gguf", tmp_path / "m.gguf", adapter)
    rows = tensors_of(base)
    rows["model.layers.0.self_attn.q_proj.weight"] = ("F32", (8, 32), bytes(8 * 32 * 4))
    shutil.copytree(base, tmp_path / "odd")
    write_mixed(tmp_path / "odd" / "model.safetensors", rows)
    with pytest.raises(ConversionError, match="it belongs to another base"):
        _merge(tmp_path / "odd", tmp_path / "out", adapter)
    # a wrapper's prefix before the layers, as of a model that sees images
    wrapped = {
        name.replace("model.layers.", "model.language_model.layers."): row
        for name, row in tensors_of(base).items()
    }
    shutil.copytree(base, tmp_path / "wrapped")
    write_mixed(tmp_path / "wrapped" / "model.safetensors", wrapped)
    there = r"has no (model\.)(layers\.0\.\S+); \1language_model\.\2 is there$"
    with aprfmt.open(tmp_path / "wrapped") as model:
        with pytest.raises(ConversionError, match=there):
            place_pairs(read_adapter(adapter)[1], model)
    pairs = {name.replace("q_proj", "s_proj"): row for name, row in tensors_of(adapter).items()}
    shutil.copytree(adapter, tmp_path / "unplaced")
    write_mixed(tmp_path / "unplaced" / "adapter_model.safetensors", pairs)
    with pytest.raises(ConversionError, match=r"s_proj has no place in .* is no weight of llama"):
        _merge(base, tmp_path / "out", tmp_path / "unplaced")
    with pytest.raises(ConversionError, match="DoRA has no form in GGUF"):
        convert_adapter(tmp_path / "x" / "adapter", tmp_path / "d.gguf", other)
    with pytest.raises(FormatError, match="no factors of a LoRA"):
        _merge(base, tmp_path / "out", base)


def test_peft_makes_its_file_again() -> None:
    if importlib.util.find_spec("peft") is None:
        pytest.skip("NOT-RUN: peft is not installed")
    script = [sys.executable, str(ROOT / "fixtures" / "make_adapters.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
