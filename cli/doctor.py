"""`aprfmt doctor`: what works here, and why the rest does not."""

from typing import TYPE_CHECKING

import click

from aprfmt.cli import options, render
from aprfmt.cli.doctor_facts import Devices, DoctorFacts, collect_facts

if TYPE_CHECKING:
    from aprfmt.compare.short_answer import Line


@click.command("doctor")
@options.common
def command() -> int:
    """Show versions, extras, native kernels and devices: what works here and why not."""
    body = collect_facts()
    return render.emit(body, 0, lambda: show(body), answer=lambda: answer(body))


def show_devices(found: Devices) -> None:
    """Print the GPUs, and for each backend why it cannot use them, if so."""
    render.line("devices", style="head")
    render.line("  cpu")
    for gpu in found["gpus"]:
        name, memory = render.escape(gpu["name"]), gpu["memory"] / (1 << 30)
        render.line(f"  cuda:{gpu['index']}  {name}, {memory:.1f} GiB, compute {gpu['compute']}")
    if found["why"]:
        render.line(f"  no GPU: {render.escape(found['why'])}")
    else:
        render.line(f"  driver {found['driver'] or 'unknown'}, CUDA up to {found['cuda']}")
    for name, why in (("torch", found["torch"]), ("cupy", found["cupy"])):
        text = f"  {name}: {render.escape(why) if why else 'can use the GPU'}"
        render.line(text, style="warn" if why and found["gpus"] else "")


def show(body: DoctorFacts) -> None:
    """Print versions, packages, devices, the llama.cpp library and native kernels as tables.

    `body` are the facts of `doctor`.
    """
    render.print_pairs(
        [
            ("aprfmt", body["aprfmt"]),
            ("python", body["python"]),
            ("system", body["system"]),
            ("cpus", body["cpus"]),
        ]
    )
    render.line("packages", style="head")
    render.table(
        [
            (
                row["name"],
                row["version"] or "not installed",
                row["for"],
                "" if row["version"] else row["get"],
            )
            for row in body["packages"]
        ],
        ("package", "version", "for", "how to get it"),
    )
    show_devices(body["devices"])
    found = body["llama_cpp"]
    render.line("engine llama.cpp", style="head")
    if found["why"]:
        render.line(f"  {render.escape(found['why'])}", style="warn" if found["folder"] else "")
    else:
        said = f"{found['folder']}: {found['version']}"
        render.line(f"  {render.escape(said)}")
    kernels = body["native"]
    render.line("native kernels", style="head")
    if not kernels["built"]:
        render.line(f"  none: {kernels['why']}; the numpy codecs do the same, slower")
        return
    render.line(f"  {kernels['cpu']}: {', '.join(kernels['kernels'])}")
    for name, why in kernels["disabled"].items():
        render.line(f"  switched off: {name}: {render.escape(why)}", style="warn")


def answer(body: DoctorFacts) -> "list[Line]":
    """Return the short answer: two (text, style) lines of what is here, then what is missing.

    A line for a missing package has the command that installs it. `body` are the facts of `doctor`.
    """
    kernels = body["native"]
    built = f"kernels {kernels['cpu']}" if kernels["built"] else f"no kernels: {kernels['why']}"
    lines: list[Line] = [
        (f"aprfmt {body['aprfmt']}, python {body['python']}, {body['system']}, "
         f"{body['cpus']} cpus, {built}", "head"),
        ("  here: " + ", ".join(row["name"] for row in body["packages"] if row["version"]), ""),
    ]  # fmt: skip
    lines += [
        (f"  {row['name']} is not installed ({row['for']}): {row['get']}", "")
        for row in body["packages"]
        if not row["version"]
    ]
    found = body["devices"]
    gpus = ", ".join(f"cuda:{gpu['index']} {gpu['name']}" for gpu in found["gpus"])
    lines.append((f"  gpu: {gpus or found['why']}", ""))
    lines += [
        (f"  {name} does not use it: {why}", "warn")
        for name, why in (("torch", found["torch"]), ("cupy", found["cupy"]))
        if why and gpus
    ]
    engine = body["llama_cpp"]
    said = engine["why"] or f"{engine['folder']}: {engine['version']}"
    return [*lines, (f"  llama.cpp: {said}", "")]
