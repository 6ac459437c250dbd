"""What a model can be combined with, and the table of capabilities as a page: the same rows and rules that plans are checked by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from titan_planner.hardware import GPUS
from titan_planner.ir.capabilities import ROWS, Row, kv_replicas, needs, together, verdict
from titan_planner.ir.features import FEATURES, Feature, mixtures
from titan_planner.ir.inventory import is_router, linear_modules
from titan_planner.ir.model import Gqa, Model
from titan_planner.ir.numbers import divisors
from titan_planner.ir.parallel import SCHEDULES, ScheduleFacts
from titan_planner.ir.rules import ep_degrees, tp_dim_violations, tp_head_violations
from titan_planner.models import MODELS
from titan_planner.render.tables import PLAIN, Style, pairs
from titan_planner.rules import known_rules

RECIPES = {
    "tensorwise": "gpu_float8",
    "rowwise": "gpu_float8",
    "rowwise_with_gw_hp": "gpu_float8",
    "mxfp8": "gpu_mxfp8",
}
"""Recipe -> the feature of GPUs that it needs."""


# ------------------------------------------------------------------ one model


def tp_degrees(model: Model) -> dict[int, int]:
    """Every legal tensor degree of `model` -> how many ranks hold the same KV head."""
    heads = max(run.block.attention.num_heads for run in model.blocks)
    found = {}
    for tp in divisors(heads):
        copies = kv_replicas(model, tp)
        broken = [*tp_head_violations(model, tp, copies), *tp_dim_violations(model, tp)]
        if not broken:
            found[tp] = copies
    return found


def model_capabilities(model: Model) -> dict[str, Any]:
    """What `model` can be combined with, as plain data for `titan-plan models --json`."""
    degrees = tp_degrees(model)
    kv_heads = min(run.block.attention.num_kv_heads for run in model.blocks if isinstance(run.block.attention, Gqa))
    experts = mixtures(model)
    block = {"tensorwise": 16, "rowwise": 16, "rowwise_with_gw_hp": 16, "mxfp8": 32}
    linears = {fqn: shape for fqn, shape in linear_modules(model).items() if not is_router(fqn)}
    return {
        "kinds": [feature.name for feature in of_group("model", "attention") if _has(model, feature)],
        "tp": [tp for tp, copies in degrees.items() if copies == 1],
        "tp_with_kv_replicas": {tp: copies for tp, copies in degrees.items() if copies > 1},
        "etp": [tp for tp in degrees if not any(tp_dim_violations(model, tp, tp))] if experts else [1],
        "ep": list(ep_degrees(model)),
        "cp_alltoall": list(divisors(kv_heads)),
        "pp": model.num_layers,
        "schedules": {
            name: {
                "stages_per_rank": list(facts.per_rank),
                "pp": model.num_layers // facts.per_rank[0],
                "microbatches": facts.microbatches,
                "not_with": _others(name),
            }
            for name, facts in SCHEDULES.items()
        },
        "checkpointing": {feature.name: _limits_json(feature) for feature in of_group("checkpointing")},
        "compile": {feature.name: _limits_json(feature) for feature in of_group("compile")},
        "float8": {
            recipe: {
                "gpus": [name for name, gpu in GPUS.items() if (gpu.mxfp8 if kind == "gpu_mxfp8" else gpu.float8)],
                "linears": sum(n % block[recipe] == 0 and k % block[recipe] == 0 for n, k in linears.values()),
                "of": len(linears),
                **_limits_json(FEATURES[recipe]),
            }
            for recipe, kind in RECIPES.items()
        },
        "refused": {
            feature.name: row.rule for feature in FEATURES.values() if (row := _refused_by_model(model, feature)) is not None
        },
    }  # fmt: skip


def of_group(*groups: str) -> tuple[Feature, ...]:
    """The features of some groups that the runtime executes, in order."""
    return tuple(feature for feature in FEATURES.values() if feature.group in groups and feature.runs)


def _has(model: Model, feature: Feature) -> bool:
    return feature.of_model is not None and feature.of_model(model)


def _refused_by_model(model: Model, feature: Feature) -> Row | None:
    """The row by which no plan of `model` has the feature."""
    for row in ROWS:
        refused = row.feature == feature.name and row.verdict == "not with"
        if refused and any(_has(model, FEATURES[other]) for other in row.others):
            return row
    return None


def _others(name: str) -> dict[str, str]:
    """Feature -> rule, for the features that `name` does not go with."""
    found = {}
    for other in FEATURES:
        row = verdict(name, other)
        if row is not None and row.verdict == "not with":
            found[other] = row.rule
    return found


def _limits_json(feature: Feature) -> dict[str, Any]:
    return {
        "what": feature.what,
        "not_with": _others(feature.name),
        "needs": {" or ".join(row.others): row.rule for row in needs(feature.name)},
    }


def model_text(model: Model, width: int, style: Style = PLAIN, *, only_degrees: bool = False) -> str:
    """The same for people, all of it or the degrees alone."""
    found = model_capabilities(model)
    copies = ", ".join(f"{tp} ({count} ranks a head)" for tp, count in found["tp_with_kv_replicas"].items())
    tensor = _numbers(found["tp"]) + (f"; with KV heads replicated {copies}" if copies else "")
    experts = mixtures(model)
    rows = [
        ("made of", "; ".join(FEATURES[name].what for name in found["kinds"])),
        ("tp", f"{tensor}  [tp-heads, tp-dims]"),
        (
            "ep",
            f"{_numbers(found['ep'])}, ep x etp dividing dp_shard x cp x tp; etp 1 or tp  [ep-region]"
            if experts
            else "none: the model has no experts  [ep-region]",
        ),
        ("cp", f"any, by allgather or ring; by alltoall where cp x tp divides {found['cp_alltoall'][-1]}  [cp-heads]"),
        ("pp", f"up to {found['pp']} stages of at least one layer  [pp-layers]"),
    ]
    lines = [*pairs(rows, width=width)]
    if only_degrees:
        return "\n".join(lines)
    for title, entries in (
        ("schedules", [(name, _schedule_words(name, facts)) for name, facts in SCHEDULES.items()]),
        ("checkpointing", [(f.name, _words(f)) for f in of_group("checkpointing")]),
        ("compile", [(f.name, _words(f)) for f in of_group("compile")]),
        ("8-bit recipes", list(_recipe_words(found["float8"]))),
        (
            "no plan of it has",
            [(name, f"{FEATURES[name].what}  [{rule}]") for name, rule in found["refused"].items()],
        ),
    ):
        lines += ["", style.bold(title), *pairs(entries, width=width)]
    return "\n".join(lines)


def _recipe_words(recipes: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Recipes that run on the same GPUs on one line."""
    alike: dict[str, list[str]] = {}
    for name, recipe in recipes.items():
        words = (
            f"{recipe['linears']} of {recipe['of']} linears have dims for it; on {', '.join(recipe['gpus'])}, or emulated  "
            "[float8-hardware, float8-linears]"
        )
        alike.setdefault(words, []).append(name)
    for words, names in alike.items():
        yield names[0], words
        for name in names[1:]:
            yield name, f"as {names[0]}"


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in values)


