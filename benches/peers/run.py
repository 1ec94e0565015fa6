#!/usr/bin/env python3
"""deltapool beside llama.cpp on the same checkpoint, interleaved in one run.

    pip install llama-cpp-python gguf numpy safetensors torch transformers
    pip download --no-deps --no-binary :all: llama-cpp-python
    tar xf llama_cpp_python-*.tar.gz
    cargo build --release
    python benches/peers/run.py --model DIR --source llama_cpp_python-VERSION --json peers.json

The library is that of the installed llama-cpp-python; its source package has the headers and the
converter. A round measures every row with both engines, each in a process of its own, in an order
that turns from round to round. Rates are tokens per second of CPU time of the process; a ratio is
that of one round. Printed as Markdown, with minimum / median / maximum of the rounds.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

# Steps of a decode, and what each of several sequences has before the first of them.
DECODE_STEPS = 32
BATCH_CONTEXT = 16


def prefill(tokens, step=512):
    name = f"prefill {tokens}" + (f", steps of {step:,}" if step != 512 else "")
    ours = ["prefill", "--tokens", str(tokens), "--max-num-batched-tokens", str(step)]
    return name, ours, ["prefill", str(tokens), str(step)]


def decode(name, sequences, context):
    numbers = [str(n) for n in (sequences, context, DECODE_STEPS)]
    flags = ["--sequences", "--context", "--steps"]
    ours = ["decode"] + [word for pair in zip(flags, numbers) for word in pair]
    return name, ours, ["decode"] + numbers


# Name, arguments of deltapool, arguments of llama_bench.
ROWS = [
    prefill(512),
    prefill(4096),
    prefill(4096, step=2048),
    decode("decode, empty context", 1, 0),
    decode("decode at 4096", 1, 4096),
    decode("decode, 8 sequences", 8, BATCH_CONTEXT),
    decode("decode, 32 sequences", 32, BATCH_CONTEXT),
]


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="checkpoint: config.json and safetensors")
    add("--source", type=Path, help="unpacked source package: headers and converter")
    add("--gguf", type=Path, help="GGUF of the checkpoint; made when there is none as new")
    add("--dtype", default="bf16", choices=["bf16", "f32", "f16"], help="of the GGUF's weights")
    add("--libllama", type=Path, help="folder of libllama; default: that of llama-cpp-python")
    add("--include", type=Path, help="folder of llama.h; default: that of --source")
    add("--deltapool", type=Path, default=ROOT / "target/release/deltapool")
    add("--rounds", type=int, default=5)
    add("--threads", type=int, default=1)
    add("--rows", help="only rows whose name contains one of these words, comma-separated")
    add("--json", type=Path, help="also write all rounds to this file")
    args = parser.parse_args()
    if args.rounds < 1 or args.threads < 1:
        sys.exit("run.py: --rounds and --threads are 1 or more")
    for path, what in [(args.model / "config.json", "--model"), (args.deltapool, "--deltapool")]:
        if not path.is_file():
            sys.exit(f"run.py: {what}: no file {path}")
    return args


def peer_folders(args):
    """The folder of llama.cpp's library and those of its headers."""
    folders, includes = [args.libllama], [args.include]
    if args.source:
        vendor = args.source / "vendor/llama.cpp"
        includes += [vendor / "include", vendor / "ggml/include"]
    found = importlib.util.find_spec("llama_cpp")
    if found and found.origin:
        package = Path(found.origin).parent
        folders.append(package / "lib")
        includes += [package / "include", package.parent / "include"]
    library = next((f for f in folders if f and list(f.glob("libllama.*"))), None)
    if library is None:
        sys.exit("run.py: no libllama: pip install llama-cpp-python, or give --libllama")
    includes = [folder.resolve() for folder in includes if folder and folder.is_dir()]
    for header in ("llama.h", "ggml.h"):
        if not any((folder / header).is_file() for folder in includes):
            sys.exit(f"run.py: no {header}: give --source, or --include")
    return library.resolve(), includes


def build_driver(args, folder):
    """Compiles llama_bench.cpp against the peer's library."""
    library, includes = peer_folders(args)
    driver = folder / "llama_bench"
    command = [os.environ.get("CXX", "c++"), "-O2", "-std=c++17", str(HERE / "llama_bench.cpp")]
    command += [f"-I{include}" for include in includes]
    command += ["-L", str(library), f"-Wl,-rpath,{library}"]
    names = [name for name in ("llama", "ggml", "ggml-base") if list(library.glob(f"lib{name}.*"))]
    command += [f"-l{name}" for name in names] + ["-o", str(driver)]
    subprocess.run(command, check=True)
    return driver


