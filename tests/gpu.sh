#!/usr/bin/env bash
# What only a GPU can show, in under eight minutes on an H200 with 16 cores: the CUDA tests on the
# real device, operators beside their floors, the link, a model of the shapes of Kimi-Linear-48B
# with random weights, and swap beside recomputation. Needs no network and no weights.
#
#   tests/gpu.sh [OUT]                 builds what is missing (cargo --offline), reports to docs/gpu
#   tests/gpu.sh --pack FILE           builds here and packs what runs there, for a machine without
#                                      Rust; with nvcc ($NVCC) it carries compiled kernels
#   tests/gpu.sh --bundle FILE [OUT]   runs what was packed
#   tests/gpu.sh --dry [OUT]           all of it on the emulated device, with tiny shapes: the script
#                                      is what this proves, its numbers say nothing
#
# The exit code is 1 where a test failed or a step did not run to its end. Targets that are missed
# are counted and shown.
set -euo pipefail
cd "$(dirname "$0")/.."

LIMIT=${LIMIT:-470}
WORK=target/gpu
TESTS=(cuda_rows cuda_sampling cuda cuda_gemm cuda_moe cuda_kda cuda_attention cuda_device
  models program)
OUT=docs/gpu
BUNDLE=
DRY=
PACK=

usage() {
  sed -n '/^#   tests/,/^# The exit/p' "$0" | sed '$d; s/^# //' >&2
  exit 2
}

while (($#)); do
  case $1 in
    --dry) DRY=1 ;;
    --bundle | --pack)
      (($# > 1)) || usage
      if [[ $1 == --pack ]]; then PACK=$2; else BUNDLE=$2; fi
      shift
      ;;
    -*) usage ;;
    *) OUT=$1 ;;
  esac
  shift
done

# Builds the program and the tests, the tests under the names of TESTS in $WORK/bin.
build() {
  local made path name seen=
  mkdir -p "$WORK/bin"
  made=$(cargo test --offline --release --no-run --message-format=json \
    -p deltapool-kernels --features cuda --test 'cuda*'
  cargo test --offline --release --no-run --message-format=json \
    --features cuda --test cuda --test cuda_program)
  while IFS= read -r path; do
    name=$(basename "${path%-*}")
    # Two files are called cuda: operators, and whole models.
    case $path in
      */cuda_program-*) name=program ;;
      */cuda-*) [[ -n $seen ]] && name=models; seen=1 ;;
    esac
    install -m 755 "$path" "$WORK/bin/$name"
  done < <(sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' <<<"$made" | grep -v '/deltapool$')
  cargo build --offline --release --features cuda
}

pack() {
  build
  local folder=$WORK/pack
  rm -rf "$folder"
  mkdir -p "$folder/bin" "$(dirname "$PACK")"
  for name in "${TESTS[@]}"; do strip -o "$folder/bin/$name" "$WORK/bin/$name"; done
  strip -o "$folder/deltapool" target/release/deltapool
  # Tests look for their files where they were built.
  pwd >"$folder/root"
  tar -C "$folder" -cJf "$PACK" .
  printf 'packed %s: %d bytes\n' "$PACK" "$(stat -c %s "$PACK")"
}

unpack() {
  local root
  rm -rf "${WORK:?}/bin"
  mkdir -p "$WORK" target/release target/tmp
  tar -C "$WORK" -xJf "$BUNDLE"
  install -m 755 "$WORK/deltapool" target/release/deltapool
  root=$(cat "$WORK/root")
  if [[ ! -e $root ]]; then
    mkdir -p "$(dirname "$root")"
    ln -s "$PWD" "$root"
  fi
  if [[ $(realpath "$root") != "$(realpath .)" ]]; then
    printf 'the tests were built in %s, which is another folder here\n' "$root" >&2
    exit 1
  fi
}

# The stand-ins for libcuda and libnvrtc, where the loader finds them.
emulate() {
  local folder=$WORK/emulated
  rm -rf "$folder"
  mkdir -p "$folder"
  cp -r kernels/cuda kernels/emu "$folder"
  bash "$folder/emu/build.sh" "$folder" >"$WORK/emulated.log" 2>&1
  LD_LIBRARY_PATH=$PWD/$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export LD_LIBRARY_PATH
}

FAILED=0
PASSED=0
SKIPPED=0

