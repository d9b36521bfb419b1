#!/usr/bin/env bash
# The main job on this machine: trains MHA and DAMCHA on the text that ships with the package,
# prints the results beside the paper's and a text that each model wrote. Options are passed on:
#   bash launch/local.sh --config.seeds=0,1
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment ""
cd "$root"
# Compiled programs are kept, so that a repeated or resumed run starts at once.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$root/.cache/jax}"
workdir=runs/gpt2_enwik8/mix-cpu
"$environment_python" -m experiments.gpt2_enwik8 --config=configs/mix.py:cpu \
  --workdir="$workdir" "$@"
"$environment_python" -m experiments.sample --workdir="$workdir" --prompt="The "
