"""The formats of exported models. Free of torch."""

from __future__ import annotations

# By name, the suffix of a file.
FORMATS = {"safetensors": ".safetensors", "torch": ".pt2", "onnx": ".onnx"}
