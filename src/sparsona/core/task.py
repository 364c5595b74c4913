"""The learning problem as pure functions around a private torch.nn.Module."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from sparsona.core.errors import SparsonaError
from sparsona.core.layout import Frozen, Layout, Slot
from sparsona.core.losses import argmax_score, cross_entropy, squared_error, token_cross_entropy
from sparsona.core.metrics import Metric
from sparsona.core.outline import Roles
from sparsona.core.packing import Packing
from sparsona.core.round import Batch
from sparsona.core.tree import Tree

Builder = Callable[[], nn.Module]
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)  # table lookups: no FLOPs

OUTPUTS = {  # what data has several of, and what a model returns for them
    "classes": ("classes", "one logit per class"),
    "labels": ("labels", "one logit per label"),
    "numbers": ("targets", "one number per target"),
    "binary": ("yes or no", "one logit (two for task='classification')"),
}


class Task:
    """A model and its loss as pure functions of trees.

    The module is private to this task and to one thread. Its frozen parameters (requires_grad=False) are in no tree:
    they stay in it as they are.

    Args:
        model: a module, whose current weights are then the start of every run, or a function that builds one, called
            under each run's seed.
        input_shape: the shape of one example.
        num_classes: the last dimension of the outputs.
        losses: `losses(outputs, batch)` returns the losses and their weights.
        score: `score(outputs, batch)` returns the number of correct predictions and of all.
        roles: which parameters are input, output and norms; None: read from the module, or guessed.
        tokens: the inputs are int64, not float32.
        targets: what is predicted, as core/losses.py lists it; None: as the losses suggest.
        metrics: what else predictions are judged by, by name.
        packing: an example is several inputs, packed into one row; the module is called with them unpacked.

    Example:
        >>> task = Task(nn.Linear(4, 3), input_shape=(4,), num_classes=3)
        >>> params, buffers = task.init(seed=0)
        >>> task.forward(params, buffers, torch.zeros(2, 4), train=False)[0].shape
        torch.Size([2, 3])
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
        tokens: bool = False,
        targets: str | None = None,
        metrics: Mapping[str, Metric] | None = None,
        packing: Packing | None = None,
    ) -> None:
        self.input_shape, self.num_classes = tuple(input_shape), num_classes
        self.losses, self.score, self.metrics = losses, score, dict(metrics or {})
        usual = "numbers" if losses is squared_error else "tokens" if losses is token_cross_entropy else "classes"
        self.targets = targets or usual
        self.takes_tokens, self.is_regression = tokens, self.targets == "numbers"
        # How a forward pass is computed, not what it computes: set by executors.
        self.half: torch.dtype | None = None  # convolutions and products in this type, weights in float32
        self.channels_last: bool | None = None  # None: on a CPU, if the network supports it
        if not callable(model):
            raise SparsonaError(
                f"the model is a {type(model).__name__}",
                expected="a torch.nn.Module, a function that builds one, or the name of a network",
            )
        if not isinstance(model, nn.Module):
            _check_builder(model)
        self._start = _copied(model) if isinstance(model, nn.Module) else model
        self._given: dict[str, Tensor] = {}
        self.packing = packing
        self._module = self._build(0)
        _copied(self._module)  # also one that a function built
        _check_parameters(self._module)
        if packing is not None:
            self._module.register_forward_pre_hook(packing, with_kwargs=True)
        trial = _random_examples(self.input_shape, tokens, 2)
        self.layout, self.uncounted = _parameter_layout(self._module, trial[:1], num_classes, packing, self.targets)
        self._frozen = _frozen_values(self._module)  # on the CPU
        self._frozen_seed: int | None = None
        self._frozen_on: dict[torch.device, dict[str, Tensor]] = {}
        self.whole_layout = self.layout  # `layout` has fewer entries after `restrict`
        self._kept: dict[str, Tensor] = {}
        _check_independence(self._module, trial)
        # Whether a forward pass in training mode draws noise, changes buffers, or mixes the examples of a batch.
        self.draws_noise, moved = _train_once(self._module, trial)
        self.moves_buffers = bool(moved)
        self.mixes_examples = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self._module.modules())
        # Networks with noise or moving buffers are trained on whole batches anyway, and noise would look like mixing.
        if not (self.draws_noise or self.moves_buffers) and _has_own_code(self._module):
            self.mixes_examples |= _mixes_in_training(self._module, _random_examples(self.input_shape, tokens, 4))
        self._buffer_kinds = _kept_buffers(self._module, moved)
        shapes = {name: tuple(value.shape) for name, value in self._module.named_buffers()}
        self.buffer_layout = Layout(tuple(Slot(name, shapes[name]) for name in self._buffer_kinds))
        self._places = _places(self._module, self._buffer_kinds)
        # The number of groups of each GroupNorm, by the name of its weight; a LayerNorm is one group of all features.
        norms = {f"{name}.weight".lstrip("."): groups for name, _, groups in _grouped(self._module)}
        self.norm_groups = {name: groups for name, groups in norms.items() if name in self.layout.place}
        self._grouped = _grouped(self._module)
        self.takes_channels_last = _takes_channels_last(self._module, trial)
        self.gives_probabilities = num_classes > 1 and losses is not squared_error and _sums_to_one(self._module, trial)
        # A network can name its parts in an attribute `roles`.
        found = roles or getattr(self._module, "roles", None) or _guess_roles(self._module)
        self.roles = _without(found, self._frozen)

    def _build(self, seed: int) -> nn.Module:
        if isinstance(self._start, nn.Module):
            return copy.deepcopy(self._start)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self._start()
        if not isinstance(module, nn.Module):
            raise SparsonaError(f"the model is a {type(module).__name__}", expected="a torch.nn.Module that was built")
        return module

    @property
    def frozen(self) -> dict[str, Tensor]:
        """The frozen parameters by name, on the CPU."""
        return self._frozen

    def begin_with(self, weights: Mapping[str, Tensor]) -> None:
        """Make `init` return these parameters in place of its own, and freeze those of frozen ones.

        Args:
            weights: parameters by name; those that are missing keep their own initial values.
        """
        self._given = dict(weights)
        self._frozen = self._given_first(self._frozen)
        self._frozen_on.clear()

    def set_frozen(self, seed: int, device: torch.device) -> None:
        """Give the frozen parameters the values of a run, and place them on its device.

        Args:
            seed: the seed that the model is built with, if `model` is a function: that of the run, whichever seeds
                clients draw parameters of their own with.
            device: where the run trains.
        """
        if self._frozen and self._frozen_seed != seed and not isinstance(self._start, nn.Module):
            self._frozen = self._given_first(_frozen_values(self._build(seed)))
            self._frozen_seed = seed
            self._frozen_on.clear()
        self._constants(torch.empty(0, device=device).device)  # "cuda" by its number, as tensors have it

    def _given_first(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: self._given[name].to(value.dtype) if name in self._given else value for name, value in values.items()
        }

    def _constants(self, device: torch.device) -> dict[str, Tensor]:
        """The frozen parameters on a device: moved there once."""
        if device not in self._frozen_on:
            self._frozen_on[device] = {name: value.to(device) for name, value in self._frozen.items()}
        return self._frozen_on[device]

    def restrict(self, mask: Tree) -> None:
        """Make this the task of a fixed sub-network: what is outside the mask is zero, and no parameter any more.

        Args:
            mask: a bool tree of the whole network, on the device that is trained on: a captured step must not move
                it. A tensor that it keeps in part becomes a vector of its entries.
        """
        counts = []
        for slot in self.whole_layout.slots:
            index = mask[slot.name].flatten().nonzero().flatten()
            counts.append(len(index))
            if len(index) < slot.size:
                self._kept[slot.name] = index
        self.layout = self.whole_layout.keep(counts)

    def _whole(self, name: str, value: Tensor) -> Tensor:
        """A parameter as the module has it; a method may also pass tensors of its own, which stay as they are."""
        index = self._kept.get(name)
        if index is None or value.shape != index.shape:
            return value
        slot = self.whole_layout.slots[self.whole_layout.place[name]]
        return value.new_zeros(slot.size).scatter(0, index.to(value.device), value).view(slot.shape)

    def init(self, seed: int) -> tuple[Tree, Tree]:
        """Initial parameters and buffers.

        Args:
            seed: the seed that the model is built with, if `model` is a function.

        Returns:
            The trees of parameters and of buffers.
        """
        module = self._build(seed)
        own = dict(self._module.named_buffers())
        for name, value in module.named_buffers():
            if name not in self._buffer_kinds and not _is_same(value, own[name]):
                raise SparsonaError(
                    f"the buffer '{name}' ({value.dtype}) depends on the seed",
                    expected="the same values for every seed, or values that float32 represents exactly",
                    hint=f"register '{name}' as float32, or draw it from a generator of its own",
                )
        named = {name: value.detach() for name, value in module.named_parameters()}
        # What is float16 where it was frozen is float32 where it is trained.
        named |= {name: value.to(named[name].dtype) for name, value in self._given.items() if name in named}
        named |= {name: named[name].flatten()[index.to(named[name].device)] for name, index in self._kept.items()}
        params = Tree.of(named, self.layout)
        return params, self._buffer_tree(dict(module.named_buffers()))

    def _buffer_tree(self, named: Mapping[str, Tensor], layout: Layout | None = None) -> Tree:
        # Counters (num_batches_tracked) are integers; a tree has one dtype, and float32 is exact for counts of batches.
        return Tree.of({name: named[name].float() for name in self._buffer_kinds}, layout or self.buffer_layout)

    def forward(
        self, params: Mapping[str, Tensor], buffers: Tree, inputs: Tensor, train: bool, noise: Tensor | None = None
    ) -> tuple[Tensor, Tree]:
        """A forward pass with these weights.

        Args:
            params: a tree, or any named tensors; their shapes, and those of `buffers`, may differ from the module's if
                its layers accept them. A GroupNorm of another width keeps its channels per group (one group stays
                one), a LayerNorm normalises over as many features as it has weights.
            buffers: the tree of buffers.
            inputs: a batch of inputs.
            train: training mode instead of evaluation mode.
            noise: the batch's noise, which a model that draws noise in training needs.

        Returns:
            The outputs, and the buffers after this pass (the same tree in evaluation mode).
        """
        named: dict[str, Tensor] = {name: params[name] for name in params}
        for name in self._kept:
            named[name] = self._whole(name, named[name])
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
            return outputs, self._buffer_tree(named, buffers.layout)
        return outputs, buffers

    def forward_with_features(
        self,
        params: Mapping[str, Tensor],
        buffers: Tree,
        inputs: Tensor,
        layer: str,
        train: bool,
        noise: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tree]:
        """A forward pass that also returns what enters one of the layers.

        Args:
            params: as in `forward`.
            buffers: as in `forward`.
            inputs: a batch of inputs.
            layer: the name of a submodule that the pass calls once.
            train: as in `forward`.
            noise: as in `forward`.

        Returns:
            The outputs, the features (float32, one flat row per example), and the buffers after this pass.

        Example:
            >>> task = Task(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), (4,), 3)
            >>> outputs, features, _ = task.forward_with_features(*task.init(0), torch.zeros(2, 4), "2", train=False)
            >>> outputs.shape, features.shape
            (torch.Size([2, 3]), torch.Size([2, 5]))
        """
        entered: list[Tensor] = []
        # The hook runs while the pass is traced, stacked or captured: what it sees is a tensor of that pass.
        hook = self._module.get_submodule(layer).register_forward_pre_hook(lambda _, args: entered.append(args[0]))
        try:
            outputs, buffers = self.forward(params, buffers, inputs, train, noise)
        finally:
            hook.remove()
        (features,) = entered
        return outputs, features.flatten(1).float(), buffers

    def plain_layers(self) -> frozenset[str]:
        """The names of convolutions and linear layers whose outputs are their weight's rows times an input, plus the
        bias."""
        return frozenset(
            name
            for name, layer in self._module.named_modules()
            if type(layer) is nn.Linear or (type(layer) is nn.Conv2d and layer.groups == 1)
        )

    def forward_through(
        self,
        params: Mapping[str, Tensor],
        buffers: Tree,
        inputs: Tensor,
        after: Mapping[str, Callable[[Tensor], Tensor]],
    ) -> Tensor:
        """A forward pass in evaluation mode in which what leaves some layers goes through a function first.

        Args:
            params: as in `forward`.
            buffers: as in `forward`.
            inputs: as in `forward`.
            after: the functions, by the names of submodules.

        Returns:
            The outputs.

        Example:
            >>> task = Task(nn.Linear(4, 3), (4,), 3)
            >>> task.forward_through(*task.init(0), torch.ones(1, 4), {"": torch.zeros_like})
            tensor([[0., 0., 0.]])
        """
        # The hooks run while the pass is traced, stacked or captured: what they see are tensors of that pass.
        hooks = [
            self._module.get_submodule(name).register_forward_hook(lambda _, __, found, then=then: then(found))
            for name, then in after.items()
        ]
        try:
            return self.forward(params, buffers, inputs, train=False)[0]
        finally:
            for hook in hooks:
                hook.remove()

    def _call(self, named: dict[str, Tensor], inputs: Tensor) -> Tensor:
        """Call the module with these tensors in place of its own: torch.func.functional_call without its checks, which
        cost a quarter of a small network's forward pass. A buffer that the pass replaces is replaced in `named`."""
        own = [store[key] for store, key, _ in self._places]
        frozen = self._constants(inputs.device) if self._frozen else {}
        last = self.channels_last
        if last is None:
            last = self.takes_channels_last and inputs.device.type == "cpu"
        for store, key, name in self._places:
            tensor = named[name] if name in named else frozen[name]
            if last and tensor.dim() == 4:
                tensor = tensor.contiguous(memory_format=torch.channels_last)
            store[key] = tensor
        for _, layer, groups in self._grouped:
            _set_size(layer, groups)
        if last and inputs.dim() == 4:
            inputs = with_channels_last(inputs)
        try:
            with self._in_half(inputs):
                outputs: Tensor = self._module(inputs)
            if self._buffer_kinds:
                held = [(name, store[key]) for store, key, name in self._places if name not in frozen]
                named |= {name: value for name, value in held if value is not named[name]}
            return outputs if self.half is None else outputs.float()
        finally:
            for (store, key, _), value in zip(self._places, own, strict=True):
                store[key] = value
            for _, layer, groups in self._grouped:
                _set_size(layer, groups)

    def _in_half(self, inputs: Tensor) -> AbstractContextManager[Any]:
        if self.half is None:
            return nullcontext()
        return torch.autocast(inputs.device.type, dtype=self.half, cache_enabled=False)

    def __copy__(self) -> Task:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_places", "_grouped", "_frozen_on")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._frozen_on = {}
        # References into the module, which is a new object.
        self._places, self._grouped = _places(self._module, self._buffer_kinds), _grouped(self._module)

    @property
    def num_labels(self) -> int:
        """The number of classes that examples have: two where one logit tells them apart."""
        return 2 if self.targets == "binary" else self.num_classes

    def predict_classes(self, outputs: Tensor) -> Tensor:
        """The predicted class of each example."""
        if self.targets == "binary":
            return (outputs > 0).squeeze(-1).long()
        return outputs[..., : self.num_classes].argmax(dim=-1)

    def count_right(self, sum_of_scores: float) -> int | None:
        """The number of correct predictions; None in a regression, which has none."""
        return None if self.is_regression else int(sum_of_scores)

    def mean_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The weighted mean of the losses.

        Args:
            outputs: what `forward` returned for the batch.
            batch: the batch.

        Returns:
            A scalar.
        """
        losses, weight = self.losses(outputs, batch)
        return (losses * weight).sum() / weight.sum()

    def gradient(self, params: Tree, buffers: Tree, batch: Batch) -> Tree:
        """The gradient of the mean loss with the model in evaluation mode.

        Args:
            params: where to differentiate.
            buffers: the buffers of the model.
            batch: the batch.

        Returns:
            A tree of the layout of `params`, dense.
        """
        at = params.like(params.flat.detach().requires_grad_())
        outputs, _ = self.forward(at, buffers, batch.inputs, train=False)
        (flat,) = torch.autograd.grad(self.mean_loss(outputs, batch), [at.flat])
        return params.like(flat)

    def undefined_at_zero(self) -> str | None:
        """The first parameter for which the network has no finite outputs if one of its rows is zero; None: there is
        none. For errors: weight_norm divides by the norm of a row."""
        params, buffers = self.init(0)
        pair = _random_examples(self.input_shape, self.takes_tokens, 2)
        for slot in self.whole_layout.slots:
            if len(slot.shape) > 1 and slot.name not in self._kept:
                changed = params.like(params.flat.clone())
                changed[slot.name][0] = 0.0
                with torch.no_grad():
                    outputs, _ = self.forward(changed, buffers, pair, train=False)
                if not outputs.isfinite().all():
                    return slot.name
        return None

    def statistics(self, params: Tree, buffers: Tree, batches: Iterable[Batch]) -> Tree:
        """The buffers with BatchNorm's statistics estimated anew: the mean over these batches.

        Everything but BatchNorm is in evaluation mode. Batches of one example have no variance and are left out.

        Args:
            params: the parameters.
            buffers: the buffers of the model.
            batches: the data.

        Returns:
            The new buffers; the same if there is no BatchNorm, or no batch of two examples.
        """
        norms = [layer for layer in self._module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        norms = [layer for layer in norms if layer.track_running_stats]
        inputs = (batch.inputs for batch in batches if len(batch.targets) > 1)
        if not norms or (first := next(inputs, None)) is None:
            return buffers
        named = {name: params[name] for name in params}
        for name, kind in self._buffer_kinds.items():
            named[name] = buffers[name].to(kind, copy=True)
        own = {id(value): name for store, key, name in self._places for value in (store[key],)}
        momenta = [layer.momentum for layer in norms]
        self._module.eval()
        for layer in norms:
            layer.train().momentum = None  # a plain mean over the batches, which it counts
            for value in layer.buffers(recurse=False):
                named[own[id(value)]].zero_()
        try:
            with torch.no_grad():
                for some in (first, *inputs):
                    self._call(named, some)
        finally:
            for layer, momentum in zip(norms, momenta, strict=True):
                layer.eval().momentum = momentum
        return self._buffer_tree(named, buffers.layout)

    def module(self, params: Tree, buffers: Tree) -> nn.Module:
        """A new nn.Module with these weights, in evaluation mode.

        Args:
            params: the parameters; their shapes may differ from the task's, as in `forward`.
            buffers: the buffers.

        Returns:
            The module.
        """
        module = self._build(0)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                whole = self._frozen[name] if name in self._frozen else self._whole(name, params[name])
                parameter.data = whole.to(parameter.device, parameter.dtype, copy=True).contiguous()
            for name, buffer in module.named_buffers():
                if name in self._buffer_kinds:
                    buffer.data = buffers[name].to(buffer.device, buffer.dtype, copy=True).contiguous()
        for _, layer, groups in _grouped(module):
            _set_size(layer, groups)
        for layer in module.modules():
            _state_sizes(layer)
        return module.eval()


def _check_builder(model: Builder) -> None:
    """Refuse a function or class that cannot be called without arguments."""
    try:
        parameters = inspect.signature(model).parameters.values()
    except (TypeError, ValueError):  # of some that are written in C; called, they say it themselves
        return
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [one.name for one in parameters if one.default is one.empty and one.kind not in optional]
    if needed:
        name = getattr(model, "__name__", type(model).__name__)
        raise SparsonaError(
            f"the model is {name}, which needs arguments to be called: {', '.join(needed)}",
            expected="a torch.nn.Module that was built, or a function without arguments that builds one",
            hint=f"model={name}(...), or lambda: {name}(...) for other weights with each seed",
        )


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise SparsonaError(
            f"the model cannot be copied: {error}",
            expected="a torch.nn.Module that copy.deepcopy takes",
            hint="torch.nn.utils.parametrizations has norms that can be copied; or pass a function that builds it",
        ) from error


def _grouped(module: nn.Module) -> list[tuple[str, Any, int]]:
    """Norms that compute over several channels: name, layer, and number of groups."""
    return [
        (name, layer, layer.num_groups if isinstance(layer, nn.GroupNorm) else 1)
        for name, layer in module.named_modules()
        if isinstance(layer, nn.GroupNorm | nn.LayerNorm) and layer.weight is not None and layer.weight.dim() == 1
    ]


def _set_size(layer: Any, groups: int) -> None:
    """Let a norm follow the number of its weights: a GroupNorm keeps its channels per group."""
    if isinstance(layer, nn.LayerNorm):
        layer.normalized_shape = tuple(layer.weight.shape)
    elif groups > 1:
        layer.num_groups = len(layer.weight) * groups // layer.num_channels


def _state_sizes(layer: Any) -> None:
    """Let a layer's attributes state the sizes of its tensors, for whoever prints or exports it."""
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, nn.modules.conv._ConvNd) and not layer.transposed:
        layer.out_channels, layer.in_channels = layer.weight.shape[0], layer.weight.shape[1] * layer.groups
    elif isinstance(layer, nn.modules.batchnorm._NormBase) and layer.running_mean is not None:
        layer.num_features = len(layer.running_mean)
    elif isinstance(layer, nn.GroupNorm) and layer.weight is not None:
        layer.num_channels = len(layer.weight)


