"""Runs whose messages are transformed: every method, every executor, bytes, and going on after an interruption."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from method_lines import anywhere, further_rows_are_slow
from processes import EAGER, small, start, traces

import sparsona as sp
from sparsona import methods
from sparsona.core.errors import SparsonaError
from sparsona.core.tree import leaves
from sparsona.costs import cost
from sparsona.engine.forecast import forecast
from sparsona.engine.population import num_bytes
from sparsona.engine.rounds import simulate
from sparsona.executors.serial import Serial
from sparsona.experiment import build
from sparsona.wire.codec import encode
from sparsona.wire.format import message_size, paper_size, sizes_of

TINY = {"clients": 4, "rounds": 2, "epochs": 1, "batch_size": 16, "data_rate": 0.1, "executor": "serial"}
CHANGES = ["topk:0.2", "clip:0.5+noise:0.001", "clip:0.5+topk:0.2+quantize:4"]


def context_of(method: str, transform: str, **more):
    return build.make_context(build.make_config(method, {**TINY, "transform": transform, **more}))


def check_ledger(context) -> None:
    """Two rounds whose bytes are those that `cost` knew before."""
    engine = simulate(context, Serial(context))
    population = engine.start()
    for index in range(2):
        population, record = engine.play(population, index)
        for turn in record.turns:
            known = context.method.cost(context.task.layout, context.clients[turn.client], context.plan.round_at(index))
            up, down = known.up or (), known.down or ()
            traffic = turn.traffic
            if context.method.peer is not None and known.compact:
                continue
            if context.method.peer is not None:
                assert traffic.up % message_size(up) == traffic.down % message_size(up) == 0
                assert traffic.up // message_size(up) == traffic.paper_up // paper_size(up)
                continue
            assert traffic.paper_down == paper_size(down)
            for sent, parts, is_exact in ((traffic.down, down, True), (traffic.up, up, known.exact)):
                most = message_size(parts) if parts else 0
                assert (sent == most) if is_exact and not (parts and known.compact) else (0 < sent <= most)
        if context.method.peer is not None and index:
            assert any(turn.traffic.up for turn in record.turns)


SLOW = ["quantize:bits=5,way=both", "bf16", "compact"]


@pytest.mark.parametrize("transform", ["half", *(pytest.param(text, marks=pytest.mark.slow) for text in SLOW)])
@pytest.mark.parametrize("name", further_rows_are_slow(sorted(methods.METHODS)))
def test_every_method_sends_what_cost_says(name: str, transform: str) -> None:
    if methods.card(name).peers:
        transform = transform.replace(",way=both", "")
    if name == "fedmask" and transform != "compact":  # it sends no numbers
        with pytest.raises(SparsonaError, match="where clients send masks only"):
            check_ledger(context_of(name, transform))
        return
    check_ledger(context_of(name, transform, **anywhere(name)))


@pytest.mark.parametrize("transform", CHANGES)
@pytest.mark.parametrize("name", ["fedspa", "fedspa-rsm", "pfedgate"])
def test_changes_are_clipped_and_thinned_at_the_cost_foretold(name: str, transform: str) -> None:
    check_ledger(context_of(name, transform))


def outcome_of(context) -> tuple[list[bytes], list[int], int]:
    """The bits that two rounds leave, the bytes of their turns, and how many were counted of encoded messages."""
    engine = simulate(context, Serial(context))
    population = engine.start()
    counted, encoded = [], 0
    for index in range(2):
        population, record = engine.play(population, index)
        counted += [turn.traffic.up + turn.traffic.down for turn in record.turns]
        encoded += sum(turn.traffic.paper_up for turn in record.turns)
    tensors = [tensor.numpy().tobytes() for _, tensor in leaves((population.server, population.states))]
    return tensors, counted, encoded


@pytest.mark.parametrize(
    ("name", "chain"),
    [
        ("fedavg", ""),
        ("fedspa", ""),
        ("fedspa", "topk:0.2+half"),
        ("dispfl", ""),
        ("fedmask", ""),
        pytest.param("fedavg", "bf16", marks=pytest.mark.slow),
        pytest.param("fedspa", "clip:0.5+noise:0.001", marks=pytest.mark.slow),
        pytest.param("fedspa", "quantize:4", marks=pytest.mark.slow),
        pytest.param("pfedgate", "", marks=pytest.mark.slow),
    ],
)
def test_compact_runs_leave_the_same_bits_and_send_less(name: str, chain: str) -> None:
    plain, compact = (outcome_of(context_of(name, text)) for text in (chain, f"{chain}+compact".strip("+")))
    assert plain[0] == compact[0]
    assert plain[2] == compact[2], "the papers' count"
    assert all(less <= whole for less, whole in zip(compact[1], plain[1], strict=True))
    assert sum(compact[1]) < (0.99 if name == "fedmask" else 0.93) * sum(plain[1])


def test_the_ledger_has_the_length_of_what_was_sent() -> None:
    """Of messages that are encoded, and of those that only could be."""
    context = context_of("fedspa", "compact")
    engine = simulate(context, Serial(context))
    population = engine.start()
    _, record = engine.play(population, 0)
    round_ = context.plan.round_at(0)
    for turn in record.turns:
        reply = context.method.server.reply(population.server, context.clients[turn.client], round_)
        assert turn.traffic.down == len(encode(reply)) == num_bytes(reply) < message_size(sizes_of(reply))


def test_a_compact_cost_is_a_bound_of_bytes_only() -> None:
    plain, compact = (cost("fedspa", model="lenet5", transform=text) for text in ("", "compact"))
    assert plain.exact
    assert not compact.exact
    assert any("bytes are upper bounds" in note for note in compact.notes)
    assert (plain.encoded, plain.flops, plain.paper) == (compact.encoded, compact.flops, compact.paper)
    assert cost("local", model="lenet5", transform="compact").exact, "nothing is sent"
    assert not cost("fedmask", model="lenet5", transform="compact").exact, "masks become shorter, too"
    context = context_of("fedavg", "compact").server_side
    assert not forecast(context).exact
    assert forecast(context, with_bytes=False).exact


def test_messages_that_are_not_encoded_count_as_many_bytes_and_mean_the_same(tmp_path) -> None:
    """`stacked` passes updates on as they are: same bytes, and results within its rounding."""
    for method, transform in (("fedspa", "topk:0.2+half"), ("dispfl", "quantize:8")):
        found = [
            sp.train(method, **{**TINY, "executor": executor}, transform=transform, out=tmp_path / executor / method)
            for executor in ("serial", "stacked")
        ]
        assert found[0].summary["bytes"] == found[1].summary["bytes"]
        one, other = (run.summary["accuracy"]["mean"] for run in found)
        assert one == pytest.approx(other, abs=0.02)


@pytest.mark.parametrize(
    ("method", "transform"),
    [
        ("fedspa", "topk:0.2+quantize:4+compact"),
        pytest.param("fedavg", "quantize:bits=8,way=both", marks=pytest.mark.slow),
    ],
)
def test_workers_give_the_bits_of_serial(method: str, transform: str, tmp_path, forked_workers) -> None:
    one, other = (
        traces(sp.train(method, **{**TINY, "executor": name}, transform=transform, out=tmp_path / name).path)
        for name in ("serial", "workers")
    )
    assert one == other


def test_killed_and_resumed_with_what_was_held_back(forks, tmp_path) -> None:
    """What top-k kept is in the checkpoint: killed after a round, the run goes on to the same bits."""
    kill = EAGER + (
        "import os, signal\n"
        "seen = session.Checkpoints.save\n"
        "def save(self, progress, *rest):\n"
        "    seen(self, progress, *rest)\n"
        "    if progress.completed == 3:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "session.Checkpoints.save = save\n"
    )
    options = small(tmp_path, rounds=6, transform="topk:0.1")
    whole = start(forks, tmp_path, "run", "fedspa", *options, "--out", "whole", "--json").wait()
    assert whole[0] == 0, whole[2]
    assert start(forks, tmp_path, "run", "fedspa", *options, "--out", "run", "--json", setup=kill).wait()[0] == -9
    again = start(forks, tmp_path, "resume", "run", "--json").wait()
    assert again[0] == 0, again[2]
    assert traces(tmp_path / "run") == traces(tmp_path / "whole")


def test_what_is_held_back_is_forgotten_with_a_lost_update_and_by_stateless_clients() -> None:
    context = context_of("fedspa", "topk:0.1", drop_rate=0.6, rounds=6)
    engine = simulate(context, Serial(context))
    population = engine.start()
    dropped = 0
    for index in range(6):
        before = dict(population.states)
        population, record = engine.play(population, index)
        for turn in record.turns:
            if turn.dropped:
                dropped += 1
                assert population.states.get(turn.client) is before.get(turn.client)
            else:
                held = dict(leaves(population.states[turn.client]))["memory[0][update]"]
                assert int(held.count_nonzero()) > 0
    assert dropped
    context = context_of("fedspa", "topk:0.1", stateless=True)
    engine = simulate(context, Serial(context))
    assert engine.play(engine.start(), 0)[0].states == {}


def test_half_changes_little_and_is_not_nothing() -> None:
    def model(transform: str) -> torch.Tensor:
        context = context_of("fedavg", transform)
        engine = simulate(context, Serial(context))
        population, _ = engine.play(engine.start(), 0)
        return population.server.params.flat

    plain, half = model(""), model("half")
    assert not torch.equal(plain, half)
    assert float((plain - half).abs().max()) < 2e-3


def test_the_protocol_and_the_config_say_it(tmp_path) -> None:
    run = sp.train("fedspa", **TINY, transform=["clip:0.5", "half"], out=tmp_path / "a")
    assert (
        "Messages are transformed; what clients send: changes clipped to norm 0.5, then half precision; "
        "what the server sends: half precision." in run.protocol
    )
    assert json.loads((run.path / "config.json").read_text())["transform"] == ["clip:0.5", "half"]
    assert "transformed" not in sp.train("local", **TINY, transform="half", out=tmp_path / "b").protocol


class TestRefused:
    def test_a_model_where_only_a_change_makes_sense_before_a_folder_is_made(self, say) -> None:
        said = say("run", "fedavg", "--transform", "topk:0.1", "--out", "run")
        said.refused("the transform 'topk' for part 'model', which is a model", "half")
        assert not os.path.exists("run")

    @pytest.mark.parametrize("transform", ["half", "noise:0.1", "quantize:4", "half:down"])
    def test_masks_of_which_it_changes_nothing(self, transform, tmp_path) -> None:
        who = "the server sends" if "down" in transform else "clients send"
        with pytest.raises(SparsonaError, match=f"where {who} masks only: it would change nothing"):
            sp.train("fedmask", **TINY, transform=transform, out=tmp_path / "run")
        assert not (tmp_path / "run").exists()
        with pytest.raises(SparsonaError, match=f"where {who} masks only: it would change nothing"):
            cost("fedmask", model="lenet5", transform=transform)

    def test_an_unknown_name(self, say) -> None:
        say("run", "fedavg", "--transform", "haf").refused("unknown transform 'haf'", "did you mean 'half'?")

    def test_a_server_where_there_is_none(self) -> None:
        with pytest.raises(SparsonaError, match="dispfl, which has no server"):
            context_of("dispfl", "half:down")


def test_a_comparison_may_give_it_to_one_method(tmp_path) -> None:
    found = sp.compare(["fedavg", "fedavg:transform=half"], **TINY, out=tmp_path / "both")
    plain, half = (run.summary["bytes"]["up"] for run in found.runs)
    assert half < 0.51 * plain


def test_cost_of_the_command_line_is_that_of_a_run(tmp_path) -> None:
    """Without torch, and to the byte."""
    run = sp.train("fedspa", **TINY, transform=["topk:0.2", "quantize:4"], out=tmp_path / "run")
    options = ["--data", "digits", "--rounds", "2", "--clients", "4", "--per-round", "2"]
    code = (
        "import sys; from sparsona.cli.app import main\n"
        f"sys.argv = ['sparsona', 'cost', 'fedspa', *{options}, '--transform', 'topk:0.2', '--transform', "
        "'quantize:4', '--json']\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules\n"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    turns = 2 * 2
    found = cost("fedspa", data="digits", rounds=2, clients=4, per_round=2, transform=["topk:0.2", "quantize:4"])
    assert found.encoded.up * turns == run.summary["bytes"]["up"]
    assert found.encoded.down * turns == run.summary["bytes"]["down"]
    assert found.to_json() == json.loads(told)
    # What top-k holds back is as large as a dense model.
    plain = cost("fedspa", data="digits", rounds=2, clients=4, per_round=2)
    assert found.memory.kept - plain.memory.kept == 4 * found.num_parameters


def test_the_share_of_entries_uploaded_is_unknown_where_entries_take_fewer_bytes(tmp_path):
    options = {"clients": 4, "per_round": 2, "rounds": 1, "epochs": 1, "data_rate": 0.1, "executor": "serial"}
    plain = sp.train("fedavg", out=tmp_path / "plain", **options)
    half = sp.train("fedavg", out=tmp_path / "half", transform="half", **options)
    assert plain.summary["bytes"]["upload_share"] == 1.0
    assert half.summary["bytes"]["upload_share"] is None
    assert half.summary["bytes"]["up"] < 0.6 * plain.summary["bytes"]["up"]
