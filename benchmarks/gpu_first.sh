#!/usr/bin/env bash
# The first minutes on a machine with a GPU, most valuable first: crossover, what the card is, tests, other benchmarks.
#
#     benchmarks/gpu_first.sh pack WHEELS        on a machine with a package index: collects what the other may lack
#     benchmarks/gpu_first.sh run WHEELS OUT     on the machine with the GPU, which needs no network
#     benchmarks/gpu_first.sh rehearse OUT       here, without a GPU: the same at toy sizes on a second CPU device
#
# Needs Python 3.12, and for `run` JAX with CUDA, Flax and optax, which are not packed. OUT gets a log and a JSON for each part
# as it ends, and `parts.txt` with its seconds and exit status: what there was no time for is missing, the rest is whole.
# PARTS="tests selection" chooses parts; LIMIT is the seconds for all of them (default 520).
set -uo pipefail
cd "$(dirname "$0")/.."

# What `run` cannot take from the machine. The JAX is the one that mpi4jax was built for; another is built there.
JAX="${JAX:-0.11.2}"
MPI=(mpich==5.0.2 mpi4py==4.1.2)
TESTERS=(pytest pytest-xdist hypothesis)
MOST_MB=60
BUILD_NEEDED=("setuptools>=82.0.1" wheel nanobind)

usage() {
    sed -n '2,10s/^# \{0,1\}//p' "$0"
    exit 2
}

pack() {
    local wheels
    mkdir -p "$1"
    wheels=$(cd "$1" && pwd)
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    python3.12 -m venv "$work/venv"
    "$work/venv/bin/pip" install -q "jax==$JAX" "jaxlib==$JAX" "${BUILD_NEEDED[@]}" "${MPI[@]}"
    "$work/venv/bin/pip" download -q -d "$wheels" "${MPI[@]}" "${TESTERS[@]}" "${BUILD_NEEDED[@]}"
    "$work/venv/bin/pip" download -q --no-deps --no-binary mpi4jax --no-build-isolation -d "$wheels" mpi4jax==0.9.1.post2
    # An empty CUDA_PATH folder: only the targets for the CPU, which are all that jaxcross calls.
    mkdir "$work/no-cuda"
    PATH="$work/venv/bin:$PATH" CUDA_PATH="$work/no-cuda" "$work/venv/bin/pip" wheel -q --no-deps --no-build-isolation \
        --no-cache-dir --no-binary mpi4jax -w "$wheels" mpi4jax==0.9.1.post2
    echo "$JAX" >"$wheels/jax.txt"
    du -sh "$wheels"
    if [ "$(du -sm "$wheels" | cut -f 1)" -gt "$MOST_MB" ]; then
        echo "$wheels holds more than $MOST_MB MB, which a small machine may not take: $(ls -S "$wheels" | head -3 | xargs)"
        exit 1
    fi
}

install() {
    local wheels=$1
    python3 -m pip install -q --no-index --find-links "$wheels" --no-compile "${MPI[@]}" "${TESTERS[@]}" || return
    if [ "$(python3 -c 'import jaxlib; print(jaxlib.__version__)')" = "$(cat "$wheels/jax.txt")" ]; then
        python3 -m pip install -q --no-index --no-deps --no-compile "$wheels"/mpi4jax-*.whl || return
    else
        python3 -m pip install -q --no-index --find-links "$wheels" "${BUILD_NEEDED[@]}" || return
        CUDA_PATH=$(mktemp -d) python3 -m pip install -q --no-index --no-deps --no-build-isolation \
            "$wheels"/mpi4jax-*.tar.gz || return
    fi
    export PYTHONPATH="$PWD"
    python3 -c 'import jax, mpi4jax; print("JAX", jax.__version__, jax.devices())'
}

