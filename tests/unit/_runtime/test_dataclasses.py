"""Data classes made late behave as those of the standard library, which are the oracle here."""

# Of a decorator that is a parameter checkers do not know that it makes data classes.
# mypy: disable-error-code="call-arg, arg-type, unused-ignore"

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
import threading
from dataclasses import FrozenInstanceError, asdict, astuple, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from icechunk_async._runtime.dataclasses import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable

EACH = pytest.mark.parametrize("make", [dataclasses.dataclass, dataclass])
BOTH = (dataclasses.dataclass, dataclass)


@dataclass(frozen=True, slots=True)
class Point:
    """As most of ours are."""

    kind: ClassVar[str] = "point"
    x: int
    y: int = 2
    names: list[str] = field(default_factory=list, compare=False)
    note: str = field(default="", repr=False, kw_only=True)

    def moved(self, by: int) -> Point:
        """Return another."""
        return replace(self, x=self.x + by)


@dataclass(frozen=True, slots=True)
class Named(Point):
    """Adds to its base."""

    name: str = "n"


def _point(make: Any, **options: Any) -> Any:
    @make(**{"frozen": True, "slots": True, **options})
    class Pair:
        x: int
        y: int = 2

    return Pair


def _outcome(action: Callable[..., object], *arguments: Any, **named: Any) -> Any:
    """Return the result of an action, or the type and the text of its error."""
    try:
        return action(*arguments, **named)
    except (AttributeError, TypeError) as error:
        return type(error), str(error)


OPTIONS = pytest.mark.parametrize(
    "options",
    [
        {},
        {"frozen": False},
        {"slots": False},
        {"frozen": False, "slots": False},
        {"eq": False},
        {"repr": False},
        {"kw_only": True},
        {"eq": False, "frozen": False},
    ],
    ids=str,
)
ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {}),
    ((1, 3), {}),
    ((), {"x": 1, "y": 3}),
    ((), {"y": 3, "x": 1}),
    ((), {}),
    ((1, 2, 3), {}),
    ((1,), {"x": 1}),
    ((1,), {"z": 1}),
]


@OPTIONS
def test_arguments_values_and_complaints_are_those_of_the_standard_library(
    options: dict[str, Any],
) -> None:
    """Python itself complains, in the same words."""
    theirs, ours = (_point(make, **options) for make in BOTH)
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert ours.__match_args__ == theirs.__match_args__
    for given, named in ARGUMENTS:
        found = []
        for cls in (theirs, ours):
            made = _outcome(cls, *given, **named)
            found.append((made.x, made.y) if isinstance(made, cls) else made)
        assert found[0] == found[1]


@OPTIONS
def test_equality_hash_and_repr_are_those_of_the_standard_library(options: dict[str, Any]) -> None:
    """Also where they are not asked for."""
    seen: list[list[Any]] = []
    for make in BOTH:
        cls = _point(make, **options)
        one, same, other = (cls(x=x, y=5) for x in (1, 1, 2))
        seen.append(
            [
                one == same,
                one == other,
                one == (1, 5),
                one == _point(make)(1, 5),
                "address" if " at 0x" in repr(one) else repr(one),
                _outcome(hash, one) == _outcome(hash, same),
                _outcome(hash, one) == _outcome(hash, cls(x=1, y=6)),
                hasattr(one, "__dict__"),
            ]
        )
    assert seen[0] == seen[1]
    if options == {}:
        assert hash(_point(dataclass)(1, 5)) == hash((1, 5))


@OPTIONS
def test_attributes_can_be_set_where_the_standard_library_lets_them(
    options: dict[str, Any],
) -> None:
    """Frozen instances say so in the same words."""
    seen: list[list[object]] = []
    for make in BOTH:
        one = _point(make, **options)(x=1, y=5)
        seen.append(
            [
                _outcome(setattr, one, "x", 3),
                _outcome(delattr, one, "y"),
                _outcome(getattr, one, "x"),
            ]
        )
    assert seen[0] == seen[1]


@EACH
def test_a_class_keeps_the_methods_that_it_has(make: Any) -> None:
    """Only what is missing is added."""

    @make(frozen=True, slots=True)
    class Own:
        x: int

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 7

    @make(frozen=True, slots=True)
    class Equal:  # noqa: PLW1641 -- that is added
        x: int

        def __eq__(self, other: object) -> bool:
            return True

    @make(slots=True)
    class Changed:
        x: int

        def __hash__(self) -> int:
            return 7

    assert (repr(Own(1)), hash(Own(1)), Own(1) == 3, hash(Changed(1))) == ("own", 7, True, 7)
    assert hash(Equal(1)) == hash((1,))


