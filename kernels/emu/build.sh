#!/bin/bash
# Builds the stand-ins for libcuda and libnvrtc from the kernels: build.sh FOLDER
# FOLDER has cuda/ and emu/, and gets the libraries. $CXX is the compiler. An object file that is
# there already is taken as it is.
set -euo pipefail
cd "$1"
cxx=${CXX:-g++}
flags=(-std=c++17 -O2 -g -fPIC -fvisibility=hidden -DDELTAPOOL_EMULATED -Iemu -Wall
  -Wno-unknown-pragmas -Wno-unused-function)
for kernel in cuda/*.cu; do
  object=${kernel%.cu}.o
  [ -f "$object" ] || "$cxx" "${flags[@]}" -include emu.h -x c++ -c "$kernel" -o "$object"
done
for part in emu driver; do
  [ -f "emu/$part.o" ] || "$cxx" "${flags[@]}" -c "emu/$part.cpp" -o "emu/$part.o"
done
# Loaded by path, found by name by whoever asks for libcuda afterwards.
library=(-shared -Wl,-z,nodelete)
"$cxx" "${library[@]}" -Wl,-soname,libcuda.so -o libcuda.so cuda/*.o emu/emu.o emu/driver.o
"$cxx" "${flags[@]}" "${library[@]}" -Wl,-soname,libnvrtc.so -o libnvrtc.so emu/nvrtc.cpp
