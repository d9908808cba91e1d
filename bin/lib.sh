# shellcheck shell=bash
# What bin/quickstart and bin/test share: the environment in .venv, made once and then only checked.
# Sourced with `root` set to the checkout. Writes nothing outside the checkout but pip's cache, where there is one.

venv=$root/.venv
stamp=$venv/.rudra-stamp
large=400000000 # bytes to fetch from which on we ask first

# What a person's shell exports for other projects must not reach this environment.
unset PYTHONPATH PYTHONHOME PYTHONSTARTUP PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
if [ ! -d "${XDG_CACHE_HOME:-$HOME/.cache}/pip" ]; then
    export PIP_CACHE_DIR=${PIP_CACHE_DIR:-$root/.cache/pip}
fi

# An activated .venv is no interpreter to make .venv with: nothing here takes one from it.
outside=()
IFS=: read -r -a folders <<<"$PATH"
for folder in "${folders[@]}"; do
    [ "$folder" -ef "$venv/bin" ] || outside+=("$folder")
done
PATH=$(IFS=: && printf '%s' "${outside[*]}")

say() { printf '==> %s\n' "$*"; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# apt_install PACKAGE...: the command as this user has to type it.
apt_install() {
    local sudo=
    [ "$(id -u)" = 0 ] || sudo='sudo '
    printf '%sapt-get update && %sapt-get install -y %s' "$sudo" "$sudo" "$*"
}

# ensure_env EXTRAS YES: .venv with this package, torch and the extras ("" or "dev"). YES non-empty answers the
# question about a large download. One process at a time; a failed or interrupted build leaves nothing.
ensure_env() {
    (
        flock 9
        if ! stamp_holds; then
            build_env "$1" "$2"
        elif [ -n "$1" ] && ! grep -qx "extras=$1" "$stamp"; then
            say "Environment: adding what the tests need"
            install_into -q -e ".[$1]"
            write_stamp "$1" "$(stamped interpreter)"
        else
            say "Environment: .venv is ready"
        fi
    ) 9<"$root"
}

# --- the stamp: what the environment was made from ---

inputs_hash() {
    # The tools' settings at the end of pyproject.toml change nothing that gets installed.
    { sed '/^# --- the tools/,$d' "$root/pyproject.toml" && cat "$root/constraints.txt"; } | sha256sum | cut -d' ' -f1
}

# What the environment is now: asking it also shows that it runs and that its torch is still there.
env_facts() {
    "$venv/bin/python" - <<'PY'
import sys
from importlib import metadata
print("python=" + " ".join(sys.version.split()), sys.base_prefix)
print("torch=" + metadata.version("torch"))
PY
}

write_stamp() { # EXTRAS INTERPRETER
    {
        printf 'root=%s\ninputs=%s\n' "$root" "$(inputs_hash)"
        env_facts
        printf 'interpreter=%s\nextras=%s\n' "$2" "$1"
    } >"$stamp.new"
    mv "$stamp.new" "$stamp"
}

stamped() { sed -n "s/^$1=//p" "$stamp"; }

stamp_holds() {
    local facts
    [ -f "$stamp" ] && [ "$(stamped root)" = "$root" ] && [ "$(stamped inputs)" = "$(inputs_hash)" ] || return 1
    facts=$(env_facts 2>/dev/null) || return 1
    [ "$facts" = "$(grep -E '^(python|torch)=' "$stamp")" ] || return 1
    [ -z "${RUDRA_PYTHON:-}" ] || [ "$(probe "$RUDRA_PYTHON" | sed -n 1p)" = "$(stamped interpreter)" ]
}

# --- the interpreter ---

# probe PYTHON: its path, how it makes environments ("-": it cannot) and its torch ("-": none that will do), a line
# each. Fails for anything that is no Python >= 3.10, and for that of .venv, which goes before a new one is made.
probe() {
    RUDRA_VENV=$venv "$1" - 2>/dev/null <<'PY'
import os, re, sys
if sys.version_info < (3, 10):
    sys.exit(1)
ways = [sys.executable]
while os.path.islink(ways[-1]):
    ways.append(os.path.join(os.path.dirname(ways[-1]), os.readlink(ways[-1])))
folders = [os.path.join(sys.prefix, "bin"), *map(os.path.dirname, ways)]
if os.path.realpath(os.path.join(os.environ["RUDRA_VENV"], "bin")) in map(os.path.realpath, folders):
    sys.exit(1)
from importlib import metadata, util
try:
    torch = metadata.version("torch")
except metadata.PackageNotFoundError:
    torch = "0"
makers = [name for name in ("venv", "virtualenv") if util.find_spec(name)]
if not util.find_spec("ensurepip"):
    makers = [name for name in makers if name != "venv"]
print(sys.executable)
print((makers + ["-"])[0])
print(torch if [int(n) for n in re.findall(r"\d+", torch)[:2]] >= [2, 4] else "-")
PY
}

# Sets python, maker, python_torch: $RUDRA_PYTHON, else the first interpreter that has torch, else the first that can
# make an environment.
choose_python() {
    local candidates candidate facts rank best=-1 found=
    candidates=(python3 python3.{14,13,12,11,10} /usr/bin/python3)
    if [ -n "${RUDRA_PYTHON:-}" ]; then
        candidates=("$RUDRA_PYTHON")
        if [ "$(dirname "$RUDRA_PYTHON")" -ef "$venv/bin" ]; then
            die "RUDRA_PYTHON=$RUDRA_PYTHON is in .venv itself, which is made anew. Fix: unset it, or name the one outside"
        fi
    fi
    for candidate in "${candidates[@]}"; do
        command -v "$candidate" >/dev/null || continue
        mapfile -t facts < <(probe "$candidate")
        [ "${#facts[@]}" = 3 ] || continue
        if [ "${facts[1]}" = - ]; then
            if command -v virtualenv >/dev/null; then facts[1]=virtualenv-command; fi
            if command -v uv >/dev/null; then facts[1]=uv; fi
        fi
        rank=0
        [ "${facts[1]}" = - ] || rank=1
        [ "$rank" = 0 ] || [ "${facts[2]}" = - ] || rank=2
        if [ "$rank" -gt "$best" ]; then
            best=$rank found=$candidate python=${facts[0]} maker=${facts[1]} python_torch=${facts[2]}
        fi
    done
    if [ -z "$found" ]; then
        [ -z "${RUDRA_PYTHON:-}" ] || die "RUDRA_PYTHON=$RUDRA_PYTHON is no Python 3.10 or newer. Fix: correct or unset it"
        die "no Python 3.10 or newer on PATH. Fix: $(apt_install python3 python3-venv), or set RUDRA_PYTHON to one"
    fi
    if [ "$maker" = - ]; then
        local package=python3-venv
        [ "$python" = /usr/bin/python3 ] || package=$(basename "$python")-venv
        die "$python cannot make virtual environments (it has no ensurepip). Fix: $(apt_install "$package")"
    fi
}

# --- building ---

build_env() ( # EXTRAS YES
    [ -w "$root" ] || die "$root cannot be written by $(id -un). Fix: use a checkout of your own"
    local python maker python_torch
    choose_python
    # From here on whatever ends this leaves no half of an environment.
    trap 'rm -rf "$venv"' EXIT
    trap 'exit 130' INT TERM HUP
    if [ -e "$venv" ] && [ ! -f "$stamp" ]; then
        say "Environment: .venv is removed, because it is not one that this script finished"
    fi
    say "Environment: making .venv with $python"
    rm -rf "$venv"
    make_venv
    if [ "$python_torch" != - ] && share_torch; then
        say "  torch $python_torch of $python is used as it is"
    else
        install_torch "$2"
    fi
    say "  installing rudra-zmq and what it needs${1:+, and what the tests need}"
    install_into -q -e ".${1:+[$1]}"
    write_stamp "$1" "$python"
    trap - EXIT
)

make_venv() {
    local command
    case $maker in
    venv) command=("$python" -m venv) ;;
    virtualenv) command=("$python" -m virtualenv -q) ;;
    virtualenv-command) command=(virtualenv -q -p "$python") ;;
    uv) command=(uv venv -q --seed -p "$python") ;;
    esac
    quietly "${command[@]}" "$venv"
    # An editable install, and a dry run with a report, need a pip of 2022 or newer.
    "$venv/bin/python" -c 'import pip, sys; sys.exit(tuple(map(int, pip.__version__.split(".")[:2])) < (22, 3))' ||
        install_into -q --upgrade pip
}

