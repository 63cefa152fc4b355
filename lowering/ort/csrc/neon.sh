#!/bin/sh
# Cross-compiles the library for aarch64 (NEON) with $CXX_AARCH64, and runs its own check of the kernels under qemu.
#
#   CXX_AARCH64   the compiler, such as aarch64-linux-gnu-g++ or "python -m ziglang c++ -target aarch64-linux-gnu"
#   QEMU_AARCH64  the emulator; without it the check is built and not run
#
# The check compares the kernels with the plain reference on small problems of every type: no Python and no ONNX Runtime
# are needed on the other side.
set -eu
source=$(cd "$(dirname "$0")" && pwd)
build=${1:?usage: neon.sh BUILD_DIRECTORY}
mkdir -p "$build"
flags="-std=gnu++20 -O2 -fPIC -Wall -Wextra -Wno-psabi -ffp-contract=fast -fno-math-errno"
set -- reference.cc check_kernel.cc
for file; do
  $CXX_AARCH64 $flags -c "$source/$file" -o "$build/${file%.cc}.o"
done
$CXX_AARCH64 $flags -fno-exceptions -fno-rtti -DFA_ISA=baseline -c "$source/kernel/attention.cc" -o "$build/attention.o"
$CXX_AARCH64 $flags -fno-exceptions -fno-rtti -DFA_ISA=baseline -c "$source/kernel/gradient/gradient.cc" -o "$build/gradient.o"
$CXX_AARCH64 $flags -static "$build"/*.o -o "$build/check_kernel"
if [ -n "${QEMU_AARCH64:-}" ]; then
  "$QEMU_AARCH64" "$build/check_kernel"
else
  echo "built $build/check_kernel; set QEMU_AARCH64 to run it"
fi
