#!/usr/bin/env bash
# Write requirements.lock: exact versions for every supported Python, of the package with cpu, monitor and dev.
# Needs uv on PATH. The result names no index and no local path, so it installs from whatever index pip is set up for.
set -euo pipefail
cd "$(dirname "$0")/.."

{
    echo "# Exact versions for development and CI on Python 3.10 to 3.13 (extras cpu, monitor, dev)."
    echo "# Made by 'make lock'; do not edit. Install with: pip install -r requirements.lock"
    "${UV:-uv}" pip compile pyproject.toml \
        --extra cpu --extra monitor --extra dev \
        --universal --python-version 3.10 --fork-strategy requires-python \
        --no-header --no-annotate --no-emit-index-url --no-emit-find-links --quiet
} >requirements.lock.new
mv requirements.lock.new requirements.lock
