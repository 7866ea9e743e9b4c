"""Chat templates: as transformers renders them, and held where they are hostile."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2 import nodes
from jinja2.defaults import DEFAULT_NAMESPACE

from aprfmt.base.template_scan import ATTRIBUTE_FILTERS, constant_value, find_suspicious
from aprfmt.errors import FormatError, UsageError
from aprfmt.tokenizer import template
from aprfmt.tokenizer.conversations import unrendered_reason
from aprfmt.tokenizer.render_child import make_environment
from aprfmt.tokenizer.template import render, scan_template
from aprfmt.tokenizer.template_language import BUILT_IN, LANGUAGES, foreign_template, reads_messages
from tests.cli.run import aprfmt
from tests.patience import PATIENCE
from tests.tokenizer.fake import fake

pytestmark = pytest.mark.usefixtures("rendered_each_time")

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 < 2 & \"é\" 'x'\n{{ 3 }}"},
    {"role": "assistant", "content": "yes", "tool_calls": [{"name": "f", "arguments": {"a": [1]}}]},
]

PLAIN: dict[str, str] = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "tokens": "{{ bos_token }}{{ messages[0]['content'] | trim }}{{ eos_token }}[{{ unk_token }}]",
    "tojson": "{{ messages | tojson }}{{ messages[2].tool_calls[0] | tojson(indent=2) }}",
    "tojson-options": "{{ {'b': 'é', 'a': 1} | tojson(sort_keys=true, ensure_ascii=true) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}",
    "loopcontrols": "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}"
    "{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "blocks": "{% for m in messages %}\n    {% if m.role == 'user' %}\n  {{ m.role }}\n"
    "    {%- endif %}\n{% endfor %}\n",
    "macro": "{% macro show(m) %}<{{ m.role }}>{% endmacro %}{{ show(messages[1]) }}",
    "methods": "{{ messages[0].content.split(' ')[-1].upper() }}{{ messages[2].items() | list }}",
    "slices": "{% for m in messages[1:][::-1] %}{{ m.role }}{{ loop.index0 }}{% endfor %}",
    "dict": "{{ dict(a=1).get('a') }}{{ dict.fromkeys(['x']) }}",
    "tools": "{{ tools is none }}{{ documents is defined }}{{ date_string is defined }}",
    "strftime": "{{ strftime_now('%Y') | length }}",
    "cycler": "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}",
}


def scanned(text: str) -> list[str]:
    """Scan in this process; the child's way is tested once."""
    return find_suspicious(text, make_environment())


