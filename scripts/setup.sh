# Make $PYTHON a Python that can run this checkout. Sourced, never run:  source scripts/setup.sh EXTRA
# EXTRA is an extra of pyproject.toml: hf (demo) or test.
#
# Which environment:
#   1. a virtual environment on PATH (activated or not) that has torch is used as it is
#   2. else .venv in the checkout, made on the first run from the python3 on PATH; if that one has
#      torch, .venv sees it (--system-site-packages)
# An installed torch is never replaced. The second run finds a stamp of this pyproject.toml in the
# environment and installs nothing.

setup_fail() {  # step, what to do
    echo >&2
    echo "Set-up failed at: $1" >&2
    echo "  $2" >&2
    exit 1
}

setup_pip() {  # step, what to do when it fails, arguments of pip install
    local step=$1 advice=$2
    shift 2
    echo "==> $step" >&2
    local started=$SECONDS
    "$PYTHON" -m pip install --disable-pip-version-check "${SETUP_PIP_FLAGS[@]}" "$@" >&2 ||
        setup_fail "$step (pip install $*)" "$advice"
    echo "    done in $((SECONDS - started)) s" >&2
}

setup_torch_version() {  # python; fails without torch
    "$1" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null
}

setup_is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

setup_choose_python() {
    local python=python3
    if setup_is_new_enough python3 && setup_torch_version python3 >/dev/null &&
        python3 -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; then
        PYTHON=$(command -v python3)
        echo "==> Using the environment of $PYTHON and its torch" >&2
        return
    fi
    PYTHON=$SETUP_ROOT/.venv/bin/python
    setup_is_new_enough "$PYTHON" && return
    for python in python3 python3.13 python3.12 python3.11 none; do
        setup_is_new_enough "$python" && break
    done
    [[ $python != none ]] || setup_fail "finding Python" \
        "Python 3.11 or newer is needed (on Debian: apt-get install python3 python3-venv)."
    local flags=--clear
    setup_torch_version "$python" >/dev/null && flags="--clear --system-site-packages"
    echo "==> Making .venv ($("$python" --version), venv $flags)" >&2
    "$python" -m venv $flags "$SETUP_ROOT/.venv" || setup_fail "making .venv" \
        "It needs the venv module (on Debian: apt-get install python3-venv) and room (df -h)."
}

setup_install() {  # extra
    local extra=$1 prefix new_stamp stamp
    prefix=$("$PYTHON" -c 'import sys; print(sys.prefix)')
    new_stamp="$SETUP_ROOT $(cksum <"$SETUP_ROOT/pyproject.toml")"
    for stamp in "$prefix/moe-ep-$extra.stamp" "$prefix/moe-ep-test.stamp"; do  # test includes hf
        if [[ -f $stamp && $(<"$stamp") == "$new_stamp" ]]; then
            echo "==> Set-up is complete ($PYTHON); nothing to install" >&2
            return
        fi
    done
    "$PYTHON" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m ensurepip >/dev/null ||
        setup_fail "finding pip in $prefix" "Install pip into that environment, then run this again."

    local extras=$extra has_gpu='' torch
    nvidia-smi -L >/dev/null 2>&1 && has_gpu=yes
    SETUP_PIP_FLAGS=(--progress-bar on)
    [[ -t 2 ]] || SETUP_PIP_FLAGS=(--progress-bar off --quiet)

    if torch=$(setup_torch_version "$PYTHON"); then
        echo "==> torch $torch is installed and stays" >&2
        if [[ $has_gpu ]] && setup_is_at_least 2.14.1 "$torch"; then
            extras=$extra,gpu
        elif [[ $has_gpu ]]; then
            echo "    The gpu extra needs torch 2.14.1 or newer and is left out: GPU kernels will" \
                'not run. To have them: pip install -e ".[gpu]"' >&2
        fi
        echo "    To download: up to 0.4 GB" >&2
    elif [[ $has_gpu ]]; then
        extras=$extra,gpu
        echo "==> To download: about 4 GB (torch for CUDA); 10 GB on disk" >&2
    else
        echo "==> No NVIDIA GPU. To download: about 0.6 GB, 2 GB on disk (3 GB, 8 GB on disk, where" \
            "the package index has torch for CUDA only)" >&2
        setup_pip "Installing torch 2.13.0" \
            "Check the network and the free disk space (df -h), then run this again." \
            torch==2.13.0
    fi

    local arguments=(--editable "$SETUP_ROOT[$extras]")
    if torch=$(setup_torch_version "$PYTHON"); then
        # An installed torch is a constraint: no dependency may replace it.
        local pin=$prefix/moe-ep-constraint.txt
        echo "torch==$torch" >"$pin"
        arguments+=(--constraint "$pin")
    fi
    setup_pip "Installing moe-ep with [$extras]" \
        "pip's message above names the package. Check the network and the free disk space (df -h)." \
        "${arguments[@]}"
    "$PYTHON" -c 'import torch, moe_ep.launch.cli' || setup_fail "importing what was installed" \
        "Remove .venv and run this again; if it stays, report the traceback above."
    echo "$new_stamp" >"$prefix/moe-ep-$extra.stamp"
}

setup_is_at_least() {  # least version, version
    [[ $(printf '%s\n' "$1" "${2%%[+a-z]*}" | sort -V | head -1) == "$1" ]]
}

SETUP_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
setup_choose_python
setup_install "$1"
