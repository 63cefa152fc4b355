#!/bin/sh
# Installs the aarch64 wheel beside ONNX Runtime's own aarch64 wheel, and runs 600 tests of tests/lowering with it, in an
# aarch64 Python under qemu-user: some minutes.
#
#   usage: run_aarch64.sh WHEEL FOLDER [pytest's arguments]
#
#   QEMU_AARCH64   the emulator (qemu-aarch64-static or qemu-aarch64 of PATH)
#   AARCH64_ROOT   a Debian for arm64 with python3 (default: debootstrap, which only root can run, makes FOLDER/root)
#   PYTHON         an interpreter with pip
#
# Where the emulator or debootstrap is missing, this says so and succeeds. Tests that start Python again cannot run here:
# the system does not know how to start a program for aarch64.
set -eu
wheel=$(realpath "${1:?usage: run_aarch64.sh WHEEL FOLDER}")
mkdir -p "${2:?usage: run_aarch64.sh WHEEL FOLDER}"
folder=$(realpath "$2")
shift 2
sources=$(cd "$(dirname "$0")/../.." && pwd)
root=${AARCH64_ROOT:-$folder/root}
qemu=${QEMU_AARCH64:-$(command -v qemu-aarch64-static || command -v qemu-aarch64 || true)}

left_out() {
  echo "the aarch64 wheel was not run: $1"
  exit 0
}

# Unpacks a Debian for arm64 without running anything of it. proc/cpuinfo describes a Cortex-A72: ONNX Runtime asks for it,
# and would be given that of this machine.
make_root() {
  rm -rf "$root"
  debootstrap --arch=arm64 --foreign --variant=minbase --include=python3 bookworm "$root" > "$folder/debootstrap.log" ||
    left_out "debootstrap failed, see $folder/debootstrap.log"
  for package in "$root"/var/cache/apt/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink -C "$root"
  done
  rm -rf "$root/var/cache/apt/archives" "$root/proc"
  mkdir "$root/proc"
  for processor in 0 1; do
    printf '%s\n' "processor : $processor" 'BogoMIPS : 100.00' 'Features : fp asimd crc32 cpuid' 'CPU implementer : 0x41' \
      'CPU architecture: 8' 'CPU variant : 0x0' 'CPU part : 0xd08' 'CPU revision : 3' ''
  done > "$root/proc/cpuinfo"
}

[ -n "$qemu" ] || left_out "install qemu-user (Debian: apt install qemu-user-static) or set QEMU_AARCH64"
if [ ! -e "$root/proc/cpuinfo" ]; then
  command -v debootstrap >/dev/null || left_out "install debootstrap, or set AARCH64_ROOT"
  [ "$(id -u)" = 0 ] || left_out "debootstrap needs root; or set AARCH64_ROOT"
  make_root
fi
run() { "$qemu" -L "$root" "$root/usr/bin/python3" "$@"; }
version=$(run -c 'import sys; print(*sys.version_info[:2], sep=".")')

# pip, which this machine's interpreter runs, takes wheels for a glibc of up to 2.28 only: those of the others, too.
site=$folder/site-$version
rm -rf "$site/fa_compiler"*
platforms=$(for minor in 28 27 26 24 17; do echo "--platform manylinux_2_${minor}_aarch64"; done)
# shellcheck disable=SC2086
install() {
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --upgrade --only-binary=:all: --target "$site" \
    --python-version "$version" $platforms "$@"
}
[ -d "$site/onnxruntime" ] || install "$wheel" pytest hypothesis
install --no-deps "$wheel"

# The tests without the sources, which the installed package would be hidden by.
rm -rf "$folder/tests"
cp -r "$sources/tests" "$folder/tests"
cd "$folder"
export PYTHONPATH="$site:$folder"
run -c 'import platform, onnxruntime, fa_compiler
from fa_compiler.lowering.ort import library_path
print(platform.machine(), "onnxruntime", onnxruntime.__version__, library_path())'
[ $# -gt 0 ] || set -- tests/lowering/test_flash_attention_score.py tests/lowering/test_decode.py -k "not random"
run -m pytest -q -p no:cacheprovider -p no:xdist "$@"
