"""The command line: ``emerge verify``, ``compare``, ``replay``, ``rules``, ``doctor``."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from emerge import __version__
from emerge.cli import options as opt
from emerge.cli.run import Request, compare_specs, run_campaign

app = typer.Typer(
    name="emerge", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Proves that two computation graphs of a large model compute the same thing, or shows where they part.",
)  # fmt: skip
rules_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The laws that proofs are made of.")
app.add_typer(rules_app, name="rules")

Out = Annotated[
    Path | None,
    typer.Option("--out", help="Directory for report.json and counterexamples.", show_default="emerge-out/<campaign>"),
]
Engine = Annotated[str | None, typer.Option("--engine", help="Datalog engine: auto, embedded or souffle.")]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="Pairs that run at a time, in processes.")]
Timeout = Annotated[float | None, typer.Option("--timeout", help="Seconds per pair.")]
Memory = Annotated[float | None, typer.Option("--memory", help="GB for an execution.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the executions.")]
Base = Annotated[
    str, typer.Option("--base", help="Shipped rules of the algebra: full, or minimal (those about layout only).")
]
Synthesis = Annotated[
    bool | None,
    typer.Option("--synthesis/--no-synthesis", help="Synthesise rules where a proof falls short.", show_default=False),
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="Where programs are executed and rules tested: auto (cuda if there is one), cpu or cuda."),
]
Format = Annotated[str, typer.Option("--format", help="text or json; json prints that document only.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"emerge {__version__}")
        raise typer.Exit(0)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""


def _request(
    out: Path | None,
    engine: str | None,
    jobs: int,
    timeout: float | None,
    memory: float | None,
    seed: int | None,
    form: str,
    debug: bool,
    base: str,
    synthesis: bool | None,
    device: str | None,
) -> Request:
    return Request(
        out,
        opt.check_engine(engine),
        jobs,
        opt.positive(timeout, "--timeout"),
        opt.positive(memory, "--memory"),
        seed,
        opt.check_format(form),
        debug,
        opt.check_base(base),
        synthesis,
        opt.check_device(device),
    )


@app.command()
def verify(
    config: Annotated[Path, typer.Argument(help="Campaign file (YAML).")],
    pair: Annotated[list[str] | None, typer.Option("--pair", help="Only this pair; may be repeated.")] = None,
    out: Out = None,
    engine: Engine = None,
    jobs: Jobs = 1,
    timeout: Timeout = None,
    memory: Memory = None,
    seed: Seed = None,
    form: Format = "text",
    base: Base = "full",
    synthesis: Synthesis = None,
    device: Device = None,
    debug: Debug = False,
) -> None:
    """Runs the pairs of a campaign file."""

    def body() -> int:
        from emerge.campaign.config import load_campaign
        from emerge.relate.notation import closest
        from emerge.util.errors import InputError

        request = _request(out, engine, jobs, timeout, memory, seed, form, debug, base, synthesis, device)
        campaign = load_campaign(config)
        for name in pair or ():
            if name not in {p.id for p in campaign.pairs}:
                raise InputError(f"--pair {name!r} is not in {config}; {closest(name, [p.id for p in campaign.pairs])}")
        if pair:
            campaign.pairs = [p for p in campaign.pairs if p.id in pair]
        return run_campaign(campaign, request)

    opt.guarded(body, debug)


@app.command()
def compare(
    paths: Annotated[
        list[Path], typer.Argument(metavar="REFERENCE IMPLEMENTATION | CASE_DIR...", help="Graph files or directories.")
    ],
    relations: Annotated[
        Path | None, typer.Option("--relations", help="relations.json, or YAML lines; default: names and shapes.")
    ] = None,
    mesh: Annotated[str | None, typer.Option("--mesh", help="Mesh axes of the implementation, e.g. tp=2,dp=4.")] = None,
    rules: Annotated[
        list[Path] | None, typer.Option("--rules", help="Further rule files or folders; may be repeated.")
    ] = None,
    trust: Annotated[list[str] | None, typer.Option("--trust", help="Admit this law without a certificate.")] = None,
    out: Out = None,
    engine: Engine = None,
    jobs: Jobs = 1,
    timeout: Timeout = None,
    memory: Memory = None,
    seed: Seed = None,
    form: Format = "text",
    base: Base = "full",
    synthesis: Synthesis = None,
    device: Device = None,
    debug: Debug = False,
) -> None:
    """Compares two graphs, or the two sides of every case directory (one with a relations.json)."""

    def body() -> int:
        request = _request(out, engine, jobs, timeout, memory, seed, form, debug, base, synthesis, device)
        campaign = compare_specs(paths, relations, opt.parse_mesh(mesh), rules or [], trust or [], request)
        return run_campaign(campaign, request)

    opt.guarded(body, debug)


@app.command()
def capture(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="SPEC", help="python:module:function, hf:CONFIG.json, FILE.pt2, or a YAML file with one source."
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Where seq.json or rank*.json go.")],
    mesh: Annotated[str | None, typer.Option("--mesh", help="Mesh axes of a parallel program, e.g. tp=2.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Allow pickled content in a .pt2 archive.")] = False,
    debug: Debug = False,
) -> None:
    """Captures a live model into graph files. It runs the model's code; graph files never run code."""

    def body() -> int:
        from emerge.cli.capture import capture_to

        return capture_to(spec, output, opt.parse_mesh(mesh), trust)

    opt.guarded(body, debug)


