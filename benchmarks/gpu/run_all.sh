#!/bin/bash
# Every measurement that needs a GPU, in one command that can be repeated: what was measured already is not measured again.
#
#   benchmarks/gpu/run_all.sh                     all parts, results in benchmarks/results
#   benchmarks/gpu/run_all.sh --list              the parts, their limits, and packages that are missing here
#   benchmarks/gpu/run_all.sh --only NAME ...     these parts alone
#   benchmarks/gpu/run_all.sh --dry               on a CPU, tiny: shows that every part runs
#   benchmarks/gpu/run_all.sh --wheels DIR        installs the wheels of DIR first, into a folder of their own: for a machine
#                                                 without internet
#   benchmarks/gpu/run_all.sh --gather FILE       keeps all results in this one file too, and goes on from what it holds
#   benchmarks/gpu/run_all.sh --help              the other options
#
# PYTHON chooses the interpreter: one that has torch with Triton. Sentinel itself need not be installed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x "$root/.venv/bin/python" ] || PYTHON=$root/.venv/bin/python
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
# What a part prints is seen while it runs.
export PYTHONUNBUFFERED=1

args=()
while [ $# -gt 0 ]; do
    case $1 in
        --wheels|--wheels=*)
            if [ "$1" = --wheels ]; then wheels=${2:-}; shift; else wheels=${1#*=}; fi
            shift || true
            if ! compgen -G "$wheels/*.whl" >/dev/null; then
                echo "run_all.sh: --wheels: expected a folder with wheels (*.whl), got \"$wheels\"" >&2
                exit 2
            fi
            # Named by what it holds: the next call on this machine finds it.
            site=${TMPDIR:-/tmp}/sentinel-gpu-wheels-$( (echo "$PYTHON"; ls -l "$wheels"/*.whl) | cksum | tr ' ' -)
            install=("$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --disable-pip-version-check)
            if [ ! -e "$site.complete" ]; then
                rm -rf "$site"
                # One wheel of another Python stops them all: then each by itself, and those that fail are named.
                if "${install[@]}" --target "$site" "$wheels"/*.whl 2>/dev/null; then
                    touch "$site.complete"
                else
                    for wheel in "$wheels"/*.whl; do
                        "${install[@]}" --upgrade --target "$site" "$wheel" ||
                            echo "run_all.sh: $(basename "$wheel") cannot be installed" >&2
                    done
                fi
            fi
            PYTHONPATH=$PYTHONPATH:$site
            ;;
        *) args+=("$1"); shift ;;
    esac
done

# Without the library the host's part of a step is numpy's, and takes longer than what users have.
if ! "$PYTHON" -c 'from sentinel.native import implementation; raise SystemExit(implementation == "numpy")' 2>/dev/null; then
    (cd "$root" && "$PYTHON" setup.py --quiet build_ext --inplace >/dev/null 2>&1) || echo "run_all.sh: the C library cannot be built" >&2
fi

exec "$PYTHON" "$root/benchmarks/gpu/run_all.py" ${args[@]+"${args[@]}"}
