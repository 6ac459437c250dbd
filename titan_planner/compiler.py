"""Compile a spec: resolve, lower, run the passes with a check after each, attach estimate and remarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from titan_planner.cost.estimate import estimate
from titan_planner.ir.cluster import Cluster
from titan_planner.ir.errors import Complaint, InvariantError, Place, SpecError
from titan_planner.ir.model import Model
from titan_planner.ir.plan import Plan
from titan_planner.ir.request import Spec
from titan_planner.ir.verify import verify
from titan_planner.lower import Problem, lower
from titan_planner.machines import resolve_cluster
from titan_planner.models import find_model, override
from titan_planner.models.hf_config import read_hf_config
from titan_planner.passes import PASSES, Context, Pass
from titan_planner.rules import feasibility, spec_complaints, to_spec_address
from titan_planner.spec import LoadedSpec

Dump = Callable[[str, Plan], None]


class PassBroke(Exception):
    """A pass returned a plan that breaks a rule although nothing the user pinned forces it: a bug of Titan."""


def pass_names() -> tuple[str, ...]:
    """Names of the passes in order."""
    return tuple(entry.__name__ for entry in PASSES)


def select_passes(stop_after: str | None = None, without: Sequence[str] = ()) -> tuple[Pass, ...]:
    """The passes up to `stop_after` (the string `lower` for none), less those in `without`."""
    chosen: list[Pass] = []
    if stop_after == "lower":
        return ()
    for entry in PASSES:
        if entry.__name__ not in without:
            chosen.append(entry)
        if entry.__name__ == stop_after:
            break
    return tuple(chosen)


def compile_spec(loaded: LoadedSpec, passes: Sequence[Pass] = PASSES, dump: Dump | None = None) -> Plan:
    """The plan of a loaded spec. `dump` is called with the plan after lowering and after every pass.

    Raises `SpecError` with every complaint that can be found, each at its place in the user's file.
    """
    try:
        return _compile(resolve(loaded), passes, dump, loaded.is_set)
    except SpecError as error:
        raise SpecError([_located(complaint, loaded) for complaint in error.complaints]) from None
    except InvariantError as error:
        complaint = Complaint(error.message, error.field, hint=error.hint, rule=error.rule)
        raise SpecError(_located(complaint, loaded)) from None


def resolve(loaded: LoadedSpec) -> Problem:
    """The spec with its model and machines looked up, all complaints at once."""
    spec = loaded.spec
    complaints: list[Complaint] = []
    model = None
    try:
        model = find_or_read_model(spec, loaded.folder)
    except InvariantError as error:
        complaints.append(Complaint(error.message, f"model.{error.field}", hint=error.hint, rule=error.rule))
    cluster, problems = resolve_cluster(spec.cluster)
    complaints += problems
    complaints += spec_complaints(spec, model, cluster)
    if complaints or model is None or cluster is None:
        # What can be judged without the missing half is judged too, so that all errors come at once.
        raise SpecError(complaints + (_lower_complaints(loaded, model, cluster) if model and cluster else []))
    return Problem(spec=spec, model=model, cluster=cluster, name=spec.name or loaded.name)


def _lower_complaints(loaded: LoadedSpec, model: Model, cluster: Cluster) -> list[Complaint]:
    try:
        lower(Problem(spec=loaded.spec, model=model, cluster=cluster, name="check"))
    except SpecError as error:
        return list(error.complaints)
    return []


def find_or_read_model(spec: Spec, folder: Path) -> Model:
    """The model that a spec names, overrides applied. Raises `InvariantError` on a field of the spec's `model`."""
    section = spec.model
    if section.hf_config is not None:
        model = read_hf_config(folder / section.hf_config)
    else:
        assert section.family is not None and section.flavor is not None
        model = find_model(section.family, section.flavor)
    try:
        return override(model, section.overrides)
    except InvariantError as error:
        raise InvariantError(f"overrides.{error.field}", error.message, error.hint, rule=error.rule) from None


def _compile(problem: Problem, passes: Sequence[Pass], dump: Dump | None, is_set: Callable[[str], bool]) -> Plan:
    plan = lower(problem)
    if dump:
        dump("lower", priced(plan))
    for index, entry in enumerate(passes):
        ctx = Context(entry.__name__, finish=_finisher(tuple(passes[index + 1 :])))
        result = entry(plan, ctx)
        broken = verify(result)
        if broken:
            _blame(entry.__name__, broken, is_set)
        plan = replace(result, remarks=(*plan.remarks, *ctx.remarks))
        if dump:
            dump(entry.__name__, priced(plan))
    plan = priced(plan)
    complaint = feasibility(plan)
    if complaint is not None:
        raise SpecError(complaint)
    return plan


def priced(plan: Plan) -> Plan:
    """`plan` with its estimate."""
    return replace(plan, estimate=estimate(plan))


def _finisher(rest: tuple[Pass, ...]) -> Callable[[Plan], Plan]:
    def finish(candidate: Plan) -> Plan:
        for index, entry in enumerate(rest):
            candidate = entry(candidate, Context(entry.__name__, finish=_finisher(rest[index + 1 :])))
        return candidate

    return finish


def _blame(name: str, broken: Sequence[Complaint], is_set: Callable[[str], bool]) -> None:
    """A rule broken by something the user wrote is the user's to mend; anything else is a bug of the pass."""
    if all(is_set(to_spec_address(complaint.address)) for complaint in broken):
        raise SpecError(list(broken))
    details = "; ".join(f"{c.address}: {c.message} [{c.rule}]" for c in broken)
    raise PassBroke(f"the pass `{name}` returned an invalid plan: {details}")


def _located(complaint: Complaint, loaded: LoadedSpec) -> Complaint:
    if complaint.place is not None:
        return complaint
    address = to_spec_address(complaint.address)
    place = loaded.place(address) or Place(loaded.name)
    return replace(complaint, address=address, place=place)
