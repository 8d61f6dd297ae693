"""A script of the repository, or a file of a test, as a module."""

import importlib.util
import sys


def loaded(path, name):
    """The module that a file makes; one under the same name is replaced."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where a dataclass of it looks itself up
    spec.loader.exec_module(module)
    return module
