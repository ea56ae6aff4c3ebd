"""The blocks of a Markdown page that a reader would paste, in their order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

from tests.broker.test_process import LIMIT_S

ROOT: Final = Path(__file__).parents[2]
ADDRESS: Final = "http://127.0.0.1:8080"
_HEADING_OR_BLOCK: Final = re.compile(r"^#{2,3} ([^\n]+)$|^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    heading: str
    language: str
    text: str


def blocks(text: str) -> list[Block]:
    found, heading = [], ""
    for match in _HEADING_OR_BLOCK.finditer(text):
        heading = match[1] or heading
        if match[2]:
            found.append(Block(heading, match[2], match[3]))
    return found


def run(block: Block, address: str, directory: Path) -> str:
    """Return what the block prints when it is pasted beside a broker at this address; fail if it fails."""
    ended = subprocess.run(
        ["sh", "-e"] if block.language == "sh" else [sys.executable, "-"],
        input=block.text.replace(ADDRESS, address),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=directory,
        env=os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])},
    )
    assert ended.returncode == 0, (block.heading, ended.stderr)
    return ended.stdout
