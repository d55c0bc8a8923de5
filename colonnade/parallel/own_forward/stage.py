"""A stage: the model itself without the units that lie elsewhere, whose forward pass does its part of the calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map_with_path, tree_unflatten

from colonnade.errors import ScheduleError
from colonnade.parallel.own_forward.calls import WATCHER, derived
from colonnade.parallel.own_forward.cuts import Part


class Absent:
    """Stands where a unit of another stage is, for a forward pass that calls it. It is no module: none is there."""

    def __init__(self, name: str, twin: nn.Module) -> None:
        vars(self).update(_unit=name, _twin=twin)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watcher = WATCHER.get()
        return self._no_call() if watcher is None else watcher.call(self._unit, self._no_call, args, kwargs)

    def _no_call(self, *args: Any, **kwargs: Any) -> Any:
        raise ScheduleError(f"{self._unit!r} is in another pipeline stage, and cannot be called here", code="C050")

    def __getattr__(self, name: str) -> Any:
        """What forward passes read off their layers (`layer.attention_type`, the dtype of a weight)."""
        return getattr(vars(self)["_twin"], name)

    def __deepcopy__(self, memo: Any) -> Absent:
        return self


class _Leave(BaseException):
    """Ends the forward pass of a stage; no Exception, which a model may catch."""


class Run:
    """One forward pass of a stage: the calls before its part give something of the right form, its own are made."""

    def __init__(self, part: Part, message: dict[str, Any]) -> None:
        self._part = part
        self._at = 0
        self._inside = False
        self._forms: list[list[Any]] = message.get("forms", [])
        self._form_of: list[int | None] = message.get("calls", [])
        self._values: dict[int, Tensor] = dict(zip(part.takes, message.get("values", ()), strict=True))
        self._device = next((value.device for value in self._values.values()), None)
        self._fillers: dict[int, list[Any]] = {}

    def message(self, inputs: Any) -> dict[str, Any]:
        """What the next stage is given."""
        values = [self._values[number] for number in self._part.gives]
        return {"inputs": inputs, "values": values, "forms": self._forms, "calls": self._form_of}

    def call(self, name: str, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the next call of the pass."""
        if self._inside:
            return own(*args, **kwargs)
        part, at = self._part, self._at
        self._at += 1
        if at >= len(part.names) or part.names[at] != name:
            raise ScheduleError(_other_order(part, at, name), code="C050")
        form = part.forms[at]
        if form is None:
            return self._run(own, args, kwargs)
        if at < part.first:
            return tree_unflatten(self._filler(at), form)
        self._keep_inputs(at, args, kwargs)
        if at == part.stop:
            raise _Leave
        if at in part.reads:
            args, kwargs = self._received(part.reads[at], args, kwargs)
        self._fillers.clear()
        result = self._run(own, args, kwargs)
        self._keep_outputs(at, tree_leaves(result))
        return result

    def _run(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._inside = True
        try:
            return own(*args, **kwargs)
        finally:
            self._inside = False

    def _filler(self, at: int) -> list[Any]:
        """In place of the leaves of a result of another stage: nothing comes of it but shapes and dtypes."""
        index = self._form_of[at]
        assert index is not None
        if index not in self._fillers:
            self._fillers[index] = [self._filled(leaf) for leaf in self._forms[index]]
        return self._fillers[index]

    def _filled(self, leaf: Any) -> Any:
        if not isinstance(leaf, list):
            return leaf
        dtype, *shape = leaf
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self._device)

    def _received(self, places: dict[str, int], args: Any, kwargs: Any) -> Any:
        def replaced(path: Any, leaf: Any) -> Any:
            number = places.get(keystr(path))
            return leaf if number is None else self._values[number]

        return tree_map_with_path(replaced, (args, kwargs))

    def _keep_inputs(self, at: int, args: Any, kwargs: Any) -> None:
        places = self._part.keeps_inputs.get(at)
        for path, leaf in tree_flatten_with_path((args, kwargs))[0] if places else ():
            if (number := places.get(keystr(path))) is not None:  # type: ignore[union-attr]
                self._values[number] = leaf

    def _keep_outputs(self, at: int, leaves: list[Any]) -> None:
        if self._part.stop == len(self._part.names):
            return  # nobody comes after
        for leaf, number in self._part.keeps_outputs.get(at, {}).items():
            self._values[number] = leaves[leaf]
        form = [[str(leaf.dtype)[6:], *leaf.shape] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if form not in self._forms:
            self._forms = [*self._forms, form]
        self._form_of = [*self._form_of, *[None] * (at - len(self._form_of)), self._forms.index(form)]


def _other_order(part: Part, at: int, name: str) -> str:
    expected = f"{part.names[at]!r} was to come" if at < len(part.names) else "no other was to come"
    return (
        f"the forward pass calls {name!r} where {expected}, as in the pass by which the model was cut into stages. A pipeline "
        f"needs the same calls in every pass (no layers left out at random); for inputs of another kind give a batch of them to parallelize(sample=) "
        f"or split(sample=)"
    )


class ModelStage(nn.Module):
    """What the classes of stages inherit: the model's own forward pass, in part."""

    _colonnade_part: Part
    _colonnade_settings: dict[str, Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first stage takes what the model takes, the last returns what it returns; in between go messages."""
        part, message = self._colonnade_part, {}
        if part.first:
            message = kwargs
            args, kwargs = message["inputs"]
        run = Run(part, message)
        token = WATCHER.set(run)
        try:
            result = self._colonnade_forward(*args, **{**kwargs, **self._colonnade_settings})
        except _Leave:
            return run.message((args, kwargs))
        finally:
            WATCHER.reset(token)
        if part.stop < len(part.names):
            raise ScheduleError(
                f"the forward pass ended without a call of {part.names[part.stop]!r}, which was to come", code="C050"
            )
        return result_of(result)

    def _colonnade_forward(self, *args: Any, **kwargs: Any) -> Any:
        own = vars(self).get("_colonnade_own_forward")
        return super().forward(*args, **kwargs) if own is None else own(*args, **kwargs)


def stage_class(kind: type) -> Any:
    """The class of the stages of a model. Who unwraps its forward pass finds the model's."""
    made = derived(ModelStage, kind)
    if "forward" not in vars(made):

        def forward(self: ModelStage, *args: Any, **kwargs: Any) -> Any:
            return ModelStage.forward(self, *args, **kwargs)

        vars(forward).update(__signature__=inspect.signature(forward), __wrapped__=kind.forward)  # type: ignore[attr-defined]
        made.forward = forward
        if hasattr(kind, "generate"):
            made.generate = no_generate
    return made


def no_generate(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Stands in the place of transformers' `generate`, which would call the whole model."""
    raise ScheduleError(
        "generate() needs all stages of the model, and a pipeline has them on several ranks: call engine.save_pretrained(folder) "
        "on every rank, and generate with transformers' from_pretrained(folder) in one process",
        code="C050",
    )


def result_of(output: Any) -> Any:
    """What a last stage gives: of an output with logits these, with the loss if there is one; else the output."""
    logits, loss = getattr(output, "logits", None), getattr(output, "loss", None)
    if not isinstance(logits, Tensor):
        return output
    return logits if loss is None else {"loss": loss, "logits": logits}


class _Members:
    """A list or a dict some members of which are absent: they are iterated over, but are no modules of it."""

    _colonnade_members: dict[str, Absent | None]
    _modules: dict[str, nn.Module]

    def _all(self) -> dict[str, nn.Module | Absent]:
        return {
            name: self._modules[name] if absent is None else absent for name, absent in self._colonnade_members.items()
        }

    def __len__(self) -> int:
        return len(self._colonnade_members)


class _List(_Members):
    def __iter__(self) -> Iterator[Any]:
        return iter(self._all().values())

    def __getitem__(self, index: Any) -> Any:
        return [*self._all().values()][index]


class _Dict(_Members):
    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __getitem__(self, key: str) -> Any:
        return self._all()[key]

    def __contains__(self, key: str) -> bool:
        return key in self._colonnade_members

    def keys(self) -> Any:
        return self._all().keys()

    def values(self) -> Any:
        return self._all().values()

    def items(self) -> Any:
        return self._all().items()


def take_out(owner: nn.Module, absent: dict[str, Absent]) -> None:
    """Have these children of a module be no modules of it, though its forward pass still finds them."""
    if isinstance(owner, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        vars(owner)["_colonnade_members"] = {name: absent.get(name) for name in owner._modules}
        owner.__class__ = derived(_Dict if isinstance(owner, nn.ModuleDict) else _List, type(owner))
    if not isinstance(owner, (nn.ModuleList, nn.Sequential)):
        vars(owner).update(absent)
    for name in absent:
        del owner._modules[name]
