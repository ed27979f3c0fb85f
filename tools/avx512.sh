#!/usr/bin/env bash
# tools/avx512.sh [PYTEST ARGUMENTS]: builds the package with emulated AVX-512 (tests/cpp/emulated_avx512.h) and runs its tests
# on a CPU with AVX2. make avx512 calls it. Run it after a change of kernels on a machine without AVX-512.
#
# Without arguments the tests of CPU kernels in test-quick run (3 minutes after a build of 8 on two cores). AMX is not
# emulated here: the tests of make test need a CPU with AVX-512 BF16 for it.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD here=$PWD/build/avx512
python=$PWD/${VENV:-.venv}/bin/python

export FLASH_ATTN_EXT_CUDA=0 CXXFLAGS="-I$root/csrc -include $root/tests/cpp/emulated_avx512.h"
"$python" setup.py --quiet build --build-base "$here" --build-temp "$here/objects" --build-lib "$here/package"

# The current folder is first on Python's path. In the tree's root, it would be the package without emulation.
cd "$here/package"
export PYTHONPATH=$PWD
"$python" -c 'import flash_attn_ext as f; print(f.__file__, f.available_kernels())'
arguments=(-m "not slow and not other_compiler" "$root/tests")
for folder in cuda cuda_host ptx tools; do arguments+=(--ignore "$root/tests/$folder"); done
if [ $# -gt 0 ]; then
  arguments=("${@/#tests/$root/tests}")  # paths that begin with "tests"
else
  export FLASH_ATTN_EXT_TEST_PAIRS=1
fi
exec "$python" -m pytest --quiet --rootdir "$root" -c "$root/pyproject.toml" -p no:cacheprovider \
  --numprocesses "${WORKERS:-2}" --dist loadfile --no-loadscope-reorder "${arguments[@]}"
