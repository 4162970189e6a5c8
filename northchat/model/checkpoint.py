"""A model's file or directory, whatever its format."""

from pathlib import Path

from northchat.model.gguf import GGUFFile
from northchat.model.safetensors import SafetensorsWeights
from northchat.model.weights import Weights


def open_weights(path: Path) -> Weights:
    """Open a GGUF file or a directory with config.json and safetensors; reads headers only.

    Raises ModelError when it is neither, damaged, or of an architecture that we can't run.
    """
    return SafetensorsWeights(path) if path.is_dir() else GGUFFile(path)
