"""What methods are built from: means, optimizers, phases of training, parts of a model."""
