#!/bin/sh
# Runs every test, from a bare clone: installs what the build lacks, builds, tests. Arguments go to
# meson: -Dwerror=true, -Db_sanitize=address,undefined, ... Tests that need a GPU skip without one.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
. "$root/tools/setup.sh"

install_missing
configure "$@"
build

say 'Testing'
rm -f "$root/build/meson-logs/testlog.json"
status=0
meson test -C "$root/build" --no-rebuild --print-errorlogs || status=$?
python3 "$root/tools/summary.py" "$root/build/meson-logs/testlog.json" || status=$?
exit "$status"
