"""Installs this clone into the running Python, editable. `make` calls this program, which shows the compiler's
progress.

    python tools/install_here.py

pip alone would print nothing for minutes. The whole output is written to build/install.log. After an error, the program
prints the end of the log.
"""

import re
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

LOG = Path("build/install.log")
COMMAND = [sys.executable, "-m", "pip", "install", "-v", "--no-build-isolation", "--no-deps", "--editable", "."]
NINJA = re.compile(r"^\s*\[(\d+)/(\d+)\] ")  # ninja's line for a finished file


def show(text: str) -> None:
    """Overwrites the line in a terminal; elsewhere, as in a log of CI, writes a new one."""
    print(f"\r{text:<70}" if sys.stdout.isatty() else text, end="" if sys.stdout.isatty() else "\n", flush=True)


def main(command: list[str] = COMMAND) -> int:
    LOG.parent.mkdir(exist_ok=True)
    started, last_lines, shown = time.monotonic(), deque(maxlen=40), 0.0
    with LOG.open("w") as log, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:  # fmt: skip
        for line in process.stdout or ():
            log.write(line)
            last_lines.append(line)
            step = NINJA.match(line)
            interval = 0.0 if sys.stdout.isatty() else 10.0
            if step and (time.monotonic() - shown >= interval or step[1] == step[2]):
                shown = time.monotonic()
                show(f"  {step[1]} of {step[2]} files compiled, {shown - started:.0f} s")
    if sys.stdout.isatty():
        print()
    if process.returncode:
        print(*last_lines, sep="", end="", file=sys.stderr)
        print(f"The whole output is in {LOG}.", file=sys.stderr)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
