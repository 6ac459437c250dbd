"""The time of one collective: alpha-beta models of NCCL's algorithms on the links that a group of ranks really has.

    group = place(cluster, ranks=8, stride=1)                    # a tensor group in a node
    collective_seconds("all_gather", 2**30, group)

Formulas: ring, tree and their steps as in NCCL's tuning model (NCCL 2.28 src/graph/tuning.cc); sizes moved as in nccl-tests
doc/PERFORMANCE.md (bus bandwidth = what the slowest link carries). All groups of an axis communicate at the same time, as
ranks of a training step do, so a node's links are shared by all groups that it holds a part of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias, assert_never

from titan_planner.cost.collectives import Axis, Collective, Kind, axis_ranks, axis_stride
from titan_planner.ir.cluster import Cluster
from titan_planner.ir.plan import Plan


@dataclass(frozen=True, slots=True)
class Network:
    """What links reach of their peaks, and what a message costs before the first byte. Defaults are NCCL on NVIDIA GPUs.

    Sources: [T] NCCL 2.28 src/graph/tuning.cc; [212] github.com/NVIDIA/nccl-tests issue 212, a maintainer on H100: 370 of
    450 GB/s per GPU in rings, and with NVLink SHARP 275 GB/s of algorithm bandwidth; [267] issue 267: 48 to 49 of 50 GB/s
    a ConnectX-7 port, and all-to-all uses one port a rank; [A] AutoParallel's H100 constants (NCCL 2.27): algorithm
    bandwidth of all-gather 537/434/394 GB/s and of all-reduce 324/236/267 GB/s at 2/4/8 GPUs of a node, all-to-all 380.
    """

    intra_efficiency: float = 0.85
    """Share of a node's link that a ring reaches with many ranks; [212] 0.82 and [A] 0.77 at 8, less `intra_start` / n."""
    intra_start: float = 0.44
    """What small rings lose: their share is intra_efficiency - intra_start / n; [A]: 0.60, 0.72, 0.77 at 2, 4, 8 ranks."""
    inter_efficiency: float = 0.96
    """Share of a network port; [267] 0.96 to 0.98, [A] 384 of 400 GB/s a node."""
    multicast_efficiency: float = 0.60
    """All-reduce in the switches of a node (NVLink SHARP): algorithm bandwidth over link; [212] 275/450, [A] 267/450."""
    tree_efficiency: float = 0.92
    """A tree's bandwidth over a ring's; [T]."""
    pat_efficiency: float = 0.75
    """The same for the logarithmic all-gather and reduce-scatter between nodes with one rank each; [T]."""
    exchange_intra_efficiency: float = 0.84
    """All-to-all and transfers in a node; [A] 380/450."""
    exchange_inter_efficiency: float = 0.90
    """All-to-all and transfers between nodes; [A] gives 1 - 0.44/nodes, 0.78 at 2 nodes and 0.95 at 8."""
    base_us: float = 8.4
    """Start of a collective with the protocol for large messages (Simple); [T]."""
    exchange_base_us: float = 20.0
    """Start of an all-to-all or a transfer; nominal, fitted to [A]'s 37 us for two nodes."""
    exchange_peer_us: float = 1.0
    """What every peer of an all-to-all adds; [A]: 37 us for 16 ranks to 290 us for 256."""
    multicast_us: float = 25.0
    """Latency of an all-reduce in a node's switches; [T] declares 23 to 25."""
    small: tuple[tuple[float, float, float, float], ...] = ((6.6, 0.18, 0.19, 0.25), (14.0, 0.56, 0.29, 0.90))
    """Protocols for smaller messages, LL and LL128: start in us, step over Simple's in a node and between nodes, share of
    the bandwidth; [T]: starts 6.6 and 14.0, steps 0.6 and 1.9 of 3.4 us on NVLink, 2.7 and 4.0 of 14 us on the network.
    LL carries 4 bytes of every 8 and reaches about half of that, LL128 120 of 128."""


DEFAULT_NETWORK = Network()


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate, as their placement decides what they have. `place` makes one."""

    ranks: int
    per_node: int
    """Ranks of the group on the node that has fewest of them."""
    nodes: int
    sharers: int
    """Groups of the axis that a node holds a part of, all at work at once."""
    intra_bytes_per_s: float
    """Peak of one rank's link in the node, one direction."""
    inter_bytes_per_s: float
    """Peak of one rank's share of the node's network ports, one direction; its own port where every GPU has one."""
    border_bytes_per_s: float
    """Peak of the network for the one rank of a group at a node's end, as in a ring shift."""
    intra_us: float
    inter_us: float
    multicast: bool
    """Whether the node's switches can add."""


