#!/usr/bin/env bash
# tools/aarch64.sh [PYTEST ARGUMENTS]: builds the package for 64-bit ARM and runs its tests under qemu-user. make aarch64
# calls it. Needs Debian 12 with g++-12-aarch64-linux-gnu, qemu-user-static, curl and xz-utils.
#
# 1. Python comes from Debian's packages for arm64; torch from PyPI, with the CUDA libraries that it loads: 3 GB.
# 2. setup.py runs in this Python. It calls a cross-compiler, which runs at full speed.
# 3. torch reads the CPU's description from /proc and /sys, and crashes on an x86 description. It gets an ARM description.
#
# ARM_CPU=neoverse-n1 emulates a CPU without bfloat16 products. Without arguments a sample of the tests runs (10 minutes).
set -euo pipefail
cd "$(dirname "$0")/.."
torch=${TORCH:-torch==2.13.0}
here=$PWD/build/aarch64
root=$here/root site=$here/site
export ARM_CPU=${ARM_CPU:-max}
mkdir -p "$here"

debian() {
  local mirror=http://deb.debian.org/debian name file
  curl -fsS $mirror/dists/bookworm/main/binary-arm64/Packages.xz | xz -d > "$here/Packages"
  for name in libc6 libgcc-s1 libstdc++6 libgomp1 libcrypt1 zlib1g libexpat1 libffi8 libssl3 libbz2-1.0 liblzma5 \
    libsqlite3-0 libuuid1 {,lib}python3.11-minimal libpython3.11-stdlib libpython3.11-dev; do
    file=$(awk -v name="$name" '$1 == "Package:" { found = $2 == name } found && $1 == "Filename:" { print $2 }' \
      "$here/Packages")
    curl -fsS -o "$here/package.deb" "$mirror/$file"
    dpkg -x "$here/package.deb" "$root"
  done
}

# pip refuses a second package in an existing folder such as nvidia. So each package is first installed separately.
from_pypi() {
  local platforms=() name
  for name in manylinux_2_{28,27,26,25,24,18,17} manylinux2014 linux; do platforms+=(--platform "${name}_aarch64"); done
  rm -rf "$here/part"
  python3 -m pip install --quiet --target "$here/part" --only-binary :all: --python-version 3.11 "${platforms[@]}" "$@"
  mkdir -p "$site"
  cp -rn "$here/part/." "$site"
}

machine() {
  local cpu
  mkdir -p "$root/proc"
  for cpu in $(seq 0 $(($(nproc) - 1))); do
    mkdir -p "$root/sys/devices/system/cpu/cpu$cpu/regs/identification"
    echo 0x00000000413fd0c1 > "$root/sys/devices/system/cpu/cpu$cpu/regs/identification/midr_el1"
    printf '%s\t: %s\n' processor "$cpu" Features 'fp asimd aes crc32 atomics fphp asimdhp cpuid asimdrdm asimddp' \
      'CPU implementer' 0x41 'CPU architecture' 8 'CPU variant' 0x3 'CPU part' 0xd0c 'CPU revision' 1
    echo
  done > "$root/proc/cpuinfo"
  cat > "$here/python" << END
#!/bin/sh
export PYTHONHOME=$root/usr PYTHONPATH=$site:$PWD
exec qemu-aarch64-static -cpu \$ARM_CPU -0 $here/python -L $root $root/usr/bin/python3.11 "\$@"
END
  chmod +x "$here/python"
}

if [ ! -e "$here/made" ]; then
  debian
  from_pypi --no-deps "$torch"
  from_pypi numpy pytest hypothesis expecttest filelock 'typing-extensions>=4.10' sympy networkx jinja2 fsspec \
    'setuptools>=77'
  from_pypi 'cuda-toolkit[cublas,cudart,cufft,cufile,cupti,curand,cusolver,cusparse,nvjitlink,nvrtc,nvtx]==13.0.3'
  for name in 'nvidia-cudnn-cu13==9.20.*' nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvshmem-cu13; do
    from_pypi --no-deps "$name"
  done
  rm -rf "$here/part"
  machine
  touch "$here/made"
fi

export CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++ CPATH=$root/usr/include FLASH_ATTN_EXT_CUDA=0
"$here/python" setup.py --quiet build_ext --inplace
"$here/python" -c 'import flash_attn_ext as f; print(f.build_info(), f.available_kernels())'
[ $# -gt 0 ] || set -- tests/api/test_parity.py tests/cpu/test_kernel_selection.py tests/packed/test_varlen.py
exec "$here/python" -m pytest -q -p no:cacheprovider "$@"
