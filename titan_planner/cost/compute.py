"""Seconds of computing per module and microbatch on one rank: forward, both halves of backward, recomputation."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import assert_never

from titan_planner.cost.ops import (
    Elementwise,
    Fusion,
    Matmul,
    Mixing,
    Op,
    Shape,
    block_ops,
)
from titan_planner.cost.program import Attention
from titan_planner.cost.roofline import (
    CASTS,
    MatmulSeconds,
    Precision,
    attention_seconds,
    elementwise_seconds,
    matmul_seconds,
    memory_rate,
)
from titan_planner.ir.cluster import Gpu
from titan_planner.ir.execution import CheckpointPolicy
from titan_planner.ir.model import Block


@dataclass(frozen=True, slots=True)
class Seconds:
    """Time of computing by kind. `launch` is what the host adds when it cannot launch kernels as fast as they run."""

    matmul: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    casts: float = 0.0
    launch: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.matmul + self.attention + self.memory_bound + self.casts + self.launch

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.matmul + other.matmul,
            self.attention + other.attention,
            self.memory_bound + other.memory_bound,
            self.casts + other.casts,
            self.launch + other.launch,
        )

    def __mul__(self, times: float) -> Seconds:
        return Seconds(
            self.matmul * times,
            self.attention * times,
            self.memory_bound * times,
            self.casts * times,
            self.launch * times,
        )


@dataclass(frozen=True, slots=True)
class ModuleSeconds:
    """One module, one microbatch. Backward is `recompute`, then `to_input`, then `to_weight`."""

    forward: Seconds = Seconds()
    recompute: Seconds = Seconds()
    to_input: Seconds = Seconds()
    to_weight: Seconds = Seconds()

    @property
    def backward(self) -> Seconds:
        """Everything that backward does."""
        return self.recompute + self.to_input + self.to_weight

    def __add__(self, other: ModuleSeconds) -> ModuleSeconds:
        return ModuleSeconds(
            self.forward + other.forward,
            self.recompute + other.recompute,
            self.to_input + other.to_input,
            self.to_weight + other.to_weight,
        )

    def __mul__(self, times: float) -> ModuleSeconds:
        return ModuleSeconds(
            self.forward * times, self.recompute * times, self.to_input * times, self.to_weight * times
        )


@dataclass(frozen=True, slots=True)
class Kernels:
    """What decides how fast an op runs, beside its shape."""

    gpu: Gpu
    base: Precision  # of everything else: bf16 or float32
    precision: Precision  # of the converted linears
    emulated: bool  # 8-bit values in products of the base's precision
    fused_casts: bool
    float8_products: float  # of the 8-bit rate that the GPU's efficiency gives, what this program's kernels reach
    gradient_bytes: int
    launches: bool  # the host launches every kernel: no CUDA graphs
    early_stop: bool  # recomputation ends with the last tensor that backward needs
    attention: Attention
    recompute_attention: bool  # of blocks that keep all else
    recompute_elementwise: bool  # a selective policy computes memory-bound ops again


ATTENTION_SAVES = "_scaled_dot_product"
"""What the names of torch's attention ops begin with, after the namespace."""


@functools.lru_cache(maxsize=4096)
def block_seconds(
    block: Block,
    dim: int,
    shape: Shape,
    policy: CheckpointPolicy,
    converted: frozenset[str],
    kernels: Kernels,
    forced: frozenset[str] = frozenset(),
) -> ModuleSeconds:
    """One transformer block; `converted` are the linears in 8-bit, `forced` those whose shapes are always recomputed,
    named below the block."""
    ops = block_ops(block, dim, shape)
    forward = _Clock(kernels)
    to_input, to_weight = _Clock(kernels), _Clock(kernels)
    for op in ops:
        forward.run(op, converted)
    for op in reversed(ops):
        to_input.run_backward(op, converted)
        to_weight.run_weight_gradient(op, converted)
    again = _Clock(kernels)
    share = 1.0
    if policy.mode == "memory_budget":
        # The compiler's own choice: the cheapest ops first, so less time than bytes; taken as in proportion.
        assert policy.memory_budget is not None
        share = 1.0 - policy.memory_budget
    for op in recomputed(ops, policy, kernels, forced):
        again.run(op, converted)
    return ModuleSeconds(forward.seconds(), again.seconds() * share, to_input.seconds(), to_weight.seconds())


