#!/usr/bin/env bash
# Walk several boxes one after the other: docs/examples/loop.sh [PARAMS.yml ...]; without arguments, every file in params/.
# The last line of each walk, one JSON document, goes to walks.jsonl in the reports folder. Exit status: 0 all done, else that of the last walk that was not.
set -u
cd "$(dirname "$0")/../.." || exit 2
fieldbook=${FIELDBOOK:-.venv/bin/fieldbook}
reports=${FIELDBOOK_REPORTS:-reports}
mkdir -p "$reports"
worst=0
[ $# -gt 0 ] || set -- params/*.yml
for file in "$@"; do
    out=$("$fieldbook" run "$file")
    status=$?
    # A file that is no params file ends with status 2, one line on stderr and nothing on stdout.
    [ -z "$out" ] || printf '%s\n' "$out" | tail -n 1 >> "$reports/walks.jsonl"
    echo "$file: exit status $status" >&2
    case $status in
        0) ;;
        130 | 143) exit $status ;;   # interrupted: the rest is not begun
        *) worst=$status ;;
    esac
done
exit $worst