@pytest.mark.parametrize("name", PLAIN)
def test_renders_as_transformers_does(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    prompt = name != "macro"
    variables: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs: Any = render_jinja_template(
        [MESSAGES], chat_template=PLAIN[name], add_generation_prompt=prompt, **variables
    )
    (wanted,) = theirs[0]
    got = render(
        PLAIN[name], MESSAGES, add_generation_prompt=prompt, variables=variables, where="x"
    )
    assert got == wanted
    assert bool(scanned(PLAIN[name])) is (name == "cycler")


# template -> what the scan must say of it ("" where reading cannot tell)
HOSTILE: dict[str, tuple[str, str]] = {
    "class": ("{{ messages.__class__.__mro__ }}", "__class__"),
    "item": ("{{ messages['__class__'].mro() }}", "__class__"),
    "concatenated": ("{{ ''['__cl' ~ 'ass__'].mro() }}", "__class__"),
    "added": ("{{ ''['__cl' + 'ass__'].mro() }}", "__class__"),
    "reversed": ("{{ ''['__ssalc__' | reverse].mro() }}", "__class__"),
    "joined": ("{{ ''[['__cl', 'ass__'] | join].mro() }}", "__class__"),
    "escaped": (r"{{ ''['\x5f\x5fclass\x5f\x5f'].mro() }}", "__class__"),
    "run-time": ("{{ ''['__' ~ messages[0].role ~ '__'].x.y }}", "run time"),
    "attr": ("{{ (''|attr('__class__')).mro() }}", "attr"),
    "map-attr": ("{{ (messages|map('attr', '__class__')|list)[0].mro() }}", "attr"),
    "map-attribute": ("{{ (messages|map(attribute='__class__')|list)[0].mro() }}", "__class__"),
    "groupby": ("{{ (messages|groupby('__class__'))[0][0].mro() }}", "__class__"),
    "lipsum": ("{{ lipsum.__globals__['os'].popen('id').read() }}", "popen"),
    "cycler": ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "cycler"),
    "joiner": ("{{ joiner.__init__.__globals__ }}", "joiner"),
    "namespace": ("{{ namespace.__init__.__globals__ }}", "__init__"),
    "namespace-set": ("{% set ns = namespace(__class__=1) %}x", ""),
    "namespace-private": ("{% set ns = namespace(a=1, _b=1) %}{{ ns.a }}", ""),
    "namespace-dict": (
        "{% set ns = namespace({'a': 1, '__class__': 1}) %}{{ ns.a }}", "string '__class__'"
    ),
    "namespace-pairs": ("{% set ns = namespace([('_b', 1)], a=1) %}{{ ns.a }}", ""),
    "namespace-item": ("{% set ns = namespace(a=1) %}{% set ns.__class__ = 2 %}{{ ns.a }}", ""),
    "dict-class": ("{{ dict.__class__.__mro__[1] }}", "__mro__"),
    "self": ("{{ self._TemplateReference__context.environment.x.y }}", "_TemplateReference"),
    "undefined": ("{{ nothing.__init__.__globals__ }}", "__globals__"),
    "function": ("{{ raise_exception.__globals__['json'].x }}", "__globals__"),
    "function-code": ("{{ strftime_now.func_globals.x.y }}", "func_globals"),
    "format-bound": ("{{ '{0.__class__.__mro__}'.format('x').y.z }}", "format"),
    "format-indirect": ("{% set f = '{0.__class__}'.format %}{{ f('x').y.z }}", "__class__"),
    "format-map": ("{{ '{a.__class__}'.format_map({'a': 1}).x.y }}", "format_map"),
    "format-mapped": ("{{ ['{0.__class__}'] | map('format', 1) | list }}", "__class__"),
    "caller": ("{% macro m() %}{{ caller.__globals__.x }}{% endmacro %}{% call m() %}{% endcall %}",
               "__globals__"),
    "mutation": ("{{ messages.append(1) }}", ""),
    "clear": ("{{ messages[0].clear() }}", ""),
    "include": ("{% include '/etc/passwd' %}", "another template"),
    "import": ("{% import 'os' as os %}{{ os }}", "another template"),
    "extends": ("{% extends '/etc/passwd' %}", "another template"),
    "function-call": ("{{ open('/etc/passwd').read() }}", "calls open()"),
    "exec-name": ("{{ self.os.system('id') }}", "system"),
    "range": ("{% for i in range(10 ** 9) %}x{% endfor %}", "range()"),
    "repeat": ("{{ 'a' * 10 ** 10 }}", "multiplies"),
    "repeat-list": ("{{ ([0] * 10 ** 9) | length }}", "multiplies"),
    "output": ("{{ 'a' * 5000000 }}", "multiplies"),
    "doubling": ("{% set ns = namespace(s='x') %}{% for i in range(64) %}"
                 "{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s | length }}", ""),
    "width": ("{{ '%999999999d' | format(1) }}", ""),
    "recursion": ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", ""),
    "nesting": ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "nested"),
    "center": ("{{ 'x' | center(999999999) }}", ""),
    "indent": ("{{ ('x\n' * 9999) | indent(99999) }}", ""),
    "replace": ("{{ ('x' * 9999) | replace('x', 'y' * 99999) }}", "multiplies"),
    "syntax": ("{% if %}", "does not parse"),
    "unclosed": ("{% for x in messages %}", "does not parse"),
    "raise-other": ("{{ 1 // 0 }}", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str) -> None:
    text, finding = HOSTILE[name]
    with pytest.raises(FormatError, match=r"x\.gguf: the chat template"):
        render(text, MESSAGES, add_generation_prompt=True, variables={}, where="x.gguf")
    found = scanned(text)
    assert any(finding in line for line in found) if finding else not found


