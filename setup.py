"""Builds the optional C kernels and the checksum; the rest stands in pyproject.toml.

Without a compiler, or where it fails, the package installs and works on its numpy codecs.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("aprfmt") / "codecs" / "native"
FLAGS = [] if sys.platform == "win32" else ["-std=c11", "-O3", "-g0"]

setup(
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