def _words(feature: Feature) -> str:
    return "; ".join([feature.what, *_limits(feature.name)])


def _limits(name: str) -> Iterator[str]:
    by_rule: dict[str, list[str]] = {}
    for other, rule in _others(name).items():
        by_rule.setdefault(rule, []).append(other)
    for row in needs(name):
        yield f"needs {' or '.join(row.others)} [{row.rule}]"
    for rule, others in by_rule.items():
        yield f"not with {', '.join(others)} [{rule}]"


def _schedule_words(name: str, facts: ScheduleFacts) -> str:
    stages = _stage_words(facts)
    return "; ".join([f"{facts.what}: {stages}, {_MICROBATCHES[facts.microbatches]}", *_limits(name)])


_MICROBATCHES = {
    "any": "any number of microbatches",
    "at least the stages": "microbatches at least the stages",
    "rounds": "microbatches in equal rounds of about pp",
}


def _stage_words(facts: ScheduleFacts) -> str:
    fewest, most = facts.per_rank
    if most is None:
        return f"{fewest} or more stages a rank"
    return f"{fewest} stage{'s' * (fewest > 1)} a rank" + (" in a V" if facts.placement == "V" else "")


# ------------------------------------------------------------------ the page

_SHOWN = ("model", "attention", "parallelism", "schedule", "checkpointing", "compile", "quantisation")


