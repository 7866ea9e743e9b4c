"""`aprfmt tokenize` and `aprfmt template`, as a user types them."""

import json
from pathlib import Path

import pytest

from aprfmt.tokenizer.carriers import to_gguf
from tests.cli.run import aprfmt
from tests.tokenizer.fake import added_ids, byte_level, folder_model, without_json, write_gguf


def test_tokenize(demo_model: Path) -> None:
    from transformers import AutoTokenizer

    text = "It is a truth <|im_end|>"
    wanted = AutoTokenizer.from_pretrained(demo_model).encode(text)
    done = aprfmt("tokenize", demo_model, text)
    lines = done.out.splitlines()
    assert (done.code, lines[0]) == (0, " ".join(map(str, wanted)))
    assert lines[-1].split() == [str(wanted[-1]), '"<|im_end|>"'] and len(lines) == len(wanted) + 1
    body = aprfmt("tokenize", demo_model, text, "--json").json
    assert body["ids"] == wanted and body["count"] == len(wanted) and body["ok"]
    assert body["schema"] == "aprfmt.tokenize/1"
    assert body["tokenizer"].endswith("tokenizer.json")


def test_tokenize_options(demo_model: Path) -> None:
    plain = aprfmt("tokenize", demo_model, "<|im_end|>", "--no-parse-special", "--json").json
    end = added_ids(demo_model)["<|im_end|>"]
    assert end not in plain["ids"]
    back = aprfmt("tokenize", demo_model, ",".join(map(str, plain["ids"])), "--decode", "--json")
    assert back.json["text"] == "<|im_end|>"
    newline = byte_level(demo_model)[0]["\u010a"]
    shown = aprfmt("tokenize", demo_model, f"{end} {newline}", "--decode")
    assert shown.out == "<|im_end|>\\n\n"


def test_a_second_bos_is_warned_of(gemma: Path) -> None:
    twice = aprfmt("tokenize", gemma, "<bos>hi")
    assert twice.out.startswith("2 2 2202\n") and "begins with <bos> twice" in twice.err
    once = aprfmt("tokenize", gemma, "<bos>hi", "--no-special")
    assert once.out.startswith("2 2202\n") and not once.err


@pytest.mark.parametrize("text", ["x", "1,-2", "1.5", "99999999999", "\u0663"])
def test_no_ids_to_decode(demo_model: Path, text: str) -> None:
    done = aprfmt("tokenize", demo_model, "--decode", "--", text)
    assert done.code == 2 and "is no token id" in done.err and not done.out


def test_ids_without_a_token_are_warned_of(demo_model: Path) -> None:
    done = aprfmt("tokenize", demo_model, "30,99999", "--decode")
    assert (done.code, done.out) == (0, "?\n") and "no token has id 99999 (1 of 2)" in done.err


def test_messages_stand_alone(demo_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps([{"role": "user", "content": "hi"}]))
    for option in ("--user", "--system"):
        done = aprfmt("template", demo_model, "--messages", file, option, "x")
        assert done.code == 2 and "leave --user and --system out" in done.err and not done.out


def test_template(demo_model: Path, tmp_path: Path) -> None:
    done = aprfmt("template", demo_model, "--user", "hi", "--system", "Be brief.")
    assert done.code == 0 and not done.err
    assert done.out.splitlines()[:5] == [
        "<|im_start|>system",
        "Be brief.<|im_end|>",
        "<|im_start|>user",
        "hi<|im_end|>",
        "<|im_start|>assistant",
    ]
    file = tmp_path / "chat.json"
    file.write_text(json.dumps([{"role": "user", "content": "hi"}]))
    body = aprfmt("template", demo_model, "--messages", file, "--no-generation-prompt", "--json")
    assert body.json["text"] == "<|im_start|>user\nhi<|im_end|>\n"
    assert (
        body.json["ids"][0] == added_ids(demo_model)["<|im_start|>"]
        and body.json["suspicious"] == []
    )


