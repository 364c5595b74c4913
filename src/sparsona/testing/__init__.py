"""Properties that every method must have, as functions that check one each. Needs torch and nothing else.

    from sparsona.testing import check
    check(CARD, options={"margin": 0.5}, accuracy=0.35)

For pytest, parametrize over `PROPERTIES`, so that each failure has a name:

    @pytest.mark.parametrize("name", PROPERTIES)
    def test_battery(name):
        PROPERTIES[name](CASE)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from sparsona.methods import MethodCard
from sparsona.testing import accounting, exchange, participation, repetition, training
from sparsona.testing.case import Case

__all__ = ["PROPERTIES", "SHORT", "Case", "check"]

Property = Callable[[Case], None]


def _by_name(*properties: Property) -> Mapping[str, Property]:
    return MappingProxyType({found.__name__: found for found in properties})


# For a further row of a file that is checked with all of them: what its other options may change.
SHORT = _by_name(
    repetition.same_seed_same_bits,
    repetition.state_keeps_its_structure,
    accounting.every_update_survives_the_wire,
    accounting.every_update_passes_the_gate,
    accounting.costs_equal_the_ledger,
    accounting.costs_say_what_is_kept,
    accounting.costs_say_what_training_holds,
    accounting.density_bounds_messages,
    training.is_named_like_its_row,
    training.learns,
)
PROPERTIES = _by_name(
    *SHORT.values(),
    repetition.generators_are_untouched,
    repetition.inputs_are_unchanged,
    repetition.state_survives_the_store,
    repetition.loss_and_update_are_pure,
    exchange.frames_give_the_same_bits,
    repetition.clients_run_together_as_alone,
    training.predictions_ignore_their_batch,
    training.deployed_module_predicts_the_same,
    training.learning_rate_takes_effect,
    training.statistics_stay_at_home,
    training.shared_model_is_evaluated,
    participation.clients_without_memory,
    participation.lost_updates_change_nobody,
    participation.novel_clients_join_at_the_end,
    participation.everyone_trains_some_are_aggregated,
)


def check(
    card: MethodCard,
    options: Mapping[str, Any] = MappingProxyType({}),
    model: Any = None,
    accuracy: float = 0.35,
    properties: Mapping[str, Property] = PROPERTIES,
) -> None:
    """Check every property of a method, on a problem that takes seconds.

    Args:
        card: the method. It need not be installed.
        options: of the method and the run; choose those that reach most of its code.
        model: a function that builds the network for images of 1x8x8 pixels in ten classes, or a row of
            `sparsona models`; None: the default of `digits`.
        accuracy: the mean accuracy it must exceed; guessing reaches 0.1.
        properties: which of them to check: `PROPERTIES`, or `SHORT` for a further row of a file.

    Returns:
        None if every property holds.

    Raises:
        AssertionError: names the first property that does not hold.

    Example:
        >>> from sparsona.methods import card
        >>> check(card("fedavg"), {"batch_size": 32}, properties={"learns": PROPERTIES["learns"]}, accuracy=0.2)
    """
    case = Case(card, options, model, accuracy)
    for name, holds in properties.items():
        try:
            holds(case)
        except Exception as error:
            raise AssertionError(f"{card.name}: {name.replace('_', ' ')}: {error}") from error
