#!/usr/bin/env bash
# Checks that what is committed can be released, and leaves wheel and sdist in dist/:
#   bash launch/release.sh [PYTEST OPTIONS...]
# Builds from HEAD with `python -m build`, installs the wheel in a new environment, and runs the
# library's tests there, outside the tree. Options go to pytest: `-k metric`, `-m families`.
# PYTHON=path/to/python chooses the interpreter. Publishes nothing.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
choose_python
constraints=$root/launch/constraints-py312.txt
if [ "$version" = 3.11 ]; then constraints=$root/launch/constraints-py311.txt; fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { "$1" -m pip install --quiet --disable-pip-version-check "${@:2}"; }

mkdir "$work/tree" "$work/tests"
git -C "$root" archive HEAD | tar -x -C "$work/tree"
"$python" -m venv "$work/builder"
install "$work/builder/bin/python" build
"$work/builder/bin/python" -m build --outdir "$work/dist" "$work/tree"

"$python" -m venv "$work/user"
wheel=$(echo "$work"/dist/*.whl)
install "$work/user/bin/python" --constraint "$constraints" "${wheel}[test]"
cd "$work/tree"
"$work/user/bin/python" -m tests.library_tests "$work/tests"
cd "$work/tests"
"$work/user/bin/python" -P -m pytest -q -n auto --dist loadfile --max-worker-restart=0 -p no:cacheprovider "$@"
mkdir -p "$root/dist"
cp "$work"/dist/* "$root/dist/"
printf 'Ready: %s\n' "$root"/dist/*
