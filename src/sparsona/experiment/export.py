"""Models of a run as files that are used without sparsona: safetensors, torch.export programs and ONNX.

Every file is read back and must predict what the run itself predicts, or it is not written.
"""

from __future__ import annotations

import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from sparsona.analysis.measure import metric_values
from sparsona.analysis.statistics import accuracy_summary, wilson_interval
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.formats import FORMATS
from sparsona.core.points import point as point_of
from sparsona.core.printable import printable, warn
from sparsona.core.version import VERSION
from sparsona.data.augment import as_inputs
from sparsona.data.names import file_names, name_of
from sparsona.experiment.build import GIVEN, describe_examples, network_name, view_of
from sparsona.experiment.stored_models import StoredModel, StoredModels
from sparsona.report.model_card import Card, Measured, Sizes, write_card
from sparsona.runs.facts import MEANS, ExampleFacts, RunFacts
from sparsona.runs.folder import RunFolder, explain_disk_errors, reached, write_atomically
from sparsona.runs.listing import full_name
from sparsona.sparsity.dead_units import drop_dead_units

METADATA = "sparsona"  # the key, or the name of the extra file, of what a file says about itself
VALUES, BITS = ".values", ".bits"  # endings of the two tensors that a sparse one is stored as
# What a file without a card says about itself: what is needed to run the model.
NEEDED = ("model", "targets", "num_outputs", "class_names", "input_shape", "input_dtype", "input_preparation")
RELATIVE, ABSOLUTE = 1e-4, 1e-5  # how far outputs may be off: float32 sums in another order
BATCHES = (1, 2, 5)  # sizes of the batches that a file is tried with


@dataclass(frozen=True)
class Exported:
    """A file that was written.

    Args:
        path: the file.
        card: its model card, if one was written.
        client: whose model it is; None: the shared one.
        format: safetensors, torch or onnx.
        sizes: of the network and of what was written.
        largest_difference: between its outputs and those of the run, on random inputs.
        largest_output: the largest of these outputs.
    """

    path: Path
    card: Path | None
    client: int | None
    format: str
    sizes: Sizes
    largest_difference: float
    largest_output: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain = asdict(self)
        return plain | {"path": str(self.path), "card": None if self.card is None else str(self.card)}


