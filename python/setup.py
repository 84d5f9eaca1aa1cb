"""Builds the wheel: for this platform if the library is in the package, otherwise for all. pyproject.toml has the other settings.

HVD_WHEEL_VERSION, such as v1.2.3, is the version of the wheel, which is that of the hvdrun with which it is built.
"""
import os

from setuptools import setup
from setuptools.dist import Distribution

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before 70.1
    from wheel.bdist_wheel import bdist_wheel

LIBRARY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hvdrun", "libhvdrun.so")


class Built(Distribution):
    def has_ext_modules(self):
        return os.path.exists(LIBRARY)


class AnyPython(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(version=os.environ.get("HVD_WHEEL_VERSION") or "0.0.0.dev0", distclass=Built, cmdclass={"bdist_wheel": AnyPython})
