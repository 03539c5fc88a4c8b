# shellcheck shell=sh disable=SC2154
# For demo.sh and test.sh to source, with $root set: installs what the build lacks, builds.
# On Debian and Ubuntu through apt, as root or with a sudo that asks no password; else it names the
# command and stops. When nothing is missing it touches neither apt nor the network.

say() {
    printf '== %s\n' "$*"
}

have() {
    command -v "$1" >/dev/null 2>&1
}

# Prints the compiler: $CC, else the first of those that meson would take.
compiler() {
    if [ -n "${CC:-}" ]; then
        echo "$CC"
        return
    fi
    for candidate in cc gcc clang; do
        if have "$candidate"; then
            echo "$candidate"
            return
        fi
    done
}

# Compiles and links a program that includes a header; $CC may hold flags, so it is split. A missing
# C library fails here, too.
compiles() {
    printf '#include <stdarg.h>\n#include <stddef.h>\n#include <setjmp.h>\n#include <stdint.h>\n%s\n%s\n' \
        "#include <$1>" 'int main(void) { return 0; }' >"$scratch/probe.c"
    # shellcheck disable=SC2086
    $(compiler) "$scratch/probe.c" -o "$scratch/probe" $2 >/dev/null 2>&1
}

# Prints the packages to install.
missing_packages() {
    if [ -z "$(compiler)" ]; then
        echo gcc libc6-dev
    elif ! compiles stdlib.h ''; then
        echo libc6-dev
    fi
    have python3 || echo python3
    have meson || echo meson
    have ninja || echo ninja-build
    have pkg-config || echo pkg-config
    have c++ || have g++ || have clang++ || echo g++
    compiles cmocka.h -lcmocka || echo libcmocka-dev
}

apt_install() {
    say "Installing $*"
    if ! $as_root env DEBIAN_FRONTEND=noninteractive sh -c '
        apt-get update
        apt-get install -y --no-install-recommends "$@"' sh "$@" >"$scratch/apt.log" 2>&1 </dev/null
    then
        tail -n 20 "$scratch/apt.log" >&2
        return 1
    fi
}

install_missing() {
    if [ -n "${CC:-}" ] && ! have "${CC%% *}"; then
        echo "CC=$CC: no such compiler" >&2
        exit 1
    fi
    packages=$(missing_packages | tr '\n' ' ')
    [ -n "$packages" ] || return 0
    as_root=none
    if have apt-get; then
        if [ "$(id -u)" = 0 ]; then
            as_root=
        elif have sudo && sudo -n true 2>/dev/null; then
            as_root='sudo -n'
        fi
    fi
    # shellcheck disable=SC2086
    if [ "$as_root" = none ] || ! apt_install $packages; then
        echo "Missing: $packages" >&2
        echo "On Debian 12 or Ubuntu 24.04 install it with" >&2
        echo "    sudo apt-get install -y --no-install-recommends $packages" >&2
        exit 1
    fi
    still=$(missing_packages | tr '\n' ' ')
    if [ -n "$still" ]; then
        echo "apt-get installed $packages, yet this is still not found: $still" >&2
        exit 1
    fi
}

# configure [meson options]: $root/build, made anew when it was made here for another compiler or with
# other options.
configure() {
    wanted="$(compiler) $*"
    made_for="$root/build/made_for"
    again=
    if [ -f "$made_for" ] && [ "$(cat "$made_for")" != "$wanted" ]; then
        rm -rf "$root/build"
    elif [ -f "$root/build/build.ninja" ]; then
        again=--reconfigure
    fi
    # shellcheck disable=SC2086
    quietly meson setup $again "$root/build" "$root" "$@"
    echo "$wanted" >"$made_for"
}

# build [targets]: all of them when none is named.
build() {
    say "Building with $(compiler) in $root/build"
    quietly ninja -C "$root/build" "$@"
}

# Runs a command; its output is shown when it fails.
quietly() {
    if ! "$@" >"$scratch/log" 2>&1; then
        cat "$scratch/log" >&2
        return 1
    fi
}

# Where cores are shared, threads that spin between small loops stall each other.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' HUP INT TERM