class Exporter:
    """Writes models of one run, of which the checkpoint is read once.

    Args:
        folder: the run.
        models: its models.
    """

    def __init__(self, folder: RunFolder, models: StoredModels) -> None:
        self._folder, self._models = folder, models
        if not (so_far := reached(folder.path)).finished:
            rounds = folder.config["rounds"]
            warn(f"the run has not finished: its models are those after round {so_far.completed} of {rounds}")

    @property
    def clients(self) -> range:
        """The numbers of all clients."""
        return range(len(self._models.context.clients))

    def number(self, client: int | str) -> int:
        """The number of a client, given that or its name."""
        return self._models.number(client)

    def name(self, client: int | None) -> str:
        """What a client is called in tables: its name, or its number where it has none; None: the shared model."""
        return "shared" if client is None else name_of(self._folder.facts.client_names, client)

    def file_name(self, client: int | None) -> str:
        """What a model's file is called, without a suffix: by the client's name, made safe, or by its number."""
        if client is None:
            return "shared"
        names = self._folder.facts.client_names
        return f"client-{self._file_names[client] if names else client}"

    @cached_property
    def _file_names(self) -> tuple[str, ...]:
        return file_names(self._folder.facts.client_names)

    def write(
        self,
        client: int | str | None,
        path: Path,
        format: str | None = None,  # noqa: A002
        *,
        guarded: bool = False,
        sparse: bool = False,
        card: bool = True,
    ) -> Exported:
        """Write one model, as `Run.export` says."""
        kind = format_of(path, format)
        check_place(path, kind, sparse)
        found = self._models.shared() if client is None else self._models.personal(client, guarded)
        module = found.module()
        examples = self._folder.facts.examples or describe_examples(self._models.context.federation)
        if examples is None:
            raise SparsonaError(
                f"the run's data is {self._models.context.federation.x.dtype}",
                expected="float32, bytes or tokens",
                hint="run.personal_model(client) is the module",
            )
        about = self._about(found, examples, kind)
        trial = Trial(examples, self._folder.facts.targets, found.predict)
        num_before = self._folder.facts.num_parameters + self._folder.facts.num_frozen
        metadata = about if card else {key: about[key] for key in NEEDED if key in about}
        sizes, largest = write_model(path, kind, module, trial, metadata, num_before, sparse)
        beside = None
        if card:
            beside = path.with_name(f"{path.name}.md")
            about |= {"sparse": "true"} if sparse else {}
            text = write_card(self._card(found, path.name, about, kind, sizes, largest))
            write_atomically(beside, text.encode(errors="backslashreplace"))
        return Exported(path, beside, found.client, kind, sizes, *largest)

    def _about(self, model: StoredModel, examples: ExampleFacts, kind: str) -> dict[str, str]:
        facts, config, run = self._folder.facts, self._folder.config, full_name(self._folder.path)
        measured = self._measured(model)
        return describe_file(run, facts, config, examples, kind, model.client, model.completed, model.point, measured)

    def _measured(self, model: StoredModel) -> Measured | None:
        """What the run measured of this very model; None: nothing."""
        rows = self._folder.records.evaluations(model.completed, model.point)
        metrics = metric_values(self._folder, model.completed, model.point)
        if model.client is None:
            if not rows:
                return None
            known = {name: values[~np.isnan(values)] for name, values in metrics.items()}
            right = [(row.correct, row.count) for row in rows if row.correct is not None]
            figures, weight = accuracy_summary(*np.array(right).T) if right else {}, self._folder.facts.weight
            return Measured(
                sum(row.count for row in rows),
                figures.get(MEANS[weight]),
                None,
                sum(row.loss for row in rows) / len(rows),
                num_clients=len(rows),
                is_weighted=weight == "examples",
                metrics={name: float(values.mean()) for name, values in known.items() if len(values)},
            )
        mine = {name: float(values[model.client]) for name, values in metrics.items()}
        mine = {name: value for name, value in mine.items() if value == value}
        for row in rows:
            if row.client == model.client and row.count > 0 and (row.correct is None or row.correct >= 0):
                if row.correct is None:
                    return Measured(row.count, None, None, row.loss, metrics=mine)
                interval = wilson_interval(row.correct, row.count)
                return Measured(row.count, row.correct / row.count, interval, row.loss, metrics=mine)
        return None

    def _card(
        self,
        model: StoredModel,
        file: str,
        about: dict[str, str],
        kind: str,
        sizes: Sizes,
        largest: tuple[float, float],
    ) -> Card:
        folder, context = self._folder, self._models.context
        flops = None
        if model.client is not None:
            round_ = context.plan.round_at(0)
            flops = context.method.cost(context.task.layout, context.clients[model.client], round_).infer_flops
        return Card(
            file=file,
            about=about,
            format=kind,
            sizes=sizes,
            largest=largest,
            measured=self._measured(model),
            point=point_of(model.point).text,
            config=folder.config,
            facts=folder.facts,
            summary=folder.summary,
            environment=folder.environment,
            infer_flops=flops,
            client=model.client,
        )


def describe_file(
    run: str,
    facts: RunFacts,
    config: Mapping[str, Any],
    examples: ExampleFacts,
    kind: str,
    client: int | None,
    completed: int,
    point: str,
    measured: Measured | None,
) -> dict[str, str]:
    """What a file says about itself, as texts: the safetensors and ONNX formats take nothing else."""
    name = None if client is None or not facts.client_names else facts.client_names[client]
    network = network_name(config["model"], config["data"])
    accuracy = None if measured is None or measured.accuracy is None else f"{measured.accuracy:.6f}"
    found = {
        "tool": f"sparsona {VERSION}",
        "run": run,
        "method": facts.title,
        "data": examples.name or str(config["data"]),
        "client": "shared" if client is None else str(client),
        "client_name": name,
        "seed": str(config["seed"]),
        "rounds": str(completed),
        "model": {GIVEN: "your own"}.get(network or GIVEN, network),
        "point": point,
        "test_accuracy": accuracy,
        "test_examples": None if measured is None else str(measured.count),
        "targets": facts.targets or "classes",
        "num_outputs": str(examples.num_outputs),
        "class_names": json.dumps(facts.class_names) if facts.class_names else None,
        **describe_inputs(examples, in_graph=kind != "safetensors"),
    }
    return {key: printable(value, kept="") for key, value in found.items() if value is not None}


def check_place(path: Path, kind: str, sparse: bool) -> None:
    if sparse and kind != "safetensors":
        raise SparsonaError(
            f"sparse {kind}", expected="sparse with safetensors: the others have no such tensors", hint="leave it out"
        )
    if path.exists():
        raise SparsonaError(f"'{path}' exists already", expected="a new file", hint="give it another name")


def write_model(
    path: Path, kind: str, module: nn.Module, trial: Trial, about: dict[str, str], num_parameters: int, sparse: bool
) -> tuple[Sizes, tuple[float, float]]:
    """Make a file, check it, and write it: all of it or nothing."""
    data, largest, counts = _MAKERS[kind](module, trial, about, sparse)
    with explain_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)
    return Sizes(num_parameters, *counts, len(data)), largest