@app.command()
def replay(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Output directory of a run.")],
    pair: Annotated[str, typer.Argument(metavar="PAIR", help="Id of a refuted pair.")],
    full: Annotated[bool, typer.Option("--full", help="Run at the captured sizes.")] = False,
    memory: Memory = None,
    form: Format = "text",
    debug: Debug = False,
) -> None:
    """Runs a saved counterexample again: exit status 1 when the difference shows again, 0 when it does not."""

    def body() -> int:
        from emerge.cli.replay import replay_pair

        opt.check_format(form)
        limit = opt.positive(memory, "--memory")
        return replay_pair(directory, pair, full=full, memory_gb=limit, form=form)

    opt.guarded(body, debug)


@app.command()
def doctor(debug: Debug = False) -> None:
    """Says what this installation can do."""

    def body() -> int:
        from emerge.cli.doctor import report_lines

        lines, healthy = report_lines()
        print("\n".join(lines))
        return opt.OK if healthy else opt.INPUT_ERROR

    opt.guarded(body, debug)


RulePaths = Annotated[
    list[Path] | None, typer.Option("--rules", help="Further rule files or folders; may be repeated.")
]


def _rules_api() -> Any:
    from emerge.util.errors import InputError

    try:
        return import_module("emerge.rules.api")
    except ImportError as e:
        raise InputError(f"the rule base cannot be examined by this installation ({e})") from None


def _rule_files(paths: list[Path] | None) -> list[Path]:
    from emerge.campaign.config import rule_files

    return rule_files(paths or [], "--rules")


@rules_app.command("list")
def rules_list(rules: RulePaths = None, debug: Debug = False) -> None:
    """Lists the laws with their evidence."""

    def body() -> int:
        for line in _rules_api().list_rules(_rule_files(rules)):
            print(line)
        return opt.OK

    opt.guarded(body, debug)


@rules_app.command("show")
def rules_show(
    name: Annotated[str, typer.Argument(help="Name of a law.")], rules: RulePaths = None, debug: Debug = False
) -> None:
    """Shows a law: its meaning, clauses and certificate."""

    def body() -> int:
        print(_rules_api().show_rule(name, _rule_files(rules)))
        return opt.OK

    opt.guarded(body, debug)


@rules_app.command("check")
def rules_check(
    names: Annotated[list[str] | None, typer.Argument(help="Laws to check; all when none is named.")] = None,
    rules: RulePaths = None,
    update: Annotated[
        bool, typer.Option("--update", help="Write the certificates of the shipped laws, if all of them pass.")
    ] = False,
    seed: Seed = None,
    debug: Debug = False,
) -> None:
    """Validates laws again; exit status 1 when one fails."""

    def body() -> int:
        lines, passed = _rules_api().check_rules(names or [], _rule_files(rules), seed=seed or 0, update=update)
        for line in lines:
            print(line)
        return opt.OK if passed else opt.FAILED

    opt.guarded(body, debug)


@rules_app.command("promote")
def rules_promote(
    name: Annotated[str, typer.Argument(help="Name of a rule of the algebra.")],
    source: Annotated[Path, typer.Option("--from", help="The .egg file it stands in.")],
    to: Annotated[
        Path | None, typer.Option("--to", help="Folder of rules.", show_default="the shipped rules")
    ] = None,
    new_name: Annotated[str | None, typer.Option("--as", help="Its name there.")] = None,
    debug: Debug = False,
) -> None:
    """Copies a rule, e.g. a synthesised one, into a folder of rules after validating it."""

    def body() -> int:
        from emerge.synthesis.store import promote

        (path,) = _egg_files(source)
        target, evidence = promote(name, path, to, new_name)
        print(f"{new_name or name}: {evidence}, written to {target}")
        return opt.OK

    opt.guarded(body, debug)


@rules_app.command("add")
def rules_add(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="A .egg file.")],
    to: Annotated[Path, typer.Option("--to", help="Folder of rules.")],
    debug: Debug = False,
) -> None:
    """Copies the rules of a file into a folder of rules after validating all of them."""

    def body() -> int:
        from emerge.synthesis.store import add_rules

        (path,) = _egg_files(source)
        target, evidence = add_rules(path, to)
        print(f"{path}: {evidence}, written to {target}")
        return opt.OK

    opt.guarded(body, debug)


def _egg_files(path: Path) -> list[Path]:
    from emerge.util.errors import InputError

    if path.suffix != ".egg" or not path.is_file():
        raise InputError("expected a .egg file; name one", str(path))
    return [path]


def main() -> None:
    """Entry point of the console script; exits with the status of DESIGN section 10."""
    sys.exit(run_main(sys.argv[1:]))


def run_main(args: list[str]) -> int:
    """The command line as a function; returns the exit status."""
    try:
        status = app(args=args, prog_name="emerge", standalone_mode=False)
    except KeyboardInterrupt:
        opt.fail("interrupted")
        return opt.INTERRUPTED
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else opt.INPUT_ERROR
    except Exception as e:
        message = getattr(e, "format_message", None)
        if message is not None:  # a usage error of the option parser, whichever package it comes from
            text = message().strip()
            if text:
                opt.fail(f"{text.rstrip('.')}; see emerge --help")
            return opt.INPUT_ERROR
        if type(e).__name__ == "Abort":
            return opt.INTERRUPTED
        opt.fail(f"internal error ({type(e).__name__}: {e}); run again with --debug and report it")
        return opt.INTERNAL
    return status if isinstance(status, int) else opt.OK


if __name__ == "__main__":
    main()
