"""How a rank computes its share: recomputation, Float8, compilation, loss."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from titan_planner.ir.errors import InvariantError
from titan_planner.ir.record import Field, record

Float8Recipe: TypeAlias = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"]


@record
class CheckpointPolicy:
    """What a block keeps for backward. Layers refer to a policy by its name."""

    name: Annotated[str, Field("Name that layers refer to.", pattern=r"^[a-z][a-z0-9_]*$")]
    mode: Annotated[
        Literal["none", "full", "selective", "memory_budget"],
        Field(
            "none keeps all; full keeps the block's input; selective keeps listed ops; memory_budget lets compile choose."
        ),
    ]
    save_ops: Annotated[
        tuple[str, ...],
        Field(
            "selective: torch ops whose outputs are kept, e.g. aten.mm.default.",
            pattern=r"^[A-Za-z_][A-Za-z0-9_]*\.[A-Za-z0-9_]+\.[A-Za-z0-9_]+$",
        ),
    ]
    recompute_every_second_matmul: Annotated[bool, Field("selective: keep only every other matmul of the block.")]
    force_recompute_fqns: Annotated[
        tuple[str, ...], Field("selective: linears whose matmul shape is always recomputed.")
    ]
    memory_budget: Annotated[
        float | None, Field("memory_budget: 0 keeps as little as full, 1 as much as none.", ge=0, le=1)
    ]

    def check(self) -> None:
        if (self.mode == "memory_budget") != (self.memory_budget is not None):
            raise InvariantError(
                "memory_budget",
                f"policy `{self.name}`: `memory_budget` goes with mode memory_budget only",
                rule="ac-options",
            )
        if self.save_ops and self.mode != "selective":
            raise InvariantError(
                "save_ops", f"policy `{self.name}`: `save_ops` goes with mode selective only", rule="ac-options"
            )
        for name in ("recompute_every_second_matmul", "force_recompute_fqns"):
            if getattr(self, name) and self.mode != "selective":
                raise InvariantError(
                    name,
                    f"policy `{self.name}`: `{name}` goes with mode selective only, but the mode is {self.mode}",
                    rule="ac-options",
                )


KEEP_ALL = CheckpointPolicy(
    name="none",
    mode="none",
    save_ops=(),
    recompute_every_second_matmul=False,
    force_recompute_fqns=(),
    memory_budget=None,
)
"""The policy of modules that recompute nothing; every plan has it."""


@record
class ActivationCheckpoint:
    """The policies that layers use, and options common to them."""

    policies: Annotated[
        tuple[CheckpointPolicy, ...], Field("Named policies; `none` is always among them.", min_items=1)
    ]
    preserve_rng_state: Annotated[bool, Field("Restore RNG state when recomputing (needed with dropout only).")]
    early_stop: Annotated[bool, Field("Stop recomputing as soon as the last needed tensor is back.")]
    determinism_check: Annotated[Literal["default", "none"], Field("Compare recomputed tensors' metadata.")]

    def policy(self, name: str) -> CheckpointPolicy | None:
        """The policy called `name`, or None."""
        return next((policy for policy in self.policies if policy.name == name), None)


@record
class SkippedLinear:
    """Linears that stay in high precision, and why."""

    module: Annotated[str, Field("Selector.")]
    reason: Annotated[str, Field("Why it is not converted.", decision=False)]


@record
class Float8:
    """Which linears run in 8-bit floats. recipe null means none does."""

    recipe: Annotated[Float8Recipe | None, Field("Scaling recipe, or null for no Float8.")]
    converted: Annotated[tuple[str, ...], Field("Selectors of the linears that are converted.")]
    skipped: Annotated[tuple[SkippedLinear, ...], Field("Linears that are not, with reasons.")]
    experts: Annotated[
        tuple[str, ...], Field("Selectors of stacked experts whose grouped products are converted (mxfp8 only).")
    ] = ()
    enable_fsdp_float8_all_gather: Annotated[bool, Field("FSDP gathers weights in Float8 (tensorwise only).")]
    precompute_float8_dynamic_scale_for_fsdp: Annotated[
        bool, Field("Compute all scales in one step after the optimizer.")
    ]
    emulate: Annotated[bool, Field("Emulate in high precision where the hardware lacks Float8.")]

    def check(self) -> None:
        if self.recipe is None and (self.converted or self.experts or self.enable_fsdp_float8_all_gather):
            raise InvariantError(
                "recipe",
                "`recipe` is null, but Float8 linears or a Float8 all-gather are asked for",
                rule="float8-options",
            )
        if self.recipe is None and self.emulate:
            raise InvariantError(
                "emulate",
                "`emulate` is on, but `recipe` is null, so no Float8 is computed",
                "turn `emulate` off",
                rule="float8-options",
            )


@record
class Compile:
    """torch.compile of the listed components."""

    enable: Annotated[bool, Field("Compile at all.")]
    components: Annotated[
        tuple[Literal["model", "loss"], ...], Field("What is compiled; `model` is compiled block by block.")
    ]
    backend: Annotated[str, Field("Compiler backend, e.g. inductor.")]

    def check(self) -> None:
        if self.enable and not self.components:
            raise InvariantError(
                "components",
                "`enable` is on, but `components` is empty, so nothing is compiled",
                "turn `enable` off",
                rule="compile-components",
            )


@record
class Loss:
    """Cross-entropy over the vocabulary, normalised by the global number of valid tokens."""

    kind: Annotated[Literal["cross_entropy"], Field("Loss function.")]
    chunks: Annotated[
        int, Field("The sequence is cut into this many chunks for head and loss; 1 is plain.", ge=1, le=10**6)
    ]
    z_loss: Annotated[float, Field("Weight of the squared log-partition penalty; 0 turns it off.", ge=0)]