def page() -> str:
    """docs/capabilities.md."""
    parts = (
        _HEAD,
        "## What does not go with what\n",
        *_feature_lines(),
        "\n## The grid\n",
        _GRID_HEAD,
        *_grid(),
        "\n## Schedules\n",
        "| schedule | stages a rank | microbatches | splits backward |\n|---|---|---|---|",
        *(
            f"| {name} | {_stage_words(facts)} | {facts.microbatches} | {'yes' if facts.splits_backward else 'no'} |"
            for name, facts in SCHEDULES.items()
        ),
        "\n## Models\n",
        "`titan-plan models FAMILY:FLAVOR` prints the same in full, with `--json` for scripts.\n",
        "| model | tp | tp with KV heads replicated | ep | stages | alltoall: cp x tp divides |\n|---|---|---|---|---|---|",
        *_model_lines(),
        "\n## 8 bits and machines\n",
        "| GPU | tensorwise, rowwise, rowwise_with_gw_hp | mxfp8 |\n|---|---|---|",
        *(f"| {name} | {_yes(gpu.float8)} | {_yes(gpu.mxfp8)} |" for name, gpu in GPUS.items()),
        "\nEverything can be emulated anywhere (`emulate: true`), for its numerics, not its speed.\n",
        "## What the runtime refuses\n",
        "A plan may hold these, and `titan-run` refuses them by name ([training.md](training.md)):\n",
        *(f"- `{feature.name}`: {feature.what} (`{feature.at}`)" for feature in FEATURES.values() if not feature.runs),
        "\n## Rules\n",
        "Every id that a complaint can name. `titan-plan explain ID` says why it holds and where in a spec it looks.\n",
        "| id | statement |\n|---|---|",
        *(f"| `{rule.id}` | {rule.statement.replace('|', chr(92) + '|')} |" for rule in known_rules().values()),
    )
    return "\n".join(parts) + "\n"


_HEAD = """\
# What goes with what

```
titan-plan models llama3:8B
titan-plan explain pp-split-backward-selective
```

Generated by `make docs` from the table that specs and plans are checked by (`titan_planner/ir/capabilities.py`); a test holds it
current. Whatever no row names goes together. Names in the first column are features of a plan; those in brackets are rules.
"""
_GRID_HEAD = """\
`x`: never together; `-`: a plan has one of them at most; `!`: one needs the other, or an alternative to it; `n`: numbers decide.
The rule stands in the table above. Columns are numbered as the rows.
"""


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _feature_lines() -> Iterator[str]:
    yield "| feature | what it is | limits |\n|---|---|---|"
    for feature in FEATURES.values():
        limits = list(_limits(feature.name))
        for row in ROWS:
            if row.feature == feature.name and row.verdict == "by numbers":
                limits.append(f"with {' or '.join(row.others)}: {row.why} [{row.rule}]")
        if limits or feature.group in _SHOWN:
            yield f"| `{feature.name}` | {feature.what} | {'; '.join(limits) or 'none'} |"


def _grid() -> Iterator[str]:
    shown = [feature.name for feature in of_group(*_SHOWN)]
    yield "| | " + " | ".join(str(number + 1) for number in range(len(shown))) + " |"
    yield "|---" * (len(shown) + 1) + "|"
    for number, name in enumerate(shown):
        cells = [_mark(name, other) if column < number else "" for column, other in enumerate(shown)]
        yield f"| {number + 1} {name} | " + " | ".join(cells) + " |"


def _mark(a: str, b: str) -> str:
    mark = {"no": "x", "by numbers": "n", "one of them": "-", "yes": ""}[together(a, b)]
    needed = any(y in need.others for x, y in ((a, b), (b, a)) for need in needs(x))
    return mark or "!" * needed


def _model_lines() -> Iterator[str]:
    for family, flavors in MODELS.items():
        for flavor, model in flavors.items():
            found = model_capabilities(model)
            copies = ", ".join(str(tp) for tp in found["tp_with_kv_replicas"]) or "none"
            ep = _numbers(found["ep"]) if mixtures(model) else "none"
            yield (
                f"| {family}:{flavor} | {_numbers(found['tp'])} | {copies} | {ep} | up to {found['pp']} | "
                f"{found['cp_alltoall'][-1]} |"
            )
