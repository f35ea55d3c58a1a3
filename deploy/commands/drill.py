"""`pdserve drill`: proves on a cluster that losing anything costs its users nothing.

Exit codes: 0 every drill passed (in `all`, or could not be held here and says why), 1 one failed, 2 a wrong argument,
3 the one drill asked for could not be held here.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from deploy.streams import libraries_silent, print_json
from pdserve.config import Config, load_config
from pdserve.errors import ConfigError

app = typer.Typer(help="Break a cluster on purpose, and see what its users notice.", no_args_is_help=True)
_out = Console(highlight=False)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object a drill, the last line a summary.")]


@app.command("list")
def list_drills(json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """The drills there are."""
    from drills.catalogue import DRILLS

    if json_output:
        print_json({"drills": [{"name": drill.name, "about": drill.about} for drill in DRILLS]})
        return
    table = Table("drill", "what it does", box=box.SIMPLE)
    for drill in DRILLS:
        table.add_row(drill.name, drill.about)
    table.add_row("sim", "The whole cluster in one thread under a virtual clock: `pdserve drill sim --seeds N`")
    _out.print(table)


@app.command()
def run(
    names: Annotated[list[str], typer.Argument(help="Drills' names, or all.")],
    seed: Annotated[int, typer.Option(help="Of the load and of what chance decides.")] = 0,
    duration: Annotated[float, typer.Option(min=5, help="Seconds, for drills that go on as long as one likes.")] = 60.0,
    streams: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 5,
    target: Annotated[
        str, typer.Option("--target", help="host:port of each router of a running cluster, commas between.")
    ] = "",
    config: Annotated[Path | None, typer.Option("--config", help="TOML file for the drills' clusters.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the timelines into this page.")] = None,
    defect: Annotated[
        str, typer.Option("--break", help="Put in an intentional defect: the drill must then fail.")
    ] = "",
    json_output: JsonOption = False,
) -> None:
    """Hold drills, or all of them, and give a verdict on each."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of Ray's, into the picture
    from drills.catalogue import find
    from drills.defects import DEFECTS
    from drills.display import LiveProgress, SilentProgress, print_outcome
    from drills.run import OwnClusters, UsersCluster, drill_config, hold_all
    from drills.stage import Settings
    from drills.timeline import page

    drills = [drill for name in names for drill in find(name)]
    if target and defect:
        raise ConfigError("--break needs a cluster of the drill's own: leave --target out")
    if defect and defect not in DEFECTS:
        raise ConfigError(f"--break {defect}: there are {', '.join(DEFECTS)}")
    if html is not None and not html.absolute().parent.is_dir():
        raise ConfigError(f"--html {html}: there is no directory {html.absolute().parent}")
    settings = replace(Settings(), seed=seed, duration_s=duration, streams=streams)
    outcomes = []
    with libraries_silent() as own:
        out = Console(file=own, highlight=False)
        progress = SilentProgress() if json_output else LiveProgress(out)
        clusters = (
            UsersCluster([part.strip() for part in target.split(",")])
            if target
            else OwnClusters(drill_config(load_config(config) if config else Config()), progress, defect)
        )
        with clusters, progress:
            for outcome in hold_all(drills, clusters, settings, progress):
                outcomes.append(outcome)
                if json_output:
                    print_json(outcome.verdict.as_dict(), file=own, indent=None)
                else:
                    progress.pause()
                    print_outcome(out, outcome)
    counts = Counter(outcome.verdict.status.value for outcome in outcomes)
    if json_output:
        print_json({"summary": True, "seed": seed, **counts}, indent=None)
    elif len(outcomes) > 1:
        _out.print(", ".join(f"{count} {status}" for status, count in counts.items()))
    if html is not None:
        html.write_text(page([each.verdict for each in outcomes], [each.picture for each in outcomes]))
    raise typer.Exit(_exit_code(counts))


@app.command()
def sim(
    seeds: Annotated[int, typer.Option(min=1, help="How many simulated clusters.")] = 500,
    first: Annotated[int, typer.Option(min=0, help="The first one's seed.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """The whole cluster in one thread under a virtual clock, once for each seed; each is replayed by its number."""
    from simulation import run as simulate_all

    report = simulate_all(range(first, first + seeds))
    if json_output:
        print_json(
            {
                "drill": "sim",
                "pass": not report.failures,
                "seeds": report.runs,
                "events": report.events,
                "failed": [failure.seed for failure in report.failures],
                "counts": dict(report.counts),
            }
        )
    else:
        _out.print(str(report), markup=False, soft_wrap=True)
    raise typer.Exit(1 if report.failures else 0)


def _exit_code(counts: Counter[str]) -> int:
    if counts["FAIL"]:
        return 1
    return 0 if counts["PASS"] else 3
