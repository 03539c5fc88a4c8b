#!/bin/sh
# Runs the kernels' test under compute-sanitizer, all tools at once, and prints a line for each.
#
#   tools/sanitize.sh [program [tool...]]    program: build/tests/test_sanitize
#
# Exit: 0 all clean; 1 not; 77 when there is no GPU or no compute-sanitizer (CUDA toolkit).
set -u
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
program=${1:-$root/build/tests/test_sanitize}
if [ $# -gt 0 ]; then shift; fi
if [ $# -eq 0 ]; then set -- memcheck racecheck initcheck synccheck; fi

PATH=$PATH:/usr/local/cuda/bin:/opt/cuda/bin
if ! command -v compute-sanitizer >/dev/null; then
    echo 'sanitize: skipped: compute-sanitizer is not installed'
    exit 77
fi
if [ ! -x "$program" ]; then
    echo "sanitize: $program is not there: build it first" >&2
    exit 1
fi

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
for tool; do
    (
        start=$(date +%s)
        compute-sanitizer --tool "$tool" --error-exitcode 99 "$program" >"$logs/$tool" 2>&1
        echo "$? $(($(date +%s) - start))" >"$logs/$tool.result"
    ) &
done
wait

status=0
for tool; do
    read -r code seconds <"$logs/$tool.result"
    case $code in
    0) echo "$tool: clean ($seconds s)" ;;
    77)
        echo "$tool: skipped: no GPU"
        [ $status -ne 0 ] || status=77
        ;;
    *)
        echo "$tool: FAILED with code $code ($seconds s); the last of its output:"
        tail -n 60 "$logs/$tool" | sed 's/^/    /'
        status=1
        ;;
    esac
done
exit $status
