#!/bin/bash
# Runs recorded launches under the sanitizers: sanitize.sh FOLDER RECORD [SEEDS]
# FOLDER has cuda/ and emu/ and takes what is built; RECORD was written by the stand-in for libcuda.
# Races between threads of a block: ThreadSanitizer. Accesses outside an allocation or a shared
# struct, misaligned vectors, overflow: AddressSanitizer and UndefinedBehaviorSanitizer.
set -euo pipefail
folder=$1 record=$2 seeds=${3:-2}
cd "$folder"
cxx=${CXX:-g++}
flags=(-std=c++17 -O1 -g -DDELTAPOOL_EMULATED -Iemu -Wno-unknown-pragmas)

build() { # NAME FLAGS_OF_KERNELS -- FLAGS_OF_EMULATOR
  local name=$1 own=()
  shift
  while [ "$1" != -- ]; do own+=("$1") && shift; done
  shift
  [ -x "$name/replay" ] && return
  mkdir -p "$name"
  for kernel in cuda/*.cu; do
    "$cxx" "${flags[@]}" "${own[@]}" -include emu.h -x c++ -c "$kernel" \
      -o "$name/$(basename "$kernel" .cu).o"
  done
  "$cxx" "${flags[@]}" "$@" -c emu/emu.cpp -o "$name/emu.o"
  "$cxx" "${flags[@]}" "${own[@]}" -c emu/replay.cpp -o "$name/replay.o"
  "$cxx" "${own[@]}" "$name"/*.o -o "$name/replay"
}

# The emulator itself is not watched for races: it orders the threads as a device does.
build races -fsanitize=thread -- -DEMU_TSAN
build bounds -fsanitize=address,undefined -fno-sanitize-recover=all \
  -- -fsanitize=address,undefined -fno-sanitize-recover=all

# Memory must lie where ThreadSanitizer expects it.
TSAN_OPTIONS=halt_on_error=1:exitcode=66 setarch -R races/replay "$record" "$seeds"
ASAN_OPTIONS=detect_leaks=0 bounds/replay "$record" "$seeds"