TOLD = (
    ("{{ messages[0].content.strip() }}", ""),
    ("{{ messages.get('a') }}", ""),
    ("{{ '{}'.format(1) }}", ""),
    ("{{ '{a.b}'.upper() }}", ""),
    ("{{ '{a[0]}'.format(1) }}", "calls .format() in a way that can read members by name"),
    ("{{ x.format(1) }}", "calls .format() in a way that can read members by name"),
    ("{{ x.format_map(1) }}", "calls .format_map() in a way that can read members by name"),
    ("{{ range(10000) }}{{ range(-10000) }}", ""),
    ("{{ range(1, 10001) }}", "counts beyond 10000 in range()"),
    ("{{ range(-10001) }}", "counts beyond 10000 in range()"),
    ("{{ other(10001) }}", "calls other(), which chat templates do not have"),
    ("{% macro other(i) %}{% endmacro %}{{ other(10001) }}", ""),
    ("{{ x * 10000 }}", ""),
    ("{{ 10001 * x }}", "multiplies by more than 10000"),
    ("{{ x * -10001 }}", "multiplies by more than 10000"),
    ("{{ x ** 64 }}{{ x ** -64 }}", ""),
    ("{{ x ** 65 }}", "raises to a large or unknown power"),
    ("{{ x ** -65 }}", "raises to a large or unknown power"),
    ("{{ 2 ** x }}", "raises to a large or unknown power"),
    ("{{ x | map(attribute='a.b') }}{{ x | list }}", ""),
    ("{{ x | map(attribute='a.mro') }}", "uses the filter map on 'a.mro', one of Python's"),
    ("{{ x | join('_a') }}", ""),
    ("{{ x | map('attr', 'b') }}", "uses the filter map with attr, which reads members by"),
    ("{{ x['a' ~ y] }}", ""),
    ("{{ x['_' ~ y] }}", "reads a member whose name is put together at run time"),
    ("{{ x[y] }}{{ x['a'] }}", ""),
    ("{{ request }}", "uses request, which leads to jinja2's own functions and not to the"),
    ("{% set request = 1 %}{{ request }}", ""),
    ("{{ '__a' }}{{ 'a__b' }}", ""),
    ("{{ '__a__' }}", "holds the string '__a__', one of Python's internals"),
)


def test_of_a_call_a_name_or_a_number_only_what_leads_elsewhere_is_told() -> None:
    for text, found in TOLD:
        told = scanned(text)
        assert [line.startswith(f"line 1: {found}") for line in told] == [True] * bool(found), text


def test_a_template_has_jinjas_functions_without_random_words() -> None:
    def rendered(text: str) -> str:
        return render(text, MESSAGES, add_generation_prompt=True, variables={}, where="x.gguf")

    for name in {*DEFAULT_NAMESPACE, "raise_exception", "strftime_now"}:
        there = rendered(f"{{% if {name} is defined %}}yes{{% else %}}no{{% endif %}}")
        assert there == ("no" if name == "lipsum" else "yes"), name
    with pytest.raises(FormatError, match="lipsum"):
        rendered("{{ lipsum(n=1, html=false) }}")


