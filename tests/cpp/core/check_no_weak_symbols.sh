#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: check_no_weak_symbols.sh NM LIBRARY. Fails if a kernels_avx*.o holds a function that the linker may take for all.
set -eu
weak=$("$1" -C -A "$2" | grep 'kernels_avx' | grep ' W ' || true)
[ -z "$weak" ] || { echo "shared functions compiled for one instruction set:"; echo "$weak"; exit 1; }
"$1" -A "$2" | grep -q 'kernels_avx512.*kernels_avx512' || { echo "no AVX-512 kernels in $2"; exit 1; }
