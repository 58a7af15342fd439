"""Builds the one C library, where there is a compiler: without one, sentinel installs and runs on numpy."""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildLibrary(build_ext):
    """A plain shared library for ctypes: no module init to export, and not worth a failed installation."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return list(ext.export_symbols)

    def build_extension(self, ext: Extension) -> None:
        if self.compiler.compiler_type == "unix":
            # No -march: the instruction set is chosen at run time. No contraction: the same sums on every machine.
            ext.extra_compile_args = ["-O3", "-g0", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno"]
            # Nobody reads the flags of floating-point exceptions: loops with comparisons can be vectors.
            ext.extra_compile_args += ["-fno-trapping-math"]
            # Memory is read as floats and as bit patterns, and gathered as either.
            ext.extra_compile_args += ["-fvisibility=hidden", "-fno-strict-aliasing"]
            ext.extra_link_args = ["-pthread"]
        super().build_extension(ext)


setup(
    ext_modules=[
        Extension(
            "sentinel.native._kernels",
            sources=["sentinel/native/kernels.c"],
            depends=sorted(map(str, Path("sentinel/native").glob("*.h"))),
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary},
)
