"""`titan-plan`: the planner's verbs. Parse, call, print, exit code; no logic.

Exit codes: 0 fine, 1 says no (invalid, infeasible, differs), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from titan_planner import __version__
from titan_planner.ir.errors import Complaint, InvariantError, Place, TitanError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the process's exit code."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if not hasattr(arguments, "run"):
        parser.print_help()
        return 2
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a character still gets the sentence
    try:
        try:
            code: int = arguments.run(arguments)
        except TitanError as error:
            code = _refuse(error.complaints, arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted.
        _abandon_stdout()
        return 0
    except OSError as error:
        from titan_planner.console import complain

        _abandon_stdout()
        where = f"`{error.filename}`" if error.filename else "the output"
        message = f"{where} cannot be read or written: {error.strerror or error}"
        complain([Complaint(message, hint="check the file, its rights and the free space")])
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


def _abandon_stdout() -> None:
    """Let what is left in stdout's buffer go nowhere: Python would complain once more while closing it."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(complaints: Sequence[Complaint], arguments: argparse.Namespace) -> int:
    if getattr(arguments, "json", False):
        print(json.dumps({"ok": False, "complaints": [_complaint_json(c) for c in complaints]}, indent=2))
    else:
        from titan_planner.console import complain

        complain(complaints)
    return 1


def _complaint_json(complaint: Complaint) -> dict[str, Any]:
    place = complaint.place or Place("")
    return {
        "file": place.file,
        "line": place.line,
        "column": place.column,
        "address": complaint.address,
        "message": complaint.message,
        "hint": complaint.hint,
        "rule": complaint.rule,
    }


