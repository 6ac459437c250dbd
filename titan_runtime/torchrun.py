"""The torchrun command lines that start a plan with as many ranks as it has."""

from __future__ import annotations

from titan_planner.ir.plan import Plan


def torchrun_line(plan: Plan, path: str) -> str:
    """The command that runs the plan in the file `path`; with several nodes, the one to give on each."""
    nodes, ranks = plan.cluster.nodes, plan.cluster.gpus_per_node
    if nodes == 1:
        where = f"--standalone --nproc-per-node {ranks}"
    else:
        where = f"--nnodes {nodes} --nproc-per-node {ranks} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"torchrun {where} -m titan_runtime --plan {path}"


def torchrun_advice(plan: Plan, path: str) -> str:
    """The line in words, with what HOST is where there is one."""
    line = torchrun_line(plan, path)
    if plan.cluster.nodes == 1:
        return line
    return f"on each of the {plan.cluster.nodes} nodes, with HOST the name of one of them: {line}"
