"""Every check fails for its own fault and for no other; good files pass, also with --strict."""

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import aprfmt as package
from aprfmt.checks import validate
from aprfmt.checks.table import file_checks
from tests.checks.file import bases
from tests.checks.file.bases import MAKERS, element, hf, patch, sealed_swap, swap, text
from tests.cli.run import aprfmt
from tests.conversion.folders import tensors_of, write_mixed
from tests.formats.apr_files import AprFile, Tensor, sealed

_SCALE = "model.layers.2.mlp.up_proj.input_scale"
NORM = "model.layers.0.input_layernorm.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


@dataclass(frozen=True)
class Mutation:
    """A good file, what is done to it, and the one check that fails (a warning if `strict`).

    `also` are checks to which the same fault is one: what nothing reads is unread, too.
    """

    check: str
    base: str
    change: Callable[[Path], object]
    says: str
    strict: bool = False
    also: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.check}-{self.says.replace(' ', '_')[:24]}"


def _gap(path: Path) -> None:
    """Set the last byte of the padding behind the header."""
    with package.open(path) as model:
        first = min(tensor.offset for tensor in model.values())
    data = path.read_bytes()
    assert data[first - 1] == 0
    patch(path, first - 1, b"\x01")


def _sealed_gap(path: Path) -> None:
    _gap(path)
    path.write_bytes(sealed(path.read_bytes()))


def _unaligned(path: Path) -> None:
    one = Tensor(b"a").data
    tensors = (
        Tensor(b"a", data=one + bytes(4) + one, size=16),
        Tensor(b"b", data=b"", offset=20, size=16),
    )
    path.write_bytes(AprFile(tensors=tensors).build())


def _stray_shard(path: Path) -> None:
    shutil.copy(sorted(path.glob("model-*"))[0], path / "model-00007-of-00009.safetensors")


def _total_size(path: Path) -> None:
    text(path, "model.safetensors.index.json", lambda v: v["metadata"].update(total_size=1))


def _manifest(path: Path) -> None:
    assert aprfmt("hash", path, "--write", "--raw-only").code == 0
    element(path, "blk.0.attn_q.weight", 5, bytes([1]), 2)


def _state(path: Path) -> None:
    """Say that blocks are longer than they are."""
    raw = bases.weights(path).read_bytes()
    at = raw.index(b'"blocksize": 64')
    patch(path, at, b'"blocksize": 32')


def _key(name: str, value: Any) -> Callable[[Path], None]:
    return lambda path: text(path, "config.json", lambda v: v.update({name: value}))


def _drop_section(path: Path) -> None:
    text(path, "config.json", lambda v: v.pop("quantization_config"))


def _claim(path: Path) -> None:
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    _key("quantization_config", section)(path)


def _twice_id(value: Any) -> None:
    vocab = value["model"]["vocab"]
    first, second = list(vocab)[:2]
    vocab[first] = vocab[second]


def _wrong_merge(value: Any) -> None:
    value["model"]["merges"][3] = ["no such", "token"]


def _far_token(value: Any) -> None:
    value["model"]["vocab"]["<far>"] = 5000


def _wide(path: Path) -> None:
    """Give the embedding three rows for every token."""
    rows = tensors_of(path)
    dtype, (count, columns), raw = rows["model.embed_tokens.weight"]
    rows["model.embed_tokens.weight"] = (dtype, (3 * count, columns), raw * 3)
    write_mixed(path / "model.safetensors", rows)
    _key("vocab_size", 3 * count)(path)


def _far_added(value: Any) -> None:
    row = dict(value["added_tokens"][0], id=1536, content="<image>")
    value["added_tokens"].append(row)


