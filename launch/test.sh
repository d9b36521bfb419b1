#!/usr/bin/env bash
# Makes the environment and runs the default tests; options are passed on to pytest:
#   bash launch/test.sh -m slow
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment test
cd "$root"
# One worker per core; a file stays with one worker, since its tests share what is slow to make. A
# worker that dies is one failure: a replacement may wait for ever (pytest-xdist's issue 1378).
exec "$environment_python" -m pytest -n auto --dist loadfile --max-worker-restart=0 "$@"
