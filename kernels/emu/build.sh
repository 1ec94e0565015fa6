#!/bin/bash
# Builds the stand-ins for libcuda, libnvrtc and libcublasLt from the kernels: build.sh FOLDER
# FOLDER has cuda/ and emu/, and gets the libraries. $CXX is the compiler.
set -euo pipefail
folder=$1
cd "$folder"
flags=(-std=c++17 -O2 -g -fPIC -fvisibility=hidden -DDELTAPOOL_EMULATED -Iemu -Wall
  -Wno-unknown-pragmas -Wno-unused-function)
for kernel in cuda/*.cu; do
  "${CXX:-g++}" "${flags[@]}" -include emu.h -x c++ -c "$kernel" -o "${kernel%.cu}.o"
done
for part in emu driver; do
  "${CXX:-g++}" "${flags[@]}" -c "emu/$part.cpp" -o "emu/$part.o"
done
# Loaded by path, found by name by whoever asks for libcuda afterwards.
"${CXX:-g++}" -shared -Wl,-soname,libcuda.so -Wl,-z,nodelete -o libcuda.so cuda/*.o emu/emu.o emu/driver.o
"${CXX:-g++}" "${flags[@]}" -shared -Wl,-soname,libnvrtc.so -Wl,-z,nodelete -o libnvrtc.so emu/nvrtc.cpp
"${CXX:-g++}" "${flags[@]}" -shared -Wl,-soname,libcublasLt.so -Wl,-z,nodelete -o libcublasLt.so \
  emu/blaslt.cpp libcuda.so