def _random_examples(input_shape: tuple[int, ...], tokens: bool, count: int) -> Tensor:
    """Examples to test a model with; as tokens, only 0 and 1 are in every vocabulary."""
    generator = torch.Generator().manual_seed(0)
    if tokens:
        return torch.randint(0, 2, (count, *input_shape), generator=generator)
    return torch.rand((count, *input_shape), generator=generator)


def _check_independence(module: nn.Module, pair: Tensor) -> None:
    """Test that in evaluation mode an example's outputs depend neither on its batch nor on random draws."""
    trial = copy.deepcopy(module).eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        is_independent = _same_in_halves(trial, pair)
    if not is_independent:
        raise SparsonaError(
            "the model's prediction for an example, in evaluation mode, depends on the batch that it is in",
            expected="each prediction to depend on its own input alone",
            hint="BatchNorm with track_running_stats=True, dropout in training alone, no means over the batch",
        )


def _same_in_halves(module: Callable[[Tensor], Tensor], examples: Tensor) -> bool:
    """Whether the outputs for examples are the same in two batches as in one."""
    together, apart = module(examples), torch.cat([module(half) for half in examples.chunk(2)])
    slack = 1e-3 * float(apart.nan_to_num().abs().max()) + 1e-5  # rounding differs with the size of a batch
    return together.shape == apart.shape and torch.allclose(together, apart, rtol=0.0, atol=slack, equal_nan=True)


