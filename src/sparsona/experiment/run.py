"""The result of a run: accuracies, personal models, tables and the report, read from its folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sparsona.analysis import summary as summaries
from sparsona.analysis.conditions import early_stop_sentence
from sparsona.analysis.format import human_bytes
from sparsona.analysis.heard import divergence_note
from sparsona.analysis.measure import headline_score, measure_curve, measure_of, measure_of_metric, metric_values
from sparsona.analysis.summary import untrained_note
from sparsona.analysis.view import RunView, read_view
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.files import replace_file
from sparsona.core.points import RECEIVED
from sparsona.core.printable import printable
from sparsona.core.torch_state import usual_torch
from sparsona.data.names import name_of
from sparsona.engine.context import ClientContext
from sparsona.experiment.stored_models import StoredModels, load_progress
from sparsona.runs.checkpoint import Progress
from sparsona.runs.comparison import COMPARISON_FILE, check_member, comparison_in, read_comparison
from sparsona.runs.failed import NOT_PLAYED, FailedRun, read_failed
from sparsona.runs.folder import RunFolder
from sparsona.runs.profile import is_profiled, read_profile
from sparsona.runs.traits import check_traits, compared_clients, read_traits

if TYPE_CHECKING:
    import numpy as np
    from pandas import DataFrame
    from plotly.graph_objects import Figure
    from torch import nn

    from sparsona.analysis.bounds import Bounds
    from sparsona.analysis.clients import ClientEffects
    from sparsona.analysis.figures import Drawn
    from sparsona.analysis.gates import Gates
    from sparsona.analysis.numbers import Per
    from sparsona.analysis.privacy import Spent
    from sparsona.analysis.similarity import Similarity
    from sparsona.analysis.targets import Targets
    from sparsona.experiment.export import Exported, Exporter
    from sparsona.experiment.leakage import Leakage
    from sparsona.experiment.new_data import NewResults
    from sparsona.runs.verify import Verification


class Run:
    """A run's result, read from its folder. `train`, `resume` and `load` return it.

    Args:
        folder: the run's folder.
        context: rebuilds the data, model and method of the run, for what needs its data.
        model_context: rebuilds model and method without data, for its models. None: `context`.

    Example:
        >>> import sparsona as sp
        >>> run = sp.train("fedavg", clients=4, rounds=1, data_rate=0.1, out="runs/doc")
        >>> run.config["clients"], run.summary["method"], run.points
        (4, 'fedavg', ['received'])
    """

    def __init__(
        self,
        folder: RunFolder,
        context: Callable[[], ClientContext],
        model_context: Callable[[], ClientContext] | None = None,
    ) -> None:
        self._folder, self._make_context = folder, context
        self._make_model_context = model_context or context
        self.path = folder.path
        self.config: dict[str, Any] = folder.config
        self.summary: dict[str, Any] = folder.summary or summaries.summary_of(folder)

    def __repr__(self) -> str:
        measure = measure_of(self._folder)
        score, accuracy = headline_score(measure, self.summary), self.summary["accuracy"]["mean"]
        reached = "not evaluated" if score is None else f"{measure.mean_name} {measure.brief(score)}"
        first = f"Run({self.summary['method']}, {self.summary['rounds']} rounds, {reached}, '{self.path}')"
        more = [f"{human_bytes(self.summary['bytes']['total'])} sent"]
        if accuracy is not None:
            spread = {"bottom decile": "bottom_decile", "worst": "worst"}
            known = {name: self.summary["accuracy"].get(key) for name, key in spread.items()}
            more = [f"{name} {value:.1%}" for name, value in known.items() if value is not None] + more
        if (density := self.config["options"].get("density")) is not None:
            more.append(f"density {density:g}")
        if (diverged := self.summary.get("diverged")) is not None:
            more.append(divergence_note(diverged))
        if (never := self.summary.get("untrained")) is not None:
            more.append(untrained_note(never))
        if (stop := self.summary.get("early_stop")) is not None:
            more.append(early_stop_sentence(stop))
        return f"{printable(first, kept='')}\n  {printable(', '.join(more), kept='')}"

    @property
    def protocol(self) -> str:
        """How the accuracies were obtained, in words."""
        return self.summary["protocol"]

    def verify(self) -> Verification:
        """Check that all files of the run are those that were written, and belong together; reads everything.

        Returns:
            What is right, what is wrong, and what nothing vouches for.

        Example:
            >>> import sparsona as sp
            >>> sp.train("local", clients=4, rounds=1, data_rate=0.1).verify().is_right
            True
        """
        from sparsona.runs.verify import verify

        return verify(self.path)

    def accuracies(self, point: str | None = None) -> np.ndarray:
        """Each client's accuracy on its own test data, from 0 to 1; NaN for those not tested.

        Args:
            point: one of `points`, such as "novel_tuned", at its last evaluation. None: the headline's.

        Returns:
            float64 [clients].

        Example:
            >>> import sparsona as sp
            >>> sp.train("local", clients=4, rounds=1, data_rate=0.1).accuracies().shape
            (4,)
        """
        import numpy as np

        if self._folder.facts.is_regression:
            raise SparsonaError(
                f"'{self.path}' predicts numbers: there is no accuracy",
                expected="a run on classes",
                hint="run.errors() has each client's mean loss, run.metric('rmse') its other figures",
            )
        correct, count = self.counts(point)
        return np.where(count > 0, correct / np.maximum(count, 1), np.nan)

    @property
    def client_names(self) -> tuple[str, ...] | None:
        """The names of the clients, in order; None: they have none."""
        return self._folder.facts.client_names or None

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes, in order; None: they have none."""
        return self._folder.facts.class_names or None

    def accuracies_by_name(self, point: str | None = None) -> dict[str, float]:
        """The same as `accuracies`, by the clients' names: only those that were tested.

        Args:
            point: as for `accuracies`.

        Returns:
            Accuracy by name, or by number as text where clients have no names.

        Example:
            >>> import numpy as np
            >>> import sparsona as sp
            >>> x, y = np.eye(12), np.arange(12) % 2
            >>> federation = sp.Federation.from_clients({"north": (x, y), "south": (x, y)})
            >>> list(sp.train("local", federation, rounds=1).accuracies_by_name())
            ['north', 'south']
        """
        found = enumerate(self.accuracies(point).tolist())
        return {name_of(self.client_names, client): value for client, value in found if value == value}

    def counts(self, point: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Each client's right predictions and its number of test examples, 0 for those not tested.

        Args:
            point: as for `accuracies`.

        Returns:
            Two arrays of int [clients].
        """
        _, _, correct, count = summaries.headline(self._folder) if point is None else summaries.at(self._folder, point)
        return correct, count

    def errors(self, point: str | None = None) -> np.ndarray:
        """Each client's mean loss on its own test data, such as a regression's squared error; NaN for those not tested.

        Args:
            point: as for `accuracies`.

        Returns:
            float64 [clients].
        """
        return summaries.losses(self._folder, point)

    def metric(self, name: str, point: str | None = None) -> np.ndarray:
        """Each client's value of one of the run's metrics; NaN where it is undefined or was not tested.

        Args:
            name: one of `run.summary["metrics"]`.
            point: as for `accuracies`.

        Returns:
            float64 [clients].

        Example:
            >>> import sparsona as sp
            >>> run = sp.train("local", clients=4, rounds=1, data_rate=0.2, metrics=["f1", "auc"])
            >>> run.metric("f1").shape, sorted(run.summary["metrics"])
            ((4,), ['auc', 'f1'])
        """
        at, completed, _, _ = summaries.headline(self._folder) if point is None else summaries.at(self._folder, point)
        found = metric_values(self._folder, completed, at)
        if name not in found:
            raise unknown_name("metric of this run", name, found)
        return found[name]

    def metric_curve(self, name: str, point: str = RECEIVED) -> list[tuple[int, float]]:
        """The mean of a metric, over the clients that it is defined for, against completed rounds.

        Args:
            name: one of the run's metrics.
            point: one of `points`.

        Returns:
            Pairs of completed rounds and mean.
        """
        return measure_curve(self._folder, measure_of_metric(name), point)

    @property
    def points(self) -> list[str]:
        """The evaluation points of this run: which models were evaluated, on which data."""
        return summaries.points(self._folder)

    @property
    def novel(self) -> list[int]:
        """The clients that took no part in training."""
        return list(self._folder.facts.novel)

    def curve(self, point: str = RECEIVED) -> list[tuple[int, float]]:
        """Mean accuracy (of a regression: loss) over clients against completed rounds.

        Args:
            point: one of `points`.

        Returns:
            Pairs of completed rounds and mean.
        """
        return summaries.curve(self._folder, point)

    @usual_torch()
    def personal_model(self, client: int | str, guarded: bool = False) -> nn.Module:
        """A client's own model as a plain nn.Module in evaluation mode, its mask applied. It needs no data.

        Args:
            client: the number of the client, or its name.
            guarded: return the shared model instead if the client keeps that one; for a run with `guard=True`.

        Returns:
            A new module, which takes inputs as `Federation.examples` gives them.

        Example:
            >>> import sparsona as sp
            >>> run = sp.train("fedspa", clients=4, rounds=1, data_rate=0.1)
            >>> run.personal_model(0).training
            False
        """
        return self._models().personal(client, guarded).module()

    @usual_torch()
    def model(self) -> nn.Module:
        """The model that clients share, the server's or the mean of the peers', as a plain nn.Module.

        Returns:
            A new module in evaluation mode.

        Example:
            >>> import sparsona as sp
            >>> run = sp.train("fedavg", clients=4, rounds=1, data_rate=0.2)
            >>> sum(p.numel() for p in run.model().parameters()) == run.view.num_parameters
            True
        """
        return self._models().shared().module()

    @usual_torch()
    def export(
        self,
        client: int | str | None,
        path: str | Path,
        *,
        format: str | None = None,  # noqa: A002 - the word of the command line
        guarded: bool = False,
        sparse: bool = False,
        card: bool = True,
    ) -> Exported:
        """Write a client's model to a file that is used without sparsona, checked to predict the same.

        Args:
            client: the number of the client, or its name; None: the shared model.
            path: the file to write, which must not exist.
            format: "safetensors", "torch" or "onnx" (extra `onnx`); None: by the suffix, .safetensors, .pt2 or .onnx.
            guarded: as for `personal_model`.
            sparse: in safetensors, store the tensors that are mostly zero as their other values and a bit for each.
            card: write a model card beside it, PATH.md: how the model was trained and measured. Without one the file
                tells neither whose model it is nor how good, but what is needed to run it.

        Returns:
            The path, sizes before and after, and the largest difference to the run's own predictions.

        Example:
            >>> import sparsona as sp
            >>> run = sp.train("fedspa", clients=4, rounds=1, data_rate=0.2)
            >>> made = run.export(0, "mine.safetensors")
            >>> made.path.name, made.card.name, made.sizes.nonzero < made.sizes.parameters
            ('mine.safetensors', 'mine.safetensors.md', True)
        """
        return self.exporter().write(client, Path(path), format, guarded=guarded, sparse=sparse, card=card)

    def exporter(self) -> Exporter:
        """What writes several models of this run, whose checkpoint it reads once: `write` is `export`."""
        from sparsona.experiment.export import Exporter

        return Exporter(self._folder, self._models())

    @usual_torch()
    def evaluate(
        self,
        client: int | str | Sequence[int | str | None] | None,
        x: Any,
        y: Any,
        guarded: bool = False,
        *,
        owners: Any = None,
    ) -> NewResults:
        """Evaluate a client's model, or several, on new data.

        Args:
            client: the number of the client, or its name; several of either; "all": every client; None: the shared
                model.
            x: examples as the run's data had them: images of bytes as bytes, numbers not normalised otherwise.
            y: their labels, or what else the run predicts.
            guarded: as for `personal_model`.
            owners: whose each example is, as in the run's data: a client's model is then evaluated on that client's own
                rows, and "all" leaves out clients that have none. None: every model is evaluated on all rows, as the
                shared model always is.

        Returns:
            For each model accuracy, loss, a row for each class and the confusion matrix. A loss or metric that is a
            function from Python is left out unless `sparsona.load` was given it again.

        Example:
            >>> import numpy as np
            >>> import sparsona as sp
            >>> run = sp.train("local", clients=4, rounds=1, data_rate=0.2)
            >>> run.evaluate(0, np.zeros((3, 1, 8, 8), np.float32), [0, 1, 2]).rows()[0]["examples"]
            3
        """
        from sparsona.experiment.new_data import evaluate_models

        which = [client] if client is None or isinstance(client, int | str) else list(client)
        return evaluate_models(self._models(), which, x, y, guarded, owners)

    def _models(self) -> StoredModels:
        return StoredModels(self._folder, self._make_model_context, self._make_context)

    def _progress(self, context: ClientContext) -> Progress:
        return load_progress(self._folder, context)

    def clients(self, against: Run | str | None = None) -> ClientEffects:
        """What this run's models do to each client, over those of another run or of another point of this one.

        Args:
            against: a run on the same clients, or the name of a point of this run. None: the shared model that the
                run evaluated, such as points=["global"].

        Returns:
            For each kind of data, every client's accuracy before and after (of a regression, what it is judged by);
            `rows()` is a table of them, and `sparsona.save_picture` draws it.

        Example:
            >>> import sparsona as sp
            >>> run = sp.train("fedspa", clients=4, rounds=1, data_rate=0.1, points=["global"])
            >>> [change.name for change in run.clients().changes]
            ['test']
        """
        from sparsona.analysis.clients import client_effects

        return client_effects(self._folder, against._folder if isinstance(against, Run) else against)

    @usual_torch()
    def gates(self) -> Gates:
        """How clients used the blocks of a gated model, turn by turn, in the rounds that were evaluated.

        Returns:
            For each recorded turn the density used (s'), the upload share (q) and what appendix E's formula makes of
            it, and of each block the mean score, the mean gate, and the share of the batches that used it;
            `sparsona.save_picture` draws the histogram of the gates over the rounds.

        Example:
            >>> import sparsona as sp
            >>> gates = sp.train("pfedgate", clients=4, rounds=2, data_rate=0.1).gates()
            >>> gates.rounds, gates.turns[0].density_used <= 0.5
            ([1, 2], True)
        """
        from sparsona.analysis.gates import gates_of

        return gates_of(self._folder)

    @usual_torch()
    def similarity(self, of: str | None = None) -> Similarity:
        """The distances between the clients' current masks or gates, beside the similarity of their labels.

        Args:
            of: what is compared, where a method has more than one: of pFedGate, "phi" are the gates' parameters
                (figure 4 of its paper). None: the method's usual, of pFedGate the mean scores of the last turn.

        Returns:
            Distances and label similarities of all clients or, of more than 64, of 64 that are drawn by the run's
            seed; `sparsona.save_picture` draws it.
        """
        from sparsona.analysis.similarity import similarity_of

        context = self._make_context()
        check_traits(context, of)
        traits = read_traits(context, self._progress(context).population, compared_clients(context), of)
        return similarity_of(self._folder, traits.kind, traits.clients, traits.distances(), of)

    def privacy(self) -> Spent | None:
        """What this run has spent of differential privacy so far; needs the extra `privacy`.

        Returns:
            Epsilon of the run and of each client; None for a run without --privacy.

        Example:
            >>> import sparsona as sp
            >>> run = sp.train("fedavg", clients=4, rounds=1, data_rate=0.1, privacy="local:noise=2.0")
            >>> round(run.privacy().epsilon, 2)
            4.38
        """
        from sparsona.analysis.privacy import spent

        return spent(self._folder)

    def leakage(
        self,
        *,
        batch_sizes: Sequence[int] = (1, 4, 8),
        batches: int = 2,
        steps: int = 300,
        noise: float | None = None,
        seed: int = 0,
        listen: Callable[[int, int], None] | None = None,
    ) -> Leakage:
        """What this run reveals, by attacks: classes from its clients' last masks, pictures from updates of one step.

        Args:
            batch_sizes: of the updates whose pictures are searched; empty: masks alone are attacked.
            batches: how many batches of each size.
            steps: of each search.
            noise: the noise multiplier of updates with noise; None: the run's, or 1.
            seed: of everything that is drawn.
            listen: called with the searches done and their number.

        Returns:
            What was reached, beside what an attacker reaches without the messages, and epsilon.

        Example:
            >>> import sparsona as sp
            >>> run = sp.train("fedspa", clients=8, rounds=1, data_rate=0.2, partition="shards:2")
            >>> [row["attack"] for row in run.leakage(batch_sizes=()).rows()]
            ['class present, from masks']
        """
        from sparsona.experiment.leakage import check_arguments, leakage_of

        checked = check_arguments(batch_sizes, batches, steps, noise, seed, listen)
        context = self._make_context()
        population = self._progress(context).population
        return leakage_of(self._folder, context, population, *checked, listen)

    def union_density(self) -> float | None:
        """The share of the model's entries that are in the last mask of any client; None: clients have no masks."""
        import numpy as np

        context = self._make_context()
        if context.method.trait is None:
            return None
        check_traits(context)
        traits = read_traits(context, self._progress(context).population, range(len(context.clients)))
        if traits.kind != "mask":
            return None
        return float(np.bitwise_count(np.bitwise_or.reduce(traits.rows)).sum()) / max(traits.size, 1)

    @usual_torch()
    def bounds(
        self,
        *,
        clients: int = 8,
        batches: int = 8,
        seed: int = 0,
        along: int = 0,
        delta: float = 1e-5,
        noise: float = 0.0,
        listen: Callable[[int, int], None] | None = None,
    ) -> Bounds:
        """What the theorems of the method's paper say of this run, beside what was measured.

        Constants are estimated on training data alone, from the first and the last models.

        Args:
            clients: how many clients they are estimated on, drawn by `seed`.
            batches: how many batches of each are drawn for variances, and limit the examples of Hessian products.
            seed: of clients, batches and power iterations.
            along: replay the run, and measure at so many rounds between the first and the last as well.
            delta: the probability of failure in DisPFL's and pFedGate's theorems.
            noise: the standard deviation of the noise that DisPFL's theorem supposes on gradients.
            listen: called with the parts done and their number.

        Returns:
            Constants, bounds and assumptions; `sparsona.save_picture` draws those that speak of rounds. Without bounds
            where no theorem of the four papers applies.

        Example:
            >>> import sparsona as sp
            >>> run = sp.train("fedalt", clients=4, rounds=1, data_rate=0.1)
            >>> [bound.theorem for bound in run.bounds(clients=2, batches=2).bounds]
            ['FedAlt, Theorem 2', 'FedSim, Theorem 1, Eq. (6)']
        """
        from sparsona.experiment.theory.bounds import estimate_bounds

        context = self._make_context()
        progress = self._progress(context)
        return estimate_bounds(
            self._folder,
            context,
            progress.population,
            progress.completed,
            clients=clients,
            batches=batches,
            seed=seed,
            along=along,
            delta=delta,
            noise=noise,
            listen=listen,
        )

    @property
    def is_profiled(self) -> bool:
        """Whether the run was profiled."""
        return is_profiled(self.path)

    def profile(self) -> dict[str, Any]:
        """Where the time went, phase by phase; only of a run that was profiled.

        Returns:
            The content of profile.json, as docs/profile.md describes it.
        """
        return read_profile(self.path)

    def report(self, path: str | Path) -> Path:
        """Write a self-contained HTML page; needs the extra `report`.

        Args:
            path: the file to write.

        Returns:
            The path.

        Example:
            >>> import sparsona as sp
            >>> sp.train("local", clients=4, rounds=1, data_rate=0.1).report("page.html").name
            'page.html'
        """
        from sparsona.report.page import write_report

        return write_report([self.view], path)

    @cached_property
    def view(self) -> RunView:
        """The run as plain data, for tables and reports."""
        return read_view(self._folder)

    @property
    def _alone(self) -> Comparison:
        return Comparison(self.path, [self])

    def to_frame(self, per: Per = "round") -> DataFrame:
        """Results as a pandas DataFrame: `Comparison.to_frame`, of this run alone."""
        return self._alone.to_frame(per)

    def to_csv(self, path: str | Path | None = None, per: Per = "round") -> str:
        """The same as CSV: `Comparison.to_csv`, of this run alone."""
        return self._alone.to_csv(path, per)

    def plot_curves(
        self, against: Literal["rounds", "bytes", "paper bytes", "steps"] = "rounds", metric: str | None = None
    ) -> Figure:
        """The learning curve as a Plotly figure: `Comparison.plot_curves`, of this run alone."""
        return self._alone.plot_curves(against, metric)

    def plot_clients(self) -> Figure:
        """Every client's accuracy as a Plotly figure: `Comparison.plot_clients`, of this run alone."""
        return self._alone.plot_clients()

    def _repr_html_(self) -> str:
        return self._alone._repr_html_()


class Comparison:
    """Several runs of the same experiment, method by method and seed by seed. `compare` returns it.

    Args:
        path: the folder of the comparison.
        runs: its runs, in order.
        missing: the runs that failed, which are not among them: method, seed, folder and error of each.

    Example:
        >>> import sparsona as sp
        >>> both = sp.compare(["local", "fedavg"], clients=4, rounds=1, data_rate=0.1)
        >>> len(both.runs), [row["method"] for row in both.differences()]
        (2, ['FedAvg'])
    """

    def __init__(self, path: Path, runs: list[Run], missing: Sequence[FailedRun] = ()) -> None:
        self.path, self.runs, self.missing = path, runs, tuple(missing)

    def __repr__(self) -> str:
        from sparsona.analysis.answer import answer
        from sparsona.analysis.numbers import to_text

        views, failed = self.views(), f", {len(self.missing)} failed" if self.missing else ""
        first = printable(f"Comparison({len(self.runs)} runs{failed}, '{self.path}')", kept="")
        return printable(f"{first}\n{answer(views)}\n{to_text(views, missing=self.missing)}") if views else first

    def to_frame(self, per: Per = "method") -> DataFrame:
        """Results as a pandas DataFrame of numbers; pandas must be installed.

        Args:
            per: a line for each "method" (mean and spread over seeds), "client" or "round".

        Returns:
            The frame. Accuracies are from 0 to 1; NaN where a figure is not known.
        """
        from sparsona.analysis.extra import import_extra
        from sparsona.analysis.numbers import numbers

        # Of None alone pandas would make a column of objects; beside a number it makes NaN of it.
        lines = [
            {key: math.nan if one is None else one for key, one in line.items()} for line in numbers(self.views(), per)
        ]
        return import_extra("pandas", "data frames", "pandas").DataFrame(lines)

    def to_csv(self, path: str | Path | None = None, per: Per = "method") -> str:
        """The same numbers as CSV.

        Args:
            path: a file to write as well.
            per: as for `to_frame`.

        Returns:
            The text.
        """
        from sparsona.analysis.numbers import to_csv

        return _write(to_csv(self.views(), per), path)

    def to_markdown(self, path: str | Path | None = None, every: bool = False) -> str:
        """The table as Markdown.

        Args:
            path: a file to write as well.
            every: all columns instead of the first ones.

        Returns:
            The text.
        """
        from sparsona.analysis.numbers import to_markdown

        return _write(to_markdown(self.views(), every, self.missing), path)

    def to_latex(self, path: str | Path | None = None, every: bool = False, caption: str = "", label: str = "") -> str:
        r"""The table for LaTeX, with the package booktabs.

        Args:
            path: a file to write as well.
            every: all columns instead of the first ones.
            caption: with one, the tabular stands in a table.
            label: of that table, for \\ref; with a label alone the tabular stands in a table as well.

        Returns:
            The text.
        """
        from sparsona.analysis.numbers import to_latex

        return _write(to_latex(self.views(), every, caption, label, self.missing), path)

    def plot_curves(
        self, against: Literal["rounds", "bytes", "paper bytes", "steps"] = "rounds", metric: str | None = None
    ) -> Figure:
        """Means over clients, on test data, against rounds, bytes or local steps, as a Plotly figure.

        Args:
            against: what is drawn across.
            metric: what is drawn: "accuracy", "loss" or one of the runs' metrics. None: the `patience_metric` of runs
                that have one, and otherwise what they are judged by. The axis says which it is.

        Returns:
            The figure; needs the extra `report`.
        """
        from sparsona.report import plots

        return plots.learning_curves(self.views(), against, metric)

    def plot_clients(self) -> Figure:
        """Every client's accuracy, a box for each method, as a Plotly figure.

        Returns:
            The figure; needs the extra `report`.
        """
        from sparsona.report import plots

        return plots.client_accuracies(self.views())

    def _repr_html_(self) -> str:
        from sparsona.report.notebook import results_html

        return results_html(self.views(), self.missing)

    def plot_tradeoff(self, counting: Literal["encoded", "paper"] = "encoded") -> Figure:
        """Accuracy against bytes sent, a mark for each method, as a Plotly figure.

        Args:
            counting: bytes as encoded, or as the papers count.

        Returns:
            The figure; needs the extra `report`.
        """
        from sparsona.report import plots

        found = plots.tradeoff(self.views(), counting)
        if found is None:
            raise SparsonaError("none of these methods sends anything", expected="a method that does")
        return found

    def report(self, path: str | Path | None = None) -> Path:
        """Write one self-contained HTML page about all runs; needs the extra `report`.

        Args:
            path: the file to write. None: report.html in the folder of the comparison.

        Returns:
            The path.
        """
        from sparsona.report.page import write_report

        return write_report(self.views(), path or self.path / "report.html", missing=self.missing)

    def views(self) -> list[RunView]:
        """The runs as plain data, for tables and reports."""
        return [run.view for run in self.runs]

    def verify(self) -> Verification:
        """Check that the files of all runs are those that were written, and belong to this comparison.

        Returns:
            What is right, what is wrong, and what nothing vouches for.
        """
        from sparsona.runs.verify import verify

        return verify(self.path)

    def table(self) -> list[dict[str, str]]:
        """One row per method, ready to print.

        Returns:
            A dict per method from the titles of columns to mean ± spread over seeds; then one for each run that
            failed, which says so in the first column.
        """
        from sparsona.analysis.table import failed_rows, rows

        found = rows(self.views(), in_print=False)
        return [*found, *failed_rows(self.missing, list(found[0])[1:])]

    def figures(self) -> list[dict[str, Any]]:
        """The table as numbers.

        Returns:
            A dict per method from the names of columns to mean and spread over seeds, unrounded.
        """
        from sparsona.analysis.table import figures

        return figures(self.views())

    def notes(self) -> list[str]:
        """What a reader of the table must know, such as runs that failed, and methods that took many more local steps
        than others.

        Returns:
            Sentences; none where the methods did about the same work, or were matched.
        """
        from sparsona.analysis.table import notes

        return notes(self.views(), self.missing)

    def differences(self) -> list[dict[str, str]]:
        """Differences in mean accuracy to the first method, paired by seed.

        Returns:
            A dict for each further method with its difference in percentage points and a 95% interval, also of the
            accuracy weighted by test size.
        """
        from sparsona.analysis.table import differences

        return differences(self.views(), in_print=False)

    def rounds_to(self, targets: Sequence[float], point: str | None = None, share: float | None = None) -> Targets:
        """Rounds until the mean accuracy over clients first reached each target.

        Args:
            targets: accuracies in percent.
            point: whose learning curve is read. None: each method's headline.
            share: also the rounds to this share of each method's own final accuracy, relative to the first method's.

        Returns:
            By method and target, the rounds of each seed, their mean and spread; `rows()` is a table of them.

        Example:
            >>> import sparsona as sp
            >>> both = sp.compare(["local", "fedavg"], clients=4, rounds=1, data_rate=0.1)
            >>> [row["to 99%"] for row in both.rounds_to([99]).rows()]
            ['>1', '>1']
        """
        from sparsona.analysis.targets import targets_of

        return targets_of(self.views(), targets, point, share)

    def figure(self, name: str, against: Sequence[Run] = ()) -> Drawn:
        """A figure of the papers, of these runs.

        Args:
            name: one that `sparsona figure` lists, such as "violins".
            against: runs of one method to compare with, by seed, where the figure does.

        Returns:
            An analysis: `rows()` is a table of it, and `sparsona.save_picture` draws it.

        Example:
            >>> import sparsona as sp
            >>> both = sp.compare(["local", "fedavg"], clients=4, rounds=2, data_rate=0.1)
            >>> [row["series"] for row in both.figure("accuracy-by-rounds").rows()][:2]
            ['Local', 'Local']
        """
        from sparsona.analysis.figures import figure_of

        return figure_of(name, self.views(), [run.view for run in against])


def _write(text: str, path: str | Path | None) -> str:
    if path is not None:
        with replace_file(Path(path)) as file:
            file.write(text.encode(errors="backslashreplace"))
    return text


def views_in(path: str | Path) -> list[RunView]:
    """The run in this folder, or every run of a comparison that has results, as plain data; of a search, those with the
    options that were chosen."""
    path = comparison_in(Path(path))
    if not (path / COMPARISON_FILE).exists():
        return [read_view(RunFolder.open(path))]
    failed, begun = read_failed(path), []
    for place, planned in read_comparison(path):
        if (place / "config.json").exists():
            begun.append(RunFolder.open(place))
            check_member(begun[-1], planned)
    # What a run that failed had reached before does not compare with the results of those that did not.
    found = [read_view(folder) for folder in begun if folder.path.name not in failed and summaries.has_results(folder)]
    if not found:
        why = f": {'; '.join(one.sentence for one in failed.values())}" if failed else ""
        raise SparsonaError(
            f"no run of the comparison '{path}' has results yet{why}",
            expected="at least one evaluated round",
            hint=f"`sparsona resume {path}` continues it",
        )
    return found


def missing_in(path: str | Path) -> list[FailedRun]:
    """The runs of a comparison in this folder that have no results: those that failed, and those not begun."""
    path = comparison_in(Path(path))
    if not (path / COMPARISON_FILE).exists():
        return []
    failed = read_failed(path)
    for folder, config in read_comparison(path):
        if folder.name not in failed and not (folder / "config.json").exists():
            failed[folder.name] = FailedRun(str(config.get("method")), config.get("seed", 0), folder.name, NOT_PLAYED)
    return list(failed.values())
