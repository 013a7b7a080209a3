#!/usr/bin/env bash
# The seven notebooks of one box by plain papermill, in one run folder: docs/examples/papermill_one_box.sh PARAMS.yml [RUN_DIR]
# `fieldbook run` does the same and more: it waits for other walks, shows progress, and stops the server whatever happens.
set -eu
cd "$(dirname "$0")/../.."
params=${1:?give a params file such as params/cpu-smollm2.yml}
python=${PYTHON:-.venv/bin/python}
box=$(basename "$params" .yml)
# An absolute path, since a notebook's kernel does not start where papermill was called.
run_dir=$(realpath -m "${2:-${FIELDBOOK_REPORTS:-reports}/$box/papermill-$(date -u +%Y%m%d-%H%M%S)}")
mkdir -p "$run_dir"
cp "$params" "$run_dir/params.yml"
# A server that notebook 05 starts belongs to this shell and ends with it.
finish() {
    "$python" -m fieldbook stop "$run_dir" >&2
    "$python" -m fieldbook publish "$run_dir"
}
trap finish EXIT
for notebook in notebooks/0*.ipynb; do
    "$python" -m papermill "$notebook" "$run_dir/$(basename "$notebook")" -f "$params" -p run_dir "$run_dir" --cwd notebooks --no-progress-bar
done
