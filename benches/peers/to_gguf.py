#!/usr/bin/env python3
"""Runs llama.cpp's own converter on a checkpoint.

    to_gguf.py LLAMA_CPP_DIR CHECKPOINT OUT.gguf f32|bf16|q8_0

LLAMA_CPP_DIR is the folder vendor/llama.cpp of the source package of llama-cpp-python. Needs numpy,
safetensors, torch and transformers in the interpreter that runs it.

The converter knows tokenizers by a hash of what they make of a text. Generated vocabularies have no
entry in its table; they are converted as GPT-2's, which changes no weight.
"""

import os
import runpy
import sys


def main():
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    llama, checkpoint, out, kind = sys.argv[1:]
    converter = os.path.join(llama, "convert_hf_to_gguf.py")
    if not os.path.isfile(converter):
        sys.exit(f"to_gguf.py: no convert_hf_to_gguf.py in {llama}")
    sys.path.insert(0, llama)
    sys.path.insert(1, os.path.join(llama, "gguf-py"))
    from conversion import base

    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = [converter, checkpoint, "--outfile", out, "--outtype", kind]
    runpy.run_path(converter, run_name="__main__")


if __name__ == "__main__":
    main()
