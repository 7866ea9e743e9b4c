"""`aprfmt template --against llama.cpp`: templates rendered by jinja2 and by llama.cpp's server.

Tests of llama.cpp itself are NOT-RUN without a server of it (package xllamacpp, or llama-server).
The program's side is held by a server of our own that answers as llama-server does. Seen red: the
assistant's last turn taken for one to go on with, arguments of a call handed over as an object, a
stand-in whose tokenizer puts a BOS, which llama.cpp then takes off the text.
"""

import json
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from aprfmt.errors import BackendUnavailableError, FormatError
from aprfmt.model import open_model
from aprfmt.tokenizer import llama_server, template_engines
from aprfmt.tokenizer.conversations import ENGINE_CONVERSATIONS
from aprfmt.tokenizer.llama_server import render_by_llama_cpp, server_program
from aprfmt.tokenizer.template import render_several
from aprfmt.tokenizer.template_engines import compare_engines
from tests.cli.run import ROOT, aprfmt
from tests.conftest import not_run

SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
PLAIN = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = (
    "{% if tools %}<|tools|>{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</call>{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{% endif %}"
)
THINKING = PLAIN + "{% if enable_thinking %}<think>{% endif %}"
DATED = "{{ date_string | default('26 Jul 2024') }}" + PLAIN
JOINED = PLAIN + (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ 'arguments: ' + c.function.arguments }}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def llama_cpp() -> None:
    """NOT-RUN where no llama.cpp renders templates."""
    try:
        server_program()
    except BackendUnavailableError as error:
        not_run(str(error))


@pytest.mark.llama_cpp
@pytest.mark.parametrize("template", [PLAIN, TOOLS])
def test_llama_cpp_and_jinja2_agree(template: str, llama_cpp: None) -> None:
    found = compare_engines(template, SPECIAL, "test")
    assert not found.differing, [f"{row.conversation}: {row.text}" for row in found.differing]
    assert len(found.rows) == len(ENGINE_CONVERSATIONS) == 11
    assert "llama.cpp" in found.engine and found.text.startswith("same: ")
    texts = {row.conversation: row.llama_cpp or "" for row in found.rows}
    assert all(row.jinja2 == row.llama_cpp for row in found.rows)
    if template == PLAIN:  # a BOS that the template writes is there, and the last turn ends
        assert texts["one question"].startswith("<|bos|>")
        assert texts["an answer, no prompt"].endswith("It is 4.<|eos|>")
    else:
        assert '<call>add{"a": 2, "b": 2}</call>' in texts["a tool called"]
        assert "<think>Two and two make four.</think>" in texts["an answer with reasoning"]
        assert texts["no thinking"].endswith("<think></think>")


@pytest.mark.llama_cpp
@pytest.mark.parametrize(
    ("template", "variable"), [(THINKING, "enable_thinking"), (DATED, "date_string")]
)
def test_a_variable_that_llama_cpp_alone_sets_is_named(
    template: str, variable: str, llama_cpp: None
) -> None:
    found = compare_engines(template, SPECIAL, "test")
    assert found.differing and found.text.startswith("different: chat_template - llama.cpp")
    for row in found.differing:
        assert row.given == (variable,) and f"only llama.cpp sets {variable}" in row.text


@pytest.mark.llama_cpp
def test_what_one_engine_alone_refuses_is_said(llama_cpp: None) -> None:
    found = compare_engines(JOINED, SPECIAL, "test")
    named = {row.conversation for row in found.differing}
    assert named == {"a tool called", "a tool called and answered"}
    assert all("jinja2 alone refuses it: " in row.text for row in found.differing)


