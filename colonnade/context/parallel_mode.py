"""ParallelMode: the kinds of parallelism (dimensions of the device mesh), an enum that users can extend at run time.

A mode declares whether the ranks of a group see *the same* data (tensor) or *distinct* data (data, sequence). Gradient
reductions and their divisors follow from that.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from colonnade.errors import LayoutError, did_you_mean, listed

DataKind = Literal["same", "distinct"]


class _OpenEnum(type):
    """Makes `ParallelMode("data")`, `ParallelMode["DATA"]`, iteration and `in` work as on an Enum."""

    _by_value: dict[str, ParallelMode]
    _by_name: dict[str, ParallelMode]

    def __call__(cls, value: object) -> Any:
        """The member for a member, a value, or a member of a user's Enum, which registers itself if its value is new."""
        if isinstance(value, ParallelMode):
            return value
        if isinstance(value, str) and value in cls._by_value:
            return cls._by_value[value]
        if isinstance(value, enum.Enum) and isinstance(value.value, str):
            # Colossal-AI documents an own Enum as the way to add a mode.
            return cls._by_value.get(value.value) or ParallelMode.register(value.name, value.value)
        raise LayoutError(
            f"{value!r} is not a parallel mode; known values: {listed(cls._by_value)}."
            f"{did_you_mean(str(value), cls._by_value)} "
            f"To add a mode, call ParallelMode.register('NEW_MODE', 'new_mode', data='same').",
            code="C011",
        )

    def __getitem__(cls, name: str) -> ParallelMode:
        if name not in cls._by_name:
            raise KeyError(f"no parallel mode named {name!r}; known: {listed(cls._by_name)}")
        return cls._by_name[name]

    def __getattr__(cls, name: str) -> ParallelMode:
        if name.startswith("_") or name not in cls.__dict__.get("_by_name", ()):
            hint = did_you_mean(name, cls.__dict__.get("_by_name", ()))
            raise AttributeError(f"ParallelMode has no member {name!r}.{hint}")
        return cls._by_name[name]

    def __iter__(cls) -> Iterator[ParallelMode]:
        return iter(list(cls._by_name.values()))

    def __len__(cls) -> int:
        return len(cls._by_name)

    def __contains__(cls, value: object) -> bool:
        return isinstance(value, ParallelMode) or (isinstance(value, str) and value in cls._by_value)


class _BuiltIn(tuple[str, DataKind]):
    """A member as declared in the class body; registered below under the name of the attribute."""


def _built_in(value: str, data: DataKind) -> Any:
    return _BuiltIn((value, data))


