"""hvdrun's workers in Python. Programs of PyTorch import hvdrun.torch; docs/pytorch.md is the guide."""
import importlib.machinery
import importlib.util
import os
import sys


__all__ = ["__version__"]
__version__: str  # the version that hvdrun version prints, without the v, or that of the wheel

_here = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_marker = os.path.join(_here, "hvdrun.embedded")


def _give_way() -> None:
    """Replaces this package by the package hvdrun that the user has installed, if hvdrun has put this one before it in the path."""
    here = _here
    if not os.path.exists(_marker):
        return
    others = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec(__name__, others)
    if spec is None or spec.origin is None:  # not installed, or a folder without __init__.py
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[__name__] = module
    spec.loader.exec_module(module)


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        with open(_marker) as f:
            version = f.read()
    except FileNotFoundError:
        from importlib import metadata

        try:
            version = metadata.version(__name__)
        except metadata.PackageNotFoundError:
            version = "(devel)"  # imported from a source folder
    globals()[name] = version = version.removeprefix("v")
    return version


def __dir__() -> "list[str]":
    return __all__


_give_way()