def _has_own_code(module: nn.Module) -> bool:
    """Whether a network computes more than layers of torch and networks of this package, whose examples only BatchNorm
    mixes: of those nothing need be tested, so that they start as fast as they can."""
    return any(
        not type(layer).__module__.startswith(("torch.nn.", "sparsona."))
        or bool(layer._forward_hooks or layer._forward_pre_hooks)
        for layer in module.modules()
    )


def _mixes_in_training(module: nn.Module, examples: Tensor) -> bool:
    """Whether an example's outputs in training mode depend on its batch, of a network without noise. Tested by passes:
    networks of the user's may take a mean over the batch themselves, in training alone."""
    trial, draw = copy.deepcopy(module).train(), torch.Generator().manual_seed(0)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for value in trial.parameters():
                # Zeros, as of a last layer or of a branch that is to grow, would hide what is before them.
                if value.is_floating_point() and value.square().mean() < 1e-4:
                    noise = torch.randn(value.shape, generator=draw).to(value)
                    value.add_(noise, alpha=0.3 * (value.shape[:1].numel() / value.numel()) ** 0.5)
            # A copy for each pass: one that counts its passes would differ from one to the next.
            return not _same_in_halves(lambda inputs: copy.deepcopy(trial)(inputs), examples)
    except Exception:  # with such weights, or so many examples; if it is wrong, training says how
        return False


