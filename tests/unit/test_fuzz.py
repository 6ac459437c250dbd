"""Malformed YAML and JSON at both loaders: a value or one clear error, never a crash."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from titan_planner.compiler import compile_spec
from titan_planner.ir.codec import digest, dumps, encode
from titan_planner.ir.diff import diff
from titan_planner.ir.errors import Place, PlanError, SpecError, TitanError
from titan_planner.ir.request import Spec
from titan_planner.ir.verify import parse_plan
from titan_planner.render import diff as render_diff
from titan_planner.render.explain import explain, explain_json
from titan_planner.render.show import show, show_json
from titan_planner.spec import load_spec
from titan_planner.yaml_source import parse_yaml

from .builders import PIPELINE, TINY, compile_text

SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

PLAN = compile_text(PIPELINE)
PLAN_TEXT = dumps(PLAN)

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
    st.sampled_from(["auto", "-1", "3e-4", "1:30", "010", ".inf", "off", "~", "*a", "&a", "!!x", "<<", "a.b", "[", "%",
                     "aten\ud800", "\udfff"]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


def check_complaints(error: TitanError) -> None:
    assert error.complaints
    for complaint in error.complaints:
        assert complaint.message.strip()
        assert complaint.place is not None
        assert len(complaint.message) < 2000


def check_spec_text(tmp_path, text: str | bytes) -> None:
    path = tmp_path / "spec.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    try:
        compile_spec(load_spec(path))
    except SpecError as error:
        check_complaints(error)


def check_plan_text(text: str) -> None:
    """What the loader accepts can also be digested, written, shown, explained and compared."""
    try:
        plan, _ = parse_plan(text, Place("plan.json"))
    except PlanError as error:
        check_complaints(error)
        return
    digest(plan)
    assert parse_plan(dumps(plan), Place("again.json"))[0] == plan
    difference = diff(PLAN, plan)
    for shown in (
        dumps(plan),
        show(plan),
        explain(plan),
        render_diff.text(difference),
        render_diff.markdown(difference),
    ):
        shown.encode()
    json.dumps([show_json(plan), explain_json(plan), render_diff.json_value(difference)])


@SETTINGS
@given(st.text(max_size=200))
def test_any_text_as_yaml(text):
    try:
        parse_yaml(text, "x.yaml")
    except SpecError as error:
        check_complaints(error)


@SETTINGS
@given(st.binary(max_size=200))
def test_any_bytes_as_spec(tmp_path, content):
    check_spec_text(tmp_path, content)


@SETTINGS
@given(VALUES)
def test_any_value_as_spec(tmp_path, value):
    check_spec_text(tmp_path, yaml.safe_dump(value, allow_unicode=True))


SECTIONS = sorted(Spec.__dataclass_fields__)


@SETTINGS
@given(st.dictionaries(st.sampled_from(SECTIONS), VALUES, max_size=4))
def test_any_value_in_a_known_section(tmp_path, sections):
    check_spec_text(tmp_path, yaml.safe_dump({**yaml.safe_load(TINY), **sections}, allow_unicode=True))


def paths_in(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += paths_in(inner, (*at, key))
    return found


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        value = value[part]
    return value


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    value = copy.deepcopy(value)
    target = value
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = new
    return value


SPEC_DATA = {
    **yaml.safe_load(PIPELINE),
    "training": {"steps": 20, "seq_len": 8192, "local_batch_size": 16, "global_batch_size": 32},
    "model": {"family": "llama3", "flavor": "8B", "overrides": {"num_layers": 16, "vocab_size": 128256}},
    "limits": {"memory_headroom": 0.1, "max_tp": 8},
    "lr_scheduler": {"warmup_steps": 3, "decay_ratio": 0.5},
    "checkpoint": {"interval": 3},
}
NUMBERS = st.one_of(st.integers(-3, 300), st.sampled_from([0.5, 1e9, 10**30, "auto", None, True, [], {}]))


@SETTINGS
@given(st.sampled_from(paths_in(SPEC_DATA)), NUMBERS | VALUES)
def test_a_good_spec_with_one_value_changed(tmp_path, path, new):
    check_spec_text(tmp_path, yaml.safe_dump(replaced(SPEC_DATA, path, new), allow_unicode=True))


@SETTINGS
@given(st.integers(0, 400), st.integers(0, 40), st.text(max_size=6))
def test_a_good_spec_with_its_text_cut(tmp_path, start, length, insert):
    check_spec_text(tmp_path, PIPELINE[:start] + insert + PIPELINE[start + length :])


@SETTINGS
@given(st.text(max_size=200))
def test_any_text_as_plan(text):
    check_plan_text(text)


PLAN_DATA = encode(PLAN)
PLAN_PATHS = paths_in(PLAN_DATA)


@SETTINGS
@given(st.sampled_from(PLAN_PATHS), NUMBERS | VALUES)
def test_a_good_plan_with_one_value_changed(path, new):
    check_plan_text(json.dumps(replaced(PLAN_DATA, path, new)))


@SETTINGS
@given(st.integers(0, len(PLAN_TEXT)), st.integers(0, 60), st.text(max_size=6))
def test_a_good_plan_with_its_text_cut(start, length, insert):
    check_plan_text(PLAN_TEXT[:start] + insert + PLAN_TEXT[start + length :])


@SETTINGS
@given(st.sampled_from([path for path in PLAN_PATHS if isinstance(at(PLAN_DATA, path), str)]), st.text(max_size=4))
def test_a_good_plan_with_half_a_surrogate_pair(path, before):
    text = json.dumps(replaced(PLAN_DATA, path, before + "\ud800"))
    with pytest.raises(PlanError) as caught:
        parse_plan(text, Place("plan.json"))
    check_complaints(caught.value)
    assert "half of a surrogate pair" in caught.value.complaints[0].message
    str(caught.value).encode()
