"""`pdserve bench`: measurements in ratios, as tables for people or one JSON object for programs."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from deploy import streams
from pdserve.errors import InvalidArgument

app = typer.Typer(help="Measure against this machine's own limits.", no_args_is_help=True)
_out = Console(highlight=False)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object with `rows`.")]
ThreadsOption = Annotated[list[int], typer.Option("--threads", help="Thread counts; may be repeated.")]


@app.command()
def kernels(threads: ThreadsOption = [1, 2], json_output: JsonOption = False) -> None:  # noqa: B006 - typer's way
    """Each operation in the embedded model's shapes, against the machine and against torch."""
    # Before torch is there: its threads would go on spinning while ours are measured.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from bench.kernels import bench_kernels

    with streams.libraries_silent():
        rows = bench_kernels(threads)
    _print(rows, json_output)


@app.command()
def engine(
    model: Annotated[Path | None, typer.Option(help="A Hugging Face directory. Default: the embedded model.")] = None,
    threads: ThreadsOption = [1, 2],  # noqa: B006
    kernels: Annotated[str, typer.Option(help="auto, cpu or reference.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    under_load: Annotated[bool, typer.Option(help="Again beside a busy event loop.")] = False,
    json_output: JsonOption = False,
) -> None:
    """One engine in one process: decode at batch 1, 8, 32 (128 in, 128 out) and prefill of 1,024 tokens."""
    from bench.engine import bench_engine
    from model.embedded import embedded_model_directory

    with streams.libraries_silent():
        rows = bench_engine(model or embedded_model_directory(), kernels, dtype, threads, under_load)
    _print(rows, json_output)


TRANSFER_PARTS = ("modes", "transports", "integrity")


@app.command()
def transfer(
    part: Annotated[list[str], typer.Option(help=f"Of {', '.join(TRANSFER_PARTS)}; may be repeated.")] = [  # noqa: B006
        *TRANSFER_PARTS
    ],
    tokens: Annotated[list[int], typer.Option(min=1, help="Prompt lengths of `modes`; may be repeated.")] = [  # noqa: B006
        256,
        1024,
        4000,
    ],
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each kind, taken in turns.")] = 10,
    json_output: JsonOption = False,
) -> None:
    """The KV wire: what is left of a transfer after prefill, bytes a second by transport, what integrity costs."""
    from bench.transfer import FRAME_SIZES, MIN_INTEGRITY_PAIRS, bench_integrity, bench_transports
    from bench.transfer_peer import TRANSPORTS
    from deploy.commands.transfer_bench import bench_integrity_ttft, bench_modes

    if unknown := set(part) - set(TRANSFER_PARTS):
        raise InvalidArgument("part", f"has {unknown.pop()!r}: must be one of {', '.join(TRANSFER_PARTS)}")
    tables: list[list[Any]] = []
    with streams.libraries_silent():
        if "modes" in part:
            tables.append(bench_modes(tokens, rounds))
        if "transports" in part:
            tables.append(bench_transports(TRANSPORTS, FRAME_SIZES, rounds))
        if "integrity" in part:
            pairs = max(rounds, MIN_INTEGRITY_PAIRS)
            tables.append(bench_integrity(["ipc", "shared"], 1 << 20, pairs))  # inline, and the default on one host
            tables.append(bench_integrity_ttft(256, pairs))
    _print_tables(tables, json_output)


FAILOVER_PARTS = ("stalls", "recovery", "throughput")


@app.command()
def failover(
    part: Annotated[list[str], typer.Option(help=f"Of {', '.join(FAILOVER_PARTS)}; may be repeated.")] = [  # noqa: B006
        *FAILOVER_PARTS
    ],
    kills: Annotated[int, typer.Option(min=1, help="Of each kind, for `stalls`.")] = 50,
    seconds: Annotated[float, typer.Option(min=10, help="Of each load of `throughput`.")] = 120.0,
    interval: Annotated[float, typer.Option(min=5, help="Seconds between its kills.")] = 30.0,
    json_output: JsonOption = False,
) -> None:
    """What a lost worker costs: stalls of streams, time until all run again, throughput under repeated kills."""
    from deploy.commands.failover_bench import bench_recovery, bench_stalls, bench_throughput

    if unknown := set(part) - set(FAILOVER_PARTS):
        raise InvalidArgument("part", f"has {unknown.pop()!r}: must be one of {', '.join(FAILOVER_PARTS)}")
    tables: list[list[Any]] = []
    with streams.libraries_silent():
        if "stalls" in part:
            tables.append(bench_stalls(kills))
        if "recovery" in part:
            tables.append([bench_recovery()])
        if "throughput" in part:
            tables.append(bench_throughput(seconds, interval))
    _print_tables(tables, json_output)


def _print_tables(tables: list[list[Any]], json_output: bool) -> None:
    if json_output:
        _print([row for rows in tables for row in rows], json_output)
    else:
        for rows in tables:
            _print(rows, json_output)


def _print(rows: list[Any], json_output: bool) -> None:
    objects = [asdict(row) for row in rows]
    if json_output:
        streams.print_json({"rows": objects})
        return
    table = Table(*objects[0], box=box.SIMPLE)
    for row in objects:
        table.add_row(*(_cell(key, value) for key, value in row.items()))
    _out.print(table)


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return " to ".join(_cell(key, part) for part in value)
    if isinstance(value, float):
        return f"{value:.0%}" if key.endswith("_share") else f"{value:.3g}"
    return str(value)
