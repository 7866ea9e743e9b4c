"""Renders chat templates with llama.cpp, by its server's `/apply-template`.

The server is the program llama-server, or the one inside the package xllamacpp. It loads a
model that is made for it: one layer of zeros whose vocabulary has the model's special tokens,
and whose metadata have its chat template. So any model's template is rendered, whatever its
size, format and architecture. Template and server run in a child process that is killed when
they have answered.
"""

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

from aprfmt.base.child_process import import_path, start_library_child
from aprfmt.base.encodings import find_encoding
from aprfmt.base.protocols import TensorInfo, TypedValue, Value
from aprfmt.errors import BackendUnavailableError, FormatError
from aprfmt.formats import open_sink
from aprfmt.tokenizer.keys import BYTE, CONTROL, SCORES, TOKENS, TYPES, UNKNOWN

FOLDER = "APRFMT_LLAMA_CPP"  # the folder of llama.cpp's libraries and programs
PROGRAM, PACKAGE = "llama-server", "xllamacpp"
_CHILD = Path(__file__).with_name("llama_server_child.py")
_WALL_SECONDS = 120.0
_WIDTH = 32  # elements of the stand-in's hidden state


class ServerAnswers(NamedTuple):
    """Which llama.cpp rendered, and (status, text) of each conversation; "ok" with the text."""

    engine: str
    texts: list[tuple[str, str]]


def server_program() -> str | None:
    """Return the path of llama-server; None to use the one in the package xllamacpp.

    Raises BackendUnavailableError where neither is installed.
    """
    folder = os.environ.get(FOLDER)
    for place in (folder, None) if folder else (None,):
        found = shutil.which(PROGRAM, path=place)
        if found is not None:
            return os.path.abspath(found)
    if find_spec(PACKAGE) is not None:
        return None
    raise BackendUnavailableError(
        f"engine 'llama.cpp' renders chat templates by {PROGRAM}, found neither that nor the "
        f"package {PACKAGE}: pip install {PACKAGE}, or put {PROGRAM} on the PATH or into the "
        f"folder that {FOLDER} names"
    )


def render_by_llama_cpp(
    template: str,
    variables: Mapping[str, str],
    conversations: Sequence[Mapping[str, Any]],
    where: str,
) -> ServerAnswers:
    """Return what llama.cpp renders of several conversations.

    `variables` are the special tokens (`bos_token`, `eos_token`); llama.cpp has no others. Raises
    BackendUnavailableError without a server or where it does not start, FormatError where a
    special token is missing for which llama.cpp would use a default.
    """
    program = server_program()
    for name in ("bos_token", "eos_token"):
        if name in template and name not in variables:
            raise FormatError(
                f"{where}: the chat template writes {name}, and the tokenizer states none: "
                "llama.cpp would take a token by its own default"
            )
    with tempfile.TemporaryDirectory(prefix="aprfmt-template-") as folder:
        model = Path(folder) / "template.gguf"
        _write_stand_in(model, template, variables)
        request = {
            "path": import_path(),
            "program": program,
            "model": str(model),
            "bodies": [_request_body(one) for one in conversations],
        }
        answer = _run_child(json.dumps(request).encode())
    if "failed" in answer:
        raise BackendUnavailableError(f"engine 'llama.cpp': {answer['failed']}")
    return ServerAnswers(
        answer["engine"], [(str(word), str(text)) for word, text in answer["texts"]]
    )


def _request_body(conversation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the server's request for a conversation, in the form of OpenAI's API.

    Arguments of tool calls become JSON texts.
    """
    body = {"add_generation_prompt": conversation.get("add_generation_prompt", False)}
    extra = {
        key: value
        for key, value in conversation.items()
        if key not in ("messages", "tools", "add_generation_prompt")
    }
    messages = []
    for message in conversation["messages"]:
        calls = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(call["function"]["arguments"]),
                },
            }
            for call in message.get("tool_calls", ())
        ]
        messages.append({**message, "tool_calls": calls} if calls else dict(message))
    tools = {"tools": conversation["tools"]} if conversation.get("tools") else {}
    kwargs = {"chat_template_kwargs": extra} if extra else {}
    return {**body, "messages": messages, **tools, **kwargs}


def _write_stand_in(path: Path, template: str, variables: Mapping[str, str]) -> None:
    """Write the smallest llama GGUF that llama.cpp loads, with this template and these tokens.

    Keys and tensors: llama.cpp, src/llama-arch.cpp and src/llama-vocab.cpp.
    """
    named = {name: variables.get(f"{name}_token", "") for name in ("bos", "eos")}
    texts = ["<unk>", named["bos"] or "<s>", named["eos"] or "</s>"]
    kinds = [UNKNOWN, CONTROL, CONTROL]
    texts += [f"<0x{byte:02X}>" for byte in range(256)]  # of which any text is made
    kinds += [BYTE] * 256
    metadata: dict[str, Value | TypedValue] = {
        "general.architecture": "llama",
        **{f"llama.{key}": TypedValue(value, "uint32") for key, value in _SIZES.items()},
        "llama.attention.layer_norm_rms_epsilon": TypedValue(1e-5, "float32"),
        "tokenizer.ggml.model": "llama",
        TOKENS.gguf: TypedValue(texts, "array:string"),
        SCORES.gguf: TypedValue([0.0] * len(texts), "array:float32"),
        TYPES.gguf: TypedValue(kinds, "array:int32"),
        **{f"tokenizer.ggml.{name}_token_id": TypedValue(i, "uint32")
           for i, name in enumerate(("unknown", "bos", "eos"))},
        # A BOS that the tokenizer puts is taken off the rendered text again.
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": template,
    }  # fmt: skip
    shapes = {"token_embd": (len(texts), _WIDTH), "output_norm": (_WIDTH,)}
    for name in ("attn_norm", "ffn_norm"):
        shapes[f"blk.0.{name}"] = (_WIDTH,)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{name}"] = (_WIDTH, _WIDTH)
    row = find_encoding("F32")
    infos = [
        TensorInfo(f"{name}.weight", shape, "F32", 0, row.nbytes(shape), row.row_bytes(shape))
        for name, shape in shapes.items()
    ]
    with open_sink(path, "gguf") as sink:
        sink.plan(metadata, infos)
        for info in infos:
            sink.write(info.name, [memoryview(bytes(info.nbytes))])


_SIZES: Mapping[str, int] = {
    "context_length": 256, "embedding_length": _WIDTH, "block_count": 1,
    "feed_forward_length": _WIDTH, "attention.head_count": 1, "rope.dimension_count": _WIDTH,
}  # fmt: skip


def _run_child(payload: bytes) -> dict[str, Any]:
    """Run the child on a request and return its answer; {"failed": why} if there is none.

    The child's process group ends with it. Raises BackendUnavailableError where the child cannot be
    started.
    """
    try:
        child = start_library_child(_CHILD)
    except OSError as error:
        raise BackendUnavailableError(f"engine 'llama.cpp': {error}") from None

    # The server that the child starts must end too: kill the whole group.
    def kill_group() -> None:
        """Kill the child process with all processes that it started."""
        with suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(child.pid, signal.SIGKILL)
            else:
                child.kill()

    timer = Timer(_WALL_SECONDS, kill_group)
    timer.start()
    try:
        assert child.stdin is not None and child.stdout is not None
        with child.stdin, child.stdout:
            with suppress(BrokenPipeError):
                child.stdin.write(payload)
                child.stdin.close()
            lines = child.stdout.read().splitlines()
    finally:
        timer.cancel()
        kill_group()
        code = child.wait()
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        return {"failed": f"its server ended with exit {code} and no answer"}
    return found
