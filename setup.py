"""Builds the optional C kernels and the checksum; the rest stands in pyproject.toml.

Without a compiler, or where it fails, the package installs and works on its numpy codecs.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("aprfmt") / "codecs" / "native"
FLAGS = [] if sys.platform == "win32" else ["-std=c11", "-O3", "-g0"]


class SideBySide(build_ext):
    """Compiles the sources of an extension at the same time: two of them take nearly all of it."""

    def build_extension(self, ext: Extension) -> None:
        """Compile and link one extension."""
        compile_all = self.compiler.compile

        def compile_each(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor() as pool:
                made = pool.map(lambda one: compile_all([one], **options), sources)
                return [path for paths in made for path in paths]

        if sys.platform != "win32":  # its compiler object prepares itself at the first call
            self.compiler.compile = compile_each
        super().build_extension(ext)


setup(
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
