"""The wheel is one of a platform where it has the library, and for all where it has not. pyproject.toml says the rest."""
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


setup(distclass=Built, cmdclass={"bdist_wheel": AnyPython})
