"""A small network with its gradients written out: no autograd, double precision.

Layers are (weight, bias) names; tanh between them, nothing after the last. A convolution whose kernel covers the whole
image is such a layer, too: its weight is flattened like the image. Losses give one number per example, and their
derivatives by that example's outputs.
"""

import torch


def forward(w, layers, x):
    """One row per example: the flat inputs, the tanh of every inner layer, and the outputs."""
    activations = [x.double().flatten(1)]
    for depth, (weight, bias) in enumerate(layers):
        z = activations[-1] @ w[weight].flatten(1).T + w[bias]
        activations.append(torch.tanh(z) if depth < len(layers) - 1 else z)
    return activations


def probabilities(outputs):
    powers = torch.exp(outputs - outputs.max(1, keepdim=True).values)
    return powers / powers.sum(1, keepdim=True)


def hot(outputs, targets):
    """1 at each example's class, 0 elsewhere."""
    result = torch.zeros_like(outputs)
    for row, target in enumerate(targets.tolist()):
        result[row, target] = 1.0
    return result


def cross_entropy(outputs, targets):
    """-log p of the right class; p - onehot."""
    p, right = probabilities(outputs), hot(outputs, targets)
    return -torch.log((p * right).sum(1)), p - right


def cross_entropy_of_relu(outputs, targets):
    """The same with a ReLU on the logits."""
    losses, slopes = cross_entropy(outputs.clamp(min=0.0), targets)
    return losses, slopes * (outputs > 0)


def squares(outputs, targets):
    """||y - h||^2; 2 (h - y)."""
    gap = outputs - targets.double().reshape(outputs.shape)
    return (gap * gap).sum(1), 2 * gap


def backward(w, layers, activations, slopes):
    """The gradient by every weight of the mean over the examples, given each one's derivative by its outputs."""
    gradient, slopes = {}, slopes / len(slopes)
    for depth in reversed(range(len(layers))):
        weight, bias = layers[depth]
        gradient[weight] = (slopes.T @ activations[depth]).reshape(w[weight].shape)
        gradient[bias] = slopes.sum(0)
        if depth:
            slopes = (slopes @ w[weight].flatten(1)) * (1 - activations[depth] ** 2)
    return gradient


def gradient_of_mean(w, layers, x, y, loss=cross_entropy):
    """The gradient of the mean loss over a batch."""
    activations = forward(w, layers, x)
    _, slopes = loss(activations[-1], y)
    return backward(w, layers, activations, slopes)
