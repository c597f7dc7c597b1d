#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds segscatter against other versions of torch and Python, without CUDA kernels, and runs the pytest suite on each.
#
#   tests/compat/run.sh [--quick] SPEC...
#
# SPEC is what pip installs, with the Python to use behind an @ unless it is python3 (torch==2.8.0@python3.10), or the
# path of a Python that has torch and tests/requirements.txt already (.venv/bin/python). Nothing is installed into the
# latter; for the former a virtual environment is made in a temporary folder (6 GB for a torch with CUDA) and removed
# afterwards, unless KEEP=1. --quick runs the operators' tests only. Prints a table at the end; fails if a row failed.
set -uo pipefail
cd "$(dirname "$0")/../.."

tests=(tests/python)
if [ "${1:-}" = --quick ]; then
  tests=(tests/python/test_{ops,autograd,compile,errors,load,transforms}.py)
  shift
fi
if [ $# = 0 ]; then
  sed -n '3,11s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
export SEGSCATTER_CUDA=OFF MAX_JOBS="${MAX_JOBS:-$(nproc)}" PIP_DISABLE_PIP_VERSION_CHECK=1

work=$(mktemp -d)
cleanup() {
  if [ "${KEEP:-0}" = 1 ]; then echo "kept: $work"; else rm -rf "$work"; fi
}
trap cleanup EXIT

rows=("torch|Python|torch's CUDA|C++|installed in|built in|tests|outcome")
failed=0

# Prints the rows gathered so far as a Markdown table.
table() {
  local row
  for row in "${rows[@]}"; do
    echo "| ${row//|/ | } |"
    [ "$row" = "${rows[0]}" ] && echo "|---|---|---|---|---|---|---|---|"
  done
}

# try SPEC FOLDER: sets `row`; returns whether everything passed.
try() {
  local spec=$1 folder=$2 python begin=$SECONDS installed="-" built facts outcome
  mkdir -p "$folder"
  if [ -x "$spec" ]; then
    python=$spec
  else
    local base=python3
    [[ $spec == *@* ]] && base=${spec##*@}
    if ! { "$base" -m venv "$folder/venv" &&
      "$folder/venv/bin/python" -m pip install --quiet "${spec%@*}" &&
      "$folder/venv/bin/python" -m pip install --quiet -r tests/requirements.txt; }; then
      row="$spec|||||||not installed"
      return 1
    fi
    python=$folder/venv/bin/python
    installed="$((SECONDS - begin)) s"
  fi
  facts=$("$python" -c 'import platform, torch
print(torch.__version__, platform.python_version(), torch.version.cuda or "none", sep="|")') || {
    row="$spec||||$installed|||torch cannot be imported"
    return 1
  }

  begin=$SECONDS
  if ! PATH="$(cd "$(dirname "$python")" && pwd):$PATH" "$python" -m pip install --quiet --no-build-isolation --no-deps \
    --target "$folder/site" . >"$folder/build.log" 2>&1; then
    cat "$folder/build.log"
    row="$facts||$installed|||build failed"
    return 1
  fi
  built="$((SECONDS - begin)) s"
  facts+="|$(sed -n 's/.*"cxx_standard": "\(.*\)".*/\1/p' "$folder/site/segscatter/_build.json")"

  begin=$SECONDS
  PATH="$(cd "$(dirname "$python")" && pwd):$PATH" PYTHONPATH="$folder/site" \
    "$python" -m pytest -q -p no:cacheprovider "${tests[@]}" 2>&1 | tee "$folder/pytest.log"
  local passed=$((PIPESTATUS[0] == 0))
  outcome=$(grep -E '^(=+ )?[0-9]+ (passed|failed)|error' "$folder/pytest.log" | tail -1 | sed -E 's/^=+ | =+$| in [0-9.]+s.*//g')
  row="$facts|$installed|$built|$((SECONDS - begin)) s|${outcome:-no result}"
  ((passed))
}

for spec in "$@"; do
  printf '\n==== %s\n' "$spec"
  row=""
  try "$spec" "$work/$((${#rows[@]}))" || failed=1
  rows+=("$row")
  [ "${KEEP:-0}" = 1 ] || rm -rf "${work:?}/"*
done
echo
table
exit "$failed"
