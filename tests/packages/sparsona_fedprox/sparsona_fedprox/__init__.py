"""FedProx as a package of its own. Free of torch, so that listing methods is."""

from sparsona.methods import MethodCard

CARD = MethodCard(
    "fedprox",
    "FedProx",
    "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020",
    "nothing (BatchNorm statistics, if any)",
    "the dense model, both ways",
    "sparsona_fedprox.method:fedprox",
    "FedProxConfig",
    presets={"strong": {"mu": 1.0}},
)
