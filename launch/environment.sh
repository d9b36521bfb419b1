# shellcheck shell=bash disable=SC2034  # `root` and `environment_python` are for the caller
# Sourced by the scripts beside it: finds a Python, makes its virtual environment and installs the
# package with the versions that the tests ran with. Works from any directory.
# PYTHON=path/to/python chooses the interpreter.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

# usable_python INTERPRETER VERSION: whether it runs, is of that version and can make environments.
# A version manager's shim is on PATH but fails to run unless its version is activated, so only
# running it tells.
usable_python() {
  "$1" -c "import ensurepip, sys, venv
sys.exit('%d.%d' % sys.version_info[:2] != '$2')" </dev/null >/dev/null 2>&1
}

# find_python VERSION: prints the first usable interpreter of that version.
find_python() {
  local candidate
  while IFS= read -r candidate; do
    if usable_python "$candidate" "$1"; then
      printf '%s\n' "$candidate"
      return 0
    fi
  done < <(type -aP "python$1" python3 python
           printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python)
  return 1
}

# choose_python: sets `python` and `version` to $PYTHON or the newest supported one found.
choose_python() {
  local supported=(3.13 3.12 3.11)
  for version in "${supported[@]}"; do
    if [ -n "${PYTHON:-}" ]; then
      python=$(command -v "$PYTHON") && usable_python "$python" "$version" && return 0
    else
      python=$(find_python "$version") && return 0
    fi
  done
  printf 'error: %s; install one of Python %s (with its venv module) or set PYTHON\n' \
    "${PYTHON:-no Python found} is not usable" "${supported[*]}" >&2
  return 1
}

# prepare_environment [EXTRAS]: makes `.venv-VERSION` hold the package with these extras and sets
# `environment_python` to its interpreter. Starts afresh only when the requirements have changed.
prepare_environment() {
  local python version venv constraints requirements installed
  choose_python || return 1
  venv=$root/.venv-$version
  constraints=$root/launch/constraints-py312.txt
  if [ "$version" = 3.11 ]; then constraints=$root/launch/constraints-py311.txt; fi
  requirements=$venv/requirements-$(cat "$root/setup.cfg" "$constraints" | sha256sum | cut -c1-16)
  installed=$venv/installed-${1:-core}
  if [ ! -e "$requirements" ]; then
    "$python" -m venv --clear "$venv" || return 1
    touch "$requirements"
  fi
  if [ ! -e "$installed" ]; then
    printf 'Installing into %s (Python %s) ...\n' "$venv" "$version" >&2
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
      --constraint "$constraints" --editable "$root${1:+[$1]}" || return 1
    touch "$installed"
  fi
  environment_python=$venv/bin/python
}
