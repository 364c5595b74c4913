"""The learning problem as pure functions around a torch.nn.Module that stays inside."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Layout, Slot
from sparsona.core.losses import argmax_score, cross_entropy
from sparsona.core.outline import Roles
from sparsona.core.round import Batch
from sparsona.core.tree import Tree

Builder = Callable[[], nn.Module]
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm)


class Task:
    """A model and its loss as pure functions of trees.

    `model` is a module, whose present weights are then the start of every run, or a function that builds one, called
    under each run's seed. The module inside is private to this task and to one thread.
    """

    def __init__(
        self,
        model: nn.Module | Builder,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        losses: Callable[[Tensor, Batch], tuple[Tensor, Tensor]] = cross_entropy,
        score: Callable[[Tensor, Batch], tuple[Tensor, Tensor]] = argmax_score,
        roles: Roles | None = None,
        tokens: bool = False,  # the inputs are int64, not float32
    ) -> None:
        self.input_shape, self.num_classes = tuple(input_shape), num_classes
        self.losses, self.score = losses, score
        self._start = copy.deepcopy(model) if isinstance(model, nn.Module) else model
        self._module = self._build(0)
        self._places = _places(self._module)
        self._buffer_kinds = {name: value.dtype for name, value in self._module.named_buffers()}
        trial = torch.zeros((2, *self.input_shape), dtype=torch.int64 if tokens else torch.float32)
        self.layout = _parameter_layout(self._module, trial[:1], num_classes)
        self.buffer_layout = Layout(
            tuple(Slot(name, tuple(value.shape)) for name, value in self._module.named_buffers())
        )
        # A network that knows its parts says so in an attribute `roles`.
        self.roles = roles or getattr(self._module, "roles", None) or _guess_roles(self._module)
        # What a forward pass in training mode leaves behind or draws, and whether examples of a batch see each other.
        self.mixes_examples = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self._module.modules())
        self.draws_noise = _draws_noise(self._module, trial)

    def _build(self, seed: int) -> nn.Module:
        if isinstance(self._start, nn.Module):
            return copy.deepcopy(self._start)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self._start()

    def init(self, seed: int) -> tuple[Tree, Tree]:
        """Initial parameters and buffers."""
        module = self._build(seed)
        params = Tree.of({name: value.detach() for name, value in module.named_parameters()}, self.layout)
        return params, self._buffer_tree(dict(module.named_buffers()))

    def _buffer_tree(self, named: Mapping[str, Tensor]) -> Tree:
        # Counters (num_batches_tracked) are integers; a tree has one dtype, and float32 counts batches well enough.
        return Tree.of({name: value.float() for name, value in named.items()}, self.buffer_layout)

    def forward(
        self, params: Tree, buffers: Tree, inputs: Tensor, train: bool, noise: Tensor | None = None
    ) -> tuple[Tensor, Tree]:
        """Outputs, and the buffers after this pass (the same tree where the module has none, or in evaluation)."""
        named: dict[str, Tensor] = {name: params[name] for name in params}
        for name, kind in self._buffer_kinds.items():
            named[name] = buffers[name].to(kind, copy=True)
        if self._module.training is not train:
            self._module.train(train)
        if train and self.draws_noise:
            if noise is None:
                raise ValueError("this model draws noise in training: pass the batch's noise")
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(noise))
                outputs = self._call(named, inputs)
        else:
            outputs = self._call(named, inputs)
        if train and self._buffer_kinds:
            return outputs, self._buffer_tree({name: named[name] for name in self._buffer_kinds})
        return outputs, buffers

    def _call(self, named: dict[str, Tensor], inputs: Tensor) -> Tensor:
        """The module with these tensors in place of its own: torch.func.functional_call without its checks, which cost
        a quarter of a small network's forward pass."""
        own = [store[key] for store, key, _ in self._places]
        for store, key, name in self._places:
            store[key] = named[name]
        try:
            outputs: Tensor = self._module(inputs)
            return outputs
        finally:
            for (store, key, _), value in zip(self._places, own, strict=True):
                store[key] = value

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_places"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._places = _places(self._module)  # they point into the module, which is another one now

    def mean_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The mean of the losses over the examples (or tokens) that count."""
        losses, weight = self.losses(outputs, batch)
        return (losses * weight).sum() / weight.sum()

    def gradient(self, params: Tree, buffers: Tree, batch: Batch) -> Tree:
        """The gradient of the mean loss at `params`, with the model in evaluation mode, over every entry."""
        at = params.like(params.flat.detach().requires_grad_())
        outputs, _ = self.forward(at, buffers, batch.inputs, train=False)
        (flat,) = torch.autograd.grad(self.mean_loss(outputs, batch), [at.flat])
        return params.like(flat)

    def module(self, params: Tree, buffers: Tree) -> nn.Module:
        """A fresh nn.Module that carries these weights, in evaluation mode."""
        module = self._build(0)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(params[name])
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
        return module.eval()


def _draws_noise(module: nn.Module, inputs: Tensor) -> bool:
    """Whether a forward pass in training mode moves the generator: tried, since dropout hides in many layers."""
    trial = copy.deepcopy(module).train()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        trial(inputs)
        return not torch.equal(before, torch.get_rng_state())


def _places(module: nn.Module) -> list[tuple[dict[str, Any], str, str]]:
    """Where a module holds each tensor: the dict, the key in it, and the tensor's name (tied ones share one)."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    names = {id(value): name for name, value in tensors}
    return [
        (store, key, names[id(value)])
        for part in module.modules()
        for store in (part._parameters, part._buffers)
        for key, value in store.items()
        if value is not None
    ]