@pytest.mark.llama_cpp
def test_the_command_says_it_of_a_model(demo_model: Path, tmp_path: Path, llama_cpp: None) -> None:
    done = aprfmt("template", demo_model, "--against", "llama.cpp", "--json")
    assert done.code == 0 and done.json["cause"] is None
    copy = tmp_path / "copy"
    shutil.copytree(demo_model, copy)
    (copy / "chat_template.jinja").write_text(THINKING.replace("{{ bos_token }}", ""))
    done = aprfmt("template", copy, "--against", "llama.cpp", "--json")
    assert done.code == 1 and done.json["cause"] == "chat_template"
    assert "llama.cpp" in done.json["engine"]
    short = aprfmt("template", copy, "--against", "llama.cpp", "--format", "agent")
    assert short.code == 1 and len(short.out.splitlines()) <= 12


SERVER = """\
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

options = dict(zip(sys.argv[1::1], sys.argv[2::1]))
folder = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(folder, "started.json"), "w") as file:
    json.dump([os.getpid(), sys.argv[1:]], file)
if os.path.exists(os.path.join(folder, "fails")):
    sys.exit(3)


class Handler(BaseHTTPRequestHandler):
    def reply(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.reply(200, {"status": "ok"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        calls = [c for m in body["messages"] for c in m.get("tool_calls", ())]
        if calls:
            texts = all(isinstance(c["function"]["arguments"], str) for c in calls)
            said = "no calls here" if texts else "arguments are no text"
            self.reply(500, {"error": {"message": said}})
        else:
            self.reply(200, {"prompt": json.dumps(body)})

    def log_message(self, *args):
        pass


assert os.path.getsize(options["--model"]) > 1000
HTTPServer((options["--host"], int(options["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a program of the name on the way to it; it answers as llama-server does."""
    if os.name == "nt":
        not_run("a script is no program there")
    path = tmp_path / "bin" / "llama-server"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\n{SERVER}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv(llama_server.FOLDER, str(path.parent))
    return path


def test_the_program_is_started_asked_and_ended(program: Path) -> None:
    asked = list(ENGINE_CONVERSATIONS.values())
    engine, texts = render_by_llama_cpp(PLAIN, SPECIAL, asked, "test")
    assert engine == "llama.cpp by llama-server" and len(texts) == len(asked)
    for conversation, (status, text) in zip(asked, texts, strict=True):
        called = any(message.get("tool_calls") for message in conversation["messages"])
        assert (status, text == "no calls here") == (("error", True) if called else ("ok", False))
        if status == "ok":
            body = json.loads(text)
            assert body["messages"] == conversation["messages"]
            assert body["add_generation_prompt"] == conversation["add_generation_prompt"]
            assert body.get("tools") == conversation.get("tools")
    pid, options = json.loads((program.parent / "started.json").read_text())
    assert {"--jinja", "--no-prefill-assistant", "--no-warmup"} <= set(options)
    with pytest.raises(ProcessLookupError):
        wait_for_end(pid)


@pytest.mark.parametrize("form", ["--json", "--format agent", ""])
def test_what_a_program_renders_otherwise_is_the_answer_of_the_command(
    form: str, program: Path, demo_model: Path
) -> None:
    """The program here says JSON where jinja2 says text: each conversation differs, exit code 1."""
    done = aprfmt("template", demo_model, "--against", "llama.cpp", *form.split())
    assert done.code == 1 and not done.err
    if form == "--json":
        rows = done.json["conversations"]
        assert [row["conversation"] for row in rows] == [*ENGINE_CONVERSATIONS]
        assert done.json["cause"] == template_engines.CAUSE
        assert done.json["engine"] == "llama.cpp by llama-server"
    else:
        assert "one question" in done.out and "llama.cpp" in done.out


def wait_for_end(pid: int) -> None:
    """Raise ProcessLookupError as soon as there is no such process."""
    import time

    from tests.patience import PATIENCE

    for _ in range(int(PATIENCE * 20)):
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        if state.is_file() and state.read_text().rpartition(")")[2].split()[0] == "Z":
            raise ProcessLookupError  # ended; nobody reaps it in a container without init
        time.sleep(0.05)


