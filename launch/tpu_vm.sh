#!/usr/bin/env bash
# Runs an experiment on every host of a Cloud TPU slice, one process each:
#   bash launch/tpu_vm.sh --tpu=NAME --zone=ZONE [--dry_run] -- gpt2_enwik8 \
#     --config=configs/mix.py --workdir=/mnt/shared/mix
# Copies this tree, as committed, to the hosts, installs it there and starts the command with
# --distributed. The workdir must be on storage that all hosts share. The same command resumes.
# --dry_run prints what would run. Needs gcloud, logged in.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  printf 'error: %s\nusage: %s --tpu=NAME --zone=ZONE [--dry_run] -- EXPERIMENT FLAGS...\n' \
    "$1" "$0" >&2
  exit 2
}

run() {
  if [ -n "$dry_run" ]; then
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}

tpu='' zone='' dry_run=''
while [ $# -gt 0 ]; do
  case $1 in
    --tpu=*) tpu=${1#*=} ;;
    --zone=*) zone=${1#*=} ;;
    --dry_run) dry_run=true ;;
    -h|--help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
    --) shift; break ;;
    *) usage "unknown option '$1'" ;;
  esac
  shift
done
[ -n "$tpu" ] || usage '--tpu is missing'
[ -n "$zone" ] || usage '--zone is missing'
[ $# -gt 0 ] || usage 'the experiment is missing; name it after --'
experiment=$1
shift
[[ $experiment =~ ^[a-z0-9_]+$ && -f $root/experiments/$experiment.py ]] ||
  usage "there is no experiments/$experiment.py"
if [ -z "$dry_run" ] && ! command -v gcloud >/dev/null; then
  printf 'error: gcloud is not installed; install the Google Cloud CLI and log in\n' >&2
  exit 1
fi

archive=$(mktemp -d)/damcha-jax.tar.gz
trap 'rm -rf "$(dirname "$archive")"' EXIT
git -C "$root" archive --format=tar.gz --output="$archive" HEAD
command=$(printf '%q ' python -m "experiments.$experiment" "$@" --distributed)
remote="set -e; mkdir -p damcha-jax; tar -xzf damcha-jax.tar.gz -C damcha-jax; cd damcha-jax
python3 -m venv .venv; . .venv/bin/activate
version=\$(python -c 'import sys; print(\"py311\" if sys.version_info < (3, 12) else \"py312\")')
pip install --quiet --constraint launch/constraints-\$version.txt --editable '.[tpu]'
export JAX_COMPILATION_CACHE_DIR=\$PWD/.cache/jax
$command"
run gcloud compute tpus tpu-vm scp "$archive" "$tpu:damcha-jax.tar.gz" --zone="$zone" --worker=all
run gcloud compute tpus tpu-vm ssh "$tpu" --zone="$zone" --worker=all --command="$remote"
