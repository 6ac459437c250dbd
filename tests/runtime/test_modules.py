"""Model code against the plan's inventory and against references written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests import plans
from titan_planner.ir.inventory import num_params, parameters
from titan_planner.ir.model import Block, Blocks, Gqa, Mlp, Model, RmsNorm, Rope, RopeScaling, SwiGlu
from titan_planner.models import MODELS
from titan_runtime.init import initialise
from titan_runtime.modules import build
from titan_runtime.modules.rms_norm import RMSNorm
from titan_runtime.modules.rope import RotaryTable, frequencies, rotary_table, rotate

FLAVORS = [(family, flavor) for family, flavors in MODELS.items() for flavor in flavors]


@pytest.mark.parametrize(("family", "flavor"), FLAVORS)
def test_a_module_on_the_meta_device_has_exactly_the_planned_parameters(family: str, flavor: str) -> None:
    model = MODELS[family][flavor]
    module = build(model, seq_len=8)
    built = [(fqn, tuple(tensor.shape)) for fqn, tensor in module.named_parameters()]
    assert sorted(built) == sorted((parameter.fqn, parameter.shape) for parameter in parameters(model))
    assert sum(tensor.numel() for tensor in module.parameters()) == num_params(model)
    assert all(tensor.is_meta for tensor in module.parameters())


def test_parameters_come_in_the_inventorys_order_where_order_has_a_meaning() -> None:
    model = plans.tiny_model()
    layers = [fqn for fqn, _ in build(model).named_parameters() if fqn.startswith("layers.")]
    assert [fqn.split(".")[1] for fqn in layers] == sorted(fqn.split(".")[1] for fqn in layers)


def test_a_tied_output_is_the_embedding() -> None:
    module = build(plans.tiny_model(tied=True))
    assert module.output.weight is module.tok_embeddings.weight
    assert "output.weight" not in dict(module.named_parameters())
    assert module.get_submodule("output") is module.output


# ------------------------------------------------------------------ rotary embedding


def test_rotary_embedding_is_multiplication_by_a_complex_number_of_modulus_one() -> None:
    rope, head_dim, length = Rope(theta=10000.0, scaling=None), 8, 16
    x = torch.randn(2, length, 3, head_dim, generator=torch.Generator().manual_seed(0))
    angles = torch.tensor(
        [[position * 10000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2)] for position in range(length)]
    )
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.view_as_real(turned).flatten(-2)
    torch.testing.assert_close(rotate(x, rotary_table(rope, head_dim, length)), expected, rtol=1e-5, atol=1e-6)


def test_rotary_scaling_is_metas_loop() -> None:
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
    plain = frequencies(Rope(theta=500000.0, scaling=None), 128).tolist()
    expected = []
    for frequency in plain:  # Meta's apply_scaling, llama_models/llama3/model.py
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4.0:
            expected.append(frequency)
        elif wavelength > 8192 / 1.0:
            expected.append(frequency / 8.0)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * frequency / 8.0 + smooth * frequency)
    scaled = frequencies(Rope(theta=500000.0, scaling=scaling), 128).tolist()
    assert scaled == pytest.approx(expected, rel=1e-12)
    assert scaled[0] == plain[0]
    assert scaled[-1] == plain[-1] / 8.0
    assert any(a not in (b, b / 8.0) for a, b in zip(scaled, plain, strict=True))


def test_a_longer_table_gives_a_short_sequence_the_same_angles() -> None:
    rope = Rope(theta=10000.0, scaling=None)
    x = torch.randn(1, 5, 2, 8)
    assert torch.equal(rotate(x, rotary_table(rope, 8, 5)), rotate(x, rotary_table(rope, 8, 64)))


def test_the_table_is_right_after_memory_was_given_to_a_meta_module() -> None:
    module = build(plans.tiny_model(), seq_len=32).to_empty(device="cpu")
    for table in (part for part in module.modules() if isinstance(part, RotaryTable)):
        table.table.fill_(math.nan)
    initialise(module, plans.tiny_model(), seed=0)
    expected = rotary_table(Rope(theta=10000.0, scaling=None), 8, 32)
    assert torch.equal(module.rotary[0].table, expected)
    assert "rotary" not in "".join(module.state_dict())


def test_blocks_with_different_rotary_embeddings_read_different_tables() -> None:
    near, far = (_run(theta=theta, repeat=1) for theta in (100.0, 10000.0))
    module = build(plans.tiny_model(blocks=(near, far, near)), seq_len=16)
    assert [table.rope.theta for table in module.rotary] == [100.0, 10000.0]
    assert module.table_of == (0, 1, 0)


def _run(theta: float, repeat: int, feed_forward: SwiGlu | Mlp | None = None) -> Blocks:
    attention = Gqa(num_heads=4, num_kv_heads=2, head_dim=8, rope=Rope(theta=theta, scaling=None))
    feed_forward = feed_forward or SwiGlu(hidden_dim=48)
    block = Block(attention=attention, feed_forward=feed_forward, norm=RmsNorm(eps=1e-5))
    return Blocks(repeat=repeat, block=block)


# ------------------------------------------------------------------ the whole model


def test_norms_are_computed_in_float32() -> None:
    norm = RMSNorm(64, 1e-5).to(torch.bfloat16)
    x = (torch.randn(4, 64, generator=torch.Generator().manual_seed(1)) * 300).to(torch.bfloat16)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert norm(x).dtype is torch.bfloat16
    assert torch.equal(norm(x), exact.to(torch.bfloat16))


WITHOUT_GATE = (
    _run(10000.0, 1, Mlp(hidden_dim=64, activation="gelu")),
    _run(10000.0, 1),
    _run(10000.0, 1, Mlp(hidden_dim=40, activation="relu2")),
)


@pytest.mark.parametrize(
    "changes", [{}, {"tied": True}, {"blocks": (_run(100.0, 1), _run(10000.0, 2))}, {"blocks": WITHOUT_GATE}]
)
def test_logits_equal_those_of_a_model_written_out_with_loops(changes: dict) -> None:
    model = plans.tiny_model(**changes)
    module = filled(model)
    tokens = torch.randint(0, model.vocab_size, (2, 12), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = module(tokens)
        for row in range(2):
            torch.testing.assert_close(logits[row].double(), naive(model, module, tokens[row]), rtol=1e-4, atol=1e-4)


def test_a_later_token_changes_no_earlier_logit() -> None:
    module = filled(plans.tiny_model())
    tokens = torch.randint(0, plans.VOCAB, (1, 12), generator=torch.Generator().manual_seed(3))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % plans.VOCAB
    with torch.no_grad():
        before, after = module(tokens), module(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def filled(model: Model) -> nn.Module:
    """A module with weights large enough that every part of it matters."""
    module = build(model, seq_len=32).to_empty(device="cpu")
    initialise(module, model, seed=0)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in module.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return module


def naive(model: Model, module: nn.Module, tokens: Tensor) -> Tensor:
    """Logits of one sequence in float64, one position and one head at a time."""
    weights = {fqn: tensor.double() for fqn, tensor in module.named_parameters()}
    x = weights["tok_embeddings.weight"][tokens]

    def norm(h: Tensor, name: str, eps: float) -> Tensor:
        rows = [row / math.sqrt(float(row @ row) / len(row) + eps) for row in h]
        return torch.stack(rows) * weights[f"{name}.weight"]

    def turn(vector: Tensor, position: int, theta: float) -> Tensor:
        out = vector.clone()
        for i in range(len(vector) // 2):
            angle = position * theta ** (-2 * i / len(vector))
            a, b = float(vector[2 * i]), float(vector[2 * i + 1])
            out[2 * i] = a * math.cos(angle) - b * math.sin(angle)
            out[2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
        return out

    for number, block in enumerate(model.layers()):
        at, attention = f"layers.{number}", block.attention
        d, group = attention.head_dim, attention.num_heads // attention.num_kv_heads
        h = norm(x, f"{at}.attention_norm", block.norm.eps)
        q, k, v = (h @ weights[f"{at}.attention.{w}.weight"].T for w in ("wq", "wk", "wv"))
        mixed = torch.zeros_like(q)
        for head in range(attention.num_heads):
            shared = head // group
            for position in range(len(tokens)):
                query = turn(q[position, head * d : head * d + d], position, attention.rope.theta)
                keys = [turn(k[p, shared * d : shared * d + d], p, attention.rope.theta) for p in range(position + 1)]
                scores = torch.stack([query @ key / math.sqrt(d) for key in keys])
                mixed[position, head * d : head * d + d] = (
                    scores.softmax(0) @ v[: position + 1, shared * d : shared * d + d]
                )
        x = x + mixed @ weights[f"{at}.attention.wo.weight"].T
        h = norm(x, f"{at}.ffn_norm", block.norm.eps)
        w1, w2 = (weights[f"{at}.feed_forward.{w}.weight"] for w in ("w1", "w2"))
        h1 = h @ w1.T
        match block.feed_forward:
            case SwiGlu():
                inner = h1 * torch.sigmoid(h1) * (h @ weights[f"{at}.feed_forward.w3.weight"].T)
            case Mlp(activation="gelu"):
                inner = h1 * (1 + torch.erf(h1 / math.sqrt(2))) / 2
            case Mlp(activation="relu2"):
                inner = torch.where(h1 > 0, h1 * h1, 0)
        x = x + inner @ w2.T
    output = weights["tok_embeddings.weight" if model.tied else "output.weight"]
    return norm(x, "norm", model.norm.eps) @ output.T