def _train_once(module: nn.Module, inputs: Tensor) -> tuple[bool, dict[str, Tensor]]:
    """Whether a pass in training mode draws noise, and the buffers that it changed. Tested by a pass, since many kinds
    of layers have dropout or statistics."""
    trial = copy.deepcopy(module).train()
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            before = torch.get_rng_state()
            outputs = trial(inputs)
            draws_noise = not torch.equal(before, torch.get_rng_state())
            outputs.sum().backward()
    except Exception as error:
        raise SparsonaError(
            f"a training step of the model fails on two examples of shape {tuple(inputs.shape[1:])}: {error}",
            expected="outputs of forward(inputs) that can be differentiated by the model's parameters",
            hint="no detach(), .data or torch.no_grad() on the way from parameters to outputs",
        ) from error
    after = dict(trial.named_buffers())
    moved = {n: after[n] for n, value in module.named_buffers() if n in after and not _is_same(value, after[n])}
    return draws_noise, moved


def _sums_to_one(module: nn.Module, pair: Tensor) -> bool:
    """Whether outputs are probabilities, as softmax returns, where losses expect logits."""
    trial = copy.deepcopy(module).eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        outputs = trial(pair)
    return bool((outputs >= 0).all()) and torch.allclose(outputs.sum(-1), outputs.new_ones(()), rtol=0.0, atol=1e-4)


