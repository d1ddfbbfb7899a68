"""Measure the speed targets: ``python tests/benchmarks/run.py [--quick] [--only NAME ...] [--json FILE]``.

Ratios, both sides measured in this process one after the other, on the two packaged models, with one torch thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> None:
    from tests.benchmarks import measures

    names = [m.__name__ for m in measures.ALL]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of everything, about two minutes")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    arguments = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    bench = measures.Bench(arguments.quick)
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, one thread", flush=True)
    print("| measure | ratio | target | met | detail |\n|---|---|---|---|---|", flush=True)
    results = []
    for measure in measures.ALL:
        if measure.__name__ in arguments.only:
            start = perf_counter()
            result = measure(bench)
            results.append({**asdict(result), "seconds": perf_counter() - start})
            met = "yes" if result.met else "no"
            print(f"| {result.name} | {result.ratio:.2f} | {result.target} | {met} | {result.detail} |", flush=True)
    bench.engine.close()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
