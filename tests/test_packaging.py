"""What an installation holds."""

import importlib.util
import os
import shutil
from importlib import metadata, resources

import pytest


def test_themes_come_along() -> None:
    names = {entry.name for entry in resources.files("northchat").joinpath("themes").iterdir()}
    assert {"dark.toml", "light.toml"} <= names


def test_the_extension_is_built_where_a_cuda_compiler_is() -> None:
    try:
        metadata.version("northchat")
    except metadata.PackageNotFoundError:
        pytest.skip("runs from a source tree that isn't installed")
    if shutil.which("nvcc") is None or os.environ.get("NORTHCHAT_CUDA") == "off":
        pytest.skip("no CUDA compiler, or the extension was not wanted")
    assert importlib.util.find_spec("northchat._megakernel") is not None
