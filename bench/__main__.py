"""Runs the benchmarks: `python -m bench` runs all, `python -m bench NAME [OPTIONS]` one, and `--list` lists them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

BENCHES = ("blobs", "stores", "inline", "partition", "segment", "keyed", "topics", "broker", "kafka", "spark")


def summary(name: str) -> str:
    """Return the first line of the bench's docstring, without importing the bench."""
    folder = Path(__file__).parent
    module, package = folder / f"{name}.py", folder / name / "__main__.py"
    parsed = ast.parse((module if module.exists() else package).read_text())
    return (ast.get_docstring(parsed) or "").partition("\n")[0]


def run(name: str, options: list[str]) -> int:
    """Run a bench in a process of its own, so that it does not inherit memory, threads or warm caches."""
    print(f"== bench.{name}: {summary(name)}", flush=True)
    return subprocess.run([sys.executable, "-m", f"bench.{name}", *options], check=False).returncode


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--list"]:
        for name in BENCHES:
            print(f"{name:10} {summary(name)}")
        return 0
    if not arguments:
        return max([run(name, []) for name in BENCHES])
    name, *options = arguments
    if name not in BENCHES:
        print(f"there is no bench {name!r}: there are {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    return run(name, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
