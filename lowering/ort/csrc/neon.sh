#!/bin/sh
# Cross-compiles the library for aarch64 (NEON) with $CXX_AARCH64, and runs its own check of the kernels under qemu.
#
#   CXX_AARCH64   the compiler, such as aarch64-linux-gnu-g++ or "python -m ziglang c++ -target aarch64-linux-gnu"
#   QEMU_AARCH64  the emulator; without it the check is built and not run
#   CHECK_ROUNDS  so many random problems of each kind besides the listed ones (20), drawn from CHECK_SEED (0)
#
# The check (check/check.hpp) compares every kernel with the plain reference: no Python and no ONNX Runtime are needed on the
# other side. cmake and ninja are taken from PATH.
set -eu
source=$(cd "$(dirname "$0")" && pwd)
build=${1:?usage: neon.sh BUILD_DIRECTORY}
CXX="$CXX_AARCH64" cmake -G Ninja -S "$source" -B "$build" -DFA_CHECK=ON \
  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_EXE_LINKER_FLAGS=-static
cmake --build "$build"
if [ -n "${QEMU_AARCH64:-}" ]; then
  for check in check_kernels check_tiles; do
    "$QEMU_AARCH64" "$build/$check" "${CHECK_ROUNDS:-20}" "${CHECK_SEED:-0}"
  done
else
  echo "built $build/check_kernels; set QEMU_AARCH64 to run it"
fi
