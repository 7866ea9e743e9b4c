"""Encodings that outputs get, recipes of quantized files, resized vocabularies: by themselves."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.adapters import vocabulary
from aprfmt.attestation import recipes
from aprfmt.base.protocols import Note
from aprfmt.conversion import encoding_choice
from aprfmt.conversion.options import Options
from aprfmt.errors import ArchError, ConversionError, UsageError
from aprfmt.quantizing.mixture import SCHEMES

# --- what is wished -------------------------------------------------------------------------------


def output(
    source: str = "F32",
    shape: tuple[int, ...] = (4, 8),
    role: str = "L0.attn_q.weight",
    **more: Any,
) -> Any:
    given = {"encoding": source, "spellings": (role, "a.b"), "copies": False, "sources": ()} | more
    info = SimpleNamespace(name="w", shape=shape, encoding=source)
    return SimpleNamespace(source_encoding=source, info=info, role=role, **given)


def wished(one: Any, **options: Any) -> str | None:
    return encoding_choice._wished_encoding(one, Options(**options))


def test_an_encoding_is_wished_for_weights_and_a_float_for_vectors() -> None:
    vector = output(shape=(8,), role="L0.attn_norm.weight")
    for one, encoding, expected in (
        (output(), None, None),
        (output(), "Q8_0", "Q8_0"),
        (output("Q4_K"), "Q8_0", "Q8_0"),
        (output("Q4_K"), "F16", "F16"),
        (vector, "Q8_0", None),
        (vector, "F16", "F16"),
        (vector, "BF16", "BF16"),
        (output(role="L0.ffn_gate_inp.weight"), "Q8_0", None),  # a router, which stays exact
        (output("MADE_UP"), "Q8_0", "Q8_0"),
    ):
        assert wished(one, encoding=encoding) == expected, (one.source_encoding, one.role, encoding)
    for source in ("I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "BOOL", "C64"):
        assert wished(output(source), encoding="F16") is None, source
    asked: list[Any] = []
    assert wished(output(), encoding="Q8_0", choose=lambda *given: asked.append(given)) is None
    wished(output(role="", spellings=("a.b",)), choose=lambda *given: asked.append(given))
    assert [name for name, *_ in asked] == ["L0.attn_q.weight", "a.b"]
    assert asked[0][1:] == ((4, 8), "F32")


def test_vectors_are_those_that_readers_expect_as_floats() -> None:
    for role, shape, vector in (
        ("L0.attn_q.weight", (4, 8), False),
        ("L0.attn_q.weight", (8,), True),
        ("", (), True),
        ("", (8, 8), False),
        ("L0.attn_norm.weight", (4, 8), True),
        ("L0.ffn_gate_inp.weight", (4, 8), True),
        ("L0.ffn_gate.weight", (4, 8), False),
    ):
        assert encoding_choice._ggml_expects_float32(output(role=role, shape=shape)) is vector, (
            role,
            shape,
        )


def test_what_cannot_be_written_is_told_with_what_can() -> None:
    sentence = encoding_choice._not_written
    assert sentence("w", "IQ2_XS").startswith(
        "w: IQ2_XS is read and copied, not written here; near"
    )
    dialect = sentence("w", "GPTQ")
    assert dialect.startswith(
        "w: GPTQ is not written here: a dialect is the type of a whole model;"
    )
    assert dialect.endswith(", or a dialect with --type (aprfmt quantize --help)")
    unknown = encoding_choice._no_encoding
    assert unknown("Q4_K_M") == (
        "Q4_K_M: is a mixture of several encodings; choose one of them here (Q4_K), or the mixture "
        "with quantize --type Q4_K_M"
    )
    assert unknown("q4_k_m").startswith("q4_k_m: is a mixture") and "Q8_0" in unknown("Q8_1_0")
    stored = [SimpleNamespace(info=SimpleNamespace(name=name)) for name in "xy"]
    text = encoding_choice._refusal_text
    assert text("Q8_0", output(sources=stored), {"y": "of 3 bits"}) == "Q8_0; of 3 bits"
    assert text("Q8_0", output(sources=stored), {"z": "of 3 bits"}) == "Q8_0"


def test_a_target_holds_what_it_has_a_code_for_or_a_place() -> None:
    def target(*codes: str, carries: bool = False, keeps: bool = True) -> Any:
        return SimpleNamespace(
            holds=lambda row: row.name in codes, carries=carries, keeps=keeps, name="x"
        )

    held = encoding_choice._can_hold
    assert held("Q8_0", target("Q8_0")) and not held("Q8_0", target("U8"))
    assert held("Q8_0", target(carries=True))
    assert held("NF4", target("U8")) and not held("NF4", target())  # in several tensors
    stored = encoding_choice.stores_as_bytes
    same, other = (SimpleNamespace(format=name) for name in "xy")
    for model, keeps, generic, expected in (
        (same, True, False, True),
        (other, True, False, False),
        (other, True, True, True),
        (same, False, False, False),
        (other, False, True, False),
    ):
        given: Any = model
        assert stored(given, target(keeps=keeps), Options(generic=generic)) is expected


def test_weights_that_an_importance_matrix_lacks_are_told() -> None:
    def checked(*outputs: Any, importance: Any) -> list[Note]:
        plan: Any = SimpleNamespace(outputs=outputs, notes=[])
        encoding_choice.check_importance(plan, Options(importance=importance, imatrix=Path("m")))
        notes: list[Note] = plan.notes
        return notes

    weight, experts = output("Q4_K"), output("Q4_K", (3, 4, 8))
    for sizes, one in (((8,), weight), ((8, 24), experts)):
        for size in sizes:
            assert checked(one, importance=lambda name, size=size: np.ones(size)) == []
    for size in (7, 9, 24):
        with pytest.raises(ConversionError, match=f"matrix has {size} columns, the tensor 8;"):
            checked(weight, importance=lambda name, size=size: np.ones(size))
    left = [output("Q4_K", copies=True), output("F16")]
    assert checked(*left, importance=lambda name: None) == []
    assert checked(weight, importance=None) == []
    for count in (1, 3, 4):
        (note,) = checked(*[weight] * count, importance=lambda name: None)
        shown = ", ".join("w" * min(count, 3)) + " ..." * (count > 3)
        text = f"says nothing about {count} tensors, which are quantized without: {shown}"
        assert note == Note("warning", "m", text, "imatrix_gaps")


# --- recipes --------------------------------------------------------------------------------------


def quantized(metadata: dict[str, Any] | None = None, **encodings: str) -> Any:
    views = {
        name: SimpleNamespace(encoding=encoding, parts=None) for name, encoding in encodings.items()
    }

    class File(dict[str, Any]):
        path = Path("q.gguf")

    found: Any = File(views)
    found.metadata = metadata or {}
    return found


def test_a_type_that_the_file_contradicts_is_refused() -> None:
    refuse = recipes._refuse_other_type
    q4, q5 = SCHEMES["Q4_K_M"].file_type, SCHEMES["Q5_K_M"].file_type
    for facts, recorded in (
        ({}, ""),
        ({}, "Q4_K_M"),
        ({"general.file_type": q4}, "Q4_K_M"),
        ({"general.file_type": 9999}, "made up"),
    ):
        refuse(quantized(facts, w="Q4_K", v="Q6_K"), "Q4_K_M", recorded)
    for facts, recorded, says in (
        ({}, "Q5_K_M", "aprfmt.quantize.type says Q5_K_M, --type says Q4_K_M"),
        ({"general.file_type": q5}, "", "general.file_type says Q5_K_M"),
    ):
        with pytest.raises(UsageError, match=says):
            refuse(quantized(facts, w="Q4_K"), "Q4_K_M", recorded)
    with pytest.raises(UsageError, match=r"as Q4_K, and no tensor is; found Q6_K, F32$"):
        refuse(quantized(w="Q6_K", v="F32", x="Q6_K"), "Q4_K_M", "")


def test_an_importance_matrix_that_was_not_given_is_named() -> None:
    lacking = recipes._missing_imatrix
    key, file = "aprfmt.quantize.imatrix", "quantize.imatrix.file"
    assert lacking(quantized(), None) == ""
    assert lacking(quantized({key: "abc"}), None) == "abc"
    assert lacking(quantized({key: "abc", file: "m.gguf"}), None) == "m.gguf"
    given: Any = SimpleNamespace(path=Path("n.gguf"), sha256="abc")
    assert lacking(quantized({key: "abc"}), given) == lacking(quantized({file: "m"}), given) == ""
    with pytest.raises(UsageError, match=r"SHA-256 abc, expected abd$"):
        lacking(quantized({key: "abd"}), given)


def test_each_weight_keeps_the_encoding_that_the_file_stores_it_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recipes, "spellings_by_name", lambda model: {"w": ("other.w", "x")})
    model = quantized(w="Q4_K", x="Q8_0", iq="IQ2_XS", nf="NF4", gptq="GPTQ", f="F32")
    model.roles = {"L0.attn_q.weight": model["x"]}
    own = recipes._OwnEncodings(model)
    for name, expected in (
        ("w", "Q4_K"),
        ("other.w", "Q4_K"),
        ("x", "Q4_K"),
        ("L0.attn_q.weight", "Q8_0"),
        ("nf", "NF4"),
        ("gptq", "GPTQ"),
        ("f", "F32"),
        ("iq", None),
        ("nobody", None),
    ):
        assert own.choose(name, (1,), "BF16") == expected, name
    assert own.choose("iq", (1,), "IQ2_XS") == "IQ2_XS"  # as the base has it

    class Unknown(dict[str, Any]):
        @property
        def roles(self) -> Any:
            raise ArchError("of no architecture")

    unknown: Any = Unknown(w=SimpleNamespace(encoding="Q4_K"))
    alone = recipes._OwnEncodings(unknown)
    assert alone.choose("w", (), "F32") == "Q4_K" and alone.choose("other.w", (), "F32") is None


def test_layouts_are_those_of_the_type_or_of_the_packed_weights() -> None:
    def layouts(wanted: str = "", *, repack: bool = False, **packed: str) -> list[tuple[str, bool]]:
        model = quantized(None, **packed)
        for view in model.values():
            view.parts = {"": 1}
        base: Any = {"w": SimpleNamespace(parts={"": 1} if repack else None)}
        options = Options(choose=lambda *given: None)
        return [
            (name, one.choose is not None)
            for name, one in recipes._possible_layouts(base, model, wanted, options)
        ]

    assert layouts() == [("", True)] and layouts(repack=True) == [("", True), ("", False)]
    gptq = [name for name, row in SCHEMES.items() if row.base == "GPTQ" and row.dialect]
    assert len(gptq) > 1 and recipes._schemes_with_base("GPTQ") == gptq
    assert layouts(w="GPTQ") == [(name, True) for name in gptq]
    assert layouts(gptq[1], w="GPTQ") == [(gptq[1], True)]
    assert layouts("Q4_K_M", w="GPTQ") == [(name, True) for name in gptq]
    assert layouts(gptq[1], repack=True, w="AWQ")[-1] == ("", False)
    assert recipes._schemes_with_base("Q4_K") == []


def test_planned_tensors_are_alike_by_name_shape_and_type() -> None:
    def info(name: str, shape: tuple[int, ...] = (2,), encoding: str = "F32") -> Any:
        return SimpleNamespace(info=SimpleNamespace(name=name, shape=shape, encoding=encoding))

    stored = {"a": info("a"), "b": info("b"), "c": info("c")}
    held: Any = SimpleNamespace(source=SimpleNamespace(tensors=stored))
    plan: Any = SimpleNamespace(
        outputs=[info("a"), info("b", (3,)), info("c", (2,), "F16"), info("d")]
    )
    assert recipes._count_alike(plan, held) == 1


# --- a vocabulary of another size -----------------------------------------------------------------


def tokenizer_json(count: int, *added: Any) -> str:
    vocab = {f"t{i}": i for i in range(count)}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return json.dumps({"model": model, "added_tokens": [{"id": i} for i in added]})


def resized(
    rows: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    *,
    own: dict[str, str] | None = None,
    texts: dict[str, str] | None = None,
    form: str = "safetensors",
) -> Any:
    given = {"config.json": json.dumps({"vocab_size": 8}), "tokenizer.json": tokenizer_json(8)}
    folder = SimpleNamespace(texts=given if texts is None else texts, path=Path("base"))
    base: Any = SimpleNamespace(
        folder=folder, format=form, path=Path("base"), hyper={"vocab_size": 8}
    )
    adapter: Any = SimpleNamespace(path=Path("adapter/model.safetensors"))
    monkeypatch.setattr(vocabulary, "vocabulary_tensors", lambda base: {"embed": 8, "head": 8})
    monkeypatch.setattr(vocabulary, "_tokenizer_files", lambda folder: own or {})
    monkeypatch.setattr(vocabulary, "replace", lambda folder, **changed: changed)
    views: Any = {name: SimpleNamespace(shape=(count, 4)) for name, count in rows.items()}
    return vocabulary.resized_folder(adapter, views, base)


def test_a_merge_has_the_vocabulary_that_the_adapter_was_trained_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All tables in one size; the adapter's tokenizer where it has one, else the base's."""
    assert resized({}, monkeypatch) is None and resized({"embed": 8}, monkeypatch) is None
    assert resized({"other": 9}, monkeypatch) is None
    for rows, left in (({"embed": 9}, 8), ({"embed": 9, "head": 10}, 10)):
        with pytest.raises(ConversionError, match=f"head would have {left}: give the base 9 rows"):
            resized(rows, monkeypatch)
    both = {"embed": 10, "head": 10}
    for form, texts in (("gguf", None), ("safetensors", {})):
        with pytest.raises(ConversionError, match="merge into the base's Hugging Face folder"):
            resized(both, monkeypatch, form=form, texts=texts)
    own = {"tokenizer.json": tokenizer_json(8, 8, 9)}
    changed, note = resized(both, monkeypatch, own=own)
    assert changed["config"] == {"vocab_size": 10} == json.loads(changed["texts"]["config.json"])
    assert changed["texts"]["tokenizer.json"] == own["tokenizer.json"]
    start = "the vocabulary has 10 rows, in config.json too (8 in base): 2 tokens were added; "
    assert (note.level, note.key) == ("note", "")
    assert note.text == f"{start}the tokenizer is the adapter's, of 10 tokens"
    changed, note = resized(both, monkeypatch)
    assert changed["texts"]["tokenizer.json"] == tokenizer_json(8)
    assert (note.level, note.key) == ("warning", "vocabulary_rows")
    assert note.text == (
        f"{start}the tokenizer is the base's, of 8 tokens (adapter has no tokenizer.json: put that "
        "of the training there)"
    )
    config = {"config.json": json.dumps({"vocab_size": 8})}
    _, note = resized({"embed": 7, "head": 7}, monkeypatch, texts=config)
    assert "1 rows were cut; neither adapter nor base has a tokenizer.json" in note.text
    _, note = resized({"embed": 9, "head": 9}, monkeypatch)
    assert "(8 in base): 1 tokens were added; " in note.text
    with pytest.raises(
        ConversionError, match="has 11 tokens, and the table of the adapter 10 rows"
    ):
        resized(both, monkeypatch, own={"tokenizer.json": tokenizer_json(8, 10)})


