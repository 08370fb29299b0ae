"""The steps of `quire bench serve`, from a workload to a report."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from quire.bench.report.progress import runs_bar
from quire.bench.report.table import check_json_path, show, table, write_json
from quire.bench.serve.flags import check_flags
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.bench.serve.load import Result
    from quire.bench.serve.target import Target
    from quire.bench.serve.workload import ServeWorkload


def run(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    check_json_path(args.json)
    check_flags(args)
    if find_spec("aiohttp") is None:
        raise ConfigError(
            "bench serve needs the package aiohttp; install it with pip install aiohttp."
        )

    from quire.bench.report.picture import check_plot_path
    from quire.bench.serve.load import default_processes, run_load
    from quire.bench.serve.plot import draw
    from quire.bench.serve.probe import probe
    from quire.bench.serve.workload import make_workload

    check_plot_path(args.plot)
    workload = make_workload(args)
    target = probe(_target(args, workload))
    with runs_bar("serve", len(workload.requests), unit="request") as bar:
        result = run_load(
            target, workload.requests, args.processes or default_processes(), bar.update
        )
    report = _report(args, workload, target, result)
    _publish(report, args.json)
    if args.plot is not None:
        draw(args.plot, result.outcomes, f"{report['says']}\n{report['on']}")
    if result.interrupted:
        return 130
    return 0 if report["requests"]["answered"] else 1


def _target(args: argparse.Namespace, workload: ServeWorkload) -> Target:
    from quire.bench.serve.target import base_url, make_target

    return make_target(
        workload,
        base_url(args.url),
        args.model or "",
        args.api,
        timeout=args.timeout,
        api_key=args.api_key or os.environ.get("QUIRE_API_KEY"),
    )


def _report(
    args: argparse.Namespace, workload: ServeWorkload, target: Target, result: Result
) -> dict[str, Any]:
    from quire.bench.serve.figures import Objective, notes, summarize
    from quire.bench.serve.target import without_secrets

    objective = Objective(args.slo_ttft, args.slo_itl)
    found = summarize(result, objective)
    url = without_secrets(target.url)
    return {
        "benchmark": "serve",
        "workload": args.trace or args.workload or "random",
        "says": workload.says,
        "on": f"{url}, {target.model}",
        "url": url,
        "model": target.model,
        **found,
        "notes": notes(found, objective),
    }


def _publish(report: dict[str, Any], json_path: str | None) -> None:
    requests, seconds = report["requests"], report["seconds"]
    parts = [
        f"{report['says']}\n{report['on']}",
        f"{requests['answered']:,} of {requests['sent']:,} requests answered in {seconds:.1f} s",
        table([report["throughput"]]),
    ]
    parts += [table(report["rows"])] if report["rows"] else []
    show([*parts, "\n".join(report["notes"])], json_path)
    write_json(json_path, report)