def format_of(path: Path, given: str | None) -> str:
    """The format of a file: as named, or by its suffix."""
    if given is not None:
        if given not in FORMATS:
            raise unknown_name("format", given, FORMATS)
        if given == "torch" and path.suffix != FORMATS["torch"]:
            raise SparsonaError(
                f"'{path}' for a torch.export program", expected=f"a name that ends in {FORMATS['torch']}"
            )
        return given
    for name, suffix in FORMATS.items():
        if path.suffix == suffix:
            return name
    raise SparsonaError(
        f"'{path}': no format has the suffix '{path.suffix}'",
        expected=", ".join(f"{suffix} ({name})" for name, suffix in FORMATS.items()),
        hint="rename it, or name the format",
    )


def describe_inputs(examples: ExampleFacts, in_graph: bool) -> dict[str, str]:
    """What the inputs of an exported model must look like; `in_graph`: bytes are cropped and normalised by it."""
    if (packing := examples.packing) is not None:
        named = {one.name or f"input_{place}": one for place, one in enumerate(packing.fields)}
        return {
            "input_shape": json.dumps({name: list(one.shape) for name, one in named.items()}),
            "input_dtype": json.dumps({name: one.kind for name, one in named.items()}),
            "input_preparation": f"none: pass them as {'**' if packing.has_names else '*'}inputs",
        }
    shape, steps, dtype = list(examples.shape), [], examples.dtype
    if examples.crop is not None and examples.test_resize:
        steps.append(f"resize to {examples.crop} x {examples.crop} (bilinear, antialias)")
        shape = [*shape[:-2], examples.crop, examples.crop]
    elif examples.crop is not None and not in_graph:
        steps.append(f"cut {examples.crop} x {examples.crop} from the middle")
        shape = [*shape[:-2], examples.crop, examples.crop]
    if dtype == "int32":
        dtype = "int64"
    elif not in_graph:
        if dtype == "uint8":
            steps.append("divide by 255")
        if examples.mean:
            steps.append(f"subtract {list(examples.mean)} and divide by {list(examples.std)}, by channel")
        dtype = "float32"
    text = "; ".join(steps) if steps else "none: pass examples as the run's data had them"
    return {"input_shape": json.dumps(shape), "input_dtype": dtype, "input_preparation": text}