def test_the_size_is_set_where_the_configuration_has_it() -> None:
    base: Any = SimpleNamespace(path="base", hyper={"vocab_size": 8})
    sized = vocabulary._with_vocab_size
    for config, expected in (
        ({"vocab_size": 8, "a": 1}, {"vocab_size": 9, "a": 1}),
        ({}, {"vocab_size": 9}),
        ({"text_config": {"vocab_size": 8}}, {"text_config": {"vocab_size": 9}}),
        (
            {"text_config": {"vocab_size": 8}, "vocab_size": 8},
            {"text_config": {"vocab_size": 9}, "vocab_size": 9},
        ),
        ({"text_config": {}, "vocab_size": 8}, {"text_config": {}, "vocab_size": 9}),
    ):
        assert sized(config, 9, base) == expected
    nowhere: Any = SimpleNamespace(path="base", hyper={"vocab_size": None})
    with pytest.raises(ConversionError, match=r"config\.json has no vocab_size"):
        sized({}, 9, nowhere)
    assert sized({"vocab_size": 8}, 9, nowhere) == {"vocab_size": 9}
    counted = vocabulary._count_token_ids
    for count, added, ids in ((3, (), 3), (3, (7, 1), 8), (0, (), 0), (0, (0,), 1)):
        assert counted(tokenizer_json(count, *added), "t") == ids
    assert (
        counted('{"model": {"vocab": {}}, "added_tokens": [{"id": 4}, 5, {"id": "x"}]}', "t") == 5
    )