def _parameter_layout(module: nn.Module, example: Tensor, num_classes: int) -> Layout:
    """Names, shapes and FLOPs per non-zero, counted by hooks on one forward pass (convolutions and linear layers)."""
    costs: dict[int, tuple[int, bool]] = {}  # by the tensor itself: tied weights have one name, and every use costs

    def count(layer: Any, _inputs: Any, output: Tensor) -> None:
        is_conv = isinstance(layer, nn.modules.conv._ConvNd)
        positions = output.numel() // output.shape[1 if is_conv else -1]
        costs[id(layer.weight)] = (costs.get(id(layer.weight), (0, False))[0] + 2 * positions, False)
        if layer.bias is not None:
            costs[id(layer.bias)] = (costs.get(id(layer.bias), (0, False))[0] + positions, is_conv)

    hooks = [
        layer.register_forward_hook(count)
        for layer in module.modules()
        if isinstance(layer, (nn.modules.conv._ConvNd, nn.Linear))
    ]
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            outputs = module(example)
    except Exception as error:
        raise SparsonaError(
            f"the model does not take one example of shape {tuple(example.shape[1:])}: {error}",
            expected="a model whose forward(inputs) takes a batch of the federation's examples",
            mend="reshape the data, or wrap the model so that it takes this shape",
        ) from error
    finally:
        for handle in hooks:
            handle.remove()
        module.train(was_training)
    if not isinstance(outputs, Tensor) or outputs.shape[-1] != num_classes:
        shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise SparsonaError(
            f"the model's output is {shape}, but the data has {num_classes} classes",
            expected=f"one logit per class: a last dimension of {num_classes}",
            mend="give the last layer as many outputs as there are classes",
        )
    frozen = [name for name, value in module.named_parameters() if not value.requires_grad]
    if frozen:
        raise SparsonaError(
            f"the model has frozen parameters: {', '.join(frozen)}",
            expected="parameters that are all trained",
            mend="make them buffers (register_buffer), which are kept as they are, or set requires_grad_(True)",
        )
    slots = []
    for name, value in module.named_parameters():
        rate, counts_dense = costs.get(id(value), (0, False))
        slots.append(Slot(name, tuple(value.shape), rate, counts_dense))
    if not slots:
        raise SparsonaError("the model has no parameters", expected="a torch.nn.Module with something to train")
    return Layout(tuple(slots))


def _guess_roles(module: nn.Module) -> Roles:
    """First and last layer with a weight matrix, and every norm: right for plain networks; others pass their own."""
    matrices: list[tuple[str, ...]] = []
    norms: list[str] = []
    for name, layer in module.named_modules():
        own = tuple(f"{name}.{key}" if name else key for key, _ in layer.named_parameters(recurse=False))
        if isinstance(layer, NORMS):
            norms.extend(own)
        elif own and any(value.dim() > 1 for value in layer.parameters(recurse=False)):
            matrices.append(own)
    return Roles(input=matrices[0] if matrices else (), output=matrices[-1] if matrices else (), norm=tuple(norms))
