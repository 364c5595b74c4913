"""FedSim and FedAlt against a literal transcription of their Algorithms 1 to 3, round by round.

`transcription_fedalt` computes in double precision with gradients written out; it borrows the product's first weights,
sampled clients and batches. Compared are the shared part, every client's personal part, what clients upload and what
the server's optimizer remembers.
"""

import mlp_by_hand
import product_run
import pytest
import torch
import transcription_fedalt as paper
from product_run import LAYERS, Draws, Recorder, distance, exact, make_context

from sparsona.engine.context import ClientContext
from sparsona.engine.rounds import simulate
from sparsona.experiment import build

ROUNDS = 4
RUN = {"rounds": ROUNDS, "per_round": 3, "epochs": 1, "batch_size": 8, "lr": 0.3, "seed": 3, "lr_schedule": "constant"}
OUTPUT, INPUT, MIDDLE = (set(LAYERS[place]) for place in (2, 0, 1))
ADDITIVE = [("additive/weight", "additive/bias")]


def by_examples(context, i):
    return context.clients[i].num_examples


def by_batches(context, i):
    return -(-context.clients[i].num_examples // 8)


def equally(context, i):
    return 1.0


# Method, options of the product; and the same in the transcription's words.
VARIANTS = {
    "alt": ("fedalt", {"weight": "equal"}, {"alpha": equally, "personal": OUTPUT}),
    "alt, by examples": ("fedalt", {"weight": "examples"}, {"alpha": by_examples, "personal": OUTPUT}),
    "alt, rates and epochs apart, input": (
        "fedalt",
        {"personal": "input", "personal_lr": 0.1, "personal_epochs": 3, "epochs": 2, "weight": "batches"},
        {"personal": INPUT, "rate_v": 0.1, "epochs": (2, 3), "alpha": by_batches},
    ),
    "alt, by name, adam, halving": (
        "fedalt",
        {"personal": "3.*", "server_optimizer": "adam", "server_lr": 0.02, "lr_schedule": "halving:2"},
        {"personal": MIDDLE, "server": paper.ServerAdam, "server_rate": 0.02, "schedule": paper.halving(2)},
    ),
    "alt, clipped and pulled": (
        "fedalt",
        {"clip_norm": 0.3, "start_pull": 0.2, "weight_decay": 0.01},
        {"max_norm": 0.3, "pull": 0.2, "weight_decay": 0.01},
    ),
    "alt, clipped as the authors do": (
        "fedalt",
        {"clip_norm": 0.3, "clip_stale": True, "max_personal_steps": 2, "personal_epochs": 3},
        {"max_norm": 0.3, "stale": True, "epochs": (1, 3), "most_steps": 2},
    ),
    "alt, stateless": ("fedalt", {"stateless": True}, {"stateless": True}),
    "alt, additive": ("fedalt", {"personal": "additive"}, {"personal": set()}),
    "sim": ("fedsim", {"weight": "equal"}, {"alpha": equally}),
    "sim, linear schedule, slow server": (
        "fedsim",
        {"server_lr": 0.5, "lr_schedule": "linear:0.25,from-zero", "personal_lr": 0.1, "epochs": 2},
        {"server_rate": 0.5, "schedule": paper.linear(0.25), "rate_v": 0.1, "epochs": (2, 2)},
    ),
    "sim, adam, clipped and pulled": (
        "fedsim",
        {
            "server_optimizer": "adam",
            "server_lr": 0.02,
            "clip_norm": 0.3,
            "start_pull": 0.2,
            "personal": "input,output",
        },
        {"server": paper.ServerAdam, "server_rate": 0.02, "max_norm": 0.3, "pull": 0.2, "personal": INPUT | OUTPUT},
    ),
}


def gradient_for(additive):
    if additive:
        return paper.mixture_gradient(LAYERS, ADDITIVE, "additive/theta")
    return lambda w, x, y: mlp_by_hand.gradient_of_mean(w, LAYERS, x, y)


def transcribe(context, first_states, local, words):
    """The transcription on the product's draws: a list of what it yields."""
    words = dict(words)
    personal, epochs, most = words.pop("personal", OUTPUT), words.pop("epochs", (1, 1)), words.pop("most_steps", None)
    alpha, own = words.pop("alpha", by_examples), words.pop("gradient", None)
    draws, w_0 = Draws(context), exact(context.params)
    u_0 = {name: value for name, value in w_0.items() if name not in personal}
    v_0 = {i: exact(state.personal) for i, state in first_states.items()}

    def batches(t, i, part):
        name, passes = {"u": ("shared", epochs[0]), "v": ("personal", epochs[1]), "both": ("both", epochs[0])}[part]
        found = draws.batches(t, i, name, passes)
        return found if part == "u" or most is None else found[:most]

    options = {"rate_u": RUN["lr"], "rate_v": RUN["lr"], **words}
    found = paper.fedsim_fedalt(
        u_0,
        v_0,
        draws.sampled,
        batches,
        own or gradient_for("additive/theta" in v_0[0]),
        local=local,
        rounds=ROUNDS,
        alpha=lambda i: alpha(context, i),
        **options,
    )
    return list(found), v_0


def play(method, options):
    context = make_context(method, RUN | {"clip_norm": None} | options)
    recorder = Recorder(context)
    star = simulate(context, recorder)
    populations, uploads = [star.start()], []
    for t in range(ROUNDS):
        recorder.uploads = {}
        populations.append(star.play(populations[-1], t)[0])
        uploads.append(recorder.uploads)
    return context, star, populations, uploads


def test_the_gradients_written_out_are_autograds():
    """The transcription itself, against torch in double precision."""
    model = product_run.network().double()
    w = {name: value.detach() for name, value in model.named_parameters()}
    random = torch.Generator().manual_seed(0)
    x = torch.randn(7, 2, 3, 3, generator=random).double()
    y = torch.randint(0, 3, (7,), generator=random)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    by_hand = mlp_by_hand.gradient_of_mean(w, LAYERS, x, y)
    for name, value in model.named_parameters():
        torch.testing.assert_close(by_hand[name], value.grad, rtol=1e-12, atol=1e-14)

    own = {"additive/weight": torch.randn(3, 18, generator=random).double(), "additive/bias": torch.ones(3).double()}
    live = {name: value.clone().requires_grad_() for name, value in own.items()}
    theta = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    second = (x.flatten(1) @ live["additive/weight"].T + live["additive/bias"]).softmax(1)
    mixed = theta.sigmoid() * model(x).softmax(1) + (1 - theta.sigmoid()) * second
    model.zero_grad()
    torch.nn.functional.nll_loss(mixed.log(), y).backward()
    found = paper.mixture_gradient(LAYERS, ADDITIVE, "additive/theta")(
        {**w, **own, "additive/theta": theta.detach()}, x, y
    )
    expected = {**{n: v.grad for n, v in model.named_parameters()}, **{n: v.grad for n, v in live.items()}}
    for name, value in {**expected, "additive/theta": theta.grad}.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_round_is_the_papers(variant):
    method, options, words = VARIANTS[variant]
    context, _, populations, uploads = play(method, options)
    first = {i: context.fresh_state(i) for i in range(product_run.CLIENTS)}
    rounds, v_0 = transcribe(context, first, "alt" if method == "fedalt" else "sim", words)
    for t, (u, v, optimizer, diary) in enumerate(rounds):
        server, states = populations[t + 1].server, populations[t + 1].states
        assert sorted(uploads[t]) == sorted(diary)
        assert distance(server.shared, u) < 1, f"round {t}"
        for i, entry in diary.items():
            assert list(uploads[t][i].parts) == ["shared"], "the personal part never travels"
            assert distance(uploads[t][i].parts["shared"].tree(), entry["u"]) < 1, f"round {t}, client {i}"
        for i in v:
            if options.get("stateless"):
                assert i not in states
            else:
                held = states.get(i, first[i]).personal
                assert distance(held, v[i]) < 1, f"round {t}, client {i}"
        if isinstance(optimizer, paper.ServerAdam):
            # Its own memory is not kept by the transcription: compared after the last round.
            (moments,) = server.moments
            assert int(moments.step) == t + 1
    if isinstance(optimizer, paper.ServerAdam):
        assert distance(moments.first, optimizer.first) < 1
        for name, value in optimizer.second.items():
            torch.testing.assert_close(moments.second[name].double(), value, rtol=1e-4, atol=1e-10)

    # Something happened to both parts, and to those alone who took part.
    moved = {i for _, _, _, diary in rounds for i in diary}
    assert len(moved) >= 3
    assert distance(exact(populations[0].server.shared), rounds[-1][0]) > 100
    for i in moved:
        assert distance(v_0[i], rounds[-1][1][i]) > 100
    if "clip_norm" in options:
        assert max(length for *_, diary in rounds for e in diary.values() for length in e["lengths"]) > 0.3


@pytest.mark.parametrize("method", ["fedalt", "fedsim"])
def test_an_additive_model_fits_the_residual_in_regression(method):
    """Section 2: ||y - h(u, x) - h_i(v_i, x)||^2, where y is a point for each class."""
    points = torch.tensor([[1.0, 0.0, -1.0], [0.5, 2.0, 0.0], [-1.0, 0.3, 0.8]])

    def losses(outputs, batch):
        return (outputs - points[batch.targets]).square().sum(1), batch.weight

    plain = make_context(method, RUN | {"clip_norm": None, "personal": "additive", "lr": 0.05})
    plain.task.losses, plain.task.is_regression = losses, True
    context = ClientContext(plain.task, plain.make_method, plain.federation, plain.plan)
    star = simulate(context, Recorder(context))
    populations = [star.start()]
    for t in range(ROUNDS):
        populations.append(star.play(populations[-1], t)[0])
    first = {i: context.fresh_state(i) for i in range(product_run.CLIENTS)}
    assert sorted(first[0].personal) == sorted(ADDITIVE[0])
    by_points = paper.residual_gradient(LAYERS, ADDITIVE)
    words = {"personal": set(), "rate_u": 0.05, "rate_v": 0.05}
    words["gradient"] = lambda w, x, y: by_points(w, x, points[y])
    rounds, _ = transcribe(context, first, "alt" if method == "fedalt" else "sim", words)
    for t, (u, v, _, diary) in enumerate(rounds):
        assert distance(populations[t + 1].server.shared, u) < 1, f"round {t}"
        for i in diary:
            assert distance(populations[t + 1].states[i].personal, v[i]) < 1, f"round {t}, client {i}"


@pytest.mark.parametrize("method", ["fedalt", "fedsim"])
def test_final_tuning_moves_the_personal_part_alone(method):
    """Step (c) of the paper's pipeline, with constant learning rate."""
    context, star, populations, _ = play(method, {"tune_epochs": 2, "start_pull": 0.1})
    _, tuned = star.finish(populations[-1])
    draws = Draws(context)
    for i in range(product_run.CLIENTS):
        state = populations[-1].states.get(i, context.fresh_state(i))
        u, v = exact(populations[-1].server.shared), exact(state.personal)
        start = exact(context.fresh_state(i).personal)
        data = draws.batches(ROUNDS, i, "personal", 2)
        _, v, _ = paper.local_alt(u, v, start, gradient_for(False), data, [], 0.0, RUN["lr"], pull=0.1)
        assert distance(tuned[i].personal, v) < 1
        assert torch.equal(tuned[i].shared.flat, populations[-1].server.shared.flat)


@pytest.mark.parametrize("server", ["sgd", "adam"])
def test_ft_part_is_fedavg_and_then_tunes_a_part(server):
    """Step (a) of the pipeline, then (c): everything is shared in the rounds, and only then a part is personal."""
    options = {"server_optimizer": server, "server_lr": 0.05, "clip_norm": 0.3, "tune_epochs": 2, "personal": "input"}
    context, star, populations, _ = play("fedavg-ft-part", options)
    draws = Draws(context)
    rounds = paper.fedsim_fedalt(
        exact(context.params),
        {i: {} for i in range(product_run.CLIENTS)},
        draws.sampled,
        lambda t, i, part: draws.batches(t, i, "train", 1),
        gradient_for(False),
        local="sim",
        rounds=ROUNDS,
        rate_u=RUN["lr"],
        rate_v=0.0,
        alpha=lambda i: by_examples(context, i),
        server={"sgd": paper.ServerSGD, "adam": paper.ServerAdam}[server],
        server_rate=0.05,
        max_norm=0.3,
    )
    for t, (u, _, _, _) in enumerate(rounds):
        assert distance(populations[t + 1].server.params, u) < 1, f"round {t}"
    _, tuned = star.finish(populations[-1])
    for i in range(product_run.CLIENTS):
        w = exact(populations[-1].server.params)
        u, v = ({name: w[name] for name in w if (name in INPUT) is own} for own in (False, True))
        data = draws.batches(ROUNDS, i, "personal", 2)
        _, v, _ = paper.local_alt(u, v, v, gradient_for(False), data, [], 0.0, RUN["lr"], max_norm=0.3)
        assert distance(tuned[i].params, {**u, **v}) < 1


def test_the_presets_are_the_papers_and_the_authors():
    for method in ("fedalt", "fedsim"):
        paper_ = build.make_config(method, {"preset": "paper"}).options
        assert (paper_["epochs"], paper_["weight"], paper_["clip_norm"], paper_["weight_decay"]) == (
            1,
            "examples",
            None,
            0,
        )
        authors = build.make_config(method, {"preset": "authors"}).options
        assert (authors["weight"], authors["max_personal_steps"]) == ("batches", 1000)
