#!/usr/bin/env bash
# What only a GPU can show, in under eight minutes on an H200 with 16 cores: the CUDA tests on the
# real device, operators beside their floors, the link, a model of the shapes of Kimi-Linear-48B
# with random weights, and swap beside recomputation. Needs no network and no weights.
#
#   tests/gpu.sh [OUT]                 builds what is to be built (cargo --offline) and runs; reports
#                                      go to docs/gpu
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

# Seconds of all of it, and until which tests may run.
LIMIT=${LIMIT:-470}
TESTS_LIMIT=${TESTS_LIMIT:-190}
# By how much a step may take longer than it is allowed.
SLOW=1
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

# Builds the program and the tests, the tests under the names of TESTS in $WORK/bin. On the emulated
# device two files of them run.
build() {
  local made path name models=
  local command=(cargo test --offline --release --no-run --message-format=json --features cuda)
  mkdir -p "$WORK/bin"
  if [[ -n $DRY ]]; then
    made=$("${command[@]}" -p deltapool-kernels --test cuda_rows --test cuda_device)
    made+=$("${command[@]}" --test cuda_program)
  else
    made=$("${command[@]}" -p deltapool-kernels --test 'cuda*')
    # The program is built with them, as their tests run it.
    made+=$("${command[@]}" --test cuda --test cuda_program)
  fi
  while IFS= read -r path; do
    name=$(basename "${path%-*}")
    # Two files are called cuda: operators come first, then whole models.
    case $name in
      cuda_program) name=program ;;
      cuda) name=${models:-cuda} models=models ;;
    esac
    install -m 755 "$path" "$WORK/bin/$name"
  done < <(sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' <<<"$made" | grep -v '/deltapool$')
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

# The stand-ins for libcuda and libnvrtc, where the loader finds them; built where their sources
# are others than those they were built from.
emulate() {
  local folder=$WORK/emulated
  if ! diff -rq --exclude='*.o' kernels/cuda "$folder/cuda" >/dev/null 2>&1 ||
    ! diff -rq --exclude='*.o' kernels/emu "$folder/emu" >/dev/null 2>&1; then
    rm -rf "$folder"
    mkdir -p "$folder"
    cp -r kernels/cuda kernels/emu "$folder"
    bash "$folder/emu/build.sh" "$folder" >"$WORK/emulated.log" 2>&1
  fi
  LD_LIBRARY_PATH=$PWD/$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export LD_LIBRARY_PATH
}

FAILED=0
PASSED=0
SKIPPED=0

# step NAME SECONDS COMMAND...: what it prints goes to OUT/NAME.txt.
step() {
  local name=$1 seconds=$(($2 * SLOW)) start=$SECONDS status=0 left=$((LIMIT - SECONDS))
  shift 2
  ((seconds < left)) || seconds=$left
  if ((seconds < 5)); then
    printf -- '-- %-18s not run: its time is over\n' "$name" | tee -a "$OUT/summary.txt"
    FAILED=$((FAILED + 1))
    return
  fi
  timeout --kill-after=5 "$seconds" "$@" >"$OUT/$name.txt" 2>&1 || status=$?
  if ((status)); then
    FAILED=$((FAILED + 1))
    printf -- '-- %-18s FAILED (exit code %d) after %d s\n' "$name" "$status" \
      $((SECONDS - start)) | tee -a "$OUT/summary.txt"
    tail -n 30 "$OUT/$name.txt"
  else
    printf -- '-- %-18s ok, %d s\n' "$name" $((SECONDS - start)) | tee -a "$OUT/summary.txt"
  fi
}

# A step that did not run has left nothing.
show() {
  [[ ! -e $OUT/$1.txt ]] || cat "$OUT/$1.txt"
}

# The tests of one file. Each prints what it skips and why.
tests() {
  local name=$1 file passed skipped
  shift
  file=test-$name
  step "$file" $((TESTS_LIMIT - SECONDS)) "$WORK/bin/$name" --nocapture "$@"
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
  else
    build
  fi
  mkdir -p "$OUT"
  rm -f "$OUT"/*.txt "$OUT"/*.json "$OUT"/*.svg
  export XDG_CACHE_HOME=$PWD/$WORK/cache
  if [[ -n $DRY ]]; then
    # An emulation takes as long as the machine lets it.
    LIMIT=3600 TESTS_LIMIT=3600 SLOW=10
    emulate
    XDG_CACHE_HOME+=-emulated
    config=tests/goldens/models/kimi_linear_tiny/config.json
    model=$WORK/kimi-linear-tiny
    device=(--tiny --repeats 2)
    decode=(--sequences "1,2" --context 0 --steps 1 --rounds 1)
    prefill=(--tokens 70 --rounds 1)
    crossover=(--lengths 64 --max-num-batched-tokens 64)
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
  show device
  step decode 110 "$deltapool" bench decode "${decode[@]}" "${on[@]}" --json="$OUT/decode.json"
  show decode
  step prefill 100 "$deltapool" bench prefill "${prefill[@]}" "${on[@]}" \
    --json="$OUT/prefill.json"
  show prefill
  step crossover 120 "$deltapool" bench crossover "${crossover[@]}" "${on[@]}" \
    --json="$OUT/crossover.json" --svg "$OUT/crossover.svg"
  show crossover
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
