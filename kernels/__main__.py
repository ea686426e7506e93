"""The tools that launchers run as processes of their own, without torch and CUDA in theirs: `python -m allspan.kernels`

    check                      what CUDA kernels need, and what of it is here
    compile [ARCHITECTURE …]   compiles the CUDA kernels ahead of their first use

Each prints one JSON object.
"""

from __future__ import annotations

import argparse
import runpy
import sys

TOOLS = {"check": "allspan.kernels.cuda.jit.check", "compile": "allspan.kernels.cuda.jit.warm"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m allspan.kernels", description="Runs a tool of the kernels.")
    parser.add_argument("tool", choices=tuple(TOOLS), help="The tool that is run.")
    parser.add_argument("words", nargs="*", help="Its arguments.")
    given = parser.parse_args()
    sys.argv[1:] = given.words
    runpy.run_module(TOOLS[given.tool], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
