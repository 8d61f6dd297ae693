"""mechattn: what attention does, measured on any model that TransformerLens can hook."""

import lazy_loader

__version__ = "0.1.0"

# The names of __init__.pyi are loaded when first used, so `import mechattn` imports neither torch
# nor TransformerLens.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