def with_channels_last(images: Tensor) -> Tensor:
    """The same images in the channels-last memory format. With one channel nothing moves, but the strides must be those
    of channels last, or convolutions fall back to channels first, whose pooling takes ten times as long."""
    _, channels, height, width = images.shape
    if channels == 1 and images.device.type == "cpu":
        return images.contiguous().as_strided(images.shape, (height * width, 1, width, 1))
    return images.contiguous(memory_format=torch.channels_last)


def _takes_channels_last(module: nn.Module, images: Tensor) -> bool:
    """Whether the network convolves images and accepts channels-last ones. Tested by a pass, since a view() that needs
    channels first would fail in training. It depends on the network alone, never on timings, so that every machine has
    the same bits."""
    if images.dim() != 4 or not any(isinstance(layer, nn.Conv2d) for layer in module.modules()):
        return False
    trial: nn.Module = copy.deepcopy(module)

    def check(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        # torch's backward pass of a GroupNorm over the input images crashes the process.
        if not inputs[0].requires_grad:
            raise RuntimeError("a norm of the input images")

    for layer in trial.modules():
        if isinstance(layer, nn.GroupNorm):
            layer.register_forward_pre_hook(check)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            expected = trial.eval()(images)
        trial.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            found = trial(with_channels_last(images)).detach()
            trial.train()(with_channels_last(images)).sum().backward()
    except Exception:  # any error is new here: the model needs channels first
        return False
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-4, equal_nan=True)


