"""Modules whose options are a function's; each option is written once, as a field of a dataclass."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from dataclasses import dataclass as module_of_options
else:

    def module_of_options(kind: type) -> type:
        """Returns the class as a module that has these fields as arguments and attributes."""
        made = dataclasses.dataclass(eq=False, repr=False)(kind)
        own = made.__init__

        @functools.wraps(own)
        def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            nn.Module.__init__(self)
            own(self, *args, **kwargs)

        made.__init__ = __init__
        made._option_names = tuple(field.name for field in dataclasses.fields(made))
        for name in made._option_names:
            if name in vars(made):  # a default value, which would hide a module's parameter or buffer of this name
                delattr(made, name)
        return made


def options_of(module: nn.Module) -> dict[str, Any]:
    names: Any = module._option_names
    return {name: getattr(module, name) for name in names}


__all__ = ["module_of_options", "options_of"]
