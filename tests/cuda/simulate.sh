#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests of the CUDA build without a GPU: the extension as it is built for users, on cudasim, which executes its
# PTX on the CPU and checks every access. Needs a CUDA build of segscatter in python/segscatter with PTX for the compute
# capabilities below (TORCH_CUDA_ARCH_LIST="7.5+PTX 8.0+PTX 8.6 8.9 9.0+PTX 10.0 12.0+PTX").
#
#   tests/cuda/simulate.sh [NAME...]      NAME: a run of the list below; all of them by default
#
# PYTHON     the Python that imports the CUDA torch (python)
# CUDASIM    the launcher; by default ../shared/cudasim/cudasim beside the repository. Without it, everything is skipped.
# JOBS       runs at the same time (2)
# SEGSCATTER_TEST_SEED  of the random tests; chosen and printed otherwise
# SEGSCATTER_TOUR_KERNELS  how many kernels test_tour.py takes for each tour (all of them; then every PTX instruction of
#             every kernel has to be reached, or argued for in coverage_argued.txt)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
PYTHON=${PYTHON:-python}
CUDASIM=${CUDASIM:-$root/../shared/cudasim/cudasim}
[[ -d $CUDASIM ]] && CUDASIM=$CUDASIM/cudasim

# Name, compute capability, path, allocator, and what is run of tests/cuda. 7.5 and 8.0 have the same PTX, but for its head.
values=test_values.py
costs="test_launches.py test_derivatives.py"
tour=test_tour.py
runs=(
  "9.0-one        9.0  one_launch    exact    $values test_launches.py $tour test_reference_size.py"
  "9.0-two        9.0  two_launches  exact    $values test_launches.py $tour test_reference_size.py"
  "9.0-documents  9.0  documents     exact    $values test_launches.py $tour test_reference_size.py"
  "9.0-chosen     9.0  -             exact    $values $costs test_errors_cuda.py $tour"
  "7.5-chosen     7.5  -             exact    $values $costs test_reference_size.py"
  "7.5-two        7.5  two_launches  exact    $values test_launches.py"
  "8.0-one        8.0  one_launch    exact    $tour"
  "8.0-two        8.0  two_launches  exact    $tour"
  "8.0-documents  8.0  documents     exact    $values test_launches.py $tour"
  "8.0-chosen     8.0  -             exact    $values $costs $tour"
  "12.0-one       12.0 one_launch    exact    $tour"
  "12.0-two       12.0 two_launches  exact    $values test_launches.py $tour test_reference_size.py"
  "12.0-documents 12.0 documents     exact    $tour"
  "12.0-chosen    12.0 -             exact    $values $costs $tour"
  "9.0-graph      9.0  -             caching  test_graphs.py"
  "9.0-graph-two  9.0  two_launches  caching  test_graphs.py"
  "8.0-graph-doc  8.0  documents     caching  test_graphs.py"
)

if [[ ! -x $CUDASIM ]]; then
  echo "############################################################################################"
  echo "# SKIPPED: the CUDA kernels were NOT run. There is no cudasim at $CUDASIM"
  echo "# (set CUDASIM to its launcher). On a machine with a GPU: tests/gpu/run.sh"
  echo "############################################################################################"
  echo "cuda: 0 passed, 0 failed, ${#runs[@]} skipped (runs)"
  exit 0
fi

export CUDASIM PYTHON
export PYTHONPATH=$root/python${PYTHONPATH:+:$PYTHONPATH}
SEGSCATTER_TEST_SEED=${SEGSCATTER_TEST_SEED:-$((RANDOM * 32768 + RANDOM))}
export SEGSCATTER_TEST_SEED
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export logs SEGSCATTER_COVERAGE=${SEGSCATTER_COVERAGE:-$logs/coverage}
"$CUDASIM" --build-only >/dev/null

run_one() {  # prints one line, and the log where a test failed
  read -r name cc path allocator files <<<"$1"
  local options=(--strict --cc "$cc") begin=$SECONDS tests=() file status=0
  [[ $allocator == caching ]] && options+=(--caching)
  for file in $files; do tests+=("tests/cuda/$file"); done
  [[ $path == - ]] && path=""
  SEGSCATTER_CUDA_PATH=$path OMP_NUM_THREADS=1 "$CUDASIM" "${options[@]}" "$PYTHON" -m pytest -q -p no:cacheprovider --durations=3 \
    "${tests[@]}" >"$logs/$name" 2>&1 || status=$?
  printf '%-14s %4d s  %s\n' "$name" $((SECONDS - begin)) "$(tail -1 "$logs/$name")"
  if ((status)); then
    sed "s/^/$name: /" "$logs/$name"
    touch "$logs/failed"
  fi
}
export -f run_one

echo "== CUDA tests under cudasim, SEGSCATTER_TEST_SEED=$SEGSCATTER_TEST_SEED"
for run in "${runs[@]}"; do
  read -r name _ <<<"$run"
  if (($# == 0)) || [[ " $* " == *" $name "* ]]; then printf '%s\0' "$run"; fi
done | xargs -0 -P "${JOBS:-2}" -I{} bash -c 'run_one "$1"' _ {}

count() { cat "$logs"/*-* | tail -n +1 | grep -oE "[0-9]+ $1" | awk '{n += $1} END {print n + 0}'; }
summary="cuda: $(count passed) passed, $(count failed) failed, $(count skipped) skipped"
if (($# == 0)) && [[ -z ${SEGSCATTER_TOUR_KERNELS:-} ]]; then
  "$PYTHON" tests/cuda/coverage.py "$SEGSCATTER_COVERAGE" --strict || touch "$logs/failed"
fi
echo "$summary"
[[ ! -e $logs/failed ]]