def test_a_timer_stands_behind_the_limit_of_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/fuzz/test_templates.py meets that limit; here it is out of reach, the timer near."""
    monkeypatch.setattr(template, "CPU_SECONDS", PATIENCE)
    monkeypatch.setattr(template, "WALL_SECONDS", 0.6)
    text = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(FormatError, match="s of CPU or crashed"):
        render(text, MESSAGES, add_generation_prompt=True, variables={}, where="x")
    assert any("range()" in line for line in scanned(text))


def test_limits_are_set() -> None:
    pytest.importorskip("resource", reason="NOT-RUN: this system has no resource limits")
    code = (
        "import resource as r; from aprfmt.base.resource_limits import limit_resources\n"
        "limit_resources(5, 256 << 20)\n"
        "print(r.getrlimit(r.RLIMIT_CPU), r.getrlimit(r.RLIMIT_AS), r.getrlimit(r.RLIMIT_FSIZE))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.startswith("(5, 5)") and done.stdout.endswith("(0, 0)\n")
    if sys.platform == "linux":
        assert str(256 << 20) in done.stdout


def test_a_template_may_refuse() -> None:
    text = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UsageError, match="refuses these messages: roles must alternate"):
        render(text, MESSAGES, add_generation_prompt=True, variables={}, where="x")
    assert scanned(text) == []


def test_messages_that_are_no_data() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": object()}]
    with pytest.raises(UsageError, match="not plain JSON data"):
        render("x", messages, add_generation_prompt=True, variables={}, where="x")


def test_text_comes_back_as_it_was() -> None:
    content = "".join(map(chr, range(1, 0x180))) + "\U0001f999\u2028\r\n"
    messages = [{"role": "user", "content": content}]
    options: dict[str, Any] = {"add_generation_prompt": False, "variables": {}, "where": "x"}
    assert render("{{ messages[0].content }}", messages, **options) == content


def test_a_long_answer_below_the_limit() -> None:
    options: dict[str, Any] = {"add_generation_prompt": False, "variables": {}, "where": "x"}
    assert render("{{ 'é' * (2 * 1024 * 1024) }}", MESSAGES, **options) == "é" * (2 << 20)
    with pytest.raises(FormatError, match="more than 4 MiB"):
        render("{{ 'é' * (2 * 1024 * 1024) }}x", MESSAGES, **options)


def test_the_child_has_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    seen: dict[str, Any] = {}
    real = subprocess.Popen

    def spy(args: Any, **options: Any) -> Any:
        seen.update(options, args=args)
        return real(args, **options)

    monkeypatch.setattr(subprocess, "Popen", spy)
    assert scan_template("{{ 1 }}") == []
    assert seen["env"] == {} and seen["cwd"] == "/" and "-I" in seen["args"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("{% for m in messages %}{{ m['role'] }}{% endfor %}",
         "{%- for m in messages -%}{{ m[\"role\"] }}{#- a comment #}{% endfor %}", True),
        ("a {# x #} b{{ 'q' }}", "a  b{{\"q\"}}", True),
        ("{{ 1 }}a", "{{ 1 -}} a", True),
        ("{{ 1 }}a", "{{ 1 }} a", False),
        ("{{ '1' }}", "{{ 1 }}", False),
        ("{{ x }}", "{{ y }}", False),
        ("a", "{% broken", False),
    ],
)  # fmt: skip
def test_a_template_spelled_otherwise_is_one_program(one: str, other: str, same: bool) -> None:
    assert template.are_equal_programs(one, other) is same


def test_scan_is_bounded_and_on_one_line_each() -> None:
    found = scan_template("\n".join(f"{{{{ x{i}.__class__ }}}}" for i in range(100)))
    assert len(found) == 40 and found[1].startswith("line 2: ")
    (only,) = scanned("{{ x['__a\\nb'] }}")
    assert only.startswith("line 1: reads [") and "\n" not in only


# Templates of other engines, as their documents show them: language -> text, line of the mark.
FOREIGN: dict[str, tuple[str, int]] = {
    "go": ("<s>\n{{- if .System }}{{ .System }}{{ end }}{{ .Prompt }}</s>", 2),
    "go-comment": ("{{- /*\n a vendor's */ -}}\n{{ range $i, $m := .Messages }}x{{ end }}", 1),
    "go-fields": ("[INST] {{ .System }} {{ .Prompt }} [/INST]", 1),
    "handlebars": ("{{#each messages}}<|{{role}}|>{{content}}{{/each}}", 1),
    "handlebars-partial": ("a\n\n{{> turn}}", 3),
    "erb": ("<% messages.each do |m| %><%= m.content %><% end %>", 1),
    "format": ("### Instruction:\n{prompt}\n### Response:\n", 2),
    "name": ("chatml\n", 1),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_template_of_another_engine_is_named(case: str) -> None:
    """Never an error of jinja2's parser, and never printed as if it were a chat."""
    text, line = FOREIGN[case]
    found = foreign_template(text)
    assert found is not None and (found.name, found.line) == (case.split("-")[0], line)
    assert scan_template(text) == []
    with pytest.raises(
        FormatError, match=r"x: the chat template is .*, not jinja2: .*take"
    ) as error:
        render(text, MESSAGES, add_generation_prompt=True, variables={}, where="x")
    assert found.says in str(error.value) and "unexpected" not in str(error.value)


def test_every_language_is_tried() -> None:
    assert {row.name for row in LANGUAGES} | {"name"} == {case.split("-")[0] for case in FOREIGN}


@pytest.mark.parametrize("text", [*PLAIN.values(), "{{ messages[0].content }}", "", "hello {}"])
def test_a_jinja2_template_is_no_other_language(text: str) -> None:
    assert foreign_template(text) is None


@pytest.mark.parametrize("case", FOREIGN)
def test_marks_inside_a_jinja2_template_are_its_text(case: str) -> None:
    text = FOREIGN[case][0]
    assert foreign_template("{% raw %}" + text + "{% endraw %}") is None
    assert text not in BUILT_IN


@pytest.mark.parametrize("row", [
    {"name": "tool_use"}, {"template": "x"}, {"name": 1, "template": "x"},
    {"name": "a", "template": None}, "default", None,
])  # fmt: skip
def test_rows_of_a_list_that_are_no_templates_are_left_out(row: Any) -> None:
    listed = [row, {"name": "default", "template": "{{ 1 }}"}]
    carried = fake("gguf", {"tokenizer.chat_template": listed}).carried
    assert carried.template_and_origin()[0] == "{{ 1 }}"


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ("{{ xs | map('attr', 'x') }}", True),
        ("{{ xs | map('upper') }}", False),
        ("{{ xs | selectattr('role') }}", False),
    ],
)
def test_a_filter_that_reads_members_by_name_is_named(text: str, members: bool) -> None:
    assert any("reads members by name" in line for line in scanned(text)) is members


