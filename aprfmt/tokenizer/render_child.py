"""The process that renders or scans a chat template; started by `template.py`.

Reads one JSON request from stdin, applies the request's limits to itself, then answers on stdout: a
status word, a newline, text. The sandbox is jinja2's immutable one with the filters and functions
that transformers offers, and without those that templates do not need.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any


class OutputTooLongError(Exception):
    """The template wrote more than the limit."""


class RefusedError(Exception):
    """The template called raise_exception."""


def make_environment() -> Any:
    """Return the sandboxed jinja2 environment, set up for chat templates as in transformers."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks the model's own text; here only its body is rendered."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 reads it so)

        def parse(self, parser: Any) -> Any:
            """Return the node of a `generation` block: its body in a scope."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class PlainNamespace(Namespace):
        """namespace() without names that lead to Python's internals."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            """Create a namespace; SecurityError for names with a leading underscore."""
            self, *rest = args
            names = dict(*rest, **kwargs)
            for name in names:
                refuse_private_name(name)
            Namespace.__init__(self, names)

        def __setitem__(self, name: str, value: Any) -> None:
            """Set a name; SecurityError for one with a leading underscore."""
            refuse_private_name(name)
            Namespace.__setitem__(self, name, value)

    def refuse_private_name(name: Any) -> None:
        """Raise SecurityError for a template's attribute name with a leading underscore."""
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")

    # Templates get dict() and namespace() in forms that do not lead to Python's classes.
    class PlainDict:
        """dict() as a function, so that the class cannot be reached."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            """Return dict(*args, **kwargs)."""
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            """Return dict.fromkeys of the arguments."""
            return dict.fromkeys(*args)

    # The functions and the filter that transformers gives to chat templates.
    def raise_exception(message: object) -> None:
        """Raise RefusedError with the message by which a template rejects the conversation."""
        raise RefusedError(str(message))

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """Return a template's value as JSON without HTML escapes, as transformers' filter does."""
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def strftime_now(form: str) -> str:
        """Return the current local time as text in a strftime format, for templates."""
        from datetime import datetime

        return datetime.now().strftime(form)

    # Whitespace options and extensions as in transformers.
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = tojson
    made.globals.pop("lipsum", None)  # random words; often the first step out of a sandbox
    made.globals.update(
        raise_exception=raise_exception,
        strftime_now=strftime_now,
        dict=PlainDict(),
        namespace=PlainNamespace,
    )
    return made


def render_template(request: Mapping[str, Any], limit: int) -> str:
    """Return the text of the request's template; OutputTooLongError over `limit` bytes."""
    return _generate_text(
        make_environment().from_string(request["template"]), request["context"], limit
    )


def render_contexts(request: Mapping[str, Any], limit: int) -> str:
    """Return JSON of [status, text] of every context, of at most `limit` bytes together.

    The status is "ok", "refused", "unsafe" or "error"; the text of the last three is the reason.
    """
    template = make_environment().from_string(request["template"])
    found = []
    for context in request["contexts"]:
        try:
            found.append(["ok", _generate_text(template, context, limit)])
        except RefusedError as error:
            found.append(["refused", str(error)])
        except (MemoryError, OutputTooLongError, RecursionError):
            raise
        except Exception as error:
            found.append([_error_status(error), f"{type(error).__name__}: {error}"[:300]])
        limit -= len(found[-1][1].encode("utf-8", "surrogatepass"))
    return json.dumps(found)


def template_trees(request: Mapping[str, Any]) -> str:
    """Return JSON of the syntax trees of the request's templates: equal trees render alike.

    jinja2 has applied the whitespace control by then, and quotes are gone. Neighbouring texts are
    joined, since a comment between two leaves nothing.
    """
    from jinja2 import nodes

    def node_as_list(node: Any) -> Any:
        """Return a template's syntax node as nested lists of type names and constants."""
        if isinstance(node, nodes.Node):
            return [type(node).__name__, *(node_as_list(value) for _, value in node.iter_fields())]
        if isinstance(node, list | tuple):
            return join_texts([node_as_list(one) for one in node])
        return [type(node).__name__, repr(node)]

    def join_texts(rows: list[Any]) -> list[Any]:
        """Return nodes as lists, neighbouring outputs joined into one, and neighbouring texts."""
        made: list[Any] = []
        for row in rows:
            if made and row[:1] == made[-1][:1] == ["Output"]:
                made[-1] = ["Output", join_texts([*made[-1][1], *row[1]])]
            elif made and row[:1] == made[-1][:1] == ["TemplateData"]:
                made[-1] = [
                    "TemplateData",
                    ["str", repr(_constant_text(made[-1]) + _constant_text(row))],
                ]
            else:
                made.append(row)
        return made

    made = make_environment()
    return json.dumps([node_as_list(made.parse(text)) for text in request["templates"]])


def _constant_text(row: Any) -> str:
    """Return the text in a TemplateData row of a template's tree."""
    import ast

    return str(ast.literal_eval(row[1][1]))


def _error_status(error: Exception) -> str:
    """Return the status for an error of a template: "unsafe" or "error"."""
    from jinja2.exceptions import SecurityError

    return "unsafe" if isinstance(error, SecurityError) else "error"


def _generate_text(template: Any, context: Mapping[str, Any], limit: int) -> str:
    """Return the text that a template generates; OutputTooLongError over `limit` bytes."""
    pieces: list[str] = []
    size = 0
    for piece in template.generate(**context):
        size += len(piece.encode("utf-8", "surrogatepass"))
        if size > limit:
            raise OutputTooLongError
        pieces.append(piece)
    return "".join(pieces)


def answer_request(request: Mapping[str, Any], limit: int) -> tuple[str, str]:
    """Return (status, text) for one request, by its "task"."""
    from jinja2.exceptions import SecurityError, TemplateSyntaxError

    from aprfmt.base.template_scan import find_suspicious

    try:
        if request["task"] == "scan":
            return "ok", "\n".join(find_suspicious(request["template"], make_environment()))
        if request["task"] == "several":
            return "ok", render_contexts(request, limit)
        if request["task"] == "trees":
            return "ok", template_trees(request)
        return "ok", render_template(request, limit)
    except RefusedError as error:
        return "refused", str(error)
    except TemplateSyntaxError as error:
        return "syntax", f"line {error.lineno}: {error.message}"
    except SecurityError as error:
        return "unsafe", str(error)
    except MemoryError:
        return "memory", ""
    except OutputTooLongError:
        return "output", ""
    except Exception as error:  # any error of a template becomes one sentence
        return "error", f"{type(error).__name__}: {error}"


def main() -> None:
    r"""Read one request from stdin, apply its limits, and write "status\ntext" to stdout."""
    request = json.loads(sys.stdin.buffer.read())
    sys.path[:] = request["path"]
    from aprfmt.base.resource_limits import limit_resources

    limits = request["limits"]
    limit_resources(limits["cpu_seconds"], limits["memory"])
    try:
        status, text = answer_request(request, limits["output"])
        raw = f"{status}\n{text}".encode("utf-8", "surrogatepass")
    except MemoryError:
        raw = b"memory\n"
    except RecursionError:
        raw = b"error\nnested too deeply"
    sys.stdout.buffer.write(raw)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
