#!/usr/bin/env bash
# Compiles the header in every way that it promises, with the compilers that are here, two at a time.
# One line for each; ends with 1 after the first that fails.
#   check.sh INCLUDE_DIR        the folder of normjit.h
set -u
include=$(cd "$1" && pwd) || exit 2
here=$(cd "$(dirname "$0")" && pwd)
out=$(mktemp -d)
trap 'wait; rm -rf "$out"' EXIT

strict="-Wall -Wextra -Wpedantic -Werror -I$include"
libraries="-lm -lpthread -ldl"
cd "$here" || exit 2

running=0 number=0

# attempt NAME COMMAND LOG: says whether it passed, and why not.
attempt() {
    if bash -c "set -e; $2" >"$3" 2>&1; then
        printf 'ok    %s\n' "$1"
    else
        printf 'FAIL  %s\n%s\n' "$1" "$2"
        head -n 40 "$3"
        return 1
    fi
}

wait_for_one() {
    wait -n || exit 1
    running=$((running - 1))
}

# compile NAME COMMAND: in COMMAND, @ is a file name of its own.
compile() {
    [ "$running" -lt 2 ] || wait_for_one
    number=$((number + 1))
    attempt "$1" "${2//@/$out/$number}" "$out/$number.log" &
    running=$((running + 1))
}

# found COMPILER: says so when it is not.
found() {
    command -v "$1" >/dev/null && return
    printf -- '--    %s is not here: nothing compiled with it\n' "$1"
    return 1
}

# every_file COMPILER FLAGS STD: each source on its own.
every_file() {
    local file
    for file in declarations twice macros private; do
        compile "$1 $3 $file" "$1 $2 -std=$3 $strict -c $file.c -o @.o"
    done
    compile "$1 $3 optimized" "$1 $2 -std=$3 $strict -O2 -c implementation.c -o @.o"
    if echo '#include <omp.h>' | $1 -x c -fopenmp -E - >/dev/null 2>&1; then
        compile "$1 $3 with OpenMP" "$1 $2 -std=$3 $strict -fopenmp -c implementation.c -o @.o"
    else
        printf -- '--    %s has no OpenMP here: not compiled with it\n' "$1"
    fi
}

# programs CC CXX: C and C++ files in one program, which must run.
programs() {
    local c="$1 -std=c11 $strict -c" cxx="$2 -x c++ -std=c++11 $strict -c"
    compile "$1 implementation and caller" "$c implementation.c -o @a.o; $c caller.c -o @b.o
        $1 @a.o @b.o -o @ $libraries; @"
    compile "$1 implementation, $2 caller" "$c implementation.c -o @a.o; $cxx caller.c -o @b.o
        $2 @a.o @b.o -o @ $libraries; @"
    compile "$2 implementation, $1 caller" "$cxx implementation.c -o @a.o; $c caller.c -o @b.o
        $2 @a.o @b.o -o @ $libraries; @"
    compile "$1 private functions beside public ones" "$c implementation.c -o @a.o
        $c private.c -o @b.o; $1 @a.o @b.o -o @ $libraries; @"
}

for cc in gcc clang; do
    found $cc || continue
    for std in c99 c11 c17; do
        compile "$cc $std implementation" "$cc -std=$std $strict -c implementation.c -o @.o"
    done
    compile "$cc c11 zero" "$cc -std=c11 $strict -c zero.c -o @.o"
    every_file $cc "" c11
done

for cxx in g++ clang++; do
    found $cxx || continue
    for std in c++11 c++17 c++20; do
        compile "$cxx $std implementation" "$cxx -x c++ -std=$std $strict -c implementation.c -o @.o"
    done
    # that {0} leaves out fields and braces is what it is for
    compile "$cxx c++11 zero" "$cxx -x c++ -std=c++11 $strict -Wno-missing-field-initializers \
        -Wno-missing-braces -c zero.c -o @.o"
    every_file $cxx "-x c++" c++17
done

found gcc >/dev/null && found g++ >/dev/null && programs gcc g++
found clang >/dev/null && found clang++ >/dev/null && programs clang clang++

nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
if found "$nvcc"; then
    compile "nvcc" "$nvcc -Werror all-warnings -I$include -c program.cu -o @.o"
fi

while [ "$running" -gt 0 ]; do wait_for_one; done
