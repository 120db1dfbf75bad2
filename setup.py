"""The package: see pyproject.toml."""

import setuptools

setuptools.setup()
