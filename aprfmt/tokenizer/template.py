"""Renders chat templates, which are programs from files, in a child process with limits.

The child has CPU, memory and output limits and a sandboxed jinja2 environment; it gets a
request as JSON on stdin, has no environment variables, and answers with a status word and a
text. The static scan runs there too, since parsing a hostile template may take as long as
rendering it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

from aprfmt.base.child_process import import_path, start_library_child
from aprfmt.errors import AprfmtError, FormatError, UsageError
from aprfmt.tokenizer.limits import CPU_SECONDS, MEMORY, OUTPUT, REASON, WALL_SECONDS
from aprfmt.tokenizer.template_language import TODO, foreign_template

if TYPE_CHECKING:
    import subprocess

_CHILD = Path(__file__).with_name("render_child.py")

# status word of the child -> (class raised, next words of the message)
_ANSWERS: Mapping[str, tuple[type[AprfmtError], str]] = {
    "refused": (UsageError, "refuses these messages: "),
    "syntax": (FormatError, "is not a jinja2 template: "),
    "unsafe": (FormatError, "was stopped by the sandbox: "),
    "memory": (FormatError, f"needs more than {MEMORY >> 20} MiB of memory"),
    "output": (FormatError, f"writes more than {OUTPUT >> 20} MiB"),
    "error": (FormatError, "failed: "),
}


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    variables: Mapping[str, str],
    where: str,
) -> str:
    """Return the messages rendered by a chat template.

    With `add_generation_prompt` the text ends where the answer begins. `variables` are bos_token
    and the like; `where` begins messages. Raises UsageError if the template rejects the messages,
    FormatError if it is not a valid template, is unsafe, or exceeds a limit (5 s of CPU, 256 MiB, 4
    MiB of output).
    """
    _refuse_foreign(template, where)
    request = {
        "template": template,
        "context": {
            **variables,
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        },
    }
    return _run_child("render", request, where)


# What children rendered in this process: both sides of a comparison mostly have one template.
_rendered: dict[str, str] = {}
_KEPT = 64


def render_several(
    template: str,
    conversations: Sequence[Mapping[str, Any]],
    variables: Mapping[str, str],
    where: str,
) -> list[tuple[str, str]]:
    """Return (status, text) of several conversations, rendered by one child process.

    Each conversation is {"messages", "add_generation_prompt"}; `variables` are bos_token and the
    like, `where` begins messages. The status is "ok", or "refused", "unsafe" or "error" with the
    reason as the text. Raises FormatError if the template is not one, or if rendering all of them
    exceeds a limit.
    """
    _refuse_foreign(template, where)
    contexts = [
        {**variables, "tools": None, "documents": None, **conversation}
        for conversation in conversations
    ]
    request = {"template": template, "contexts": contexts}
    try:
        key = json.dumps(request, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        key = ""  # the child's caller says what is wrong with it
    answer = _rendered.get(key) or _run_child("several", request, where)
    if key and len(_rendered) < _KEPT:
        _rendered[key] = answer
    return [(str(status), str(text)) for status, text in json.loads(answer)]


def _refuse_foreign(template: str, where: str) -> None:
    """Raise FormatError for a template of another engine's language."""
    found = foreign_template(template)
    if found is not None:
        raise FormatError(
            f"{where}: the chat template is {found.says}, not jinja2: what renders chat templates "
            f"refuses it or uses another; {TODO}"
        )


def are_equal_programs(one: str, other: str) -> bool:
    """Return whether two templates have the same syntax tree.

    False where jinja2 cannot parse one of them within the limits.
    """
    try:
        first, second = json.loads(
            _run_child("trees", {"templates": [one, other]}, "the chat template")
        )
    except AprfmtError:
        return False
    return bool(first == second)


def scan_template(template: str) -> list[str]:
    """Return a sentence for each suspicious part of a chat template; [] if there is none.

    Nothing is rendered. The sandbox protects in any case. [] too for a template of another
    language, which `foreign_template` names. A template that cannot be scanned gives one sentence.
    """
    if foreign_template(template) is not None:
        return []
    try:
        return _run_child("scan", {"template": template}, "the chat template").splitlines()
    except AprfmtError as error:
        return [f"could not be scanned: {error}"]


def _run_child(task: str, request: Mapping[str, Any], where: str) -> str:
    """Run the child on one task and return its answer's text.

    Raises UsageError or FormatError for an answer other than "ok", or none.
    """
    # The request, with the limits that the child sets for itself.
    limits = {"cpu_seconds": CPU_SECONDS, "memory": MEMORY, "output": OUTPUT}
    work = {"task": task, "path": import_path(), "limits": limits, **request}
    try:
        payload = json.dumps(work).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{where}: the messages are not plain JSON data: {error}") from None
    try:
        child = start_library_child(_CHILD)
    except OSError as error:
        raise FormatError(
            f"{where}: a process for the chat template could not start: {error}"
        ) from None
    # A timer ends the child where its CPU time cannot be limited.
    timer = Timer(WALL_SECONDS, child.kill)
    timer.start()
    try:
        raw = _exchange_with_child(child, payload)
    finally:
        timer.cancel()
        child.kill()
        code = child.wait()
    # No status word: the child ended early.
    status, separator, text = raw.partition(b"\n")
    if not separator:
        over = f"used more than {CPU_SECONDS} s of CPU or crashed (exit {code})"
        raise FormatError(f"{where}: the chat template {over}; it is broken or hostile")
    answer = text.decode("utf-8", "surrogatepass")
    if status == b"ok":
        return answer
    # Any status but "ok" becomes an error.
    kind, sentence = _ANSWERS.get(status.decode("ascii", "replace"), _ANSWERS["error"])
    reason = answer[:REASON] if sentence.endswith(": ") else ""
    raise kind(f"{where}: the chat template {sentence}{reason}")


def _exchange_with_child(child: "subprocess.Popen[bytes]", payload: bytes) -> bytes:
    """Write the request to the child and return its answer, cut at the limit; b"" if it ended.

    The child reads everything before it writes.
    """
    assert child.stdin is not None and child.stdout is not None
    with child.stdin, child.stdout:
        try:
            child.stdin.write(payload)
            child.stdin.close()
        except BrokenPipeError:
            pass  # the child ended early; the answer is empty
        return child.stdout.read(OUTPUT + REASON * 4 + 64)