@lru_cache(maxsize=4096)
def place(cluster: Cluster, ranks: int, stride: int) -> Group:
    """The worst placed group of `ranks` ranks, `stride` apart, on `cluster`; groups tile the ranks from 0 on.

    Rank r is on node r // gpus_per_node. A group that ends inside a node where the next one begins spans one node more
    than it would have to.
    """
    gpus = cluster.gpus_per_node
    seats = max(1, gpus // stride)  # places of one node that are `stride` apart
    worst: tuple[int, int] = (1, ranks)
    if ranks > seats or seats % ranks:
        # A group begins at any multiple of its ranks; where that lies within a node repeats after at most `seats` groups.
        found = []
        for start in {index * ranks % seats for index in range(seats)}:
            nodes = (start + ranks - 1) // seats + 1
            first = min(ranks, seats - start)
            last = (start + ranks - 1) % seats + 1 if nodes > 1 else first
            found.append((nodes, min(first, last)))
        worst = max(found, key=lambda one: (one[0], -one[1]))
    nodes, per_node = worst
    intra, inter = cluster.intra_node, cluster.inter_node
    # Links that a node's GPUs share are divided among them, for all of them send at once.
    own = inter.gb_per_s * 1e9 / (1 if inter.per_gpu else gpus)
    sharers = max(1, gpus // max(1, min(ranks, seats)))
    border = inter.gb_per_s * 1e9 / (1 if inter.per_gpu else sharers)
    return Group(
        ranks=ranks,
        per_node=per_node,
        nodes=nodes,
        sharers=sharers,
        intra_bytes_per_s=intra.gb_per_s * 1e9 / (1 if intra.per_gpu else gpus),
        inter_bytes_per_s=own,
        border_bytes_per_s=border,
        intra_us=intra.latency_us,
        inter_us=inter.latency_us,
        multicast=_adds_in_switches(cluster),
    )


def _adds_in_switches(cluster: Cluster) -> bool:
    """NVLink SHARP: NVSwitch of the third generation on, which came with compute capability 9.0; cards on PCIe lack it."""
    gpu = cluster.gpu
    capability = gpu.compute_capability
    if gpu.vendor != "nvidia" or capability is None or not cluster.intra_node.name.startswith("nvlink"):
        return False
    # Bridges join pairs, without a switch.
    return int(capability.split(".")[0]) >= 9 and not cluster.intra_node.name.endswith("bridge")


def axis_group(plan: Plan, axis: Axis, ranks: int | None = None) -> Group:
    """The group of `axis` of `plan`'s mesh, or of `ranks` neighbours on it (a partial reshard, a transfer's two ends)."""
    return place(plan.cluster, axis_ranks(plan, axis) if ranks is None else ranks, axis_stride(plan, axis))


def seconds(plan: Plan, collective: Collective, network: Network = DEFAULT_NETWORK) -> float:
    """Time of *one* of `collective.count` messages, in seconds, on links that nothing but its own axis uses."""
    # Pipeline neighbours: the worst pair of the whole axis, which two of its ranks alone would not show.
    ranks = None if collective.kind in ("send", "recv") else collective.ranks
    if collective.copies > 1:
        return _dispatch(collective.nbytes, collective.copies, axis_group(plan, collective.axis, ranks), network)
    return collective_seconds(collective.kind, collective.nbytes, axis_group(plan, collective.axis, ranks), network)


_Cost: TypeAlias = tuple[float, float]
"""Latency in microseconds, bytes over bandwidth in seconds."""


@lru_cache(maxsize=65536)
def collective_seconds(kind: Kind, nbytes: int, group: Group, network: Network = DEFAULT_NETWORK) -> float:
    """Seconds of one collective of `nbytes` (see `Collective` for what they are) over `group`; 0 over one rank.

    The fastest of what NCCL may choose. Never falls when bytes or latencies grow. A recv takes as long as its send: of a
    pair, count one.
    """
    if group.ranks == 1:
        return 0.0
    match kind:
        case "all_gather" | "reduce_scatter":
            return min(_ring(nbytes, 1, group, network), _logarithmic(nbytes, group, network))
        case "all_reduce":
            return min(
                _ring(nbytes, 2, group, network),
                _tree(nbytes, group, network),
                _in_switches(nbytes, group, network),
            )
        case "all_to_all":
            return _all_to_all(nbytes, group, network)
        case "ring" | "send" | "recv":
            return _transfer(nbytes, group, network)
        case _:
            assert_never(kind)


def ring_bytes_per_s(group: Group, network: Network = DEFAULT_NETWORK) -> float:
    """Bus bandwidth of rings over the group: what its slowest link carries, nodes' ports taken together.

    Every port that the group's ranks have on a node carries a ring of its own, so k ranks a node have k ports' bandwidth
    between nodes, and inside of a node every rank passes all of it on.
    """
    inside = group.intra_bytes_per_s * max(0.1, network.intra_efficiency - network.intra_start / group.ranks)
    if group.nodes == 1:
        return inside
    between = group.per_node * group.inter_bytes_per_s * network.inter_efficiency
    return between if group.per_node == 1 else min(inside, between)


def _protocols(latency_intra: float, latency_inter: float, group: Group, network: Network, transfer_s: float) -> float:
    """The fastest protocol for a message of so many steps in nodes and between them, in seconds."""
    simple = network.base_us + latency_intra * group.intra_us + latency_inter * group.inter_us
    best = simple * 1e-6 + transfer_s
    for base, intra, inter, share in network.small:
        latency = base + latency_intra * group.intra_us * intra + latency_inter * group.inter_us * inter
        best = min(best, latency * 1e-6 + transfer_s / share)
    return best


def _ring(nbytes: int, passes: int, group: Group, network: Network) -> float:
    """passes (n - 1) steps, each of B/n: all-gather and reduce-scatter pass once, all-reduce twice.

    Of the steps nodes - 1, and of an all-reduce 2 nodes, go over the network (NCCL 2.28 tuning.cc, nInterSteps).
    """
    n = group.ranks
    transfer = passes * nbytes * (n - 1) / n / ring_bytes_per_s(group, network)
    steps = passes * (n - 1)
    between = 0 if group.nodes == 1 else min(steps, 2 * group.nodes if passes == 2 else group.nodes - 1)
    return _protocols(steps - between, between, group, network, transfer)


def _tree(nbytes: int, group: Group, network: Network) -> float:
    """All-reduce up and down a double binary tree of nodes, chains inside of them (NCCL 2.28 tuning.cc)."""
    transfer = 2 * nbytes / (ring_bytes_per_s(group, network) * network.tree_efficiency)
    depth = math.ceil(math.log2(group.nodes)) if group.nodes > 1 else 0
    chain = -(-group.ranks // group.nodes) - 1
    return _protocols(2 * chain, 2 * depth, group, network, transfer)


def _in_switches(nbytes: int, group: Group, network: Network) -> float:
    """All-reduce that the node's switches compute; between nodes each rank's part goes up and down a tree."""
    if not group.multicast or group.per_node < 3:
        return math.inf  # NCCL asks for more than two ranks a node
    inside = nbytes / (group.intra_bytes_per_s * network.multicast_efficiency)
    if group.nodes == 1:
        return network.multicast_us * 1e-6 + inside
    between = (
        2 * nbytes / (group.per_node * group.inter_bytes_per_s * network.inter_efficiency * network.tree_efficiency)
    )
    depth = math.ceil(math.log2(group.nodes))
    return (network.multicast_us + 2 * depth * group.inter_us) * 1e-6 + max(inside, between)


def _logarithmic(nbytes: int, group: Group, network: Network) -> float:
    """All-gather or reduce-scatter in log2(n) steps, which NCCL (PAT, since 2.23) has for one rank a node."""
    if group.nodes == 1 or group.nodes < group.ranks:
        return math.inf
    n = group.ranks
    steps = math.ceil(math.log2(n))
    transfer = nbytes * (n - 1) / n / (ring_bytes_per_s(group, network) * network.pat_efficiency)
    return (network.base_us + steps * group.inter_us) * 1e-6 + transfer


def _all_to_all(nbytes: int, group: Group, network: Network) -> float:
    """Every rank sends B/n to every other one: in the node over its link, to others over its own port, both at once."""
    n = group.ranks
    inside = nbytes * (group.per_node - 1) / n / (group.intra_bytes_per_s * network.exchange_intra_efficiency)
    latency = network.exchange_base_us + network.exchange_peer_us * (n - 1) + group.intra_us
    if group.nodes == 1:
        return latency * 1e-6 + inside
    remote = nbytes * (n - group.per_node) / n
    between = remote / (group.inter_bytes_per_s * network.exchange_inter_efficiency)
    return (latency + group.inter_us) * 1e-6 + max(inside, between)


def _dispatch(nbytes: int, copies: int, group: Group, network: Network) -> float:
    """An exchange of tokens of which each rank, and each other node, gets a token once, however many of its experts want it.

    `copies` choices fall on n of the ranks (or nodes) evenly: n (1 - (1 - 1/n)^copies) different ones are hit (DeepEP,
    github.com/deepseek-ai/DeepEP, normal kernels: over the network to the rank's counterpart, from there over NVLink).
    """
    n = group.ranks
    token_bytes = nbytes / copies
    ranks_hit = n * (1 - (1 - 1 / n) ** copies)
    inside = token_bytes * ranks_hit * (n - 1) / n / (group.intra_bytes_per_s * network.exchange_intra_efficiency)
    latency = (network.exchange_base_us + group.intra_us) * 1e-6
    if group.nodes == 1:
        return latency + inside
    nodes_hit = group.nodes * (1 - (1 - 1 / group.nodes) ** copies)
    remote = token_bytes * nodes_hit * (group.nodes - 1) / group.nodes
    between = remote / (group.inter_bytes_per_s * network.exchange_inter_efficiency)
    return latency + group.inter_us * 1e-6 + max(inside, between)


def _transfer(nbytes: int, group: Group, network: Network) -> float:
    """One message to a neighbour; the slowest of the group's pairs decides."""
    if group.nodes == 1:
        speed = group.intra_bytes_per_s * network.exchange_intra_efficiency
        return (network.exchange_base_us + group.intra_us) * 1e-6 + nbytes / speed
    port = group.inter_bytes_per_s if group.per_node == 1 else group.border_bytes_per_s
    # A port cannot be faster than what it is attached by, whatever a hand-written cluster says.
    speed = min(port * network.exchange_inter_efficiency, group.intra_bytes_per_s * network.exchange_intra_efficiency)
    return (network.exchange_base_us + group.inter_us) * 1e-6 + nbytes / speed
