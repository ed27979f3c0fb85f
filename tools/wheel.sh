#!/usr/bin/env bash
# tools/wheel.sh PYTHON: builds a wheel for this Python and its torch, and tries it as a user would. make wheel calls it.
#
# 1. Builds it into build/wheel/raw.
# 2. auditwheel names the oldest Linux that the wheel runs on. torch's libraries stay outside, because `import torch` has
#    already loaded them. libgomp stays outside too: torch brings one, and a second one would start more threads.
# 3. Installs it in an empty environment outside the repository, and runs tests there without a compiler on PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "$1")
out=$PWD/build/wheel
torch=$("$python" -c 'import torch; print(torch.__version__.split("+")[0])')
rm -rf "$out" && mkdir -p "$out"

export FLASH_ATTN_EXT_LOCAL_VERSION=1
"$python" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$out/raw" .
PATH=$(dirname "$python"):$PATH "$python" -m auditwheel repair --wheel-dir "$out" \
  --exclude 'libtorch*.so' --exclude 'libc10*.so' --exclude 'libgomp.so*' "$out"/raw/*.whl
wheel=$(ls "$out"/*.whl)

here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
"$python" -m venv "$here/env"
cp -r tests pyproject.toml "$here"
cd "$here"
env/bin/pip install --quiet "torch==$torch" "$wheel" pytest numpy hypothesis expecttest
env -i PATH="$here/env/bin" HOME="$here" env/bin/python -m pytest -q -p no:cacheprovider \
  tests/api/test_contract.py tests/cpu/test_decode.py tests/api/test_errors.py tests/models/test_modules.py
echo "$wheel"