def test_template_says_what_is_suspicious(demo_model: Path, tmp_path: Path) -> None:
    for path in demo_model.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = demo_model / "model.safetensors"
    (tmp_path / weights.name).write_bytes(weights.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("\x1b[2J{{ messages.__class__ }}\n\u202ex")
    done = aprfmt("template", tmp_path, "--user", "hi")
    assert done.code == 0 and "reads .__class__" in done.err
    assert "\x1b" not in done.out and "\\x1b[2J" in done.out and "\u202e" not in done.out
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.x }}")
    done = aprfmt("template", tmp_path, "--user", "hi", "--json")
    assert done.code == 2 and "sandbox" in done.json["error"]["message"]
    assert done.json["error"]["where"].endswith("model.safetensors")
    assert "chat_template.jinja: the chat template" in done.json["error"]["message"]


@pytest.mark.parametrize("text", ["{}", "[1]", '[{"content": "x"}]', "["])
def test_messages_that_are_none(demo_model: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "chat.json").write_text(text)
    done = aprfmt("template", demo_model, "--messages", tmp_path / "chat.json")
    assert done.code == 2 and "chat.json" in done.err


def test_no_message(demo_model: Path) -> None:
    done = aprfmt("template", demo_model)
    assert done.code == 2 and "--user" in done.err


def test_no_template(gemma: Path) -> None:
    done = aprfmt("template", gemma, "--user", "hi")
    assert done.code == 2 and "carries no chat template" in done.err


@pytest.mark.parametrize("command", ["tokenize", "template"])
def test_help(command: str) -> None:
    done = aprfmt(command, "--help")
    assert done.code == 0 and "MODEL" in done.out


@pytest.mark.parametrize("lost", [("tokenizer.ggml.model",), ("tokenizer.ggml.tokens",)])
def test_a_template_needs_no_tokenizer_that_builds(
    lost: tuple[str, ...], demo_model: Path, tmp_path: Path
) -> None:
    """A GGUF without a key of its vocabulary: the text is transformers', but there are no ids."""
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": "hi"}]
    wanted = AutoTokenizer.from_pretrained(demo_model).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert isinstance(wanted, str)
    metadata = without_json(to_gguf(folder_model(demo_model)))
    whole = write_gguf(tmp_path / "whole.gguf", metadata)
    assert aprfmt("template", whole, "--user", "hi", "--json").json["text"] == wanted
    kept = {key: value for key, value in metadata.items() if key not in lost}
    path = write_gguf(tmp_path / "lost.gguf", kept)
    done = aprfmt("template", path, "--user", "hi", "--json")
    assert done.code == 0 and done.json["text"] == wanted
    assert done.json["ids"] is None and done.json["tokenizer"] is None
    assert done.json["no_ids"] in done.err and "no token ids: " in done.err
    shown = aprfmt("template", path, "--user", "hi")
    assert shown.code == 0 and shown.out == "".join(f"{line}\n" for line in str(wanted).split("\n"))
    assert aprfmt("tokenize", path, "hi").code == 2
    del kept["tokenizer.chat_template"]
    bare = aprfmt("template", write_gguf(tmp_path / "bare.gguf", kept), "--user", "hi")
    assert (bare.code, len(bare.err.splitlines())) == (2, 1)


def test_special_tokens_of_a_template_without_a_tokenizer(tmp_path: Path) -> None:
    keys = {
        "tokenizer.ggml.tokens": ["<s>", "</s>", "a"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 77,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    }
    path = write_gguf(tmp_path / "x.gguf", keys)
    assert aprfmt("template", path, "--user", "hi").out == "<s>hi</s>\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{{ if .System }}{{ .System }}{{ end }}{{ .Prompt }}", "a Go template"),
        ("{{#each messages}}{{content}}{{/each}}", "a Handlebars template"),
        ("llama2", "built in (llama2)"),
    ],
)
def test_commands_name_the_language_of_a_template(
    text: str, says: str, demo_model: Path, tmp_path: Path
) -> None:
    gguf = to_gguf(folder_model(demo_model)) | {"tokenizer.chat_template": text}
    path = write_gguf(tmp_path / "demo.gguf", gguf)
    done = aprfmt("template", path, "--user", "hello")
    assert done.code == 2 and says in done.err and "source model" in done.err, done.err
    seen = aprfmt("inspect", path, "--json").json["summary"]["unusual"]
    assert sum(says in one and "not jinja2" in one for one in seen) == 1, seen
    rows = {row["name"]: row for row in aprfmt("validate", path, "--json").json["checks"]}
    assert rows["chat_template"]["outcome"] == "FAIL", rows["chat_template"]
    found = str(rows["chat_template"])
    assert says in found and "source model" in found and "expected" in found