class ParallelMode(metaclass=_OpenEnum):
    """A kind of parallelism. Members are singletons: compare them with `is` or `==`."""

    __slots__ = ("data", "name", "value")

    if TYPE_CHECKING:  # the signature of the metaclass's __call__ for type checkers

        def __init__(self, value: object) -> None: ...

    _by_value: ClassVar[dict[str, ParallelMode]] = {}
    _by_name: ClassVar[dict[str, ParallelMode]] = {}

    name: str
    value: str
    data: DataKind
    """Whether the ranks of a group see the same data or distinct data."""

    GLOBAL: ClassVar[ParallelMode] = _built_in("global", "distinct")
    DATA: ClassVar[ParallelMode] = _built_in("data", "distinct")
    MODEL: ClassVar[ParallelMode] = _built_in("model", "same")
    PIPELINE: ClassVar[ParallelMode] = _built_in("pipe", "same")
    TENSOR: ClassVar[ParallelMode] = _built_in("tensor", "same")
    SEQUENCE: ClassVar[ParallelMode] = _built_in("sequence", "distinct")
    SEQUENCE_DP: ClassVar[ParallelMode] = _built_in("sequence_dp", "distinct")
    PARALLEL_1D: ClassVar[ParallelMode] = _built_in("1d", "same")
    PARALLEL_2D_ROW: ClassVar[ParallelMode] = _built_in("2d_row", "same")
    PARALLEL_2D_COL: ClassVar[ParallelMode] = _built_in("2d_col", "same")
    PARALLEL_2P5D_ROW: ClassVar[ParallelMode] = _built_in("2p5d_row", "same")
    PARALLEL_2P5D_COL: ClassVar[ParallelMode] = _built_in("2p5d_col", "same")
    PARALLEL_2P5D_DEP: ClassVar[ParallelMode] = _built_in("2p5d_dep", "same")
    PARALLEL_2P5D_XZ: ClassVar[ParallelMode] = _built_in("2p5d_xz", "same")
    PARALLEL_3D_INPUT: ClassVar[ParallelMode] = _built_in("3d_input", "same")
    PARALLEL_3D_WEIGHT: ClassVar[ParallelMode] = _built_in("3d_weight", "same")
    PARALLEL_3D_OUTPUT: ClassVar[ParallelMode] = _built_in("3d_output", "same")
    PARALLEL_3D_INPUT_X_WEIGHT: ClassVar[ParallelMode] = _built_in("3d_input_x_weight", "same")
    PARALLEL_3D_OUTPUT_X_WEIGHT: ClassVar[ParallelMode] = _built_in("3d_output_x_weight", "same")
    EXPERT: ClassVar[ParallelMode] = _built_in("expert", "distinct")
    EXPERT_DATA: ClassVar[ParallelMode] = _built_in("expert_data", "distinct")
    MOE_MODEL: ClassVar[ParallelMode] = _built_in("moe_model", "distinct")
    MOE_DATA: ClassVar[ParallelMode] = _built_in("moe_data", "distinct")

    @classmethod
    def register(cls, name: str, value: str, data: DataKind = "same") -> ParallelMode:
        """Add a mode. Registering an equal mode again returns the existing one.

        Args:
            name: The name, such as "NEW_MODE", for `ParallelMode.NEW_MODE`.
            value: The value in configs, such as "new_mode".
            data: "same" if the ranks of a group see the same data, as in tensor parallelism; "distinct" if each sees its own, as
                in data parallelism.

        Raises:
            LayoutError: An argument is invalid, or another mode has this name or value.

        Example::

            RING = colonnade.ParallelMode.register("EXAMPLE_RING", "example_ring", data="same")
            assert RING is colonnade.ParallelMode.EXAMPLE_RING
        """
        if not (isinstance(name, str) and name.isidentifier() and not name.startswith("_")):
            raise LayoutError(f"a parallel mode's name is an identifier such as 'NEW_MODE', not {name!r}", code="C011")
        if hasattr(_OpenEnum, name) or name in {"register", "name", "value", "data"}:
            raise LayoutError(
                f"{name!r} cannot name a parallel mode: ParallelMode has an attribute of this name", code="C011"
            )
        if not (isinstance(value, str) and value):
            raise LayoutError(f"a parallel mode's value is a string such as 'new_mode', not {value!r}", code="C011")
        if data not in ("same", "distinct"):
            raise LayoutError(
                f"ParallelMode.register got data={data!r}. Pass 'same' if all ranks of a group see the same data (as "
                "in tensor parallelism). Pass 'distinct' if each rank sees different data (as in data parallelism).",
                code="C011",
            )
        known = cls._by_name.get(name) or cls._by_value.get(value)
        if known is not None:
            if (known.name, known.value, known.data) == (name, value, data):
                return known
            raise LayoutError(
                f"ParallelMode.register({name!r}, {value!r}, data={data!r}) conflicts with the existing {known!r} "
                f"(data={known.data!r}). Choose another name and value.",
                code="C011",
            )
        member = object.__new__(cls)
        for field, content in (("name", name), ("value", value), ("data", data)):
            object.__setattr__(member, field, content)
        cls._by_name[name] = cls._by_value[value] = member
        return member

    def __setattr__(self, field: str, content: object) -> None:
        raise AttributeError(f"{self} is constant; its {field} cannot be changed")

    def __repr__(self) -> str:
        return f"<ParallelMode.{self.name}: {self.value!r}>"

    def __str__(self) -> str:
        return f"ParallelMode.{self.name}"

    def __copy__(self) -> ParallelMode:
        return self

    def __deepcopy__(self, memo: object) -> ParallelMode:
        return self

    def __reduce__(self) -> tuple[Any, tuple[str, str, str]]:
        # By registration: a process may see a user's mode for the first time in a pickle.
        return _restore, (self.name, self.value, self.data)


def mode_of(value: object) -> ParallelMode:
    """`ParallelMode(value)` for code inside torch.compile, which would treat a call of the class as the creation of a new
    object."""
    return value if isinstance(value, ParallelMode) else ParallelMode(value)


def _restore(name: str, value: str, data: DataKind) -> ParallelMode:
    return ParallelMode.register(name, value, data)


for _name, _declared in list(vars(ParallelMode).items()):
    if isinstance(_declared, _BuiltIn):
        delattr(ParallelMode, _name)  # the metaclass looks up all members, built-in and registered
        ParallelMode.register(_name, *_declared)