def _jinja(path: Path) -> None:
    (path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")


def _file_type(path: Path) -> None:
    at = path.read_bytes().index(b"general.file_type") + len(b"general.file_type") + 4
    patch(path, at, (15).to_bytes(4, "little"))


_TOKENIZER = "tokenizer.json"
EMBEDDING = "model.embed_tokens.weight"
START, END = 1534, 1535  # <|im_start|>, <|im_end|>


def _rows(change: Callable[[Any], None], dtype: str = "<u2") -> Callable[[Path], None]:
    """Return an edit of the embedding's rows, as their bits."""

    def edit(path: Path) -> None:
        import numpy as np

        rows = tensors_of(path)
        kind, shape, raw = rows[EMBEDDING]
        bits = np.frombuffer(raw, dtype).reshape(shape).copy()
        change(bits)
        rows[EMBEDDING] = (kind, shape, bits.tobytes())
        write_mixed(path / "model.safetensors", rows)

    return edit


def _zero_rows(bits: Any) -> None:
    bits[[START, END]] = 0


def _equal_rows(bits: Any) -> None:
    bits[START] = bits[END]


def _tiny_rows(bits: Any) -> None:
    """Make the rows of two tokens a ten-thousandth of what they are: noise beside the others."""
    import numpy as np

    values = (bits[[START, END]].astype(np.uint32) << 16).view(np.float32) * np.float32(1e-4)
    bits[[START, END]] = (values.view(np.uint32) >> 16).astype("<u2")


def _mean_row(bits: Any) -> None:
    import numpy as np

    values = (bits.astype(np.uint32) << 16).view(np.float32)
    bits[START] = (values.mean(axis=0).astype(np.float32).view(np.uint32) >> 16).astype("<u2")


def _plain_piece(path: Path) -> None:
    """Make the mark that opens a turn a piece of the vocabulary, which no merge makes."""

    def change(value: Any) -> None:
        row = next(row for row in value["added_tokens"] if row["id"] == START)
        value["added_tokens"].remove(row)
        value["model"]["vocab"][row["content"]] = START

    text(path, _TOKENIZER, change)
    config = path / "tokenizer_config.json"
    value = json.loads(config.read_text())
    value.pop("extra_special_tokens", None)
    value.pop("additional_special_tokens", None)
    value.pop("added_tokens_decoder", None)
    config.write_text(json.dumps(value))


def _processor(i: int, *behind: int) -> Callable[[Any], None]:
    """Return an edit that puts ids around a text, in the name of <|endoftext|>."""

    def change(value: Any) -> None:
        special = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
        value["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
            "special_tokens": {
                "<|endoftext|>": {"id": "<|endoftext|>", "ids": [i], "tokens": ["<|endoftext|>"]}
            },
        }

    return change


def _bad_scales(path: Path) -> None:
    for block in (6, 9, 11):
        element(path, "blk.1.ffn_up.weight", block, b"\x00\x7c", 34)


def _no_decoder(value: Any) -> None:
    value["decoder"] = None


def _cut_merges(value: Any) -> None:
    del value["model"]["merges"][900:]


def _far_mark(value: Any) -> None:
    row = dict(value["added_tokens"][0], id=1536, content="<|action|>")
    value["added_tokens"].append(row)


def _no_ends(path: Path) -> None:
    (path / "generation_config.json").unlink()
    text(path, "config.json", lambda v: v.pop("eos_token_id"))


def _zeros(*names: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        for name in names:
            bases.scaled(path, name, 0)

    return edit


def _as_bytes(values: Any) -> Any:
    """Return the bytes of 8-bit floats with these values as integers."""
    scaled = values / abs(values).max() * 448
    return scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def _as_whole(values: Any) -> Any:
    """Return the codes of 8-bit integers with one scale."""
    return (values / abs(values).max() * 127).round()


def _joined_heads(path: Path) -> None:
    """Store the query, key and value weights of layer 1 once more, joined, all of them zero."""
    rows = tensors_of(path)
    parts = [rows[f"model.layers.1.self_attn.{one}_proj.weight"] for one in "qkv"]
    shape = (sum(part[1][0] for part in parts), parts[0][1][1])
    raw = bytes(sum(len(part[2]) for part in parts))
    rows["model.layers.1.self_attn.qkv_proj.weight"] = (parts[0][0], shape, raw)
    write_mixed(path / "model.safetensors", rows)


def _double(path: Path, name: str) -> None:
    """Store twice the float32 values of a tensor."""
    rows = tensors_of(path)
    dtype, shape, raw = rows[name]
    assert dtype == "F32"
    rows[name] = (dtype, shape, (np.frombuffer(raw, "<f4") * np.float32(2)).tobytes())
    write_mixed(path / "model.safetensors", rows)


def _import(path: Path) -> None:
    """Let the pickle import a function that no value needs, and drop it."""
    import zipfile

    file = path / "pytorch_model.bin"
    with zipfile.ZipFile(file) as before:
        records = [(info, before.read(info)) for info in before.infolist()]
    with zipfile.ZipFile(file, "w") as after:
        for info, data in records:
            whole = info.filename.endswith("/data.pkl")
            after.writestr(info, data[:2] + b"cos\nsystem\n0" + data[2:] if whole else data)


MUTATIONS: tuple[Mutation, ...] = (
    Mutation("layout", "gguf", lambda p: p.write_bytes(p.read_bytes() + b"extra"),
             "5 bytes follow", True),
    Mutation("checksum", "apr", lambda p: element(p, NORM, 3, b"\x07", 2), "footer checksum"),
    Mutation("manifest", "gguf", _manifest, "stored bytes differ"),
    Mutation("padding", "gguf", _gap, "byte 0x01", True),
    Mutation("padding", "apr", _sealed_gap, "byte 0x01", True),
    Mutation("alignment", "small", _unaligned, "1 of 2 tensors", True),
    Mutation("shards", "shards", _stray_shard, "no index or count", True, ("unread",)),
    Mutation("shards", "shards", _total_size, "total_size is 1", True),
    Mutation("names", "gguf", lambda p: swap(p, b"aprfmt.writer", b"aprfmt.writ\x1bm"),
             "key 'aprfmt.writ\\x1bm'", True, ("unread",)),
    Mutation("writer", "gguf", lambda p: swap(p, b"tokenizer.ggml.pre", b"tokenizer.ggml.prx"),
             "pull request 6920"),
    Mutation("values", "gguf", lambda p: element(p, "blk.1.ffn_up.weight", 77, b"\xc0\x7f", 2),
             "1 NaN and 0 infinite"),
    Mutation("values", "hf", lambda p: element(p, NORM, 9, b"\x80\xff", 2), "0 NaN and 1 inf"),
    Mutation("block_scales", "q8", lambda p: element(p, "blk.1.ffn_up.weight", 6, b"\x00\x7c", 34),
             "block 6 has d that is NaN or infinite"),
    Mutation("block_scales", "q8", _bad_scales,
             "block 6 has d that is NaN or infinite (3 blocks are bad)"),
    Mutation("packed", "nf4", _state, "expected"),
    Mutation("activation_scales", "nvfp4", lambda p: bases.without(p, _SCALE), "1 of 28", True,
             ("quantization",)),
    Mutation("joined_scales", "nvfp4",
             lambda p: _double(p, "model.layers.2.mlp.up_proj.weight_scale_2"), "1 of 8", True),
    Mutation("unread", "hf", _key("planted", {"deep": 1}), "in no table", True),
    Mutation("unread", "hf", lambda p: (p / "model-mtp.safetensors").write_bytes(b""),
             "no index names it", True),
    Mutation("unread", "gguf", lambda p: swap(p, b"aprfmt.writer", b"aprfmt.wroter"),
             "in no table", True),
    Mutation("imports", "pytorch", _import, "os.system"),
    Mutation("architecture", "hf", _key("num_attention_heads", "many"), "num_attention_heads"),
    Mutation("completeness", "hf", lambda p: bases.without(p, NORM), "missing"),
    Mutation("architecture", "hf", _key("intermediate_size", 500), "the tensors say 512"),
    Mutation("shapes", "hf", lambda p: bases.reshaped(p, DOWN, (128, 1024)), "shape [128, 1024]"),
    Mutation("second_layouts", "hf", _joined_heads, "in two layouts, with other values"),
    Mutation("unexpected", "hf", lambda p: bases.added(p, "model.layers.0.mystery.weight"),
             "no role", True),
    Mutation("completeness", "hf", _key("tie_word_embeddings", False), "missing"),
    Mutation("code", "hf", _key("auto_map", {"AutoModel": "modeling_own.Own"}),
             "named by config.json: auto_map", True),
    Mutation("hyperparameters", "hf", _key("vocab_size", 1537), "vocab_size", True),
    Mutation("role_bounds", "hf", lambda p: bases.scaled(p, "model.norm.weight", 1e5),
             "root mean square"),
    Mutation("role_bounds", "hf", lambda p: bases.scaled(p, "model.embed_tokens.weight", 1e4),
             "standard deviation"),
    Mutation("role_bounds", "hf", lambda p: bases.scaled(p, "model.embed_tokens.weight", 20),
             "0.005 to 0.5", True),
    Mutation("role_bounds", "nvfp4", lambda p: bases.inverted(p, "weight_scale_2"),
             "in its first 8 rows"),
    Mutation("role_bounds", "nvfp4", lambda p: bases.inverted(p, "3.mlp.up_proj.weight_scale_2"),
             "in its first 8 rows"),
    Mutation("role_bounds", "hf", lambda p: bases.scaled(p, DOWN, 1e5), "standard deviation"),
    Mutation("role_bounds", "hf", lambda p: bases.scaled(p, DOWN, 1e-6), "standard deviation"),
    Mutation("role_bounds", "hf", lambda p: bases.computed(p, DOWN, _as_bytes),
             "whole numbers only, none of them negative"),
    Mutation("role_bounds", "hf", lambda p: bases.computed(p, DOWN, _as_whole),
             "whole numbers only"),
    Mutation("role_bounds", "hf", lambda p: bases.computed(p, DOWN, abs),
             "no negative value", True),
    Mutation("tokenizer", "hf", lambda p: text(p, _TOKENIZER, _twice_id), "id of its own"),
    Mutation("vocabulary_size", "hf", lambda p: text(p, _TOKENIZER, _far_token), "5001 tokens"),
    Mutation("vocabulary_size", "hf", lambda p: text(p, _TOKENIZER, _far_added), "1537 tokens",
             True),
    Mutation("vocabulary_size", "hf", _wide, "1536 tokens 4608"),
    Mutation("special_ids", "hf",
             lambda p: text(p, "generation_config.json", lambda v: v.update(eos_token_id=99_999)),
             "id 99999"),
    Mutation("special_ids", "hf",
             lambda p: text(p, "config.json", lambda v: v.update(eos_token_id="x")),
             "'x' an id, a list of ids"),
    Mutation("special_ids", "hf",
             lambda p: text(p, "generation_config.json", lambda v: v.update(eos_token_id=[1533])),
             "ends turns with '<|im_end|>' (1535)"),
    Mutation("hyperparameters", "hf", _key("rope_theta", 0), "transformers takes the second", True),
    Mutation("merges", "hf", lambda p: text(p, _TOKENIZER, _wrong_merge), "no such"),
    Mutation("merges", "hf", lambda p: text(p, _TOKENIZER, _cut_merges), "made by no merge"),
    Mutation("chat_template", "hf", _jinja, "__class__"),
    Mutation("filled", "hf", _zeros(DOWN), "every value is 0 a matrix that was filled"),
    Mutation("filled", "hf", _zeros(DOWN, DOWN.replace("mlp.down", "self_attn.o")),
             "the layer adds nothing", True),
    Mutation("token_types", "hf", _plain_piece, "'<|im_start|>' (1534) is cut into"),
    Mutation("token_rows", "hf", _rows(_zero_rows), "rows of zeros: 2: '<|im_start|>' (1534)"),
    Mutation("token_rows", "hf", _rows(_equal_rows), "one row for several tokens: 2"),
    Mutation("token_rows", "hf", _rows(_mean_row), "the mean of all rows", True),
    Mutation("token_rows", "hf", _rows(_tiny_rows), "of a usual row's length: 2", True),
    Mutation("round_trip", "hf", lambda p: text(p, _TOKENIZER, _no_decoder), "comes back as"),
    Mutation("special_ids", "hf", lambda p: text(p, _TOKENIZER, _processor(101)), "puts 101"),
    Mutation("special_ids", "hf", _no_ends, "transformers stops nowhere"),
    Mutation("special_ids", "hf", lambda p: text(p, _TOKENIZER, _processor(9999)),
             "puts 9999 (no token)"),
    Mutation("vocabulary_size", "hf", lambda p: text(p, _TOKENIZER, _far_mark), "'<|action|>'"),
    Mutation("special_ids", "gguf", lambda p: swap(p, b"tokenizer.ggml.eos_token_id",
                                                   b"tokenizer.ggml.eox_token_id"),
             "llama.cpp takes 11 (',')"),
    Mutation("token_types", "gguf", lambda p: swap(p, b"tokenizer.ggml.token_type",
                                                   b"tokenizer.ggml.token_typo"),
             "token_type is missing"),
    Mutation("file_type", "gguf", _file_type, "no tensor is Q4_K"),
    Mutation("quantization", "nf4", _drop_section, "nothing, but weights are packed (NF4)"),
    Mutation("quantization", "hf", _claim, "says NF4; the file holds no packed weight"),
    Mutation("dtype", "hf", _key("dtype", "float16"), "most float weights are BF16", True),
    Mutation("ranges", "hf",
             lambda p: text(p, "generation_config.json", lambda v: v.update(top_p=7)),
             "7 a number from 0 to 1", True),
    Mutation("counts", "small", lambda p: sealed_swap(p, b'"param_count":71', b'"param_count":72'),
             "72", True),
)  # fmt: skip


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the path of a good file, made when it is first asked for."""
    folder, found = tmp_path_factory.mktemp("good"), {}

    def get(name: str) -> Path:
        if name not in found:
            (folder / name).mkdir()
            found[name] = MAKERS[name](folder / name)
        return found[name]

    return get


def copied(source: Path, folder: Path) -> Path:
    """Copy a good file, or the folder it is."""
    if source.is_dir():
        return Path(shutil.copytree(source, folder / source.name))
    return Path(shutil.copy(source, folder))


@pytest.mark.parametrize("base", MAKERS)
def test_good_files_pass_strictly(base: str, made: Callable[[str], Path]) -> None:
    report = validate(made(base), strict=True)
    assert [c for c in report.checks if c.outcome == "FAIL"] == []
    assert report.outcome == "PASS"
    assert len(report.checks) == len(file_checks())


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_exactly_one_check_fails(
    mutation: Mutation, made: Callable[[str], Path], tmp_path: Path
) -> None:
    path = copied(made(mutation.base), tmp_path)
    mutation.change(path)
    report = validate(path, strict=mutation.strict)
    failed = [check for check in report.checks if check.outcome == "FAIL"]
    assert [check.name for check in failed] == [mutation.check, *mutation.also]
    said = " ".join(
        f"{n.finding.found} {n.finding.expected}"
        for n in report.findings
        if n.check == mutation.check
    )
    assert mutation.says in said
    assert report.exit_code == 1
    if mutation.strict:  # a warning: said, and no failure without --strict
        relaxed = validate(path)
        assert relaxed.outcome == ("NOT_RUN" if mutation.check == "unexpected" else "PASS")
        assert mutation.check in {noted.check for noted in relaxed.warnings}


def test_every_check_has_its_mutation() -> None:
    assert {mutation.check for mutation in MUTATIONS} == {row.name for row in file_checks()}


def test_a_fault_costs_a_pass(made: Callable[[str], Path], tmp_path: Path) -> None:
    """What a failed check stands before is NOT-RUN with a reason, never PASS."""
    path = hf(tmp_path)
    text(path, "config.json", lambda value: value.update(rms_norm_eps="many"))
    outcomes = {check.name: check for check in validate(path).checks}
    for name in ("completeness", "shapes", "role_bounds", "vocabulary_size"):
        assert outcomes[name].outcome == "NOT_RUN"
        assert "see the check architecture" in outcomes[name].found


def test_a_fault_of_one_tensor_hides_none_of_those_behind_it(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    """A NaN and a bad scale before and behind each other: each check names all that it is about."""
    path = copied(made("q8"), tmp_path)
    with package.open(path) as model:
        kinds = {name: model[name].encoding for name in model}
    places = [name for name, kind in kinds.items() if kind in ("F32", "Q8_0")]
    # The first and the last of each kind, and the one in the middle.
    plain, blocks = ([n for n in places if kinds[n] == kind] for kind in ("F32", "Q8_0"))
    nan = [plain[i] for i in (0, len(plain) // 2, -1)]
    bad = [blocks[i] for i in (0, len(blocks) // 2, -1)]
    for name in nan:
        element(path, name, 0, b"\x00\x00\xc0\x7f", 4)
    for name in bad:
        element(path, name, 0, b"\x00\x7c", 34)
    assert places.index(bad[0]) < places.index(nan[-1]) and places.index(nan[0]) < places.index(
        bad[-1]
    )
    said: dict[str, list[str]] = {}
    for row in aprfmt("validate", path, "--json").json["findings"]:
        said.setdefault(row["check"], []).append(row["where"])
    assert sorted(said["values"]) == sorted(nan) and sorted(said["block_scales"]) == sorted(bad)


@pytest.mark.parametrize("base", ["gguf", "hf"])
def test_a_cut_file_is_mended_by_the_command_that_is_said(
    base: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Seen red: "get it again" alone, where a part of a good copy is enough."""
    path = copied(made(base), tmp_path)
    good, cut, new = (bases.weights(one) for one in (made(base), path, tmp_path / "new"))
    cut.write_bytes(cut.read_bytes()[:-1000])
    said = [row.finding.todo for row in validate(path).findings if row.check == "layout"]
    (words,) = {shlex.join(shlex.split(one.partition("aprfmt ")[2])) for one in said}
    line = words.replace("A_WHOLE_COPY", str(good)).replace("NEW", str(new))
    assert aprfmt(*shlex.split(line)).code == 0, said
    assert new.read_bytes() == good.read_bytes()


def test_text_of_findings_is_json(made: Callable[[str], Path], tmp_path: Path) -> None:
    path = copied(made("q8"), tmp_path)
    element(path, "blk.1.ffn_up.weight", 6, b"\x00\x7c", 34)
    done = aprfmt("validate", path, "--json")
    assert done.code == 1
    body = done.json
    assert body["schema"] == "aprfmt.validate/1" and body["outcome"] == "FAIL"
    assert body["counts"]["FAIL"] == 1
    (finding,) = [row for row in body["findings"] if row["level"] == "fail"]
    assert finding["check"] == "block_scales" and finding["where"] == "blk.1.ffn_up.weight"
    assert json.dumps(body)
