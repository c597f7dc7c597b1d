#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that only a GPU can tell, in one go: builds for this GPU alone, runs the tests, compute-sanitizer and the
# benchmark. Ends within 8 minutes: every step has a limit of its own and gets no more than what is left. Later steps run
# even if earlier ones failed (but not without a build).
#
#   tests/gpu/run.sh [OUT]      OUT: a folder for logs and the table (gpu-results)
#
# Needs: a CUDA torch >= 2.8 that sees the GPU, nvcc of its major version, cmake, ninja, setuptools, pytest, Python's
# development headers. No network.
# PYTHON: the Python to use (python3).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-python3}
out=${1:-gpu-results}
mkdir -p "$out"
out=$(cd "$out" && pwd)
rm -f "$out"/*.log "$out"/*.failed "$out"/*.skipped "$out/benchmark.md"
export PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export MAX_JOBS=${MAX_JOBS:-$(nproc)} SEGSCATTER_CUDA=ON
readonly seconds_in_all=470

step() {  # step NAME SECONDS COMMAND...: runs it with a time limit and a log, and says how it went
  local name=$1 limit=$2 begin=$SECONDS status=0
  shift 2
  ((limit > seconds_in_all - SECONDS)) && limit=$((seconds_in_all - SECONDS))
  if ((limit < 5)); then
    echo "no time left" >"$out/$name.log"
    status=124
  else
    timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1 || status=$?
  fi
  if ((status == 0)); then
    printf '%-22s %4d s  %s\n' "$name" $((SECONDS - begin)) "$(tail -n 1 "$out/$name.log")"
  elif grep -qi "device not supported" "$out/$name.log"; then
    touch "$out/$name.skipped"
    printf '%-22s SKIPPED: this machine does not let compute-sanitizer work\n' "$name"
  else
    touch "$out/$name.failed"
    printf '%-22s FAILED (%s) after %d s\n' "$name" "$( ((status == 124)) && echo "limit of $limit s" || echo "exit $status")" $((SECONDS - begin))
    tail -n 40 "$out/$name.log"
  fi
  return "$status"
}

arch=$("$PYTHON" -c 'import torch; print("{}.{}".format(*torch.cuda.get_device_capability()))') || {
  echo "There is no GPU that this torch can use."
  exit 1
}
export TORCH_CUDA_ARCH_LIST=$arch
"$PYTHON" -c 'import torch; print(torch.cuda.get_device_name(), "torch", torch.__version__, "CUDA", torch.version.cuda)' | tee "$out/machine.txt"
nvidia-smi >>"$out/machine.txt" 2>&1

step build 180 "$PYTHON" setup.py build_ext --inplace || exit 1

# The path of the reduction is read from the environment, once per process; the forced ones run together, without what
# does not depend on it.
step tests-chosen 120 "$PYTHON" -m pytest -q -p no:cacheprovider -m gpu tests/gpu tests/cuda
for path in one_launch two_launches documents; do
  SEGSCATTER_CUDA_PATH=$path step "tests-$path" 100 "$PYTHON" -m pytest -q -p no:cacheprovider -m gpu tests/cuda \
    --ignore=tests/cuda/test_errors_cuda.py --ignore=tests/cuda/test_derivatives.py &
done
wait

step benchmark 110 "$PYTHON" tests/gpu/benchmark.py --seconds 35 --out "$out/benchmark.md"
cat "$out/benchmark.md" 2>/dev/null

if command -v compute-sanitizer >/dev/null; then
  filter=--kernel-name
  help=$(compute-sanitizer --help 2>&1)
  [[ $help == *"$filter"* ]] || filter=--kernel-regex
  for tool in memcheck racecheck synccheck initcheck; do  # together: most of their time is spent on the host
    step "sanitizer-$tool" 110 compute-sanitizer --tool "$tool" --error-exitcode 1 --report-api-errors no "$filter" kns=segscatter \
      "$PYTHON" tests/gpu/sanitize.py &
  done
  wait
else
  echo "compute-sanitizer is not installed: memcheck, racecheck, synccheck and initcheck were SKIPPED"
  touch "$out/compute-sanitizer.skipped"
fi

names() { (cd "$out" && for file in *."$1"; do [[ -e $file ]] && basename "$file" ".$1"; done | paste -sd' '); }
count() { find "$out" -maxdepth 1 -name "*.$1" | wc -l; }
echo "GPU kit: $(count failed) steps failed ($(names failed)), $(count skipped) skipped ($(names skipped)), $SECONDS s; logs in $out"
(($(count failed) == 0))
