"""The transformer against torch's own layer, and what sets it apart."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsona import models
from sparsona.core.task import Task

LENGTH, VOCABULARY = 12, 40


def net(options: str = "", length: int = LENGTH) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return models.builder(f"transformer:{options}", (length,), VOCABULARY)().eval()


def tokens(count: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def module() -> nn.Module:
    """With norms and biases that are not 1 and 0, which would hide mistakes."""
    module, generator = net(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in module.parameters():
            value.add_(0.1 * torch.randn(value.shape, generator=generator))
    return module


def torchs_own(block: nn.Module) -> nn.Module:
    """A block's weights in torch's layer, which has biases where ours has none."""
    with torch.random.fork_rng():
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True).train()
    state = {
        "self_attn.in_proj_weight": torch.cat([block.query.weight, block.key.weight, block.value.weight]),
        "self_attn.in_proj_bias": torch.zeros(3 * 256),
        "self_attn.out_proj.weight": block.projection.weight,
        "self_attn.out_proj.bias": torch.zeros(256),
        "linear1.weight": block.widen.weight,
        "linear1.bias": block.widen.bias,
        "linear2.weight": block.narrow.weight,
        "linear2.bias": block.narrow.bias,
        "norm1.weight": block.norm1.weight,
        "norm1.bias": block.norm1.bias,
        "norm2.weight": block.norm2.weight,
        "norm2.bias": block.norm2.bias,
    }
    layer.load_state_dict(state)
    return layer


def test_forward_is_the_networks_definition(module):
    with torch.no_grad():
        x = F.relu(math.sqrt(256) * module.embedding.weight[tokens()] + module.positions.weight)
        mask = torch.full((LENGTH, LENGTH), -math.inf).triu(1)
        for block in module.blocks:
            x = torchs_own(block)(x, src_mask=mask)
        expected = x @ module.embedding.weight.T + module.output.bias
        torch.testing.assert_close(module(tokens()), expected, rtol=1e-4, atol=1e-4)


def test_no_token_sees_a_later_one(module):
    before = tokens()
    after = before.clone()
    after[:, 5:] = (after[:, 5:] + 1) % VOCABULARY
    with torch.no_grad():
        first, second = module(before), module(after)
    assert torch.equal(first[:, :5], second[:, :5])
    assert (first[:, 5:] != second[:, 5:]).any(dim=-1).all()


def test_shorter_sequences(module):
    with torch.no_grad():
        assert module(tokens()[:, :1]).shape == (3, 1, VOCABULARY)
        torch.testing.assert_close(module(tokens()[:, :7]), module(tokens())[:, :7])


def test_initial_values():
    module = net("adapters=16")
    for name, value in module.named_parameters():
        if value.dim() == 2:
            assert value.std().item() == pytest.approx(0.01 if "adapter" in name else 0.02, rel=0.1), name
        else:
            assert (value == (1 if "norm" in name and "weight" in name else 0)).all(), name


@pytest.mark.parametrize("form", ["paper", "authors"])
def test_where_adapters_sit(form):
    """paper: both inside the residual branch; authors: the second on the skip branch."""
    block = net(f"adapters=16,adapter_form={form}").blocks[1]
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for value in block.parameters():
            value.add_(0.1 * torch.randn(value.shape, generator=generator))

        def adapted(adapter: nn.Module, x: Tensor) -> Tensor:
            inner = F.relu(x @ adapter.narrow.weight.T + adapter.narrow.bias)
            return x + inner @ adapter.widen.weight.T + adapter.widen.bias

        x = torch.randn(2, 5, 256, generator=generator)
        y = block.norm1(x + adapted(block.adapter1, block.attend(x)))
        fed = block.narrow(F.relu(block.widen(y)))
        expected = y + adapted(block.adapter2, fed) if form == "paper" else adapted(block.adapter2, y) + fed
        torch.testing.assert_close(block(x), block.norm2(expected), rtol=1e-4, atol=1e-4)


def test_clients_can_be_stacked(module):
    """Several clients at once give what each gives alone: no operation lacks a rule for it."""
    params = {name: torch.stack([value.detach(), 0.5 * value.detach()]) for name, value in module.named_parameters()}
    batches = torch.stack([tokens(), (tokens() + 1) % VOCABULARY])

    def forward(own, batch):
        return torch.func.functional_call(module, own, (batch,))

    together = torch.vmap(forward)(params, batches)
    for k in (0, 1):
        alone = forward({name: value[k] for name, value in params.items()}, batches[k])
        torch.testing.assert_close(together[k], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", ["dropout=0.5", "adapters=16,dropout=0.5"])
def test_as_a_task(options, untouched_generators):
    """Tied weights stay one; dropout follows the noise; a network of its own carries the weights."""
    task = Task(models.builder(f"transformer:{options}", (LENGTH,), VOCABULARY), (LENGTH,), VOCABULARY, tokens=True)
    params, buffers = task.init(1)
    assert task.draws_noise
    first, second, again = (
        task.forward(params, buffers, tokens(), True, torch.tensor(noise))[0].detach() for noise in (1, 2, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    module = task.module(params, buffers)
    assert module.output.weight is module.embedding.weight
    assert torch.equal(module(tokens()), task.forward(params, buffers, tokens(), False)[0])


def test_where_dropout_acts_without_adapters(untouched_generators):
    """On what attention adds and on what the feed-forward layers add."""
    block = net("dropout=0.5").blocks[0].train()
    x = torch.randn(2, 5, 256, generator=torch.Generator().manual_seed(6))
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        y = block.norm1(x + F.dropout(block.attend(x), 0.5))
        expected = block.norm2(y + F.dropout(block.narrow(F.relu(block.widen(y))), 0.5))
        torch.manual_seed(1)
        torch.testing.assert_close(block(x), expected)