# part NAME SECONDS COMMAND...: runs one part within its seconds and what is left of all.
part() {
    local name=$1 most=$2 left start status
    shift 2
    case " ${PARTS:-$name} " in *" $name "*) ;; *) return ;; esac
    left=$((LIMIT - SECONDS))
    if [ "$left" -lt 10 ]; then
        echo "$name: no time left" | tee -a "$OUT/parts.txt"
        return
    fi
    start=$SECONDS
    timeout --kill-after=5 "$((most < left ? most : left))" "$@" >"$OUT/$name.log" 2>&1
    status=$?
    [ "$status" = 0 ] || FAILED+=" $name"
    echo "$name: status $status, $((SECONDS - start)) s" | tee -a "$OUT/parts.txt"
    tail -n "${TAIL:-12}" "$OUT/$name.log" | cut -c 1-600
}

parts() {
    export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$(mktemp -d)} PYTHONUNBUFFERED=1
    local gpu=(python3 benchmarks/gpu.py "${STAND_IN[@]}")
    # Visits have ended before crossover was measured, so it comes first. The limits of these four parts leave room for
    # the installation within the default LIMIT, so even if all of them run out, `tests` gets its full time.
    part ranks_resnet50 220 "${gpu[@]}" --cases ranks --steps 10 --repeats 3 --json "$OUT/gpu_ranks_resnet50.json"
    part target_config 60 python3 benchmarks/gpu_target.py "${STAND_IN[@]}" --json "$OUT/gpu_target_config.json" "$OUT"
    part doctor 60 python3 -m jaxcross doctor
    part tests 120 python3 -m pytest -q "${TESTS[@]}"
    # What is left is shared by the rest.
    part resnet50 150 "${gpu[@]}" --cases split,depth --rivals jit,whole,copied --steps 10 --repeats 3 \
        --json "$OUT/gpu_resnet50.json"
    part gpt 120 "${gpu[@]}" --model gpt --cases split,depth --rivals jit,whole --batch-size 16 --steps 6 --repeats 3 \
        --json "$OUT/gpu_gpt.json"
    part ranks_gpt 120 "${gpu[@]}" --model gpt --cases ranks --batch-size 8 --steps 5 --repeats 3 \
        --json "$OUT/gpu_ranks_gpt.json"
    part memory 120 "${gpu[@]}" --cases memory --json "$OUT/gpu_memory.json"
    part transfers 60 "${gpu[@]}" --cases transfers --repeats 5 --sizes 1000000 100000000 --json "$OUT/gpu_transfers.json"
    part selection 60 python3 benchmarks/selection.py "${SMOKE[@]}" --repeats 5 --cores 0 --sizes 1048576 25600000 \
        --json "$OUT/gpu_selection.json"
    part profile 120 "${gpu[@]}" --cases profile --steps 10 --json "$OUT/gpu_profile.json"
    [ -z "$FAILED" ] || { echo "failed:$FAILED"; exit 1; }
}

for name in ${PARTS:-}; do
    grep -q "^    part $name " benchmarks/gpu_first.sh || { echo "PARTS: there is no part $name in benchmarks/gpu_first.sh"; exit 2; }
done
STAND_IN=() SMOKE=() FAILED='' TESTS=(tests/gpu)
LIMIT=${LIMIT:-520}
case "${1:-}:$#" in
pack:2) pack "$2" ;;
run:3)
    OUT=$3
    mkdir -p "$OUT"
    TESTS+=(-n 4 -p no:benchmark)  # that plugin, where it is installed, refuses -n
    part_start=$SECONDS
    install "$2" >"$OUT/install.log" 2>&1
    status=$?
    echo "install: status $status, $((SECONDS - part_start)) s" | tee -a "$OUT/parts.txt"
    tail -n 3 "$OUT/install.log"
    [ "$status" = 0 ] && parts
    ;;
rehearse:2)
    OUT=$2
    mkdir -p "$OUT"
    STAND_IN=(--stand-in --smoke) SMOKE=(--smoke) TESTS=(tests/cpu/benchmarks/test_gpu.py -k "would_run and placement" -m "")
    parts
    ;;
*) usage ;;
esac
