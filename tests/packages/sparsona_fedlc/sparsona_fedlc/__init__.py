"""FedLC as a package of its own. Free of torch, so that listing methods is."""

from sparsona.methods import MethodCard

CARD = MethodCard(
    "fedlc",
    "FedLC",
    "Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022",
    "nothing (BatchNorm statistics, if any)",
    "the dense model, both ways",
    "sparsona_fedlc.method:fedlc",
    "FedLCConfig",
    presets={"strong": {"margin": 2.0}},
)
