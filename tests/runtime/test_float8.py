"""Float8: exactly the planned linears, the arithmetic of the recipe, and weights that nobody else sees the difference of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from tests import plans
from tests.harness import Rank, run_ranks
from tests.parity.rows import Row
from tests.parity.runner import compile_row
from tests.runtime.test_parity import parity_plan, run
from titan_planner.ir.fqn import select
from titan_planner.ir.inventory import linear_modules, parameters
from titan_planner.ir.parallel import Mesh
from titan_planner.ir.plan import Plan
from titan_runtime.apply import float8 as subject
from titan_runtime.apply.float8 import (
    apply_float8,
    converted_experts,
    converted_linears,
    float8_problems,
    require_equal,
)
from titan_runtime.errors import RunError
from titan_runtime.init import initialise
from titan_runtime.modules import build

# Imported once, before ranks are forked: it takes two seconds.
subject._require_torchao()

ATTENTION_AND_OUTPUT = ("layers.0.attention.*", "layers.1.feed_forward.w2", "output")


def in_float8(plan: Plan, recipe: str = "tensorwise", converted: tuple[str, ...] = ("*",), **options: bool) -> Plan:
    """`plan` with the linears of some selectors in (emulated) Float8; `*` is every one."""
    if converted == ("*",):
        converted = ("layers.*.attention.*", "layers.*.feed_forward.*", "output")
    float8 = replace(plan.float8, recipe=recipe, converted=converted, emulate=True, **options)
    return replace(plan, float8=float8)


def gathered(plan: Plan, precomputed: bool = False) -> Plan:
    """`plan` with every linear in Float8, and FSDP gathering in it."""
    return in_float8(plan, enable_fsdp_float8_all_gather=True, precompute_float8_dynamic_scale_for_fsdp=precomputed)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_exactly_the_planned_linears_are_converted_and_weights_keep_name_and_type(recipe: str) -> None:
    plan = in_float8(plans.tiny_plan(), recipe, ATTENTION_AND_OUTPUT)
    module = build(plan.model, seq_len=32)
    apply_float8(module, plan)
    wanted = {f"layers.0.attention.{name}" for name in ("wq", "wk", "wv", "wo")} | {
        "layers.1.feed_forward.w2",
        "output",
    }
    assert converted_linears(module) == wanted
    assert {fqn for fqn, part in module.named_modules() if isinstance(part, nn.Linear)} == set(
        linear_modules(plan.model)
    )
    inventory = {parameter.fqn: parameter.shape for parameter in parameters(plan.model)}
    assert {fqn: tuple(p.shape) for fqn, p in module.named_parameters()} == inventory
    assert all(p.dtype is torch.float32 for p in module.parameters())


def test_a_stage_converts_what_it_holds() -> None:
    plan = in_float8(plans.tiny_plan())
    module = build(plan.model, seq_len=32)
    del module.layers["0"], module.output
    apply_float8(module, plan)
    assert converted_linears(module) == {fqn for fqn in linear_modules(plan.model) if fqn.startswith("layers.1.")}


def test_a_difference_from_the_plan_is_named() -> None:
    with pytest.raises(RunError) as caught:
        require_equal(frozenset({"layers.0.attention.wq", "output"}), frozenset({"output", "layers.1.feed_forward.w1"}))
    assert "lists 2 linears" in str(caught.value)
    assert "lacks `layers.0.attention.wq` and also has `layers.1.feed_forward.w1`" in str(caught.value)
    plan = in_float8(plans.tiny_plan())
    module = build(plan.model, seq_len=32)
    module.layers["0"].attention.wq = nn.Identity()  # not a linear, so it cannot be converted
    with pytest.raises(RunError, match=r"lacks `layers\.0\.attention\.wq`"):
        apply_float8(module, plan)


def test_tensorwise_is_a_product_of_what_8_bits_hold() -> None:
    plan = in_float8(plans.tiny_plan(), converted=("layers.0.feed_forward.w1", "output"))
    module = build(plan.model, seq_len=32).to_empty(device="cpu")
    initialise(module, plan.model, seed=0)
    apply_float8(module, plan)
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))

    def rounded(t: Tensor) -> Tensor:
        scale = 448.0 / t.abs().max()
        return (t * scale).to(torch.float8_e4m3fn).float() / scale

    for part in (module.layers["0"].feed_forward.w1, module.output):
        expected = linear(rounded(x), rounded(part.weight.detach()))
        torch.testing.assert_close(part(x), expected, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(part(x), linear(x, part.weight), rtol=1e-3, atol=1e-4)


def numbers(rank: Rank, plan: Plan, folder: str) -> tuple[list[float], list[float], int, list[str], int, set[str]]:
    """Losses, norms, bytes gathered, types of saved weights, how often a scale was computed at a gather, dtypes sent."""
    import torch.distributed as dist
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    from titan_runtime.checkpoint.storage import write_tensors
    from titan_runtime.checkpoint.tensors import model_tensors

    sent, dtypes = 0, set()
    real = collectives.foreach_all_gather_copy_out

    def counted(result, *args, **keywords):
        nonlocal sent
        sent += result.all_gather_output.numel() * result.all_gather_output.element_size()
        dtypes.update(str(dtype) for each in result.param_all_gather_input_dtypes for dtype in each)
        return real(result, *args, **keywords)

    from torch.distributed.fsdp._fully_shard import _fsdp_param_group
    from torchao.float8 import fsdp_utils

    _fsdp_param_group.foreach_all_gather_copy_out = counted
    scaled, scale = 0, fsdp_utils.hp_tensor_to_float8_dynamic

    def scaling(*args, **keywords):
        nonlocal scaled
        scaled += 1
        return scale(*args, **keywords)

    fsdp_utils.hp_tensor_to_float8_dynamic = scaling
    seen = {}

    def keep(module: nn.Module) -> None:
        seen["module"] = module

    curve = run(rank, plan, False, keep)
    saved = model_tensors(seen["module"])
    if folder:
        write_tensors(saved, Path(folder))
    dist.barrier()
    kinds = sorted({type(t.to_local()).__name__ for t in saved.values()})
    return curve.losses, curve.norms, sent, kinds, scaled, dtypes


def on_tensor_ranks() -> Plan:
    """A plan on two tensor ranks times two that shard, with parts of weights cut along either dim."""
    model = {"overrides": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 128}}
    return compile_row(Row("tp 2, dp 2", {"dp_shard": 2, "tp": 2}, sections={"model": model}))


@pytest.mark.parametrize("ranks", ["dp 2", "tp 2, dp 2"])
def test_gathering_in_float8_sends_less_and_changes_no_bit(ranks: str, tmp_path: Path) -> None:
    plan = on_tensor_ranks() if "tp" in ranks else parity_plan(plans.mesh(2), local=4)
    world = plan.mesh.world_size
    plain, sent, beforehand = (
        run_ranks(numbers, world, each, str(tmp_path / "save") if number == 2 else "", timeout=180.0)[0]
        for number, each in enumerate((in_float8(plan), gathered(plan), gathered(plan, precomputed=True)))
    )
    assert sent[:2] == plain[:2]
    assert beforehand[:2] == plain[:2]
    assert sent[2] < 0.7 * plain[2]  # nearly half of all weights are the embedding, which stays float32
    assert (plain[5], sent[5]) == ({"torch.float32"}, {"torch.float32", "torch.float8_e4m3fn"})
    assert beforehand[5] == sent[5]
    assert plain[4] == 0
    assert beforehand[4] == sent[4] / 10 > 0  # in the first of ten steps only
    assert beforehand[3] == ["Tensor"]

    # What a run that gathers in Float8 has saved, a run without any Float8 loads.
    def load(rank: Rank) -> bool:
        from titan_runtime.apply import build_model
        from titan_runtime.checkpoint.storage import read_tensors
        from titan_runtime.checkpoint.tensors import model_tensors
        from titan_runtime.mesh import build_mesh

        world = build_mesh(plan.mesh, "cpu")
        found = []
        for each in (plan, gathered(plan)):
            tensors = model_tensors(build_model(each, world, torch.device("cpu")))
            read_tensors(tensors, tmp_path / "save")
            found.append({fqn: t.full_tensor() for fqn, t in tensors.items()})
        fresh = build_model(plan, world, torch.device("cpu")).output.weight.full_tensor()
        assert not torch.equal(found[0]["output.weight"], fresh)
        return all(torch.equal(found[0][fqn], found[1][fqn]) for fqn in found[0])

    assert run_ranks(load, world) == [True] * world


def test_float8_trains_like_float32_but_not_the_same() -> None:
    exact = run_ranks(run, 2, parity_plan(plans.mesh(2), local=4), False)[0]
    for recipe in ("tensorwise", "rowwise_with_gw_hp"):
        plan = in_float8(parity_plan(plans.mesh(2), local=4), recipe)
        curve = run_ranks(run, 2, plan, False)[0]
        assert curve.losses == pytest.approx(exact.losses, rel=5e-3)
        assert curve.losses[0] != pytest.approx(exact.losses[0], rel=1e-5)


def test_chunks_and_recomputation_go_with_float8() -> None:
    plan = in_float8(parity_plan(plans.mesh(2), local=4), "rowwise")
    expected = run_ranks(run, 2, plan, False)[0]
    # A row's scale depends on the row alone in forward; in backward a chunk's columns have scales of their own.
    curve = run_ranks(run, 2, replace(plan, loss=replace(plan.loss, chunks=4)), False)[0]
    assert curve.losses[0] == pytest.approx(expected.losses[0], rel=1e-6)
    assert curve.losses == pytest.approx(expected.losses, rel=2e-3)


def test_mxfp8_rounds_blocks_of_32_to_powers_of_two() -> None:
    plan = in_float8(plans.tiny_plan(model=wide()), "mxfp8", ("layers.0.feed_forward.w1", "output"))
    module = build(plan.model, seq_len=32).to_empty(device="cpu")
    initialise(module, plan.model, seed=0)
    names = frozenset({"layers.0.feed_forward.w1", "output"})
    apply_float8(module, plan)
    assert converted_linears(module) == names
    x = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    module.to(torch.bfloat16)
    for part in (module.layers["0"].feed_forward.w1, module.output):
        out = part(x)
        torch.testing.assert_close(
            out.float(), linear(in_mxfp8(x), in_mxfp8(part.weight.detach())), rtol=1e-2, atol=1e-2
        )
        out.sum().backward()
        assert part.weight.grad.shape == part.weight.shape


def in_mxfp8(t: Tensor) -> Tensor:
    """`t` as MXFP8 holds it along its last dim."""
    blocks = t.detach().float().unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True) / 448.0)))
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def with_mxfp8_experts(grid: Mesh | None = None) -> Plan:
    """A small mixture whose experts multiply in (emulated) MXFP8, in one of its two layers."""
    model = plans.tiny_moe_model(hidden_dim=64, num_experts=4)
    plan = parity_plan(grid, model=model, local=2)
    float8 = replace(plan.float8, recipe="mxfp8", experts=("layers.1.moe.experts",), emulate=True)
    return replace(plan, fsdp=replace(plan.fsdp, param_dtype="bfloat16"), float8=float8)


def test_the_planned_experts_multiply_in_mxfp8_and_no_others() -> None:
    plan = with_mxfp8_experts()
    module = build(plan.model, seq_len=32).to_empty(device="cpu")
    initialise(module, plan.model, seed=0)
    apply_float8(module, plan)
    assert converted_experts(module) == {"layers.1.moe.experts"}
    assert converted_linears(module) == frozenset()
    module.to(torch.bfloat16)
    experts = module.get_submodule("layers.1.moe.experts")
    counts = [5, 40, 0, 10]  # no multiples of 32, and one expert that nobody chose
    x = torch.randn(sum(counts), 32, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    out = experts(x, torch.tensor(counts))
    out.sum().backward()
    rows = x.split(counts)
    for number, (part, done) in enumerate(zip(rows, out.split(counts), strict=True)):
        w1, w2, w3 = (in_mxfp8(getattr(experts, name)[number]) for name in ("w1", "w2", "w3"))
        hidden = silu(linear(in_mxfp8(part), w1).bfloat16()) * linear(in_mxfp8(part), w3).bfloat16()
        expected = linear(in_mxfp8(hidden), w2)
        torch.testing.assert_close(done.float(), expected, rtol=2e-2, atol=2e-2 * out.abs().max().item())
    assert all(weight.grad[2].count_nonzero() == 0 for weight in experts.parameters())
    assert all(weight.grad[1].count_nonzero() > 0 for weight in experts.parameters())
    assert x.grad.shape == x.shape


def test_experts_in_mxfp8_train_alike_where_they_are_spread() -> None:
    plain = replace(with_mxfp8_experts(), float8=parity_plan().float8)
    exact, one, two = (
        run_ranks(run, plan.mesh.world_size, plan, False, timeout=180.0)[0].losses
        for plan in (plain, with_mxfp8_experts(), with_mxfp8_experts(plans.mesh(2, ep=2)))
    )
    assert one == pytest.approx(exact, rel=2e-2)
    assert one[0] != pytest.approx(exact[0], rel=1e-6)
    # The same numbers, but for which rows share a block in backward.
    assert two == pytest.approx(one, rel=1e-2)


def test_mxfp8_trains_like_float32_on_exactly_the_planned_linears() -> None:
    def trained(rank: Rank, plan: Plan) -> tuple[list[float], frozenset[str]]:
        seen: list[frozenset[str]] = []
        curve = run(rank, plan, False, lambda module: seen.append(converted_linears(module)))
        return curve.losses, seen[0]

    def row(degrees: dict[str, int], recipe: str) -> Plan:
        model = {"overrides": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "hidden_dim": 128}}
        float8 = {"recipe": recipe, "emulate": recipe != "none", "filter_fqns": ["wo"] if recipe != "none" else []}
        return compile_row(Row(recipe, degrees, sections={"model": model, "float8": float8}))

    exact, _ = run_ranks(trained, 1, row({}, "none"))[0]
    for degrees in ({"dp_shard": 2}, {"tp": 2}):
        plan = row(degrees, "mxfp8")
        losses, converted = run_ranks(trained, 2, plan, timeout=180.0)[0]
        linears = linear_modules(plan.model)
        assert converted == {fqn for selector in plan.float8.converted for fqn in select(selector, linears)}
        assert converted == {fqn for fqn in linears if not fqn.endswith(".wo")}
        assert losses == pytest.approx(exact, rel=5e-3)
        assert losses[0] != pytest.approx(exact[0], rel=1e-5)


def wide() -> object:
    """A model whose feed-forward layer is a multiple of 32 wide."""
    from titan_planner.ir.model import Block, Blocks, Gqa, RmsNorm, Rope, SwiGlu

    attention = Gqa(num_heads=4, num_kv_heads=4, head_dim=8, rope=Rope(theta=10000.0, scaling=None))
    block = Block(attention=attention, feed_forward=SwiGlu(hidden_dim=64), norm=RmsNorm(eps=1e-5))
    return plans.tiny_model(blocks=(Blocks(repeat=1, block=block),))


@pytest.mark.parametrize(
    ("recipe", "emulate", "has_torchao", "capability", "words"),
    [
        ("tensorwise", True, True, None, None),
        ("tensorwise", False, True, (8, 9), None),
        ("mxfp8", False, True, (10, 0), None),
        ("mxfp8", True, True, (9, 0), None),
        ("tensorwise", True, False, None, "the package torchao is not installed"),
        ("rowwise", False, True, (8, 0), "compute capability 8.9 or higher, but this one has 8.0"),
        ("mxfp8", False, True, (9, 0), "MXFP8, which needs a GPU of compute capability 10.0 or higher"),
        ("rowwise", False, True, None, "which a CPU has not"),
        (None, False, False, None, None),
    ],
)
def test_what_a_machine_lacks_is_said_before_it_starts(recipe, emulate, has_torchao, capability, words) -> None:
    plan = plans.tiny_plan()
    plan = replace(plan, float8=replace(plan.float8, recipe=recipe, emulate=emulate))
    found = float8_problems(plan, has_torchao, capability)
    assert found == [] if words is None else len(found) == 1 and words in found[0]


def test_importing_torchao_prints_nothing() -> None:
    import subprocess
    import sys

    code = "from titan_runtime.apply.float8 import _require_torchao; _require_torchao()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=plans.REPOSITORY)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_run_with_float8_output_prints_no_warning(tmp_path: Path) -> None:
    def trained(rank: Rank) -> int:
        from titan_runtime.train import train

        plan = gathered(plans.tiny_plan(plans.mesh(2), local=4, job=plans.job(str(tmp_path), 2)), precomputed=True)
        return train(plans.on_disk(plan), rank.index, rank.world_size, rank.store)

    output: list[str] = []
    assert run_ranks(trained, 2, process_group=False, output=output) == [0, 0]
    assert all(line.startswith("titan: ") for line in output[0].splitlines())
    assert output[1] == ""