# step NAME SECONDS COMMAND...: what it prints goes to OUT/NAME.txt.
step() {
  local name=$1 seconds=$2 start=$SECONDS status=0 left=$((LIMIT - SECONDS))
  shift 2
  if ((left < 5)); then
    printf -- '-- %-18s not run: %d s are over\n' "$name" "$LIMIT" | tee -a "$OUT/summary.txt"
    FAILED=$((FAILED + 1))
    return
  fi
  timeout --kill-after=5 $((seconds < left ? seconds : left)) "$@" >"$OUT/$name.txt" 2>&1 ||
    status=$?
  if ((status)); then
    FAILED=$((FAILED + 1))
    printf -- '-- %-18s FAILED (exit code %d) after %d s\n' "$name" "$status" \
      $((SECONDS - start)) | tee -a "$OUT/summary.txt"
    tail -n 30 "$OUT/$name.txt"
  else
    printf -- '-- %-18s ok, %d s\n' "$name" $((SECONDS - start)) | tee -a "$OUT/summary.txt"
  fi
}

# The tests of one file. Each prints what it skips and why.
tests() {
  local name=$1 file passed skipped
  shift
  file=test-$name
  step "$file" 120 "$WORK/bin/$name" --nocapture "$@"
  passed=$(sed -n 's/^test result: .* \([0-9]*\) passed.*/\1/p' "$OUT/$file.txt" 2>/dev/null || true)
  skipped=$(grep -c '^skipped: ' "$OUT/$file.txt" 2>/dev/null || true)
  PASSED=$((PASSED + ${passed:-0}))
  SKIPPED=$((SKIPPED + ${skipped:-0}))
}

machine() {
  target/release/deltapool doctor
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi --format=csv --query-gpu=name,driver_version,memory.total,clocks.max.sm,\
clocks.max.mem,power.limit,pcie.link.gen.max,pcie.link.width.max
  fi
}

main() {
  local deltapool=target/release/deltapool config=tests/configs/kimi-linear-48b.json
  local model=$WORK/kimi-linear-48b
  local device=() decode=(--sequences "1,32,128" --context 512 --steps 16 --rounds 3)
  local prefill=(--tokens "512,1024,2048,4096,8192" --max-num-batched-tokens 2048 --rounds 3)
  local crossover=(--lengths "64,256,1024,2048,4096,8192" --max-num-batched-tokens 2048)
  if [[ -n $BUNDLE ]]; then
    unpack
  elif [[ ! -x $WORK/bin/program || ! -x $deltapool || -n $DRY ]]; then
    build
  fi
  mkdir -p "$OUT"
  rm -f "$OUT"/*.txt "$OUT"/*.json "$OUT"/*.svg
  export XDG_CACHE_HOME=$PWD/$WORK/cache
  if [[ -n $DRY ]]; then
    emulate
    XDG_CACHE_HOME+=-emulated
    config=tests/goldens/models/kimi_linear_tiny/config.json
    model=$WORK/kimi-linear-tiny
    device=(--tiny --repeats 2)
    decode=(--sequences "1,2" --context 0 --steps 1 --rounds 1)
    prefill=(--tokens 70 --rounds 1)
    crossover=(--lengths "64,128" --max-num-batched-tokens 64)
  else
    export DELTAPOOL_TEST_GPU=1
  fi
  # What it takes is counted from here on: the build is not the device's.
  SECONDS=0
  mkdir -p "$model"
  cp "$config" "$model/config.json"
  local on=(--model "$model" --random-weights --device cuda --quiet)

  machine 2>&1 | tee "$OUT/machine.txt"
  if [[ -n $DRY ]]; then
    # The whole suite runs on the emulated device in .ci/cuda.
    tests cuda_rows --skip caught --skip sanitizers
    tests cuda_device --skip caught
  else
    local name
    for name in "${TESTS[@]}"; do tests "$name"; done
  fi
  printf 'tests: %d passed, %d times something was skipped\n' "$PASSED" "$SKIPPED" |
    tee -a "$OUT/summary.txt"
  step device 120 "$deltapool" bench device "${device[@]}" --quiet --json="$OUT/device.json"
  cat "$OUT/device.txt"
  step decode 110 "$deltapool" bench decode "${decode[@]}" "${on[@]}" --json="$OUT/decode.json"
  cat "$OUT/decode.txt"
  step prefill 100 "$deltapool" bench prefill "${prefill[@]}" "${on[@]}" \
    --json="$OUT/prefill.json"
  cat "$OUT/prefill.txt"
  step crossover 120 "$deltapool" bench crossover "${crossover[@]}" "${on[@]}" \
    --json="$OUT/crossover.json" --svg "$OUT/crossover.svg"
  cat "$OUT/crossover.txt"
  {
    printf 'targets: %d met, %d missed, %d not judged\n' "$(verdicts met)" "$(verdicts missed)" \
      "$(verdicts 'not judged')"
    printf '%d s; %d steps failed\n' "$SECONDS" "$FAILED"
  } | tee -a "$OUT/summary.txt"
  ((FAILED == 0))
}

# How often a verdict was given.
verdicts() {
  grep -o "): $1\b" "$OUT/device.txt" 2>/dev/null | wc -l
}

if [[ -n $PACK ]]; then pack; else main; fi