# ------------------------------------------------------------------ parser


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; completion scripts are generated from it."""
    parser = argparse.ArgumentParser(
        prog="titan-plan",
        description="Compile a YAML spec of a model, a cluster and a job into a plan for distributed pre-training.",
        epilog="Exit codes: 0 fine, 1 says no (invalid, infeasible, differs), 2 wrong usage.",
    )
    parser.add_argument("--version", action="version", version=f"titan-plan {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")

    verb = verbs.add_parser("init", help="write a commented spec for a model and a cluster, or a worked example")
    verb.add_argument(
        "--model", default="llama3:8B", metavar="FAMILY:FLAVOR", help="model to train (default llama3:8B)"
    )
    verb.add_argument("--gpu", default="h100-sxm-80gb", help="GPU of the catalogue (default h100-sxm-80gb)")
    verb.add_argument("--gpus-per-node", type=_positive, default=8, metavar="N", help="GPUs in a node (default 8)")
    verb.add_argument("--nodes", type=_positive, default=1, metavar="N", help="number of nodes (default 1)")
    verb.add_argument(
        "--inter-node", default="ib-ndr-400", metavar="LINK", help="link between nodes (default ib-ndr-400)"
    )
    verb.add_argument("--example", metavar="NAME", help="write a worked example instead; `list` names them")
    _output(verb, "spec.yaml to write (default stdout)")
    verb.add_argument("--force", action="store_true", help="replace the file if it exists")
    verb.set_defaults(run=_init)

    verb = verbs.add_parser("validate", help="check a spec (or a plan) without writing anything")
    _spec(verb, "spec.yaml (- for stdin), or a plan.json")
    _json(verb)
    verb.set_defaults(run=_validate)

    verb = verbs.add_parser("compile", help="compile a spec into a plan")
    _spec(verb, "spec.yaml; - reads it from stdin")
    _output(verb, "plan.json to write (default stdout)")
    verb.add_argument("--stop-after", metavar="PASS", help="stop after this pass (`lower` runs none)")
    verb.add_argument(
        "--without", action="append", default=[], metavar="PASS", help="leave a pass out; may be repeated"
    )
    verb.add_argument("--dump-ir", metavar="DIR", help="write the plan after every pass into this folder")
    _json(verb)
    verb.set_defaults(run=_compile)

    verb = verbs.add_parser("show", help="print a plan: decisions, annotated model tree, stages, estimate")
    _plan(verb)
    _json(verb)
    verb.set_defaults(run=_show)

    verb = verbs.add_parser("explain", help="say why: the whole plan, an address of it, or a rule")
    verb.add_argument("plan", metavar="PLAN", help="plan.json, or the id of a rule")
    verb.add_argument("address", nargs="?", metavar="ADDRESS", help="e.g. mesh.tp, layers.17.attention.wk, estimate")
    _json(verb)
    verb.set_defaults(run=_explain)

    verb = verbs.add_parser(
        "diff", help="compare two plans: what changes, with which consequence, and whether a run can resume"
    )
    verb.add_argument("a", metavar="A", help="plan.json before")
    verb.add_argument("b", metavar="B", help="plan.json after")
    verb.add_argument("--format", choices=("text", "markdown", "json"), default="text", help="default text")
    verb.add_argument("--json", action="store_true", help="same as --format json")
    verb.add_argument("--exit-code", action="store_true", help="exit 1 when the plans differ")
    verb.set_defaults(run=_diff)

    verb = verbs.add_parser(
        "calibrate", help="fit the cost model's efficiencies to the measured speed of finished runs"
    )
    verb.add_argument("runs", nargs="+", metavar="RUN_DIR", help="dump folders of runs on this cluster")
    verb.add_argument(
        "--cluster", required=True, metavar="FILE", help="YAML file to write; a spec uses it by `extends: FILE`"
    )
    _json(verb)
    verb.set_defaults(run=_calibrate)

    verb = verbs.add_parser("schema", help="print the JSON Schema of specs or plans")
    verb.add_argument("kind", choices=("spec", "plan"))
    _output(verb, "file to write (default stdout)")
    verb.set_defaults(run=_schema)

    verb = verbs.add_parser("models", help="list the model catalogue, or one model in full")
    verb.add_argument("name", nargs="?", metavar="FAMILY[:FLAVOR]")
    _json(verb)
    verb.set_defaults(run=_models)

    verb = verbs.add_parser("hardware", help="list GPUs, links and nodes, or one of them with its sources")
    verb.add_argument("name", nargs="?", metavar="NAME")
    _json(verb)
    verb.set_defaults(run=_hardware)

    verb = verbs.add_parser("completion", help="print a shell completion script")
    verb.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    verb.set_defaults(run=_completion)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _spec(verb: argparse.ArgumentParser, help: str) -> None:
    verb.add_argument("spec", metavar="SPEC", help=help)
    verb.add_argument(
        "--set",
        action="append",
        default=[],
        type=_assignment,
        metavar="A.B=VALUE",
        help="override a field; may be repeated",
    )


def _assignment(text: str) -> str:
    address, equals, _ = text.partition("=")
    if not equals or not all(address.strip().split(".")):
        raise argparse.ArgumentTypeError(f"`{text}` is not `section.field=value`, e.g. training.steps=20")
    return text


def _plan(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("plan", metavar="PLAN", help="plan.json")


def _output(verb: argparse.ArgumentParser, help: str) -> None:
    verb.add_argument("-o", "--output", metavar="FILE", help=help)


def _json(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--json", action="store_true", help="print JSON for scripts")


# ------------------------------------------------------------------ verbs


def _init(arguments: argparse.Namespace) -> int:
    from titan_planner import starter
    from titan_planner.hardware import find_gpu, find_link

    if arguments.example is not None:
        return _init_example(arguments)
    family, _, flavor = arguments.model.partition(":")
    with _named("--model"):
        from titan_planner.models import MODELS, find_model

        if not flavor and family in MODELS:
            known = ", ".join(f"{family}:{name}" for name in MODELS[family])
            raise InvariantError(
                "flavor", f"`{arguments.model}` names a family without a flavor", f"use one of {known}"
            )
        model = find_model(family, flavor)
    with _named("--gpu"):
        gpu = find_gpu(arguments.gpu)
    with _named("--inter-node"):
        link = find_link(arguments.inter_node)
    text = starter.starter_spec(model, gpu, arguments.gpus_per_node, arguments.nodes, link.name)
    _write_new(text, arguments)
    if gpu.device == "cpu":
        _copy_sample_data(arguments)
    return 0


def _init_example(arguments: argparse.Namespace) -> int:
    from titan_planner import starter
    from titan_planner.ir.schema import SCHEMA_FILES, bundled

    known = starter.examples()
    if arguments.example == "list":
        print("\n".join(known))
        return 0
    if arguments.example not in known:
        raise TitanError(Complaint(f"there is no example `{arguments.example}`", hint=f"there are {', '.join(known)}"))
    text = known[arguments.example].read_text(encoding="utf-8")
    # The example's own schema path is relative to its folder in the repository.
    schema = bundled("schemas", SCHEMA_FILES["spec"]).as_uri()
    text = text.replace("$schema=../../schemas/" + SCHEMA_FILES["spec"], f"$schema={schema}")
    _write_new(text, arguments)
    if arguments.example in starter.EXAMPLES_WITH_DATA:
        _copy_sample_data(arguments)
    return 0


def _copy_sample_data(arguments: argparse.Namespace) -> None:
    """The text and tokenizer that a spec for CPUs names, beside the spec that is written to a file."""
    import shutil

    from titan_planner.ir.schema import bundled

    if arguments.output and arguments.output != "-" and not Path("data/sample").exists():
        with _writing(Path("data")):
            shutil.copytree(bundled("data"), "data", dirs_exist_ok=True)
        sys.stderr.write("wrote data/ (sample text and tokenizer)\n")


def _write_new(text: str, arguments: argparse.Namespace) -> None:
    if arguments.output and Path(arguments.output).exists() and not arguments.force:
        raise TitanError(Complaint(f"`{arguments.output}` exists already", hint="choose another name, or give --force"))
    _write(text, arguments.output)


def _validate(arguments: argparse.Namespace) -> int:
    from titan_planner.ir.codec import digest
    from titan_planner.ir.verify import load_plan_with_notes

    if arguments.spec.endswith(".json") and not arguments.set:
        plan, notes = load_plan_with_notes(arguments.spec)
        _notes(notes)
        what = "plan"
    else:
        from titan_planner.compiler import compile_spec
        from titan_planner.spec import load_spec

        plan = compile_spec(load_spec(arguments.spec, arguments.set))
        what = "spec"
    _warn_memory(plan)
    if arguments.json:
        print(json.dumps({"ok": True, "kind": what, "name": plan.name, "digest": digest(plan)}, indent=2))
    else:
        print(f"{arguments.spec}: the {what} is valid")
    return 0


def _compile(arguments: argparse.Namespace) -> int:
    from titan_planner.compiler import compile_spec, pass_names, select_passes
    from titan_planner.ir.codec import digest, dumps
    from titan_planner.ir.plan import Plan
    from titan_planner.spec import load_spec

    known = pass_names()
    for option, names in (
        ("--stop-after", [arguments.stop_after] * bool(arguments.stop_after)),
        ("--without", arguments.without),
    ):
        for name in names:
            if name not in known and not (option == "--stop-after" and name == "lower"):
                sys.stderr.write(
                    f"titan-plan compile: {option} {name}: there is no such pass; the passes are {', '.join(known)}\n"
                )
                return 2

    count = 0

    def dump(name: str, plan: Plan) -> None:
        nonlocal count
        _write(dumps(plan), str(Path(arguments.dump_ir) / f"{count}-{name}.json"))
        count += 1

    if arguments.dump_ir:
        with _writing(Path(arguments.dump_ir)):
            Path(arguments.dump_ir).mkdir(parents=True, exist_ok=True)
    passes = select_passes(arguments.stop_after, arguments.without)
    plan = compile_spec(load_spec(arguments.spec, arguments.set), passes, dump if arguments.dump_ir else None)
    _warn_memory(plan)
    if arguments.output or not arguments.json:
        _write(dumps(plan), arguments.output)
    if arguments.json:
        from titan_planner.render.show import show_json

        print(json.dumps(show_json(plan), indent=2))
    elif arguments.output and arguments.output != "-":
        from titan_planner.render import values

        sys.stderr.write(f"wrote {arguments.output}: {values.mesh(plan.mesh)}, digest {digest(plan)[:12]}\n")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from titan_planner.console import emit, style_for, width_for
    from titan_planner.render.show import show, show_json

    plan = _load(arguments.plan)
    if arguments.json:
        print(json.dumps(show_json(plan), indent=2))
    else:
        emit(show(plan, width_for(sys.stdout), style=style_for(sys.stdout)))
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    from titan_planner.console import emit, style_for, width_for
    from titan_planner.render.explain import explain, explain_json
    from titan_planner.render.rules import rule_json, rule_text
    from titan_planner.rules import close_rules, known_rules

    if arguments.address is None and not Path(arguments.plan).exists():
        found = known_rules().get(arguments.plan)
        if found is not None:
            if arguments.json:
                print(json.dumps(rule_json(found), indent=2))
            else:
                emit(rule_text(found, width_for(sys.stdout), style_for(sys.stdout)))
            return 0
        close = close_rules(arguments.plan)
        if close:
            message = f"`{arguments.plan}` is neither a file nor the id of a rule"
            raise TitanError(Complaint(message, hint=f"did you mean {' or '.join(f'`{name}`' for name in close)}?"))
    plan = _load(arguments.plan)
    if arguments.json:
        print(json.dumps(explain_json(plan, arguments.address), indent=2))
    else:
        emit(explain(plan, arguments.address, style=style_for(sys.stdout), width=width_for(sys.stdout)))
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    from titan_planner.console import emit, style_for, width_for
    from titan_planner.ir.diff import diff
    from titan_planner.render import diff as render

    arguments.json = arguments.json or arguments.format == "json"
    found = diff(_load(arguments.a), _load(arguments.b))
    if arguments.json:
        print(json.dumps(render.json_value(found), indent=2))
    elif arguments.format == "markdown":
        print(render.markdown(found))
    else:
        emit(render.text(found, style=style_for(sys.stdout), width=width_for(sys.stdout, 160)))
    return 1 if arguments.exit_code and not found.same else 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from titan_planner.calibrate import calibrate_cluster
    from titan_planner.ir.codec import encode
    from titan_planner.render.calibration import calibration_text
    from titan_planner.render.cluster_file import MARK, cluster_file
    from titan_planner.runs import read_run

    target = Path(arguments.cluster)
    if target.is_file() and not target.read_text(encoding="utf-8", errors="replace").startswith(MARK):
        raise TitanError(
            Complaint(
                f"`{target}` exists and was not written by `titan-plan calibrate`, which would replace all of it",
                place=Place("--cluster"),
                hint="name a new file, and let it stand before yours: a spec uses it by `extends: FILE`",
            )
        )
    runs = [read_run(Path(folder)) for folder in arguments.runs]
    cluster, found = calibrate_cluster(runs)
    _write(cluster_file(cluster), arguments.cluster)
    if arguments.json:
        errors = [
            {"run": str(run.folder), "step_time_ms": 1e3 * run.step_seconds, "before": before, "after": after}
            for run, before, after in zip(runs, found.before, found.after, strict=True)
        ]
        said = {"efficiency": encode(found.efficiency), "runs": errors, "warnings": list(found.warnings)}
        print(json.dumps(said, indent=2))
    else:
        print(calibration_text(runs, found, arguments.cluster))
    return 0


def _schema(arguments: argparse.Namespace) -> int:
    from titan_planner.ir.schema import SCHEMA_FILES, bundled

    _write(bundled("schemas", SCHEMA_FILES[arguments.kind]).read_text(encoding="utf-8"), arguments.output)
    return 0


def _models(arguments: argparse.Namespace) -> int:
    from titan_planner.console import emit, emit_table, style_for, width_for
    from titan_planner.ir.codec import dumps, encode
    from titan_planner.ir.inventory import num_active_params, num_params
    from titan_planner.models import MODELS, find_model
    from titan_planner.render.capabilities import model_capabilities, model_text

    if arguments.name and ":" in arguments.name:
        with _named("NAME"):
            model = find_model(*arguments.name.split(":", 1))
        if arguments.json:
            said = {"params": num_params(model), **encode(model), "capabilities": model_capabilities(model)}
            print(json.dumps(said, indent=2))
        else:
            print(f"{model.family}:{model.flavor}  {num_params(model):,} parameters")
            emit(model_text(model, width_for(sys.stdout), style_for(sys.stdout)))
            print()
            sys.stdout.write(dumps(model))
        return 0
    if arguments.name and arguments.name not in MODELS:
        with _named("NAME"):
            find_model(arguments.name, "")
    families = {arguments.name: MODELS[arguments.name]} if arguments.name else MODELS
    rows = [
        {
            "model": f"{family}:{flavor}",
            "params": num_params(model),
            "active": num_active_params(model),
            "dim": model.dim,
            "layers": model.num_layers,
            "heads": model.blocks[0].block.attention.num_heads,
            "kv_heads": model.blocks[0].block.attention.num_kv_heads,
            "hidden_dim": model.blocks[0].block.feed_forward.hidden_dim,
            "vocab": model.vocab_size,
            "tied": model.tied,
            **({"capabilities": model_capabilities(model)} if arguments.name and arguments.json else {}),
        }
        for family, flavors in families.items()
        for flavor, model in flavors.items()
    ]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    head = list(rows[0])
    emit_table("Models", head, [[_cell(row[name]) for name in head] for row in rows], right=range(1, len(head) - 1))
    for flavor, model in MODELS[arguments.name].items() if arguments.name else ():
        print()
        emit(style_for(sys.stdout).bold(f"{arguments.name}:{flavor}"))
        emit(model_text(model, width_for(sys.stdout), style_for(sys.stdout), only_degrees=True))
    return 0


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def _hardware(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from titan_planner.console import emit_table
    from titan_planner.hardware import GPUS, LINKS, NODES, UnknownHardware, find_gpu, find_link, find_node

    if arguments.name:
        suggestions: list[str] = []
        for find in (find_gpu, find_link, find_node):
            try:
                entry = asdict(find(arguments.name))
            except UnknownHardware as error:
                suggestions += error.suggestions
                continue
            if arguments.json:
                print(json.dumps(entry, indent=2))
            else:
                for key, value in entry.items():
                    print(f"{key:20} {_cell(value)}".replace("\n", "\n" + " " * 21))
            return 0
        hint = (
            f"did you mean {' or '.join(f'`{s}`' for s in suggestions[:3])}?"
            if suggestions
            else "`titan-plan hardware` lists all"
        )
        raise TitanError(Complaint(f"there is no hardware called `{arguments.name}`", hint=hint))
    tables: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
        (
            "GPUs",
            GPUS,
            (
                "name",
                "memory_gib",
                "memory_gb_per_s",
                "bf16_tflops",
                "fp8_tflops",
                "float8",
                "mxfp8",
                "intra_node_link",
            ),
        ),
        ("Links", LINKS, ("name", "gb_per_s", "latency_us", "per_gpu")),
        ("Nodes", NODES, ("name", "gpu", "gpus_per_node", "intra_node", "inter_node")),
    )
    if arguments.json:
        print(
            json.dumps(
                {title.lower(): [asdict(entry) for entry in entries.values()] for title, entries, _ in tables}, indent=2
            )
        )
        return 0
    for index, (title, entries, columns) in enumerate(tables):
        if index:
            print()
        rows = [[_cell(getattr(entry, column)) for column in columns] for entry in entries.values()]
        numeric = [
            i
            for i, column in enumerate(columns)
            if not isinstance(getattr(next(iter(entries.values())), column), (str, bool))
        ]
        emit_table(title, columns, rows, right=numeric)
    return 0


def _completion(arguments: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(build_parser(), arguments.shell))
    return 0


# ------------------------------------------------------------------ reading and writing


def _load(path: str) -> Any:
    from titan_planner.ir.verify import load_plan_with_notes

    plan, notes = load_plan_with_notes(path)
    _notes(notes)
    return plan


def _notes(notes: Sequence[Complaint]) -> None:
    from titan_planner.console import note

    for entry in notes:
        note(f"{entry.place}: {entry.message}", entry.hint)


def _warn_memory(plan: Any) -> None:
    from titan_planner.console import note

    if plan.estimate is not None and not plan.estimate.fits:
        note(
            f"the plan may not fit: {plan.estimate.peak_memory_gib:.1f} GiB a GPU expected, "
            f"{plan.estimate.memory_available_gib:.1f} GiB available after the headroom",
            "`titan-plan explain PLAN estimate` shows the parts; a smaller batch, more recomputation or more GPUs need less",
        )


@contextlib.contextmanager
def _named(option: str) -> Iterator[None]:
    """Unknown catalogue names given on the command line, as complaints about the option."""
    from titan_planner.hardware import UnknownHardware

    try:
        yield
    except InvariantError as error:
        raise TitanError(Complaint(error.message, place=Place(option), hint=error.hint)) from None
    except UnknownHardware as error:
        raise TitanError(
            Complaint(str(error), place=Place(option), hint="`titan-plan hardware` lists what there is")
        ) from None


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise TitanError(
            Complaint(f"`{path}` cannot be written: {reason}", hint="check the folder, its rights and the free space")
        ) from None


def _write(text: str, target: str | None) -> None:
    """Write to a file all at once, so that an interrupted or failed write leaves the old file whole; `-` is stdout."""
    if target is None or target == "-":
        if isinstance(sys.stdout, io.TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name != "utf-8":
            # Specs and plans are UTF-8 files, whatever the terminal is.
            sys.stdout.flush()
            sys.stdout.buffer.write(text.encode("utf-8"))
            return
        sys.stdout.write(text)
        return
    path = Path(target)
    with _writing(path):
        if path.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        if path.exists() and not path.is_file():  # a device or a pipe cannot be replaced
            path.write_text(text, encoding="utf-8")
            return
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


if __name__ == "__main__":
    sys.exit(main())