@EACH
def test_fields_that_are_not_arguments_are_made(make: Any) -> None:
    """By a default, a factory, or `__post_init__`."""

    @make(slots=True)
    class Counter:
        start: int
        step: int = field(default=2, init=False)
        seen: list[int] = field(default_factory=list, init=False)
        total: int = field(init=False, compare=False)

        def __post_init__(self) -> None:
            self.total = self.start + self.step

    @make
    class Plain:
        step: int = field(default=2, init=False)

    one, two = Counter(1), Counter(1)
    assert (one.step, one.seen, one.total) == (2, [], 3)
    assert one.seen is not two.seen
    two.total = 9
    assert one == two
    assert (Plain().step, vars(Plain())) == (2, {})
    assert repr(one).endswith("Counter(start=1, step=2, seen=[], total=3)")


@EACH
def test_hashes_take_the_fields_that_are_to_be_taken(make: Any) -> None:
    """`hash=` says more than `compare=`."""

    @make(frozen=True, slots=True)
    class Options:
        name: str
        more: dict[str, str] = field(default_factory=dict, hash=False)
        quiet: bool = field(default=False, compare=False)

    assert hash(Options("a", {"b": "c"})) == hash(Options("a"))
    assert Options("a", {"b": "c"}) != Options("a")
    assert Options("a", quiet=True) == Options("a")


@EACH
def test_what_holds_itself_has_a_repr(make: Any) -> None:
    """It does not end in an error."""

    @make(slots=True)
    class Node:
        below: list[Any]

    node = Node([])
    node.below.append(node)
    assert repr(node).endswith("Node(below=[...])")


def test_functions_of_dataclasses_take_them() -> None:
    """`replace`, `asdict`, `astuple`, `fields` and `is_dataclass`."""
    one = Point(1, note="n")
    assert is_dataclass(Point)
    assert is_dataclass(one)
    assert asdict(one) == {"x": 1, "y": 2, "names": [], "note": "n"}
    assert astuple(one) == (1, 2, [], "n")
    assert replace(one, y=5) == Point(1, 5, note="n")
    assert one.moved(2) == Point(3, note="n")
    found = {it.name: (it.type, it.default, it.kw_only, it.compare) for it in fields(Point)}
    assert found == {
        "x": ("int", dataclasses.MISSING, False, True),
        "y": ("int", 2, False, True),
        "names": ("list[str]", dataclasses.MISSING, False, False),
        "note": ("str", "", True, True),
    }
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        replace(one, z=1)  # type: ignore[call-arg]
    if sys.version_info >= (3, 13):
        assert copy.replace(one, y=5) == replace(one, y=5)


def test_patterns_match_them() -> None:
    """By position and by name."""
    match Named(1, 4):
        case Named(x, 4, name=name):
            assert (x, name) == (1, "n")
        case _:
            pytest.fail("it does not match")
    assert Point.__match_args__ == ("x", "y", "names")


@pytest.mark.parametrize("one", [Point(1, 3, ["a"], note="b"), Named(1, name="c")])
def test_copies_and_pickles_are_equal(one: Point) -> None:
    """Of frozen classes with slots as well."""
    for again in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert (again, again.names, type(again)) == (one, one.names, type(one))
    with pytest.raises(FrozenInstanceError):
        copy.copy(one).x = 3  # type: ignore[misc]


@pytest.mark.parametrize("below", BOTH)
@pytest.mark.parametrize("above", BOTH)
def test_either_kind_may_derive_from_the_other(above: Any, below: Any) -> None:
    """Fields of the base come first, and a default can be replaced."""

    @above(frozen=True, slots=True)
    class Base:
        x: int
        y: int = 2

    @below(frozen=True, slots=True)
    class Derived(Base):
        z: int = 3
        y: int = 5

    made = Derived(1)
    assert (made.x, made.y, made.z) == (1, 5, 3)
    assert [it.name for it in fields(Derived)] == ["x", "y", "z"]
    assert repr(made).endswith("Derived(x=1, y=5, z=3)")
    assert (Base(1) == made, made == Derived(1), hash(made)) == (False, True, hash((1, 5, 3)))
    with pytest.raises(FrozenInstanceError):
        made.x = 3
    assert Base(1).y == 2
    assert "x" not in vars(Derived)  # it has one slot, that of the base


@pytest.mark.parametrize("slots", [True, False])
@pytest.mark.parametrize("below", BOTH)
@pytest.mark.parametrize("above", BOTH)
def test_copies_have_the_fields_of_both_kinds(above: Any, below: Any, slots: bool) -> None:  # noqa: FBT001
    """Also if the methods that copy are those of the base, because only that one has slots."""

    @above(frozen=True, slots=True)
    class Base:
        x: int

    @below(frozen=True, slots=slots)
    class Derived(Base):
        kind: ClassVar[str] = "derived"
        y: int = 2

    assert copy.copy(Derived(1, 5)) == Derived(1, 5)
    assert copy.deepcopy(Derived(1, 5)) == Derived(1, 5)


