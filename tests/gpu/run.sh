#!/usr/bin/env bash
# Checks and measures this project on one GPU, in less than 8 minutes on an H100.
#
#   tests/gpu/run.sh OUT [--tiny] [--only NAME,...] [--seconds S]
#
#   OUT        folder for the results: results.json (all figures), NAME.json, NAME.txt (what a part said), table.txt.
#              backends.json is a table for kernels/backends_cuda.json
#   --tiny     rehearse every part with tiny sizes on the CPU, Triton's kernels interpreted (under 2 minutes)
#   --only     only these parts
#   --seconds  in all, 470 if not given; parts that find none left are not run, which counts as failed
#
# Needs torch, triton and numpy. Parts that need more say so and are skipped where it is missing: a folder of further packages
# goes into PYTHONPATH. Exit code: 0 where no part
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

recipe=(--config configs/imagenet_rn50_wmse4_100ep.yaml --model.batch_norm_ranks local --log.tensorboard false)
tests=(tests/numerics/test_whitening_triton.py tests/unit/test_saver.py tests/unit/test_bench_cost.py) # what a GPU decides comes first
for file in tests/numerics/test_*.py; do [[ $file == *_triton.py ]] || tests+=("$file"); done

if [[ -n $tiny ]]; then
    shapes="--shapes 2,8,8,4,1" cells="--slices 1 2 --sizes 4" loss_s=0.1 table_s=0.1 some=(-k cannot_do)
    recipe+=(--model.backbone test_resnet --model.projector_hidden "[16]" --model.embedding_size 4 --loss.slice_size 8
        --views.side 32 --views.test_resize 32 --device cpu --data.threads 1)
    pictures=48 images=8 step_s=1 end_s=2 steps=12 compiled=false
elif nvidia-smi -L &>/dev/null || "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    shapes= cells= loss_s=20 table_s=30 some=()
    pictures=2048 images=256 step_s=12 end_s=30 steps=200 compiled=true
else
    echo "there is no GPU here; --tiny rehearses on a CPU" >&2
    exit 2
fi
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT # pictures, and a run; ends with the script
measures=torch,timm,jsonargparse,yaml,rich,nvidia.dali # the trainer loads DALI, whatever is measured
compute() { # compute NAME SECONDS SETTINGS...: a part that measures the step alone
    part "compute_$1" "$2" "$measures" "$python" -m trainer bench compute "${recipe[@]}" --seconds $step_s \
        --out "$out/compute_$1.json" "${@:3}"
}

part environment 40 torch "$python" -m tests.gpu.environment "$out/environment.json" $tiny
part step 150 torch,timm,torchvision "$python" -m tests.gpu.check_step "$out/step.json" $tiny
part kernels 130 torch,triton "$python" -m tests.gpu.check_kernels "$out/kernels.json" $tiny
compute compiled_bf16 110 --compile $compiled --precision bf16 --data.images_per_step $images --profile "$out/trace.json"
compute eager_bf16 60 --precision bf16 --data.images_per_step $images
compute eager_fp16 60 --precision fp16 --data.images_per_step $images
part views 60 torch,nvidia.dali,PIL "$python" -m tests.gpu.check_views "$out/views.json" $tiny
part pictures 60 PIL,numpy "$python" -m tests.gpu.make_set "$work/pictures" $pictures
on_pictures=(--data.root "$work/pictures" --data.images_per_step $images --compile $compiled)
part end2end 140 $measures "$python" -m trainer bench end2end "${recipe[@]}" "${on_pictures[@]}" --seconds $end_s \
    --out "$out/end2end.json"
part loader 60 $measures "$python" -m trainer bench loader "${recipe[@]}" "${on_pictures[@]}" --seconds $step_s \
    --out "$out/loader.json"
part steps 140 $measures "$python" -m trainer pretrain "${recipe[@]}" "${on_pictures[@]}" --max_steps $steps \
    --run_dir "$work/run"
compute compiled_bf16_2_views 110 --compile $compiled --precision bf16 --data.images_per_step $images --views.num_views 2
compute graphs_bf16 110 --compile $compiled --cuda_graphs $compiled --precision bf16 --data.images_per_step $images
part whitening 60 torch,triton "$python" -m tests.gpu.time_whitening "$out/whitening.json" $tiny
part profile 50 torch,triton "$python" -m tests.gpu.profile_loss "$out/profile.json" $tiny
part loss 80 torch,rich "$python" -m trainer bench loss $shapes --seconds $loss_s --out "$out/loss.json"
part backends 80 torch,rich "$python" benchmarks/whitening_backends.py $cells --seconds $table_s --out "$out/backends.json"
part tiles 110 torch,triton "$python" -m tests.gpu.sweep_tiles "$out/tiles.json" $tiny
part sanitizer 120 torch,triton "$python" -m tests.gpu.sanitize $tiny
part pytest 200 torch,triton,pytest,hypothesis "$python" -m pytest "${tests[@]}" "${some[@]}"
finish
