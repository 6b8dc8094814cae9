"""A layer around the forward of one model; it stays there whatever others store as ``model.forward``.

A model with a layer has a class of its own, derived from its class and with the same name. In that class ``forward`` is
a data descriptor: others store any function under the name, and reading it returns a layer around the stored function.
So no order of wrapping and unwrapping loses the layer. Where layers are nested, the innermost one decides.
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
    """The state that a model with a layer keeps under ``KEY``. Without it the layers do nothing.

    Attributes:
        layers: For each name the stored function (None where the class's is used), whether it is a method, and its
            layer.
    """

    layers: dict[str, Any]

    def run(
        self, model: nn.Module, inner: Callable[..., Any], names: tuple[str, ...], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Runs a call of a layer around ``inner``, whose parameters have these names."""
        ...

    def before_head_is_read(self, model: nn.Module) -> None: ...


class _Slot:
    """A method that others may replace by an attribute of the model; reading it always returns a layer."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, model: nn.Module | None, owner: type | None = None) -> Any:
        if model is None:
            return getattr(owner._logitless_class, self.name)  # type: ignore[union-attr]
        stored, state = model.__dict__.get(self.name), model.__dict__.get(KEY)
        if state is None:
            return types.MethodType(self._own(model), model) if stored is None else stored
        if stored is None:
            self._own(model)  # raises AttributeError where the class has none
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
        self.__get__(model)  # makes the layer now, as in wear()

    def __delete__(self, model: nn.Module) -> None:
        if self.name not in model.__dict__:
            raise AttributeError(self.name)
        del model.__dict__[self.name]

    def _own(self, model: nn.Module) -> Any:
        """Returns the function of the model's class, also after the model has got its class back."""
        kind = type(model)
        return getattr(getattr(kind, "_logitless_class", kind), self.name)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _made(self, model: nn.Module, function: Any, bound: bool) -> Any:
        """Makes a layer of its function's kind: around a method it is a method, which accelerate requires."""
        if not bound:
            return _Callable(model, function)
        if function is not None:
            return _method(model, function, lambda model: function)
        return _method(model, self._own(model), self._own)


class Layered:
    """First base of a class with a layer. accelerate's hooks keep the forward that they wrap as ``_old_forward``."""

    _logitless_class: type  # the model's own class
    forward = _Slot()
    _old_forward = _Slot()

    def get_output_embeddings(self) -> Any:
        state = self.__dict__.get(KEY)
        if state is not None:
            state.before_head_is_read(self)
        return super().get_output_embeddings()  # type: ignore[misc]

    def __init_subclass__(cls) -> None:
        """Does nothing; the method of the model's class would register another model."""

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
    """Gives the model a class with a layer, around everything that others have put there before."""
    if not isinstance(model, Layered):
        model.__class__ = _above(model, _layered(_below(model)))
    for name in ("forward", "_old_forward"):
        if name in model.__dict__:
            setattr(model, name, model.__dict__[name])  # removes an earlier layer
    _ = model.forward  # makes the layer now, so that compiled code finds it


def shed(model: nn.Module) -> None:
    """Gives the model its class back, unless others such as FSDP2 have derived from it; the layer then does nothing."""
    if isinstance(model, Layered) and Layered in _below(model).__bases__:
        model.__class__ = _above(model, model._logitless_class)


def _is_parametrized(model: nn.Module) -> bool:
    """Whether torch.nn.utils.parametrize made its class, which has a property for each parametrized tensor."""
    kind = type(model)
    if not parametrize.is_parametrized(model) or len(kind.__bases__) != 1:
        return False
    return any(name in kind.__dict__ for name in model.parametrizations)  # type: ignore[union-attr]


def _below(model: nn.Module) -> type:
    """Returns the model's class without parametrizations of its own tensors."""
    return type(model).__bases__[0] if _is_parametrized(model) else type(model)


def _above(model: nn.Module, kind: type) -> type:
    """Returns the model's class with ``kind`` below its parametrizations.

    PyTorch removes the properties from the model's class itself, and in the end gives the model that class's first
    base. So the layer must be below the parametrizations.
    """
    if not _is_parametrized(model):
        return kind
    own = {name: value for name, value in type(model).__dict__.items() if name not in ("__dict__", "__weakref__")}
    return types.new_class(type(model).__name__, (kind,), exec_body=lambda namespace: namespace.update(own))


def parameter_names(inner: Callable[..., Any], model: nn.Module) -> tuple[str, ...]:
    """Returns the callable's parameters, or the class's where these name no labels, as in ``(*args, **kwargs)``."""
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
    """Makes a model that is being copied or loaded, before it gets its state."""
    model = make(*arguments)
    model.__class__ = _layered(type(model))
    return model


def _is_bound(value: Any, model: nn.Module) -> bool:
    return isinstance(value, types.MethodType) and value.__self__ is model


def _inner(layer: Any) -> Any:
    """Returns the function inside a layer, or None for anything else.

    Decorators copy attributes, so an attribute only counts if it names this very function.
    """
    if isinstance(layer, _Callable):
        return layer.inner
    of, function = getattr(layer, _INNER, (None, None))
    return function if of is layer else None


def _within(model: nn.Module, value: Any) -> Any:
    """Returns the function inside a layer of this model, and any other value as it is."""
    if _is_bound(value, model):
        function = _inner(value.__func__)
        return value if function is None else types.MethodType(function, model)
    return value.inner if isinstance(value, _Callable) and value.model is model else value


def _method(model: nn.Module, function: Any, current: Callable[[nn.Module], Any]) -> Any:
    """Makes a layer around a method. It holds no model, so a copied model calls its own.

    Args:
        model: The model.
        function: The function of the method.
        current: Returns the function at the time of a call, as a class's function may have been replaced by then.
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
    """A layer around a callable that is no method of the model, such as a partial function of accelerate's hooks."""

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
