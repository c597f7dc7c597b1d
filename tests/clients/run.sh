#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests the drop-ins in the real Megatron-Core, ms-swift and transformers, on CPU processes with gloo.
#
#   tests/clients/run.sh [pytest options]
#
# Makes a virtual environment of its own (CLIENTS_VENV, default .venv-clients, 1.6 GB), builds segscatter into it, and runs
# the tests. Exits with success, after a loud message, only where the packages cannot be installed.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=${CLIENTS_VENV:-.venv-clients}
requirements=tests/clients/requirements
stamp=$(cat "$requirements".txt "$requirements"-no-deps.txt | sha256sum | cut -d' ' -f1)

skip() {
  printf '\n%s\n' "############################################################" \
    "# SKIPPED: the tests of the drop-ins did not run." "# $1" \
    "# Nothing about Megatron, ms-swift and Hugging Face is verified." \
    "############################################################" >&2
  exit 0
}

install() {
  "${PYTHON:-python3}" -m venv "$venv" &&
    "$venv"/bin/python -m pip install --quiet --disable-pip-version-check -r "$requirements".txt &&
    "$venv"/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r "$requirements"-no-deps.txt &&
    echo "$stamp" >"$venv"/stamp
}

if [ "$(cat "$venv"/stamp 2>/dev/null)" != "$stamp" ]; then
  install || skip "The packages in $requirements*.txt could not be installed."
fi

"$venv"/bin/python - "$requirements".txt "$requirements"-no-deps.txt <<'PYTHON'
import sys
from importlib.metadata import version

pins = [line.strip().split("==") for name in sys.argv[1:] for line in open(name) if "==" in line]
wrong = {name: version(name) for name, pin in pins if version(name) != pin}
sys.exit(f"installed versions differ from their pins: {wrong}" if wrong else 0)
PYTHON

"$venv"/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall .
"$venv"/bin/python -m pytest tests/clients "$@"
