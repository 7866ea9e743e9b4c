"""Builds the optional C kernels and the checksum; the rest stands in pyproject.toml.

Without a compiler, or where it fails, the package installs and works on its numpy codecs.
"""

import os
import platform
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("aprfmt") / "codecs" / "native"
FLAGS = [] if sys.platform == "win32" else ["-std=c11", "-O3", "-g0"]
# There these kernels serve only processors from before 2013: compiling them takes 28 s, not 82.
FALLBACK = ("generic.c", "generic_weights.c") if platform.machine() in ("x86_64", "AMD64") else ()
LONGEST = ("avx2_weights.c", "generic.c", "avx2.c", "generic_weights.c")  # begun first


MAPPED = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
    "package-dir"
]


def packages() -> list[str]:
    """Return every package by its import name: those of aprfmt/ and of the folders mapped into it.

    A checkout may lack the links that lead from aprfmt/ to these folders.
    """
    found = set(find_packages(include=["aprfmt", "aprfmt.*"]))
    for name, folder in MAPPED.items():
        found |= {name, *(f"{name}.{inner}" for inner in find_packages(folder))}
    return sorted(found)


class SideBySide(build_ext):
    """Compiles the sources of an extension at the same time: four of them take nearly all of it."""

    def build_extension(self, ext: Extension) -> None:
        """Compile and link one extension."""
        compile_all = self.compiler.compile

        def compile_each(sources: list[str], **options: Any) -> list[str]:
            def compile_one(source: str) -> list[str]:
                given = dict(options)
                if Path(source).name in FALLBACK:
                    given["extra_postargs"] = [*(options.get("extra_postargs") or ()), "-O2"]
                found: list[str] = compile_all([source], **given)
                return found

            rank = {name: at for at, name in enumerate(LONGEST)}
            sources = sorted(sources, key=lambda source: rank.get(Path(source).name, len(rank)))
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return [path for paths in pool.map(compile_one, sources) for path in paths]

        if sys.platform != "win32":  # its compiler object prepares itself at the first call
            self.compiler.compile = compile_each
        super().build_extension(ext)


setup(
    packages=packages(),
    cmdclass={"build_ext": SideBySide},
    ext_modules=[
        Extension(
            "aprfmt.codecs.native._kernels",
            sources=[str(path) for path in sorted(NATIVE.glob("*.c"))],
            depends=[str(path) for path in sorted(NATIVE.glob("*.h"))],
            # Products and sums round apart unless a kernel says otherwise: the bytes depend on it.
            extra_compile_args=FLAGS and [*FLAGS, "-ffp-contract=off", "-Wno-psabi", "-pthread"],
            extra_link_args=[] if sys.platform == "win32" else ["-pthread"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "aprfmt.base._crc",
            sources=[str(Path("aprfmt") / "base" / "crc.c")],
            extra_compile_args=FLAGS,
            py_limited_api=True,
            optional=True,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
