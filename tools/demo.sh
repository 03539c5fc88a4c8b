#!/bin/sh
# Shows normjit at work, from a bare clone: installs what the build lacks, builds, says which devices
# there are, checks LayerNorm against a reference, and trains a small language model with it.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
. "$root/tools/setup.sh"

install_missing
configure
build doctor check train

say 'What is here'
"$root/build/doctor"

say 'LayerNorm against a reference in extended precision'
"$root/build/check"

text=/usr/share/common-licenses/GPL-3
if [ ! -r "$text" ]; then
    text="$root/build/text"
    cat "$root"/README.md "$root"/include/normjit/*.h "$root"/ptx_src/*.cu >"$text"
fi
say "Training a character model on $text for 20 seconds"
"$root/build/train" --seconds 20 --sample 300 "$text"
