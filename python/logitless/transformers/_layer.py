"""The layer around the forward of one model, which stays whatever others store as ``model.forward``, before or after.

A model with such a layer has a class of its own, derived from its class and named as that. In it ``forward`` is a data
descriptor: others store under the name what they like, and what they read there is a layer around what is stored. So
no order of wrapping and unwrapping loses the layer, and where layers lie within each other the innermost one decides.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.utils import parametrize

KEY = "_logitless_patch"
_INNER = "_logitless_inner"


class State(Protocol):
    """A model with a layer keeps this under ``KEY``. Without it the layers do nothing.

    Attributes:
        layers: by name what is stored there (None where the class's is used), whether it is a method, and its layer.
    """

    layers: dict[str, Any]

    def run(
        self, model: nn.Module, inner: Callable[..., Any], names: tuple[str, ...], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """The call of a layer around ``inner``, whose parameters have these names."""
        ...


class _Slot:
    """A method that others replace by an attribute of the model; all of them get a layer to call."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, model: nn.Module | None, owner: type | None = None) -> Any:
        if model is None:
            return getattr(owner._logitless_class, self.name)  # type: ignore[union-attr]
        stored, state = model.__dict__.get(self.name), model.__dict__.get(KEY)
        if state is None:
            return types.MethodType(self._own(model), model) if stored is None else stored
        if stored is None:
            self._own(model)  # raises where there is none
        bound = stored is None or _is_bound(stored, model)
        function = None if stored is None else stored.__func__ if bound else stored
        known = state.layers.get(self.name)
        if known is None or known[0] is not function or known[1] is not bound:
            known = state.layers[self.name] = (function, bound, self._made(model, function, bound))
        layer = known[2]
        if not bound:
            return layer
        return functools.partial(layer, model) if torch.compiler.is_compiling() else types.MethodType(layer, model)

    def __set__(self, model: nn.Module, value: Any) -> None:
        value = _within(model, value)
        if self.name == "forward" and _is_bound(value, model) and value.__func__ is self._own(model):
            model.__dict__.pop(self.name, None)
        else:
            model.__dict__[self.name] = value
        self.__get__(model)  # as in wear()

    def __delete__(self, model: nn.Module) -> None:
        if self.name not in model.__dict__:
            raise AttributeError(self.name)
        del model.__dict__[self.name]

    def _own(self, model: nn.Module) -> Any:
        """The function of the model's class, also of a model that has its class back."""
        kind = type(model)
        return getattr(getattr(kind, "_logitless_class", kind), self.name)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _made(self, model: nn.Module, function: Any, bound: bool) -> Any:
        """A layer of the kind that it is around: a method where that is one, as accelerate asks for."""
        if not bound:
            return _Callable(model, function)
        if function is not None:
            return _method(model, function, lambda model: function)
        return _method(model, self._own(model), self._own)


class Layered:
    """The first base of such a class. accelerate's hooks keep what they are around as ``_old_forward``."""

    _logitless_class: type  # the model's own
    forward = _Slot()
    _old_forward = _Slot()

    def __init_subclass__(cls) -> None:
        """Not that of the model's class, which would register another model."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        kind = type(self)
        if Layered not in kind.__bases__:
            return reduced
        make, arguments, *rest = reduced
        own = tuple(self._logitless_class if argument is kind else argument for argument in arguments)
        return (_renewed, (make, own), *rest)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        wear(self)  # type: ignore[arg-type]


def wear(model: nn.Module) -> None:
    """Gives the model its class with a layer, which is around all that others have put there before."""
    if not isinstance(model, Layered):
        model.__class__ = _above(model, _layered(_below(model)))
    for name in ("forward", "_old_forward"):
        if name in model.__dict__:
            setattr(model, name, model.__dict__[name])  # without a layer of former times
    _ = model.forward  # so that compiled code finds the layer made


def shed(model: nn.Module) -> None:
    """Gives it its class back, unless others have derived theirs, as FSDP2 does, in which a layer then does nothing."""
    if isinstance(model, Layered) and Layered in _below(model).__bases__:
        model.__class__ = _above(model, model._logitless_class)


def _is_parametrized(model: nn.Module) -> bool:
    """Whether its class is the one of torch.nn.utils.parametrize, with a property for each parametrized tensor."""
    kind = type(model)
    if not parametrize.is_parametrized(model) or len(kind.__bases__) != 1:
        return False
    return any(name in kind.__dict__ for name in model.parametrizations)  # type: ignore[union-attr]


def _below(model: nn.Module) -> type:
    """Its class without parametrizations of its own tensors."""
    return type(model).__bases__[0] if _is_parametrized(model) else type(model)


def _above(model: nn.Module, kind: type) -> type:
    """The model's class with another one below its parametrizations.

    PyTorch removes properties from the very class of a model, and in the end gives it the first base back. So the layer
    has to be below them.
    """
    if not _is_parametrized(model):
        return kind
    own = {name: value for name, value in type(model).__dict__.items() if name not in ("__dict__", "__weakref__")}
    return types.new_class(type(model).__name__, (kind,), exec_body=lambda namespace: namespace.update(own))


def parameter_names(inner: Callable[..., Any], model: nn.Module) -> tuple[str, ...]:
    """The callable's, or the class's where those tell nothing of labels, as those of ``(*args, **kwargs)``."""
    try:
        names = tuple(inspect.signature(inner).parameters)
    except (TypeError, ValueError):
        names = ()
    return names if "labels" in names else tuple(inspect.signature(type(model).forward).parameters)[1:]


def _layered(kind: type) -> type:
    derived: list[type] = type.__subclasses__(kind)
    for known in derived:
        if known.__bases__ == (Layered, kind):
            return known
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    names["_logitless_class"] = kind
    return types.new_class(kind.__name__, (Layered, kind), exec_body=lambda namespace: namespace.update(names))


def _renewed(make: Callable[..., nn.Module], arguments: tuple[Any, ...]) -> nn.Module:
    """A model that is copied or loaded, before it has its state."""
    model = make(*arguments)
    model.__class__ = _layered(type(model))
    return model


def _is_bound(value: Any, model: nn.Module) -> bool:
    return isinstance(value, types.MethodType) and value.__self__ is model


def _inner(layer: Any) -> Any:
    """The function that a layer is around, else None. Decorators copy attributes: a copy names another function."""
    if isinstance(layer, _Callable):
        return layer.inner
    of, function = getattr(layer, _INNER, (None, None))
    return function if of is layer else None


def _within(model: nn.Module, value: Any) -> Any:
    """A value without its layer, where it is a layer of this model."""
    if _is_bound(value, model):
        function = _inner(value.__func__)
        return value if function is None else types.MethodType(function, model)
    return value.inner if isinstance(value, _Callable) and value.model is model else value


def _method(model: nn.Module, function: Any, current: Callable[[nn.Module], Any]) -> Any:
    """A layer around a method. It holds no model, so that the copy of a bound one calls the copied model's.

    Args:
        current: the function at a call, as that of a class may have been replaced by then.
    """
    names = parameter_names(types.MethodType(function, model), model)

    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__.get(KEY)
        if state is None:
            return current(self)(self, *args, **kwargs)
        return state.run(self, functools.partial(current(self), self), names, args, kwargs)

    functools.update_wrapper(forward, function)
    setattr(forward, _INNER, (forward, function))
    return forward


class _Callable:
    """A layer around what is no method of the model, such as the partial function of accelerate's hooks."""

    def __init__(self, model: nn.Module, inner: Callable[..., Any]) -> None:
        functools.update_wrapper(self, inner)
        self.model = model
        self.names = parameter_names(inner, model)
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self.model.__dict__.get(KEY)
        if state is None:
            return self.inner(*args, **kwargs)
        return state.run(self.model, self.inner, self.names, args, kwargs)
