#!/usr/bin/env bash
# compute-sanitizer over small forwards of the fused and of the split layer.
#
#     scripts/sanitize.sh [memcheck|initcheck|racecheck|synccheck ...]      default: the first three
#
# Values are checked as well; waits have no time-out in this build, because a checker is slow. Exit
# code 0: clean; 1: errors, or wrong values; 2: compute-sanitizer is missing, or does not run here.
# What racecheck says that it cannot check is quoted and is no error. In the fused layer it reports
# writes after reads of item records (`item_ring.py`): a warp's sync before its elected lane arrives
# leaves no instruction, so that the tool takes the other lanes for unsynchronised. With every lane
# arriving it reports none.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
LIMIT=${SANITIZE_LIMIT:-900}  # seconds of each tool
CALLS=${SANITIZE_CALLS:-split ep tp}

find_sanitizer() {
    command -v compute-sanitizer && return
    ls -d /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -1 | grep . && return
    local site
    site=$("$PYTHON" -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null) || return
    find "$site" -name compute-sanitizer -type f 2>/dev/null | head -1 | grep .
}

SANITIZER=$(find_sanitizer) || {
    echo "compute-sanitizer is not on PATH, in /usr/local/cuda*/bin or in an" \
        "nvidia-cuda-sanitizer-api wheel of $PYTHON; install one of them" >&2
    exit 2
}
echo "$SANITIZER: $("$SANITIZER" --version | grep -i version | tail -1)"
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
# Kernels are compiled before, so that no checker watches a compiler.
"$PYTHON" scripts/sanitized_calls.py $CALLS || { echo "the calls fail without a checker"; exit 1; }

status=0
for tool in "${@:-memcheck initcheck racecheck}"; do
    for t in $tool; do
        log=$FOLDER/$t.log
        start=$SECONDS
        # Every tensor an allocation of its own: bounds are exact, and nothing is initialised by
        # the tensor that was there before.
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -s INT "$LIMIT" "$SANITIZER" --tool "$t" \
            --target-processes all --launch-timeout 0 --error-exitcode 9 --print-limit 20 \
            "$PYTHON" scripts/sanitized_calls.py $CALLS >"$log" 2>&1
        code=$?
        echo "== $t: exit code $code, $((SECONDS - start)) s"
        grep -E "SUMMARY|values are right|Error|[Uu]nsupported|not supported" "$log" | sort | uniq -c |
            head -20
        if grep -qi "device not supported" "$log"; then
            echo "compute-sanitizer does not run on this machine"
            exit 2
        fi
        if [ "$code" != 0 ]; then
            head -c 6000 "$log"
            if ! { [ "$t" = racecheck ] && grep -qiE "unsupported|not supported" "$log"; }; then
                status=1
            fi
        fi
    done
done
exit $status