@pytest.mark.parametrize("filter_", sorted(ATTRIBUTE_FILTERS - {"sum", "min", "max"}))
@pytest.mark.parametrize(
    ("member", "internal"),
    [("__class__", True), ("role.__class__", True), ("_private", True), ("role", False)],
)
def test_a_filter_on_an_internal_of_python_is_named(
    filter_: str, member: str, internal: bool
) -> None:
    found = scanned("{{ xs | " + f"{filter_}(attribute='{member}')" + " | list }}")
    says = f"uses the filter {filter_} on {member!r}, one of Python's internals"
    assert any(line.endswith(says) for line in found) is internal


@pytest.mark.parametrize("error", [ZeroDivisionError, ValueError, nodes.Impossible, RecursionError])
def test_a_constant_that_cannot_be_computed_is_none_and_one_without_room_an_error(
    error: type[Exception],
) -> None:
    """Seen red: a template that takes all memory counted as one without a constant."""

    def fail(kind: type[BaseException]) -> Any:
        raise kind

    assert constant_value(SimpleNamespace(as_const=lambda: fail(error))) is None
    assert constant_value(SimpleNamespace(as_const=lambda: 7)) == 7
    with pytest.raises(MemoryError):
        constant_value(SimpleNamespace(as_const=lambda: fail(MemoryError)))


@pytest.mark.parametrize("made", ["n=1, m_=2", "{'n': 1, 'm_': 2}", "[('n', 1)], m_=2"])
def test_a_namespace_takes_what_a_dict_takes(made: str) -> None:
    text = f"{{% set ns = namespace({made}) %}}{{{{ ns.n }}}}{{{{ ns.m_ }}}}"
    options: dict[str, Any] = {"add_generation_prompt": False, "variables": {}, "where": "x"}
    assert render(text, MESSAGES, **options) == "12"


def test_no_namespace_holds_a_private_name_however_it_is_given() -> None:
    options: dict[str, Any] = {"add_generation_prompt": False, "variables": {}, "where": "x"}
    for made in ("_b=1", "{'a': 1, '__class__': 1}", "[('_b', 1)], a=1", "a=1, __init__=2"):
        with pytest.raises(FormatError, match="a namespace cannot hold '_"):
            render(f"{{% set ns = namespace({made}) %}}x", MESSAGES, **options)


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", True),
        ("{{ messages[0].content }}", True),
        ("{%- set last = messages | last -%}{{ last.content }}", True),
        ("<!DOCTYPE html><html><body>messages: none</body></html>", False),  # a page saved for it
        ('{"prefix": "<|im_start|>user\\n", "suffix": "<|im_end|>\\n"}', False),  # a preset
        (
            "${messages.map(m => `<|im_start|>${m.role}\\n${m.content}`).join('')}",
            False,
        ),  # a script
        ("{{ system_prompt }}\nUSER: {{ user_prompt }}\nASSISTANT:", False),  # a form to fill in
        ("{% if conversation %}{{ conversation }}{% endif %} messages", False),
        ("", False),
    ],
)
def test_a_chat_template_has_code_that_reads_the_messages(text: str, reads: bool) -> None:
    assert reads_messages(text) is reads


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ""),
        (
            "{% for m in messages %}{{ no_token + m.content }}{% endfor %}",
            "'no_token' is undefined",
        ),
        ("{{ messages[9].content.x.y }}", "undefined"),
        # Messages of models of images: the content is a list of parts.
        ("{% for m in messages %}{{ m.content[0].text + '' }}{% endfor %}", ""),
        ("{{ messages and raise_exception('roles must alternate') }}", ""),  # refused, not broken
    ],
)
def test_a_template_that_fails_on_every_chat_is_told_why(text: str, reason: str) -> None:
    """Seen red: with texts alone the template of images fails."""
    said = unrendered_reason(text, {}, "x")
    assert reason in said and bool(said) is bool(reason)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<html>404</html>", "has no code that reads `messages`"),
        ("{{ prompt }}", "has no code that reads `messages`"),
        ("{% for m in messages %}{{ lost_token + m.content }}{% endfor %}", "'lost_token' is und"),
    ],
)
def test_a_template_that_renders_no_chat_is_named_by_all_commands(
    text: str, says: str, demo_model: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(demo_model, tmp_path / "m"))
    (other / "chat_template.jinja").write_text(text)
    rows = {row["name"]: row for row in aprfmt("validate", other, "--json").json["checks"]}
    assert rows["chat_template"]["outcome"] == "FAIL" and says in str(rows["chat_template"])
    if "messages" in text:
        return
    assert says in aprfmt("inspect", other).out
    found = aprfmt("diagnose", demo_model, other, "--json").json
    assert (found["cause"], found["exit"]) == ("chat_template", 1)
    assert f"B's chat template {says}" in found["causes"][0]["says"]