def recomputed(
    ops: tuple[Op, ...], policy: CheckpointPolicy, kernels: Kernels, forced: frozenset[str] = frozenset()
) -> tuple[Op, ...]:
    """The ops of a block's forward that backward runs again under `policy`."""
    match policy.mode:
        case "none":
            return tuple(op for op in ops if isinstance(op, Mixing)) if kernels.recompute_attention else ()
        case "full" | "memory_budget":
            return ops if not kernels.early_stop else _until_last_saved(ops)
        case "selective":
            return tuple(_not_saved(ops, policy, kernels, forced))
        case _:
            assert_never(policy.mode)


def _until_last_saved(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Without the last matmul and what follows: nothing that backward needs comes out of them."""
    last = max(i for i, op in enumerate(ops) if isinstance(op, Matmul))
    return ops[:last]


def _not_saved(ops: tuple[Op, ...], policy: CheckpointPolicy, kernels: Kernels, forced: frozenset[str]) -> Iterable[Op]:
    products = 0
    attention = any(ATTENTION_SAVES in name for name in policy.save_ops)
    grouped = any("grouped_mm" in name for name in policy.save_ops)
    plain = "aten.mm.default" in policy.save_ops
    # As the runtime does: products are told by shape, those of a forced shape are no part of the count.
    shapes = {(op.n, op.k) for op in ops if isinstance(op, Matmul) and op.name in forced}
    for op in _until_last_saved(ops):
        match op:
            case Mixing():
                if not attention:
                    yield op
            case Elementwise():
                if kernels.recompute_elementwise:
                    yield op
            case Matmul(name=name) if ".experts." in name and ".shared_experts." not in name:
                if not grouped:
                    yield op
            case Matmul():
                if (op.n, op.k) in shapes:
                    yield op
                    continue
                products += 1
                if not plain or (policy.recompute_every_second_matmul and products % 2 == 0):
                    yield op
            case _:
                assert_never(op)


class _Clock:
    """Adds up the ops of one pass, on the device and on the host."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._parts = [0.0, 0.0, 0.0, 0.0]
        self._launched = 0

    def run(self, op: Op, converted: frozenset[str]) -> None:
        kernels, parts = self._kernels, self._parts
        match op:
            case Matmul():
                took = self._matmul(op, converted)
                parts[0] += took.forward
                parts[3] += took.forward_casts
                self._launched += 1 + (3 if took.forward_casts else 0)
            case Mixing():
                parts[1] += attention_seconds(op, kernels.gpu, kernels.attention, kernels.base == "float32")[0]
                self._launched += 1
            case Elementwise():
                parts[2] += elementwise_seconds(op, kernels.gpu)[0]
                self._launched += op.forward_kernels
            case _:
                assert_never(op)

    def run_backward(self, op: Op, converted: frozenset[str]) -> None:
        kernels, parts = self._kernels, self._parts
        match op:
            case Matmul():
                took = self._matmul(op, converted)
                parts[0] += took.input_gradient
                parts[3] += took.backward_casts
                self._launched += 1 + (2 if took.backward_casts else 0)
            case Mixing():
                parts[1] += attention_seconds(op, kernels.gpu, kernels.attention, kernels.base == "float32")[1]
                self._launched += 3
            case Elementwise():
                parts[2] += elementwise_seconds(op, kernels.gpu)[1]
                self._launched += op.backward_kernels
            case _:
                assert_never(op)

    def run_weight_gradient(self, op: Op, converted: frozenset[str]) -> None:
        if isinstance(op, Matmul):
            self._parts[0] += self._matmul(op, converted).weight_gradient
            self._launched += 1

    def _matmul(self, op: Matmul, converted: frozenset[str]) -> MatmulSeconds:
        kernels = self._kernels
        return linear_seconds(op, kernels.precision if op.name in converted else kernels.base, kernels)

    def seconds(self) -> Seconds:
        matmul, attention, memory, casts = self._parts
        host = self._launched * self._kernels.gpu.efficiency.launch_us * 1e-6 if self._kernels.launches else 0.0
        return Seconds(matmul, attention, memory, casts, max(0.0, host - sum(self._parts)))


def linear_seconds(op: Matmul, precision: Precision, kernels: Kernels) -> MatmulSeconds:
    """One linear under `kernels`. Emulated 8-bit values are rounded in passes of their own and multiplied as they were."""
    took = matmul_seconds(
        op, precision, kernels.gpu, kernels.fused_casts, kernels.gradient_bytes, kernels.float8_products
    )
    if not kernels.emulated or precision == kernels.base:
        return took
    base = matmul_seconds(op, kernels.base, kernels.gpu, False, kernels.gradient_bytes)
    casts = CASTS[precision, False]
    rate = memory_rate(kernels.gpu) / EMULATION_PASSES
    return replace(
        base,
        forward_casts=(casts.input * op.m * op.k + casts.weight * op.groups * op.n * op.k) / rate,
        backward_casts=casts.gradient * op.m * op.n / rate,
    )


EMULATION_PASSES = 3.0
"""Passes of an emulated cast over a fused one: scale, round to 8 bits, widen again (torchao's emulation, op by op)."""


# Bytes per logit that the loss moves, forward and backward: eager widens to float32 (read 2 write 4), log-softmax (4, 4),
# its backward (8, 4) and narrows (4, 2); compiled reads bf16 twice and writes the gradient once; Megatron's
# vocabulary-parallel loss keeps float32 probabilities in place.
_LOSS_BYTES: dict[Fusion, tuple[float, float]] = {"eager": (16, 18), "compiled": (6, 6), "fused": (10, 6)}


@functools.lru_cache(maxsize=1024)
def head_seconds(
    dim: int,
    local_vocab: int,
    loss_vocab: int,
    shape: Shape,
    chunks: int,
    precision: Precision,
    loss_fusion: Fusion,
    kernels: Kernels,
) -> ModuleSeconds:
    """Final norm, output projection on `local_vocab` rows, and the loss of `loss_vocab` logits a token."""
    rate = memory_rate(kernels.gpu)
    product = linear_seconds(Matmul("output", shape.tokens, local_vocab, dim), precision, kernels)
    logits = float(shape.tokens * loss_vocab)
    there, back = _LOSS_BYTES[loss_fusion]
    norm = shape.stream_tokens * dim
    forward = Seconds(
        matmul=product.forward, memory_bound=(there * logits + 4 * norm) / rate, casts=product.forward_casts
    )
    return ModuleSeconds(
        forward=forward,
        # A chunked loss computes each chunk's logits again in backward.
        recompute=forward if chunks > 1 else Seconds(),
        to_input=Seconds(
            matmul=product.input_gradient,
            memory_bound=(back * logits + 8 * norm) / rate,
            casts=product.backward_casts,
        ),
        to_weight=Seconds(matmul=product.weight_gradient),
    )


@functools.lru_cache(maxsize=1024)
def embedding_seconds(dim: int, local_vocab: int, shape: Shape, kernels: Kernels) -> ModuleSeconds:
    """Looking rows up, and adding gradients to a table that is first filled with zeros."""
    rate = memory_rate(kernels.gpu)
    rows = float(shape.tokens * dim)
    table = float(local_vocab * dim)
    return ModuleSeconds(
        forward=Seconds(memory_bound=4 * rows / rate),
        to_weight=Seconds(memory_bound=(8 * rows + 2 * table) / rate),
    )