def make_gguf(args, folder):
    """The GGUF of the checkpoint, made by the peer's converter unless a newer one is there."""
    gguf = args.gguf or folder / f"{args.model.resolve().name}-{args.dtype}.gguf"
    newest = max(path.stat().st_mtime for path in args.model.iterdir())
    if gguf.is_file() and gguf.stat().st_mtime >= newest:
        return gguf
    if not args.source:
        what = "older than the checkpoint" if gguf.is_file() else "not there"
        sys.exit(f"run.py: {gguf} is {what}; --source has the converter that makes it")
    # Under another name until it is whole.
    partial = gguf.with_suffix(".partial.gguf")
    vendor = args.source / "vendor/llama.cpp"
    command = [sys.executable, HERE / "to_gguf.py", vendor, args.model, partial, args.dtype]
    subprocess.run(command, check=True, stdout=sys.stderr)
    partial.rename(gguf)
    return gguf


def result(command):
    """The JSON object that a program prints; what it says besides is shown."""
    done = subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def ours(args, words):
    command = [args.deltapool, "bench", *words, "--model", args.model, "--rounds", "1"]
    report = result([*command, "--threads", args.threads, "--json"])
    case = report["cases"][0]
    return {
        "tokens_per_cpu_second": case["tokens_per_cpu_second"]["median"],
        "tokens_per_wall_second": case["tokens_per_wall_second"]["median"],
        "peak_rss_bytes": report["peak_rss_bytes"],
        "weights_bytes": report["weights_bytes"],
        "pool_bytes": report["pool_bytes"],
        "machine": report["machine"],
    }


def theirs(args, driver, gguf, words):
    return result([driver, gguf, args.threads, *words])


def spread(values):
    return min(values), statistics.median(values), max(values)


def measure(args, rows, driver, gguf):
    """The rounds of each row: a pair of results, deltapool's and llama.cpp's."""
    rounds = {name: [] for name, _, _ in rows}
    for turn in range(args.rounds):
        for name, our_words, their_words in rows:
            arms = [
                ("deltapool", lambda: ours(args, our_words)),
                ("llama.cpp", lambda: theirs(args, driver, gguf, their_words)),
            ]
            pair = {engine: arm() for engine, arm in (arms if turn % 2 == 0 else arms[::-1])}
            rounds[name].append(pair)
            rates = " / ".join(f"{e} {r['tokens_per_cpu_second']:.1f}" for e, r in pair.items())
            print(f"round {turn + 1} of {args.rounds}: {name}: {rates}", file=sys.stderr)
    return rounds


def table(rounds):
    lines = [
        "| | deltapool | llama.cpp | ratio in a round | peak MB | of llama.cpp |",
        "|---|---|---|---|---|---|",
    ]
    for name, pairs in rounds.items():
        cells = []
        for engine in ("deltapool", "llama.cpp"):
            rates = [pair[engine]["tokens_per_cpu_second"] for pair in pairs]
            cells.append("{:.1f} / {:.1f} / {:.1f}".format(*spread(rates)))
        cells.append("{:.2f} / **{:.2f}** / {:.2f}".format(*spread(ratios(pairs))))
        for engine in ("deltapool", "llama.cpp"):
            peak = max(pair[engine]["peak_rss_bytes"] for pair in pairs)
            cells.append(f"{peak / 1e6:.0f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ratios(pairs):
    rate = "tokens_per_cpu_second"
    return [pair["deltapool"][rate] / pair["llama.cpp"][rate] for pair in pairs]


def version():
    try:
        return importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def main():
    args = arguments()
    words = args.rows.split(",") if args.rows else [""]
    rows = [row for row in ROWS if any(word in row[0] for word in words)]
    if not rows:
        sys.exit(f"run.py: --rows {args.rows}: none of " + "; ".join(row[0] for row in ROWS))
    folder = ROOT / "target/peers"
    folder.mkdir(parents=True, exist_ok=True)
    driver, gguf = build_driver(args, folder), make_gguf(args, folder)
    rounds = measure(args, rows, driver, gguf)
    machine = next(iter(rounds.values()))[0]["deltapool"]["machine"]
    peer = "llama.cpp as given" if args.libllama else f"llama-cpp-python {version()}"
    print(f"{machine['processor']}, {machine['isa']}, {args.threads} thread(s); {peer};")
    print(f"{args.model.name} in {args.dtype}, {args.rounds} rounds, tokens per CPU second:\n")
    print(table(rounds))
    if args.json:
        report = {
            "machine": machine,
            "model": str(args.model),
            "dtype": args.dtype,
            "threads": args.threads,
            "peer": peer,
            "rows": [
                {
                    "name": name,
                    "ratio": dict(zip(("min", "median", "max"), spread(ratios(pairs)))),
                    "rounds": pairs,
                }
                for name, pairs in rounds.items()
            ],
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"run.py: {error.cmd[0]} failed with status {error.returncode}")