class Prepared(nn.Module):
    """A model that takes examples as the run's data stores them: bytes are scaled, images cropped and normalised."""

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, examples: ExampleFacts) -> None:
        super().__init__()
        self.model, self.crop = model, None if examples.test_resize else examples.crop
        self.is_bytes, self.is_normalised = examples.dtype == "uint8", bool(examples.mean)
        # As sparsona.data.augment.scale computes it, to the bit.
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (examples.mean, examples.std))
        self.register_buffer("scale", (1 / 255) / std if self.is_bytes else std, persistent=False)
        self.register_buffer("shift", mean / std if self.is_bytes else mean, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs for a batch of stored examples."""
        if self.crop is not None:
            top, left = ((size - self.crop) // 2 for size in inputs.shape[-2:])
            inputs = inputs[..., top : top + self.crop, left : left + self.crop]
        if self.is_bytes:
            inputs = inputs.float()
            inputs = inputs * self.scale - self.shift if self.is_normalised else inputs * (1 / 255)
        elif self.is_normalised:
            inputs = (inputs - self.shift) / self.scale
        outputs: Tensor = self.model(inputs)
        return outputs


class Trial:
    """Random examples, and what a run predicts for them.

    Args:
        examples: what they look like.
        targets: classes, tokens or numbers.
        predict: the run's own prediction from a model's inputs.
    """

    def __init__(self, examples: ExampleFacts, targets: str, predict: Callable[[Tensor], Tensor]) -> None:
        self.examples, self.view = examples, view_of(examples)
        generator = torch.Generator().manual_seed(0)
        shape = examples.shape
        if examples.crop is not None and examples.test_resize:
            shape = (*shape[:-2], examples.crop, examples.crop)
        whole = (sum(BATCHES), *shape)
        if examples.dtype == "uint8":
            stored = torch.randint(0, 256, whole, generator=generator, dtype=torch.uint8)
        elif examples.dtype == "int32":  # only 0 and 1 are in every vocabulary
            stored = torch.randint(0, examples.num_outputs if targets == "tokens" else 2, whole, generator=generator)
        else:
            stored = torch.rand(whole, generator=generator)
        if (packing := examples.packing) is not None:  # whole numbers and bools among them: 0 and 1 are in every table
            columns = stored.split([one.size for one in packing.fields], dim=1)
            kinds = [one.kind for one in packing.fields]
            parts = [part if kind == "float32" else part.round() for part, kind in zip(columns, kinds, strict=True)]
            stored = torch.cat(parts, dim=1)
        with torch.no_grad():
            seen = stored if examples.dtype == "int32" else as_inputs(stored, self.view)
            self.outputs = [predict(inputs).float() for inputs in seen.split(BATCHES)]
        unpack: Any = packing.unpack if packing is not None else lambda rows: rows
        self.stored, self.inputs = ([unpack(rows) for rows in one.split(BATCHES)] for one in (stored, seen))

    def check(self, predict: Callable[..., Tensor], what: str, stored: bool = True) -> tuple[float, float]:
        """The largest difference of outputs, and the largest output; SparsonaError where they are not the same."""
        found, most = 0.0, 0.0
        with torch.no_grad():
            for inputs, expected in zip(self.stored if stored else self.inputs, self.outputs, strict=True):
                outputs = call(predict, inputs)
                if outputs.shape != expected.shape:
                    raise _not_the_same(what, f"outputs of shape {tuple(outputs.shape)}, not {tuple(expected.shape)}")
                finite = expected.isfinite()
                if not torch.equal(outputs.isfinite(), finite):
                    raise _not_the_same(
                        what, "outputs that are not finite where they should be, or the other way round"
                    )
                if finite.any():
                    found = max(found, float((outputs - expected)[finite].abs().max()))
                    most = max(most, float(expected[finite].abs().max()))
        if found > RELATIVE * most + ABSOLUTE:
            raise _not_the_same(what, f"outputs that differ by {found:.3g}; the largest is {most:.3g}")
        return found, most


def call(predict: Callable[..., Tensor], inputs: Any) -> Tensor:
    """The outputs for one input, or for several in a tuple or by name."""
    if isinstance(inputs, dict):
        return predict(**inputs)
    return predict(*inputs) if isinstance(inputs, tuple) else predict(inputs)


def _not_the_same(what: str, how: str) -> SparsonaError:
    return SparsonaError(
        f"{what} predicts something else than the run: {how}",
        expected="the same outputs; nothing was written",
        hint="export it as safetensors, which holds the weights as they are, and report this network",
    )


def smaller(module: nn.Module, trial: Trial) -> nn.Module:
    """The module without dead units, where that gives the same outputs."""
    made, dropped = drop_dead_units(module)
    if dropped:
        try:
            trial.check(made, "a network without its dead units", stored=False)
        except (SparsonaError, RuntimeError):
            return module
    return made


def count(module: nn.Module) -> tuple[int, int]:
    """Parameters of a module, and how many of them are not 0."""
    values = list(module.parameters())
    return sum(value.numel() for value in values), sum(int(torch.count_nonzero(value)) for value in values)


# The formats: each returns the file, the figures of its check, and its parameters.
Made = tuple[bytes, tuple[float, float], tuple[int, int]]


def _as_safetensors(module: nn.Module, trial: Trial, about: dict[str, str], sparse: bool) -> Made:
    tensors = {
        name: value.detach().cpu().contiguous().clone()
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor)
    }
    stored, notes = dict(tensors), dict(about)
    if sparse:
        stored = {}
        for name, value in tensors.items():
            stored |= _sparse(name, value)
        notes["sparse"] = json.dumps({name: list(tensors[name].shape) for name in tensors if name + BITS in stored})
    data = save(stored, metadata={"format": "pt", **notes})
    back = restore(load(data), notes)
    for name, value in tensors.items():
        if not torch.equal(back[name], value):
            raise _not_the_same("the file", f"'{name}' is not what was stored")
    return data, trial.check(module, "the network", stored=False), count(module)


def _sparse(name: str, value: Tensor) -> dict[str, Tensor]:
    """A tensor as its non-zero values and a bit for every entry, where that takes fewer bytes."""
    if value.dtype != torch.float32 or 32 * int(torch.count_nonzero(value)) + value.numel() >= 32 * value.numel():
        return {name: value}
    flat = value.flatten()
    bits = torch.from_numpy(np.packbits((flat != 0).numpy(), bitorder="little"))
    return {name + VALUES: flat[flat != 0], name + BITS: bits}


def restore(stored: dict[str, Tensor], about: dict[str, str]) -> dict[str, Tensor]:
    """The state_dict of a safetensors file, whose tensors may be stored sparse.

    Args:
        stored: the tensors of the file.
        about: its metadata.

    Returns:
        A state_dict.

    Example:
        >>> parts = _sparse("w", torch.tensor([[0.0, 2.0], [0.0, 0.0]]))
        >>> restore(parts, {"sparse": '{"w": [2, 2]}'})["w"].tolist()
        [[0.0, 2.0], [0.0, 0.0]]
    """
    shapes = json.loads(about.get("sparse", "{}"))
    parts = {name + ending for name in shapes for ending in (VALUES, BITS)}
    made = {name: value for name, value in stored.items() if name not in parts}
    for name, shape in shapes.items():
        whole = torch.zeros(shape)
        kept = np.unpackbits(stored[name + BITS].numpy(), count=whole.numel(), bitorder="little")
        whole.view(-1)[torch.from_numpy(kept).bool()] = stored[name + VALUES]
        made[name] = whole
    return made


def _as_program(module: nn.Module, trial: Trial) -> Any:
    """A torch.export program that takes stored examples in batches of any size."""
    batch, inputs = torch.export.Dim("batch", min=1), trial.stored[-1]
    several = trial.examples.packing is not None  # which have no View
    whole = (module if several else Prepared(module, trial.examples)).eval().requires_grad_(False)
    named = inputs if isinstance(inputs, dict) else {}
    args = () if named else inputs if isinstance(inputs, tuple) else (inputs,)
    shapes: Any = {name: {0: batch} for name in named} or tuple({0: batch} for _ in args)
    try:
        made = torch.export.export(whole, args, dict(named), dynamic_shapes=shapes)
    except Exception as error:  # whatever a person's own forward() may raise under a tracer
        raise SparsonaError(
            f"torch.export does not take this network: {first_line(error)}",
            expected="a forward pass without control flow that depends on data",
            hint="export it as safetensors and load it into your own module",
        ) from error
    for part in made.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # paths of this machine, and lines of a person's code
    return made


def _as_torch(module: nn.Module, trial: Trial, about: dict[str, str], sparse: bool) -> Made:
    kept, file = smaller(module, trial), io.BytesIO()
    with _quiet():
        torch.export.save(_as_program(kept, trial), file, extra_files={METADATA: json.dumps(about)})
        back = torch.export.load(io.BytesIO(file.getvalue())).module()
        return file.getvalue(), trial.check(back, "the torch.export program"), count(kept)


def _as_onnx(module: nn.Module, trial: Trial, about: dict[str, str], sparse: bool) -> Made:
    runtime = _extra("onnxruntime")
    _extra("onnxscript")
    _extra("onnx")
    kept, packing = smaller(module, trial), trial.examples.packing
    names = ["inputs"]
    if packing is not None:
        names = [one.name or f"input_{place}" for place, one in enumerate(packing.fields)]
    with _quiet():
        program = _as_program(kept, trial)
        try:
            made = torch.onnx.export(program, dynamo=True, input_names=names, output_names=["outputs"], verbose=False)
            assert made is not None
            made.model.metadata_props.update(about)
            proto = made.model_proto
            _name_batch(proto)
            data: bytes = proto.SerializeToString()
        except Exception as error:  # an operator without a counterpart, say, or more than the 2 GB of a file
            raise SparsonaError(
                f"ONNX cannot express this network: {first_line(error)}",
                expected="operators that ONNX has",
                hint="export it with --format torch",
            ) from error
        session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])

    def predict(*inputs: Tensor, **named: Tensor) -> Tensor:
        given = named or dict(zip(names, inputs, strict=True))
        return torch.from_numpy(session.run(None, {name: value.numpy() for name, value in given.items()})[0])

    return data, trial.check(predict, "the ONNX file"), count(kept)


def _name_batch(proto: Any) -> None:
    """Call the axis of examples "batch" in an ONNX graph, which has the tracer's symbol for it."""
    first = [dims[0].dim_param for one in proto.graph.input if (dims := one.type.tensor_type.shape.dim)]
    symbols = {name for name in first if name}
    for one in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in one.type.tensor_type.shape.dim:
            if dim.dim_param:  # also of an expression, such as 4*s85
                dim.dim_param = re.sub(
                    r"[A-Za-z_]\w*", lambda found: "batch" if found[0] in symbols else found[0], dim.dim_param
                )


_MAKERS: dict[str, Callable[[nn.Module, Trial, dict[str, str], bool], Made]] = {
    "safetensors": _as_safetensors,
    "torch": _as_torch,
    "onnx": _as_onnx,
}


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _extra(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise SparsonaError(
            f"{module} is not installed; ONNX files need it", hint="pip install 'sparsona[onnx]'"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' remarks on packages and classes of their own."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
