"""`aprfmt doctor`: what works here, and why other things do not."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, NotRequired, TypedDict

import click

from aprfmt.base.installation import install_command
from aprfmt.base.processors import cpu_count
from aprfmt.base.version import __version__
from aprfmt.cli import options, render
from aprfmt.errors import BackendUnavailableError
from aprfmt.inference import cuda_driver

if TYPE_CHECKING:
    from aprfmt.compare.short_answer import Line

# What each package is for, and the extras that install it: "" is the base, and none its own name.
PACKAGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("numpy", "everything that decodes", ("",)),
    ("ml_dtypes", "FP8 and BF16 arrays", ("",)),
    ("safetensors", "validate --second-reader", ("",)),
    ("gguf", "validate --second-reader", ("",)),
    ("huggingface_hub", "the token of hf:// addresses", ("",)),
    ("tokenizers", "tokenize, run, trace --prompt", ("",)),
    ("jinja2", "chat templates", ("",)),
    ("torch", "backend torch", ("torch",)),
    ("cupy", "backend cupy", ("cuda12", "cuda13")),
    ("transformers", "engine transformers", ()),
    ("llama-cpp-python", "engine llama.cpp", ("llama-cpp",)),
    ("xllamacpp", "template --against llama.cpp", ()),
    ("zstandard", "zstd-compressed APR files", ()),
    ("obstore", "s3://, gs:// and az:// addresses", ()),
    ("fsspec", "addresses of other schemes", ()),
)


Package = TypedDict("Package", {"name": str, "version": str | None, "for": str, "get": str})


class Kernels(TypedDict):
    """Whether the C extension is built, or why not; for which processor; which kernels are off."""

    built: bool
    why: NotRequired[str]
    cpu: NotRequired[str]
    kernels: NotRequired[list[str]]
    disabled: NotRequired[dict[str, str]]


class GpuRow(TypedDict):
    """One GPU of the driver; `memory` in bytes."""

    index: int
    name: str
    memory: int
    compute: str


class Devices(TypedDict):
    """What the GPU driver offers, and for each backend why it cannot use it ("" if it can)."""

    driver: str | None
    cuda: str | None
    gpus: list[GpuRow]
    why: str
    torch: str
    cupy: str


class LlamaCpp(TypedDict):
    """The folder of llama.cpp's libraries, their version, and why they do not load."""

    folder: str | None
    version: str | None
    why: str


class DoctorFacts(TypedDict):
    """Everything `aprfmt doctor` says."""

    aprfmt: str
    python: str
    system: str
    byteorder: str
    cpus: int | None
    packages: list[Package]
    native: Kernels
    devices: Devices
    llama_cpp: LlamaCpp


_DISTRIBUTIONS = {"cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy")}

# What pyproject's user extras install.
EXTRAS = ("torch", "cupy", "llama-cpp-python", "zstandard", "obstore")


def installed_version(name: str) -> str | None:
    """Return a package's version without importing it; None where it is not installed.

    "unknown" is a package that can be imported and has no recorded version.
    """
    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "unknown" if find_spec(name) is not None else None


def install_hint(name: str, extras: tuple[str, ...]) -> str:
    """Return the command that installs a package, by an extra of aprfmt or by its own name."""
    return " or ".join(map(install_command, extras)) or f"pip install {name}"


def native_kernels() -> Kernels:
    """Return {built, cpu, kernels, disabled} of the C extension, or {built: False, why}.

    `cpu` is the processor that it was built for, `disabled` is {kernel: why it is off}.
    """
    if os.environ.get("APRFMT_NATIVE") == "0":
        return {"built": False, "why": "APRFMT_NATIVE=0 is set"}
    try:
        from aprfmt.codecs import native as extension
    except ImportError as error:
        return {"built": False, "why": f"the extension was not built: {error}"}
    return {
        "built": True,
        "cpu": extension.CPU,
        "kernels": sorted(extension.KERNELS),
        "disabled": dict(extension.DISABLED),
    }


def collect_facts() -> DoctorFacts:
    """Return all facts that `doctor` prints, as plain data."""
    return {
        "aprfmt": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "byteorder": sys.byteorder,
        "cpus": cpu_count(),
        "packages": [
            {
                "name": name,
                "version": installed_version(name),
                "for": purpose,
                "get": install_hint(name, extras),
            }
            for name, purpose, extras in PACKAGES
        ],
        "native": native_kernels(),
        "devices": gpu_devices(),
        "llama_cpp": llama_cpp_library(),
    }


def llama_cpp_library() -> LlamaCpp:
    """Return the folder and version of the llama.cpp library, and why it does not load.

    `why` is "" where it loads.
    """
    from aprfmt.inference.engines.llama_library import Library, library_folder

    folder: str | None = None
    try:
        folder = str(library_folder())
        return {"folder": folder, "version": Library.open().version(), "why": ""}
    except BackendUnavailableError as error:
        return {"folder": folder, "version": None, "why": str(error)}


def gpu_devices() -> Devices:
    """Return the GPUs of the NVIDIA driver, and for each backend why it cannot use them.

    A backend's text is "" where it can. torch is imported and asked, as only it knows what it was
    built for. cupy's package and the driver are compared without importing it.
    """
    found = cuda_driver.ask_driver()
    return {
        "driver": cuda_driver.driver_version(),
        "cuda": None if found.cuda is None else ".".join(map(str, found.cuda)),
        "gpus": [
            GpuRow(index=gpu.index, name=gpu.name, memory=gpu.memory, compute=gpu.compute)
            for gpu in found.gpus
        ],
        "why": found.why,
        "torch": torch_gpu_problem(found),
        "cupy": cuda_driver.cupy_problem(found),
    }


def torch_gpu_problem(found: cuda_driver.Driver) -> str:
    """Return why torch cannot use a GPU here; "" where it can."""
    try:
        import torch
    except ImportError:
        return f"torch is not installed; {install_command(found.extra)}"
    if torch.cuda.is_available():
        return ""
    return cuda_driver.torch_problem(torch.__version__, torch.version.cuda, found)


def version_line() -> str:
    """Return the line of `aprfmt --version`: version, kernels, extras."""
    extras = [f"{name} {found}" for name in EXTRAS if (found := installed_version(name))]
    kernels = native_kernels()
    speed = f"native kernels ({kernels['cpu']})" if kernels["built"] else "numpy kernels"
    return f"aprfmt {__version__} ({', '.join([speed, *extras])})"


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
