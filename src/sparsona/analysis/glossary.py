"""The words of tables and reports. docs/glossary.md is written from here: `python -m sparsona.analysis.glossary`."""

from __future__ import annotations

# By word, what it means, in Markdown. "A / B" are words that are explained together.
WORDS = {
    "client": "one owner of data: a phone, a hospital, a sensor. Papers also say device or node",
    "server": (
        "holds the shared model and sees no data. Methods of **peers** have no server: clients send to each other"
    ),
    "round": (
        "the clients that were sampled receive a message, train, and answer; the server (or each peer) "
        "combines the answers"
    ),
    "turn": "what one client does in one round",
    "global model": "the model that the server holds. For peers, the mean of all their models is the **consensus**",
    "personal model": (
        "the model that a client uses on its own data. How much of it is shared with others depends on the method"
    ),
    "received / trained / tuned": (
        "when a personal model is evaluated: as the client would use it when a round is over; right after it "
        "has trained in the round; after final tuning. These are **evaluation points**"
    ),
    "final tuning": "a few epochs of training on a client's own data after the last round (FedAvg-FT)",
    "headline": (
        "the evaluation point whose accuracy is reported as a method's result, always after the last round, "
        "never the best one"
    ),
    "bottom decile": (
        "the accuracy of the client a tenth from the bottom: it shows how the worst-served clients fare "
        "without depending on a single one"
    ),
    "hurt": "a client is hurt by a method if it would do better with the baseline (Local, or FedAvg)",
    "novel client": "a client that is held out of all rounds and evaluated at the end, like one that joins later",
    "density": "the share of a model's parameters that are not zero; sparsity is 1 minus density",
    "capacity": "the largest density that a client's device can hold",
    "mask": "which parameters of a model a client keeps; one bit each",
    "DST": "dynamic sparse training: the mask is moved between rounds by pruning and regrowing, at the same density",
    "RSM": "random static mask: drawn once, the same for all clients",
    "ERK": "Erdős-Rényi-Kernel: a rule that distributes the density over tensors and keeps small ones denser",
    "gate": "pFedGate's small private network that picks which blocks of the shared model a client uses",
    "partition": (
        "how examples are distributed among clients. `dirichlet:0.3` gives each client a few classes; a "
        "larger number makes clients more alike"
    ),
    "validation data": (
        "a part of each client's data that is not trained on and that decisions may use (tuning, early stops, "
        "the guard). Test data is never used for decisions"
    ),
    "guard": "a client keeps its own or the shared model, whichever is better on its validation data",
    "preset": "the settings of a published experiment: `paper` follows the paper's text, `authors` the authors' code",
    "bytes sent": (
        "the size of the encoded messages, with headers, masks and checksums. The **papers' count** is four "
        "bytes per parameter, without masks"
    ),
    "busiest in / out": "the largest number of bytes that went into, and out of, one node in one round",
    "uploaded": "the share of the model's entries that a client uploads (pFedGate's q)",
    "transform": "a change that a message goes through before it is sent: half precision, quantisation, top-k, noise",
    "robust mean": (
        "a mean that a few lying clients can change by a bounded amount only: median, trimmed mean, Krum and "
        "others (`--mean`). Without it, the **plain mean** is the method's own"
    ),
    "attacker": "a simulated client that sends something other than what it trained (`--attack`); it is not tested",
    "diverged": "turns in which numbers were not finite or far out of range; they are left out of their rounds",
    "epsilon, delta": (
        "differential privacy: a bound on how much the values in a run's updates reveal about one client's "
        "data, and the probability that it is exceeded: docs/privacy.md"
    ),
    "noise multiplier": "the standard deviation of noise, in units of the norm that changes are clipped to",
    "executor": (
        "how clients are run in a simulation: one after another, in worker processes, stacked into one "
        "program, on a cluster. Serial, workers and ray give the same bits; stacked and graphed agree with "
        "them within rounding"
    ),
    "stateless": "clients keep nothing between rounds",
    "trait": "what is compared between clients by `similarity`: masks, or gates",
    "vault": "where a client on its own machine keeps its state and personal model",
}


def to_markdown() -> str:
    """The page docs/glossary.md."""
    lines = [f"| **{word}** | {meaning} |\n" for word, meaning in WORDS.items()]
    return "".join(["# Glossary\n\n| word | meaning |\n|---|---|\n", *lines])


def plain_words() -> dict[str, str]:
    """The same without markup, for a page that escapes its texts.

    Example:
        >>> plain_words()["mask"]
        'which parameters of a model a client keeps; one bit each'
    """
    return {word: meaning.replace("**", "").replace("`", "") for word, meaning in WORDS.items()}


if __name__ == "__main__":
    print(to_markdown(), end="")