@pytest.mark.parametrize("below", BOTH)
@pytest.mark.parametrize("above", BOTH)
def test_class_variables_of_a_base_are_no_fields(above: Any, below: Any) -> None:
    """They take no place among the arguments."""

    @above
    class Base:
        kind: ClassVar[str] = "base"
        x: int = 1

    @below
    class Derived(Base):
        y: int = 2

    assert (Derived(5, 6).x, Derived(5, 6).y, Derived.kind) == (5, 6, "base")
    assert [it.name for it in fields(Derived)] == ["x", "y"]


def test_plain_classes_that_derive_use_the_methods_of_their_base() -> None:
    """They are made for the base, also if the other class asks first."""

    @dataclass(slots=True)
    class Base:
        x: int

    class Derived(Base):
        pass

    class Longer(Base):
        def __init__(self) -> None:
            super().__init__(7)

    assert repr(Derived(3)).endswith("Derived(x=3)")
    assert (Derived(3) == Derived(3), Derived(3) == Base(3), Longer().x) == (True, False, 7)
    assert "__init__" not in vars(Derived)


def test_threads_may_use_a_class_first_at_the_same_time() -> None:
    """Each of them makes the methods, which are the same."""
    for _ in range(50):
        cls = _point(dataclass)
        ready = threading.Barrier(4)
        made: list[object] = []

        def use(cls: Any = cls, ready: Any = ready, made: Any = made) -> None:
            ready.wait()
            made.append(cls(1) == cls(1, 2) and hash(cls(1)))

        threads = [threading.Thread(target=use) for _ in range(4)]
        for it in threads:
            it.start()
        for it in threads:
            it.join()
        assert made == [hash((1, 2))] * 4


def test_nothing_is_compiled_for_a_class_that_nobody_uses() -> None:
    """And for one that is used only what is used: that is what it is for."""
    cls = _point(dataclass)
    kinds = {name: type(it).__name__ for name, it in vars(cls).items()}
    late = {"__init__", "__eq__", "__hash__", "__repr__", "__dataclass_fields__"}
    assert {name for name, kind in kinds.items() if kind == "_Late"} == late
    cls(1)
    assert {name for name, it in vars(cls).items() if type(it).__name__ == "_Late"} == late - {
        "__init__"
    }
    assert cls.__init__.__qualname__.endswith("Pair.__init__")
    assert cls.__init__.__module__ == __name__


def test_a_class_may_be_shown_by_a_module_that_is_not_imported() -> None:
    """As those of the facade are."""
    cls = _point(dataclass)
    cls.__module__ = "no.such.module"
    assert cls(1) == cls(1)
    assert cls.__init__.__module__ == "no.such.module"


def test_mutable_defaults_are_refused() -> None:
    """As there."""
    with pytest.raises(ValueError, match=r"Wrong.x: a list can be changed.* default_factory"):

        @dataclass
        class Wrong:
            x: list[int] = []  # noqa: RUF012 -- that is refused


@pytest.mark.parametrize("annotation", ["InitVar[int]", "KW_ONLY", "dataclasses.KW_ONLY", int])
def test_what_is_missing_is_refused(annotation: object) -> None:
    """And the sentence says what to do."""
    with pytest.raises(TypeError, match=r"Wrong.x: .* Take the one of the standard library"):
        dataclass(type("Wrong", (), {"__annotations__": {"x": annotation}}))
    with pytest.raises(TypeError, match="unexpected keyword argument 'order'"):
        dataclass(order=True)


def test_classes_that_do_it_their_own_way_are_refused() -> None:
    """Rather than half changed."""
    with pytest.raises(TypeError, match="has __slots__ already"):
        dataclass(slots=True)(type("Wrong", (), {"__annotations__": {"x": "int"}, "__slots__": ()}))
    with pytest.raises(TypeError, match="cannot be frozen"):
        dataclass(frozen=True)(type("Wrong", (), {"__setattr__": object.__setattr__}))


def test_all_that_programs_import_are_made_late() -> None:
    """But for one, which has an order: each class costs every program time."""
    script = """
import dataclasses
made = []
process = dataclasses._process_class
def counted(cls, *arguments, **named):
    made.append(cls)
    return process(cls, *arguments, **named)
dataclasses._process_class = counted
import icechunk_async.session, icechunk_async.sync.repository, icechunk_async.engine.open
import icechunk_async.engine.commit.forks, icechunk_async.engine.commit.publisher
import icechunk_async.engine.leases.member, icechunk_async.engine.leases.spiller
import icechunk_async_local
print(*(it.__name__ for it in made if it.__module__.startswith("icechunk_async")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout.decode().split() == ["Pattern"]


def test_methods_belong_to_the_module_of_the_class() -> None:
    """Tracebacks leave out frames of this library by the name that their globals have."""

    @dataclass(frozen=True)
    class Made:
        a: int

    for method in (Made.__init__, Made.__eq__, Made.__hash__):
        assert method.__globals__["__name__"] == __name__  # type: ignore[attr-defined]