# The interpreter's own packages behind those of .venv, which so works for system, user, conda and nested environments.
# Fails, and takes it back, if torch does not import.
share_torch() {
    local site
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" -c 'import sys; print(*[p for p in sys.path if p.endswith("-packages")], sep="\n")' >"$site/rudra-torch.pth"
    if ! "$venv/bin/python" -c 'import torch' >/dev/null 2>&1; then
        [ -z "${RUDRA_PYTHON:-}" ] || die "torch of RUDRA_PYTHON=$RUDRA_PYTHON does not import. Fix: repair it, or unset RUDRA_PYTHON"
        rm "$site/rudra-torch.pth"
        return 1
    fi
}

install_torch() { # YES
    local bytes quiet=-q answer
    say "  torch: asking pip what it would fetch"
    bytes=$("$venv/bin/python" "$root/bin/download_size.py" "$root/constraints.txt" torch)
    if [ "$bytes" = unknown ] || [ "$bytes" -gt "$large" ]; then
        quiet=
        local size="a download of unknown size"
        [ "$bytes" = unknown ] || size="a download of $((bytes / 1000000)) MB"
        if [ -z "$1" ] && [ -t 0 ]; then
            read -r -p "torch is $size. Fetch it? [y/N] " answer
            [[ $answer == [yY]* ]] || die "torch is needed. Fix: set RUDRA_PYTHON to an interpreter that has torch >= 2.4, or say yes"
        elif [ -z "$1" ]; then
            die "torch is $size. Fix: add --yes, or set RUDRA_PYTHON to an interpreter that has torch >= 2.4"
        fi
    fi
    say "  installing torch"
    install_into ${quiet:+"$quiet"} torch
}

# install_into PIP-ARGUMENT...: pip install under the constraints; with -q its words are shown only when it fails.
install_into() {
    local command=("$venv/bin/python" -m pip install -c "$root/constraints.txt" "$@")
    if [ "$1" = -q ]; then quietly "${command[@]}"; else "${command[@]}"; fi
}

quietly() {
    local output
    output=$(cd "$root" && "$@" 2>&1) && return
    printf '%s\n' "$output" | tail -n 15 >&2
    die "$(basename "$1") ${*:2:3} failed. Fix: see above, then run this again"
}