def test_a_program_that_does_not_start_is_said(program: Path) -> None:
    (program.parent / "fails").write_text("")
    with pytest.raises(BackendUnavailableError, match=r"llama-server ended with exit 3"):
        render_by_llama_cpp(PLAIN, SPECIAL, [ENGINE_CONVERSATIONS["one question"]], "test")


def test_without_a_server_it_is_not_run(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *args, **more: None)
    monkeypatch.setattr(llama_server, "find_spec", lambda name: None)
    done = aprfmt("template", demo_model, "--against", "llama.cpp")
    assert done.code == 2 and not done.out and done.err.count("\n") == 1
    assert "pip install xllamacpp" in done.err


@pytest.mark.parametrize("options", [("--user", "hi"), ("--no-generation-prompt",)])
def test_conversations_of_ones_own_are_refused_beside_it(
    options: tuple[str, ...], demo_model: Path
) -> None:
    done = aprfmt("template", demo_model, "--against", "llama.cpp", *options)
    assert done.code == 2 and "--against renders conversations of its own" in done.err


def test_a_token_that_is_not_stated_is_not_guessed(program: Path) -> None:
    with pytest.raises(FormatError, match="writes bos_token, and the tokenizer states none"):
        render_by_llama_cpp(PLAIN, {"eos_token": "x"}, [], "test")
    assert not (program.parent / "started.json").exists()


def test_the_stand_in_states_the_models_tokens_and_template(tmp_path: Path) -> None:
    path = tmp_path / "stand_in.gguf"
    llama_server._write_stand_in(path, TOOLS, SPECIAL)
    checks = {
        row["name"]: row["outcome"] for row in aprfmt("validate", path, "--json").json["checks"]
    }
    for name in ("layout", "completeness", "shapes", "tokenizer", "special_ids", "hyperparameters"):
        assert checks[name] == "PASS", name
    with open_model(path) as model:
        assert model.carried.chat_template() == TOOLS
        tokens = list(model.metadata["tokenizer.ggml.tokens"])
        for role, text in SPECIAL.items():
            assert tokens[model.metadata[f"tokenizer.ggml.{role}_id"]] == text
        assert model.metadata["tokenizer.ggml.add_bos_token"] is False
        assert model.spec.name == "llama"
    assert path.stat().st_size < 100_000 and ROOT.is_dir()


@pytest.mark.parametrize(
    ("template", "theirs", "given"),
    [
        (PLAIN, {}, None),
        (THINKING, {"enable_thinking": True}, ("enable_thinking",)),
        (DATED, {"date_string": "today"}, ("date_string",)),
        (DATED, {"date_string": "tomorrow"}, ()),
        (PLAIN + "{{ other }}", {"other": "x"}, ()),
        (DATED + "{{ other }}", {"date_string": "today", "other": "x"}, ()),
    ],
)
def test_a_variable_is_the_reason_only_where_jinja2_renders_the_same_with_it(
    template: str,
    theirs: dict[str, Any],
    given: tuple[str, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other engine is jinja2 with more variables. Seen red: the reason of what differs yet."""

    def rendered(template: str, variables: Any, conversations: Any, where: str) -> Any:
        rows = [{**theirs, **each} for each in conversations]
        return "llama.cpp b1", render_several(template, rows, variables, where)

    monkeypatch.setattr(template_engines, "render_by_llama_cpp", rendered)
    usual = {"enable_thinking": True, "date_string": "today"}
    monkeypatch.setattr(template_engines, "_llama_cpp_variables", lambda: usual)
    found = compare_engines(template, SPECIAL, "test")
    assert bool(found.differing) is (given is not None)
    own = {name: each for name, each in ENGINE_CONVERSATIONS.items() if set(theirs) & set(each)}
    assert set(own) == ({"thinking", "no thinking"} & set(own))
    for row in found.differing:
        assert row.given == given and row.conversation not in own
        why = f": only llama.cpp sets {' and '.join(given or ())}"
        assert row.text.endswith(why) is bool(given)
    assert all(row.given == () for row in found.rows if row.same)
