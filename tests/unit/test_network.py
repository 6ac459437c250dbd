"""Times of collectives: hand-computed, against published measurements, and what must hold for any of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.plans import mesh, tiny_plan
from titan_planner.cost.collectives import Axis, axis_ranks, axis_stride, collectives
from titan_planner.cost.network import (
    DEFAULT_NETWORK,
    Group,
    Network,
    axis_group,
    collective_seconds,
    place,
    ring_bytes_per_s,
    seconds,
)
from titan_planner.hardware import find_gpu, find_link, find_node
from titan_planner.ir.cluster import Cluster
from titan_planner.sharding import tensor_parallel_rows

GB = 1e9
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ring", "send", "recv")


def cluster(node: str, nodes: int) -> Cluster:
    found = find_node(node)
    return Cluster(
        gpu=find_gpu(found.gpu),
        gpus_per_node=found.gpus_per_node,
        nodes=nodes,
        intra_node=find_link(found.intra_node),
        inter_node=find_link(found.inter_node),
        price_per_gpu_hour=None,
    )


H100 = cluster("dgx-h100", 64)
A100 = cluster("dgx-a100-80gb", 64)
# No latency, no loss: sizes over bandwidth are all that is left.
IDEAL = Network(
    intra_efficiency=1.0, intra_start=0.0, inter_efficiency=1.0, multicast_efficiency=0.01, tree_efficiency=0.01,
    pat_efficiency=0.01, exchange_intra_efficiency=1.0, exchange_inter_efficiency=1.0, base_us=0.0, exchange_base_us=0.0,
    exchange_peer_us=0.0, multicast_us=0.0, small=(),
)  # fmt: skip


def at_once(here: Cluster) -> Cluster:
    """`here` without latencies."""
    return replace(
        here,
        intra_node=replace(here.intra_node, latency_us=0.0),
        inter_node=replace(here.inter_node, latency_us=0.0),
    )


# ------------------------------------------------------------------ placement


@pytest.mark.parametrize(
    ("node", "ranks", "stride", "nodes", "per_node", "sharers"),
    [
        ("dgx-h100", 8, 1, 1, 8, 1),  # tp 8 in a node
        ("dgx-h100", 4, 1, 1, 4, 2),  # tp 4: two groups a node
        ("dgx-h100", 64, 8, 64, 1, 8),  # fsdp over rails beside tp 8: eight groups, one port each
        ("dgx-h100", 256, 1, 32, 8, 1),
        ("dgx-h100", 32, 2, 8, 4, 2),  # beside tp 2: four ranks a node
        ("dgx-h100", 16, 64, 16, 1, 8),  # pipeline ranks, nodes apart
        ("dgx-h100", 12, 1, 2, 4, 1),  # groups end within nodes: 8 + 4 and 4 + 8
        ("gb200-nvl72", 64, 1, 2, 8, 1),  # 72 to a rack: the second group has 8 in the first one
        ("gb200-nvl72", 36, 2, 1, 36, 2),
        ("cpu-4", 2, 2, 1, 2, 2),
    ],
)
def test_groups_lie_where_the_mesh_puts_them(
    node: str, ranks: int, stride: int, nodes: int, per_node: int, sharers: int
) -> None:
    group = place(cluster(node, 64), ranks, stride)
    assert (group.nodes, group.per_node, group.sharers) == (nodes, per_node, sharers)


def test_the_worst_of_all_groups_is_meant() -> None:
    """Against counting every group's ranks on every node."""
    for gpus, ranks, stride in itertools.product((4, 6, 8), (2, 3, 4, 6, 8, 12), (1, 2)):
        here = replace(H100, gpus_per_node=gpus, nodes=24)
        seats = gpus // stride
        spans = []
        for start in range(0, 24 * seats, ranks):
            held: dict[int, int] = {}
            for seat in range(start, start + ranks):
                held[seat // seats] = held.get(seat // seats, 0) + 1
            spans.append((len(held), min(held.values())))
        group = place(here, ranks, stride)
        assert (group.nodes, group.per_node) == max(spans, key=lambda span: (span[0], -span[1]))


AXES: dict[Axis, tuple[str, ...]] = {
    "pp": ("pp",),
    "dp_replicate": ("dp_replicate",),
    "fsdp": ("dp_shard", "cp"),
    "cp": ("cp",),
    "tp": ("tp",),
    "data": ("dp_replicate", "dp_shard", "cp"),
}


@pytest.mark.parametrize("axis", AXES)
def test_the_ranks_of_an_axis_are_a_progression(axis: Axis) -> None:
    """Against the mesh's own coordinates."""
    plan = tiny_plan(mesh(pp=2, dp_replicate=3, dp_shard=2, cp=2, tp=4), total=6)
    size, stride = axis_ranks(plan, axis), axis_stride(plan, axis)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(plan.mesh.world_size):
        at = plan.mesh.coordinates(rank)
        groups.setdefault(tuple(place for name, place in at.items() if name not in AXES[axis]), []).append(rank)
    assert all(group == list(range(group[0], group[0] + size * stride, stride)) for group in groups.values())


def test_a_pipeline_transfer_is_priced_by_its_worst_pair() -> None:
    """Four pipeline ranks over two nodes: between the second and the third lies the network."""
    plan = replace(tiny_plan(mesh(pp=4, tp=4), total=4), cluster=replace(H100, nodes=2))
    group = axis_group(plan, "pp")
    assert (group.ranks, group.nodes, group.per_node) == (4, 2, 2)
    assert collective_seconds("send", 10**9, group) == pytest.approx(1 / (50 * 0.9), rel=0.01)


def test_a_record_costs_what_its_axis_has() -> None:
    """tp 8 fills nodes, so that fsdp's eight groups a node have a port each, and tp's only group NVLink."""
    plan = tiny_plan(mesh(dp_shard=8, tp=8), total=8)
    plan = replace(
        plan, cluster=replace(H100, nodes=8), sharding=tensor_parallel_rows(plan.model, sequence_parallel=True, loss_parallel=True),
    )  # fmt: skip
    found = {(one.axis, one.kind): one for one in collectives(plan)}
    for key, group in ((("fsdp", "all_gather"), place(H100, 8, 8)), (("tp", "all_gather"), place(H100, 8, 1))):
        one = found[key]
        assert seconds(plan, one) == collective_seconds(one.kind, one.nbytes, group)


def test_ports_add_up_over_a_nodes_ranks_and_are_shared_by_a_nodes_groups() -> None:
    """Eight ports of 50 GB/s: all for one group of eight ranks a node, one each for eight groups."""
    assert ring_bytes_per_s(place(H100, 64, 8), IDEAL) == 50 * GB
    assert ring_bytes_per_s(place(H100, 128, 2), IDEAL) == 4 * 50 * GB
    assert ring_bytes_per_s(place(H100, 256, 1), IDEAL) == 400 * GB
    assert ring_bytes_per_s(place(H100, 8, 1), IDEAL) == 450 * GB
    # Four ports of 12.5 GB/s for the eight GPUs of a node.
    shared = cluster("aws-p4d", 8)
    assert ring_bytes_per_s(place(shared, 8, 8), IDEAL) == 50 * GB / 8
    assert ring_bytes_per_s(place(shared, 64, 1), IDEAL) == 50 * GB


# ------------------------------------------------------------------ by hand


def test_without_latency_and_loss_times_are_bytes_over_links() -> None:
    still = at_once(H100)
    inside, across = place(still, 8, 1), place(still, 16, 1)
    assert collective_seconds("all_gather", 8 * 10**9, inside, IDEAL) == pytest.approx(7 / 450)
    assert collective_seconds("reduce_scatter", 8 * 10**9, inside, IDEAL) == pytest.approx(7 / 450)
    assert collective_seconds("all_reduce", 8 * 10**9, inside, IDEAL) == pytest.approx(14 / 450)
    assert collective_seconds("all_gather", 16 * 10**9, across, IDEAL) == pytest.approx(15 / 400)
    # Of 16 parts 7 go to ranks of the node and 8 to the other node, by one's own port.
    assert collective_seconds("all_to_all", 16 * 10**9, across, IDEAL) == pytest.approx(8 / 50)
    assert collective_seconds("all_to_all", 8 * 10**9, inside, IDEAL) == pytest.approx(7 / 450)
    assert collective_seconds("send", 10**9, place(still, 2, 64), IDEAL) == pytest.approx(1 / 50)
    assert collective_seconds("ring", 10**9, inside, IDEAL) == pytest.approx(1 / 450)


def test_latency_is_of_steps_within_and_between_nodes() -> None:
    """A ring over 32 nodes of 8: 255 steps, 31 of them over the network: the 1204 us that AutoParallel lists, 8.4 + 224 x
    3.4 + 31 x 14; and over 2 nodes 70.4."""
    large = replace(DEFAULT_NETWORK, small=())
    assert collective_seconds("all_gather", 0, place(H100, 256, 1), large) == pytest.approx(1204e-6, rel=1e-3)
    assert collective_seconds("all_gather", 0, place(H100, 16, 1), large) == pytest.approx(70e-6, rel=0.01)
    assert collective_seconds("all_gather", 0, place(H100, 8, 1), large) == pytest.approx(32.2e-6, rel=1e-3)


def test_small_messages_take_the_protocol_and_the_algorithm_of_few_steps() -> None:
    inside = place(H100, 8, 1)
    # LL: 6.6 us and seven steps of 0.6.
    assert collective_seconds("all_gather", 0, inside) == pytest.approx((6.6 + 7 * 3.4 * 0.18) * 1e-6)
    # A tree's 2 x (7 + log2 32) steps, not a ring's 510.
    tree = (6.6 + 2 * 7 * 3.4 * 0.18 + 2 * 5 * 14 * 0.19) * 1e-6
    assert collective_seconds("all_reduce", 0, place(H100, 256, 1)) == pytest.approx(tree)
    # One rank a node gathers in log2(64) steps where a ring takes 63.
    rails = place(H100, 64, 8)
    assert collective_seconds("all_gather", 2**22, rails) < 63 * 4e-6


# ------------------------------------------------------------------ as others measured


@pytest.mark.parametrize(
    ("kind", "where", "ranks", "gbps", "tolerance"),
    [
        # AutoParallel's H100 constants, NCCL 2.27: algorithm bandwidth for large messages.
        ("all_gather", H100, 2, 537, 0.08),
        ("all_gather", H100, 4, 434, 0.08),
        ("all_gather", H100, 8, 394, 0.08),
        ("all_reduce", H100, 8, 267, 0.05),
        ("all_reduce", H100, 4, 236, 0.20),
        ("all_to_all", H100, 8, 380 * 8 / 7, 0.05),
        ("all_gather", H100, 16, 410, 0.10),
        ("all_gather", H100, 256, 386, 0.10),
        # nccl-tests issue 212: 370 GB/s of bus bandwidth but for all-reduce, and 275 of algorithm bandwidth for that.
        ("all_gather", H100, 8, 370 * 8 / 7, 0.08),
        ("all_reduce", H100, 8, 275, 0.05),
    ],
)
def test_large_messages_reach_what_others_measured(
    kind: str, where: Cluster, ranks: int, gbps: float, tolerance: float
) -> None:
    size = 16 * 2**30
    reached = size / collective_seconds(kind, size, place(where, ranks, 1)) / GB  # type: ignore[arg-type]
    assert reached == pytest.approx(gbps, rel=tolerance)


def test_a_port_reaches_48_of_50() -> None:
    """nccl-tests issue 267: ConnectX-7 at 400 Gb/s gives 48 to 49 GB/s."""
    size = 16 * 2**30
    reached = size * 63 / 64 / collective_seconds("all_gather", size, place(H100, 64, 8)) / GB
    assert reached == pytest.approx(48.5, rel=0.03)


# ------------------------------------------------------------------ what must always hold


GROUPS = [place(here, ranks, stride) for here in (H100, A100, cluster("gb200-nvl72", 8), cluster("aws-p4d", 8))
          for ranks, stride in ((2, 1), (4, 1), (8, 1), (8, 8), (16, 1), (32, 2), (64, 1))]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_never_take_less(kind: str) -> None:
    for group in GROUPS:
        times = [collective_seconds(kind, 4**power, group) for power in range(18)]  # type: ignore[arg-type]
        assert times == sorted(times)
        assert times[0] > 0
        assert times[-1] > times[0]


@pytest.mark.parametrize("kind", KINDS)
def test_more_latency_and_slower_links_never_take_less(kind: str) -> None:
    def time(group: Group, nbytes: int) -> float:
        return collective_seconds(kind, nbytes, group)  # type: ignore[arg-type]

    for group, nbytes in itertools.product(GROUPS, (0, 2**16, 2**24, 2**32)):
        assert time(replace(group, intra_us=2 * group.intra_us), nbytes) >= time(group, nbytes)
        assert time(replace(group, inter_us=2 * group.inter_us), nbytes) >= time(group, nbytes)
        assert time(replace(group, intra_bytes_per_s=group.intra_bytes_per_s / 2), nbytes) >= time(group, nbytes)
        slower = replace(
            group,
            inter_bytes_per_s=group.inter_bytes_per_s / 2,
            border_bytes_per_s=group.border_bytes_per_s / 2,
        )
        assert time(slower, nbytes) >= time(group, nbytes)


def test_one_rank_sends_nothing() -> None:
    assert all(collective_seconds(kind, 2**30, place(H100, 1, 1)) == 0 for kind in KINDS)  # type: ignore[arg-type]


def test_only_switches_that_can_add_do() -> None:
    """NVLink SHARP came with H100: an A100's all-reduce is a ring's."""
    assert place(H100, 8, 1).multicast
    assert not place(A100, 8, 1).multicast
    assert not place(cluster("workstation-4x4090", 1), 4, 1).multicast
