"""python tools/requirements.py GROUP: the packages of one group of pyproject.toml's optional dependencies, for pip."""

import re
import sys
from pathlib import Path

# By a pattern, because Python 3.10 has no parser for TOML.
text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
group = re.search(rf"^{re.escape(sys.argv[1])} = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)[1]
print(*re.findall(r'^[^#]*?"([^"]+)"', group.replace(",", ",\n"), re.MULTILINE))
