"""`quire bench kv`: what the tiers below the device are worth."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from quire.bench.options import add_run_flags, counts, listed
from quire.bench.report.progress import announce_model
from quire.bench.report.table import check_json_path, publish
from quire.errors import ConfigError

SAYS = {
    "restore": "1 prompt, new, then on the device, then in a lower tier: ms to the first token",
    "interference": "32 requests decode, in turns with and without blocks that move: ms a step",
    "bandwidth": "block images to and from each tier, beside plain copies and plain I/O",
}

EXAMPLES = f"""examples:
  quire bench kv --workload restore --host-cache-bytes 2GiB --lengths 512,2048
  quire bench kv qwen3-8b --load-format dummy --workload restore --num-blocks 4200 \\
      --host-cache-bytes 30GB
  quire bench kv qwen3-8b --load-format dummy --workload interference --host-cache-bytes 30GB
  quire bench kv --workload bandwidth --ssd-cache-dir /var/cache/quire
  quire bench kv --workload bandwidth --remote-cache-url redis://127.0.0.1:6379
  quire bench kv --workload bandwidth --remote-cache-url quire:///var/cache/quire/quire-kv.sock
  quire bench kv --trace requests.jsonl --capacity 3000
  quire bench kv --trace requests.jsonl --capacity 1000,3000,10000,30000 --json

workloads:
{listed(SAYS)}
--trace needs no model. Each line of FILE is a JSON object for one request; `hash_ids` names its
blocks from the first to the last, equal names for equal tokens behind the same prefix, as in the
traces published with Mooncake (FAST '25). Shown are the shares of all blocks that would have hit as
part of a cached prefix in a tier of N blocks: with LRU, with the tiers' own policy, and with
Belady's choice, which knows the future.
"""

DEFAULT_CAPACITY = [3000]
RENAMED = {"beside": "interference"}  # workloads, by the names they had


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--workload",
        choices=SAYS,
        type=lambda name: RENAMED.get(name, name),
        help="what is measured (default: restore)",
    )
    parser.add_argument("--lengths", type=counts, metavar="N,N,…", help="prompt lengths of restore")
    parser.add_argument(
        "--trace", metavar="FILE", help="replay FILE's requests through the policies of the tiers"
    )
    parser.add_argument(
        "--capacity",
        type=counts,
        metavar="N,N,…",
        help=f"with --trace: room of the tier, in blocks (default: {DEFAULT_CAPACITY[0]})",
    )
    add_run_flags(parser, repeat=5)


def run(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    check_json_path(args.json)
    if args.trace is not None:
        return _replay_trace(args)
    if args.capacity is not None:
        raise ConfigError("--capacity is for a trace; give --trace FILE with it.")
    args.workload = args.workload or "restore"
    announce_model(settings)
    measure = _bandwidth if args.workload == "bandwidth" else _on_an_engine
    publish({"benchmark": "kv", **measure(args, settings)}, args.json)
    return 0


def _replay_trace(args: argparse.Namespace) -> int:
    from quire.bench.kv.hit_rates import run_trace

    if args.workload is not None:
        raise ConfigError("--trace is a workload of its own; leave out --workload.")
    args.capacity = args.capacity or DEFAULT_CAPACITY
    return run_trace(args)


def _on_an_engine(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    from quire.bench.engine.session import open_session
    from quire.bench.kv.decode_interference import run_decode_interference
    from quire.bench.kv.restore import run_restore

    measure = {"restore": run_restore, "interference": run_decode_interference}[args.workload]
    with open_session(settings) as session:
        return session.report(args.workload, SAYS[args.workload]) | measure(session, args)


def _bandwidth(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    from quire.bench.kv import (
        disk_bandwidth,
        host_bandwidth,
        remote_bandwidth,
        shared_bandwidth,
    )
    from quire.bench.report.machine import in_words, machine_facts
    from quire.config import EngineConfig
    from quire.kv.layout import KVLayout
    from quire.models.pool_groups import pool_groups
    from quire.models.source import open_model
    from quire.runner.device import choose_device, choose_dtype

    config = EngineConfig.create(**settings)
    device = choose_device(config.device)
    model = open_model(config.model, config.load_format, progress=False).config
    dtype = choose_dtype(config.dtype, model, device)
    layout = KVLayout(pool_groups(model, window_groups=False), config.block_size, dtype)
    size, repeat = max(layout.image_bytes), args.repeat
    blocks = max(8, min(1024, (1 << 30 if device.type == "cpu" else 1 << 32) // size))
    pools = {"host": host_bandwidth.pool_of_images, "host, by layer": host_bandwidth.pool_of_layers}
    rows = []
    for tier, pool_of in pools.items():
        found = host_bandwidth.bandwidth(pool_of(layout, 2 * blocks, device), repeat=repeat)
        rows += [{"tier": tier, **row} for row in found]
    for folder in (config.ssd_cache_dir or "").split(","):
        if folder.strip():
            path = Path(folder.strip())
            if not path.is_dir():
                raise ConfigError(f"{path} is no folder; make it, or give another.")
            found = disk_bandwidth.bandwidth(path, image_bytes=size, repeat=repeat)
            rows += [{"tier": "ssd", **row} for row in found]
    if (url := config.remote_cache_url) is not None:
        if url.startswith("quire:"):
            found = shared_bandwidth.bandwidth(url, device, image_bytes=size, repeat=repeat)
        else:
            found = remote_bandwidth.bandwidth(url, image_bytes=size, repeat=repeat)
        rows += [{"tier": "remote", **row} for row in found]
    facts = machine_facts(device)
    return {
        "workload": "bandwidth",
        "says": f"bandwidth: {SAYS['bandwidth']}; blocks of {config.model}",
        "on": in_words(facts),
        "machine": facts,
        "rows": rows,
        "notes": [
            "plain: the same bytes in the same run, with nothing else done to them; with a "
            "quire:// cache, through this process's own host memory",
            "host, by layer: from and into a tensor a layer, as other engines have them",
        ],
    }
