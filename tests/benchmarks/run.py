"""Measure the speed targets: ``python tests/benchmarks/run.py [--quick] [--only NAME,...] [--json FILE]``.

Ratios, both sides measured in this process in turn, on the two packaged models, with one torch thread.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from time import perf_counter


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

    import torch

    from tests.benchmarks import measures
    from tests.benchmarks.bench import FULL, QUICK, Bench

    names = [m.__name__ for m in measures.ALL]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="less of everything: shows that it runs, no figures to quote"
    )
    parser.add_argument("--only", nargs="+", default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--markdown", action="store_true", help="print the rows of docs/performance.md, no table")
    arguments = parser.parse_args()
    chosen = [name for given in arguments.only for name in given.split(",") if name]
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"--only: no measure {', '.join(unknown)}; there are {', '.join(names)}")

    torch.set_num_threads(1)
    bench = Bench(QUICK if arguments.quick else FULL)
    results = run(bench, [m for m in measures.ALL if m.__name__ in chosen], arguments.json)
    bench.engine.close()
    show = markdown if arguments.markdown else table
    show(results, f"{machine()}{', --quick: no figures to quote' if arguments.quick else ''}")
    sys.exit(any(math.isnan(r["ratio"]) for r in results))


def run(bench, measures, json_file=None):
    """Results as dicts. A measure that fails has the ratio NaN, and does not lose the others'."""
    from tests.benchmarks.bench import Result

    results = []
    for measure in measures:
        start = perf_counter()
        try:
            result = measure(bench)
        except Exception as error:
            result = Result(measure.__name__, math.nan, "", False, f"failed: {type(error).__name__}: {error}")
        results.append({**asdict(result), "seconds": round(perf_counter() - start, 1)})
        print(f"{result.name}: {result.ratio:.2f} ({results[-1]['seconds']} s)", file=sys.stderr, flush=True)
        if json_file:
            # NaN is no JSON: a failed measure's ratio is null there.
            plain = [{**r, "ratio": None if math.isnan(r["ratio"]) else r["ratio"]} for r in results]
            Path(json_file).write_text(json.dumps(plain, indent=1) + "\n")
    return results


def machine() -> str:
    import torch

    threads = f"torch {torch.__version__} with {torch.get_num_threads()} thread"
    return f"{threads}, {platform.machine()}, {os.cpu_count()} cores"


def cells(result) -> list[str]:
    met = "yes" if result["met"] else "no"
    return [result["name"], f"{result['ratio']:.2f}", result["target"], met, result["detail"]]


def markdown(results, title) -> None:
    print(f"{title}\n\n| measure | ratio | target | met | detail |\n|---|---|---|---|---|")
    for result in results:
        print(f"| {' | '.join(cells(result))} |")


def table(results, title) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table("measure", "ratio", "target", "met", "detail", title=title)
    for result in results:
        shown.add_row(*cells(result))
    Console().print(shown)


if __name__ == "__main__":
    main()
