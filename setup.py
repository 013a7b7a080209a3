"""All is in pyproject.toml, but for this: setuptools forgets data-files (our kernelspec) in an editable install."""

from setuptools import Distribution, setup


class EditableWithData(Distribution):
    """editable_wheel asks for has_data; the method is called has_data_files."""

    has_data = Distribution.has_data_files


setup(distclass=EditableWithData)
