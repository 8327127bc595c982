#!/usr/bin/env bash
# Checks and measures this project on one GPU, in less than 8 minutes on an H100.
#
#   tests/gpu/run.sh OUT [--tiny] [--only NAME,...] [--seconds S]
#
#   OUT        folder for the results: NAME.json (figures), NAME.txt (what a part said), table.txt.
#              backends.json is a table for kernels/backends_cuda.json
#   --tiny     rehearse every part with tiny sizes on the CPU, Triton's kernels interpreted (under 2 minutes)
#   --only     only these parts
#   --seconds  in all, 470 if not given; parts that find none left are not run, which counts as failed
#
# Needs torch, triton and numpy. Parts that need more say so and are skipped where it is missing. Exit code: 0 where no part
# failed, 1 where one did, 2 for wrong words or no GPU. PYTHON in the environment names another Python than .venv's, else python3;
# WMSE_COMMIT the commit, where this is a copy without its history.
#
# A further part is one line below: part NAME SECONDS NEEDS COMMAND... (parts.sh); the most useful ones first.
set -uo pipefail

usage() {
    sed -n '2,/^set/p' "$0" | grep '^#' | cut -c 3- >&2
    exit 2
}

out= tiny= only= end_seconds=470
while (($#)); do
    case $1 in
        --tiny) tiny=--tiny ;;
        --only) only=${2-} && shift || usage ;;
        --seconds) end_seconds=${2-} && shift || usage ;;
        -*) usage ;;
        *) [[ -z $out ]] && out=$1 || usage ;;
    esac
    shift
done
[[ -n $out && $end_seconds =~ ^[0-9]+$ ]] || usage
mkdir -p "$out" && out=$(cd "$out" && pwd) && cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" # this copy, where it is not installed
export PYTHONUNBUFFERED=1 # what a part said before it is stopped is kept
if [[ -n $tiny ]]; then
    export TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
    patience=3 # the machines of rehearsals are busy with other things
fi
source tests/gpu/parts.sh

tests=(tests/numerics/test_whitening_triton.py tests/unit/test_saver.py tests/unit/test_bench_cost.py) # what a GPU decides comes first
for file in tests/numerics/test_*.py; do [[ $file == *_triton.py ]] || tests+=("$file"); done

if [[ -n $tiny ]]; then
    shapes="--shapes 2,8,8,4,1" cells="--slices 1 2 --sizes 4" loss_s=0.1 table_s=0.1 some=(-k cannot_do)
elif nvidia-smi -L &>/dev/null || "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    shapes= cells= loss_s=20 table_s=30 some=()
else
    echo "there is no GPU here; --tiny rehearses on a CPU" >&2
    exit 2
fi
part environment 40 torch "$python" -m tests.gpu.environment "$out/environment.json" $tiny
part kernels 130 torch,triton "$python" -m tests.gpu.check_kernels "$out/kernels.json" $tiny
part whitening 60 torch,triton "$python" -m tests.gpu.time_whitening "$out/whitening.json" $tiny
part profile 50 torch,triton "$python" -m tests.gpu.profile_loss "$out/profile.json" $tiny
part loss 80 torch,rich "$python" -m trainer bench loss $shapes --seconds $loss_s --out "$out/loss.json"
part backends 80 torch,rich "$python" benchmarks/whitening_backends.py $cells --seconds $table_s --out "$out/backends.json"
part tiles 110 torch,triton "$python" -m tests.gpu.sweep_tiles "$out/tiles.json" $tiny
part sanitizer 120 torch,triton "$python" -m tests.gpu.sanitize $tiny
part pytest 200 torch,triton,pytest,hypothesis "$python" -m pytest "${tests[@]}" "${some[@]}"
finish