def _is_same(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)


def _kept_buffers(module: nn.Module, moved: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    """Names and types of the buffers that belong in a float32 tree. One that float32 cannot represent exactly stays in
    the module; if training changes it, that is an error."""
    kept: dict[str, torch.dtype] = {}
    for name, value in module.named_buffers():
        if _fits(value) and _fits(moved.get(name, value)):
            kept[name] = value.dtype
        elif name in moved:
            raise SparsonaError(
                f"training changes the buffer '{name}', whose values ({value.dtype}) float32 cannot hold exactly",
                expected="a float32 buffer, or whole numbers up to 2**24",
                hint=f"register '{name}' as float32, or do not change it in training",
            )
    return kept


def _fits(value: Tensor) -> bool:
    if value.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return True
    if value.is_floating_point() or value.is_complex():
        return False  # even if its current values fit: later ones may not
    return torch.equal(value.float().to(value.dtype), value)


def _places(module: nn.Module, buffers: Collection[str]) -> list[tuple[dict[str, Any], str, str]]:
    """Where a module holds each parameter and each of these buffers: the dict, the key in it, and the tensor's name
    (tied ones share one)."""
    tensors = [*module.named_parameters(), *((n, value) for n, value in module.named_buffers() if n in buffers)]
    names = {id(value): name for name, value in tensors}
    return [
        (store, key, names[id(value)])
        for part in module.modules()
        for store in (part._parameters, part._buffers)
        for key, value in store.items()
        if id(value) in names
    ]


def _frozen_values(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters that are not trained."""
    return {name: value.detach().cpu().clone() for name, value in module.named_parameters() if not value.requires_grad}


def _without(roles: Roles, frozen: Collection[str]) -> Roles:
    """The trained parameters of each role."""
    return Roles(
        **{one.name: tuple(name for name in getattr(roles, one.name) if name not in frozen) for one in fields(Roles)}
    )


def _check_parameters(module: nn.Module) -> None:
    """Raise SparsonaError if there is nothing to train, or not in float32."""
    if lazy := [name for name, value in module.named_parameters() if nn.parameter.is_lazy(value)]:
        raise SparsonaError(
            f"the model has layers without a size yet: {', '.join(lazy)}",
            expected="layers with known input sizes",
            hint="write nn.Linear for nn.LazyLinear, or call the model once before you pass it",
        )
    parameters = list(module.named_parameters())
    if not parameters:
        raise SparsonaError("the model has no parameters", expected="a torch.nn.Module with something to train")
    if not any(value.requires_grad for _, value in parameters):
        raise SparsonaError(
            f"all {len(parameters)} parameters of the model are frozen",
            expected="one or more to train: requires_grad=True",
            hint="call requires_grad_(True) on the last layer, or add adapters",
        )
    for name, value in parameters:
        if value.dtype != torch.float32 and value.requires_grad:
            raise SparsonaError(
                f"the parameter '{name}' is {str(value.dtype).removeprefix('torch.')}",
                expected="a float32 model",
                hint="call model.float(); on a GPU, precision='bf16' trains in half precision"
                if value.is_floating_point()
                else "train parameters that are real numbers",
            )


def _parameter_layout(
    module: nn.Module, example: Tensor, num_classes: int, packing: Packing | None, targets: str
) -> tuple[Layout, tuple[str, ...]]:
    """Names, shapes and FLOPs per non-zero entry, counted by hooks in one forward pass (convolutions and linear
    layers); and the names of matrices that no such layer uses, whose FLOPs are not counted."""
    costs: dict[int, tuple[int, bool]] = {}  # by id of the tensor: tied weights have one name, and every use counts
    of_inputs: dict[int, int] = {}  # of uses whose inputs depend on trained parameters

    def count(layer: Any, inputs: Any, output: Tensor) -> None:
        is_conv = isinstance(layer, nn.modules.conv._ConvNd)
        positions = output.numel() // output.shape[1 if is_conv else -1]
        # A transposed convolution spreads each input position, where others gather each output position.
        uses = inputs[0].numel() // inputs[0].shape[1] if is_conv and layer.transposed else positions
        costs[id(layer.weight)] = (costs.get(id(layer.weight), (0, False))[0] + 2 * uses, False)
        if inputs[0].requires_grad:
            of_inputs[id(layer.weight)] = of_inputs.get(id(layer.weight), 0) + 2 * uses
        if layer.bias is not None:
            costs[id(layer.bias)] = (costs.get(id(layer.bias), (0, False))[0] + positions, is_conv)

    hooks = [
        layer.register_forward_hook(count)
        for layer in module.modules()
        if isinstance(layer, (nn.modules.conv._ConvNd, nn.Linear))
    ]
    was_training, has_frozen = module.training, not all(value.requires_grad for value in module.parameters())
    module.eval()
    try:
        # With gradients it shows which inputs depend on trained parameters.
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(has_frozen):
            outputs = module(example)
    except Exception as error:
        raise _not_taken(module, example, packing, error) from error
    finally:
        for handle in hooks:
            handle.remove()
        module.train(was_training)
    noun, each = OUTPUTS.get(targets, OUTPUTS["classes"])
    if not isinstance(outputs, Tensor) or not outputs.dim() or outputs.shape[-1] != num_classes:
        shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        may_be_binary = targets == "classes" and num_classes == 2 and shape == (1, 1)
        raise SparsonaError(
            f"the model's output is {shape}, but the data has {num_classes} {noun}",
            expected=f"{each}: a last dimension of {num_classes}",
            hint=f"give the last layer as many outputs as there are {noun}"
            + '; or use task="binary" for the data: one logit then tells 0 from 1' * may_be_binary,
        )
    is_text = not example.is_floating_point()  # a class for each text, or for each of its tokens
    if outputs.shape[:-1] not in (example.shape[: 2 if targets == "tokens" else 1], example.shape[: 1 + is_text]):
        expected = ("examples", "positions", noun) if targets == "tokens" else ("examples", noun)
        raise SparsonaError(
            f"the model's output for one example is {tuple(outputs.shape)}",
            expected=f"({', '.join(expected)}) = {(*example.shape[: len(expected) - 1], num_classes)}",
            hint="flatten or squeeze what the model returns",
        )
    if not outputs.is_floating_point():
        raise SparsonaError(
            f"the model's output is of {str(outputs.dtype).removeprefix('torch.')}",
            expected=f"{each}, a real number that a gradient follows from",
            hint="return what the last layer returns, without argmax or rounding",
        )
    slots, frozen = [], Frozen()
    for name, value in module.named_parameters():
        rate, counts_dense = costs.get(id(value), (0, False))
        if value.requires_grad:
            slots.append(Slot(name, tuple(value.shape), rate, counts_dense))
        else:
            size = value.numel()
            more = (size, size * rate, size * of_inputs.get(id(value), 0))
            frozen = Frozen(frozen.size + more[0], frozen.flops + more[1], frozen.gradient_flops + more[2])
    uncharged = [layer for layer in module.modules() if isinstance(layer, (*NORMS, *EMBEDDINGS))]
    known = {id(value) for layer in uncharged for value in layer.parameters(recurse=False)} | set(costs)
    uncounted = [name for name, value in module.named_parameters() if value.dim() > 1 and id(value) not in known]
    return Layout(tuple(slots), frozen), tuple(uncounted)


def _not_taken(module: nn.Module, example: Tensor, packing: Packing | None, error: Exception) -> SparsonaError:
    if packing is not None:
        how = "**inputs" if packing.has_names else "*inputs"
        return SparsonaError(
            f"the model does not take one example of the inputs {packing.describe()}: {error}",
            expected=f"a model whose forward({how}) takes a batch of them",
            hint="give its forward the names of the inputs" if packing.has_names else "take them in this order",
        )
    kinds = {str(value.dtype).removeprefix("torch.") for value in module.parameters() if value.is_floating_point()}
    if "type" in str(error) and kinds != {"float32"}:
        return SparsonaError(
            f"the model has parameters of {', '.join(sorted(kinds))}, and inputs are float32: {error}",
            expected="a float32 model",
            hint="call model.float()",
        )
    return SparsonaError(
        f"the model does not take one example of shape {tuple(example.shape[1:])}: {error}",
        expected="a model whose forward(inputs) takes a batch of the federation's examples",
        hint="reshape the data, or wrap the model so that it takes this shape",
    )


def _guess_roles(module: nn.Module) -> Roles:
    """First and last layer with a weight matrix, and every norm: correct for plain networks; others pass their own."""
    matrices: list[tuple[str, ...]] = []
    norms: list[str] = []
    for name, layer in module.named_modules():
        own = tuple(f"{name}.{key}" if name else key for key, _ in layer.named_parameters(recurse=False))
        if isinstance(layer, NORMS):
            norms.extend(own)
        elif own and any(value.dim() > 1 for value in layer.parameters(recurse=False)):
            matrices.append(own)
    return Roles(input=matrices[0] if matrices else (), output=matrices[-1] if matrices else (), norm=tuple(norms))
