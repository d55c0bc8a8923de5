"""The manifest: it comes back as it was, each contradiction in it is named, and a piece is found wherever it lies."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest

from colonnade.checkpoint.manifest import (
    FORMAT,
    WIDTHS,
    Cut,
    Damaged,
    FileRecord,
    GroupRecord,
    ItemRecord,
    LayoutRecord,
    Manifest,
    StoredBox,
    TensorPart,
    TensorRecord,
    _digest,
    from_json,
    parse,
    tensors_file,
    to_json,
)
from colonnade.checkpoint.values import decode, encode
from colonnade.context import build_layout
from colonnade.errors import CheckpointError
from colonnade.parallel.boxes import Box
from colonnade.version import __version__

FILES = tuple(FileRecord(tensors_file(rank), 100, "ab") for rank in (0, 1))
ROWS = TensorPart((0, 0), (4, 3), None, "w", 0)
SCALAR = TensorPart((), (), None, "s", 1)
TENSORS = (
    TensorRecord("w", "", ("w", "tied"), (4, 3), "F32", (ROWS,)),
    TensorRecord("s", "step", ("s",), (), "F64", (SCALAR,)),
)
OPTIONS = ItemRecord("group 0", (0, 1), {"lr": {"$tensor": 0}}, 1, FILES[0].name, "options")
ITEM = ItemRecord("epoch", (0,), [1, {"$tensor": 1}, {"a": {"$tensor": 0}}], 2, FILES[1].name, "epoch")
PLAIN = ItemRecord("name", (1,), "mine", 0, None, "name")
GOOD = Manifest(
    7,
    1.5,
    LayoutRecord(2, (("data", 2, "data"),)),
    FILES,
    (Cut((3, 4), (0, 1)), Cut((1,), (0,))),
    TENSORS,
    (GroupRecord(0, ("w",), OPTIONS, "AdamW"),),
    (ITEM, PLAIN),
)


def test_a_manifest_comes_back():
    assert parse(GOOD.dump()) == GOOD
    assert GOOD.size == 200
    assert [tensor.size for tensor in GOOD.tensors] == [48, 8]
    assert [str(tensor) for tensor in GOOD.tensors] == ["w", "s (step)"]
    assert ITEM.entry(1) == "epoch#1"
    assert parse(replace(GOOD, groups=None).dump()).groups is None


def test_what_is_no_json_is_not_written():
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(GOOD, time=float("nan")).dump()


def test_the_numbers_of_the_format():
    assert FORMAT == 2
    assert tensors_file(7) == "rank-00007.safetensors"
    assert {width: [name for name in WIDTHS if WIDTHS[name] == width] for width in set(WIDTHS.values())} == {
        1: ["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"],
        2: ["U16", "I16", "F16", "BF16"],
        4: ["U32", "I32", "F32"],
        8: ["U64", "I64", "F64", "C64"],
    }


def test_a_layout_in_words():
    layout = build_layout({"parallel": {"pipeline": 2, "tensor": 2}}, world_size=8)
    record = LayoutRecord.of(layout)
    assert (record.world_size, str(record)) == (8, "data 2 x pipeline 2 x tensor 2")
    assert record.axes[0] == ("data", 2, "data")
    assert str(LayoutRecord(1, (("data", 1, "data"),))) == "one rank"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": (replace(FILES[0], name="../x.safetensors"), FILES[1])}, "has the file name '../x.safetensors'. A"),
        ({"files": (FILES[0], FILES[0])}, "lists a file twice"),
        ({"files": (replace(FILES[0], size=1), replace(FILES[1], size=54))}, "56 bytes of tensors in files of 55"),
        ({"cuts": (Cut((3, 4), (0,)), GOOD.cuts[1])}, "a sharded tensor whose 1 pieces are not adjacent"),
        ({"cuts": (Cut((4, 4), (0, 1)), GOOD.cuts[1])}, "a sharded tensor whose 2 pieces are not adjacent"),
        ({"cuts": (Cut((0, 4), (0, 1)), GOOD.cuts[1])}, "a sharded tensor whose 2 pieces are not adjacent"),
        ({"cuts": (Cut((3, 4), (0, 2)), GOOD.cuts[1])}, "refers to file number 2, but lists only 2 files"),
        ({"cuts": (Cut((3, 4), (0, 0)), GOOD.cuts[1])}, "uses an entry of a file twice"),
        ({"cuts": (Cut((2, 3), (0, 1)), GOOD.cuts[1])}, "the blocks of w do not tile the full tensor of shape"),
        ({"tensors": (replace(TENSORS[0], dtype="F33"),)}, "w has the unknown type F33; allowed are BOOL"),
        ({"tensors": (replace(TENSORS[0], shape=(1,) * 65),)}, "w has 65 dimensions; at most 64"),
        (
            {"tensors": (replace(TENSORS[0], shape=(5, 3)),)},
            r"the blocks of w do not tile the full tensor of shape \[5, 3\]: \[0, 0\]\+\[4, 3\]",
        ),
        ({"tensors": (replace(TENSORS[0], parts=()),)}, r"do not tile the full tensor of shape \[4, 3\]: none"),
        (
            {"tensors": (replace(TENSORS[0], parts=(replace(ROWS, offset=(0,)),)),)},
            r"do not tile the full tensor of shape \[4, 3\]: \[0\]\+\[4, 3\]",
        ),
        (
            {"tensors": (replace(TENSORS[0], parts=(replace(ROWS, order=(0, 0)),)),)},
            r"do not tile the full tensor of shape \[4, 3\]",
        ),
        ({"tensors": (*TENSORS, replace(TENSORS[1], label="t"))}, "uses an entry of a file twice"),
        ({"tensors": (replace(TENSORS[1], parts=(replace(SCALAR, key="epoch#0"),)),)}, "uses an entry of a file twice"),
        ({"items": (ITEM, replace(ITEM, name="other"))}, "uses an entry of a file twice"),
        (
            {"items": (replace(ITEM, value={"$tensor": 0}, tensors=1, key="options", file=FILES[0].name),)},
            "uses an entry of a file twice",
        ),
        (
            {"items": (replace(ITEM, file="rank-00009.safetensors"),)},
            "refers to the file rank-00009.safetensors, which is not",
        ),
        (
            {"items": (replace(PLAIN, file="rank-00009.safetensors"),)},
            "refers to the file rank-00009.safetensors, which is not",
        ),
        ({"items": (replace(ITEM, tensors=3),)}, "epoch declares 3 tensors, but contains 2"),
        ({"items": (replace(ITEM, tensors=0),)}, "epoch declares 0 tensors, but contains 2"),
        (
            {"items": (replace(ITEM, value=[{"$tensor": 0}, {"$tensor": 0}]),)},
            "epoch declares 2 tensors, but contains 2",
        ),
        (
            {"items": (replace(ITEM, value=[{"$tensor": 1}, {"$tensor": 2}]),)},
            "epoch declares 2 tensors, but contains 2",
        ),
        ({"items": (replace(ITEM, file=None),)}, "a value with tensors but no file"),
    ],
)
def test_what_contradicts_itself_is_damage(change, message):
    with pytest.raises(Damaged, match=message):
        parse(replace(GOOD, **change).dump())


def test_what_just_fits_is_taken():
    halves = tuple(replace(ROWS, offset=(0, at), shape=(4, size), key=f"w{at}") for at, size in ((0, 1), (1, 2)))
    turned = replace(halves[1], order=(1, 0), cut=2)
    for change in (
        {"files": (replace(FILES[0], size=2), replace(FILES[1], size=54))},
        {
            "tensors": (
                replace(TENSORS[0], shape=(1,) * 64, parts=(replace(ROWS, offset=(0,) * 64, shape=(1,) * 64, cut=1),)),
            )
        },
        {"tensors": (replace(TENSORS[0], parts=halves),)},
        {"tensors": (replace(TENSORS[0], parts=(halves[0], turned)),), "cuts": (*GOOD.cuts, Cut((8,), (1,)))},
    ):
        manifest = replace(GOOD, **change)
        assert parse(manifest.dump()) == manifest
    with pytest.raises(Damaged, match="the blocks of w do not tile the full tensor"):
        parse(replace(GOOD, tensors=(replace(TENSORS[0], parts=(halves[0], replace(turned, cut=0))),)).dump())


def changed(edit: Any) -> bytes:
    """The manifest with another content, and the digest of that."""
    content = json.loads(GOOD.dump())
    del content["digest"]
    edit(content)
    body = json.dumps(content).encode()[:-1]
    return body + f', "digest": "{_digest(body)}"}}\n'.encode()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "does not start with a format number"),
        (b'{"format": 0,' + GOOD.dump()[12:], "does not start with a format number"),
        (GOOD.dump()[:-1], "it does not end with a digest"),
        (GOOD.dump() + b"\n", "it does not end with a digest"),
        (GOOD.dump().replace(b'"step":7', b'"step":8'), "its digest is [0-9a-f]{64}, expected [0-9a-f]{64}"),
        (changed(lambda content: content.update(time=float("nan"))), "NaN is not JSON"),
        (changed(lambda content: content.update(step=-1)), "manifest.json: step is '-1', not a whole number from 0 on"),
        (changed(lambda content: content.update(tensors=5)), "manifest.json: tensors is '5', not a list"),
    ],
)
def test_what_was_not_written_so_is_damage(raw, message):
    with pytest.raises(Damaged, match=message):
        parse(raw)


@pytest.mark.parametrize(
    "value",
    [
        {"$module": "os"},
        {"$float": "x"},
        {"$float": 1.0},
        {"$tensor": "0"},
        {"$tensor": True},
        {"$tuple": "ab"},
        {"$tuple": {}},
        {"$dict": {}},
        {"$dict": [["a"]]},
        {"$dict": ["ab"]},
        {"$dict": [[[1], 2]]},
        {"$dict": [[{"$tuple": [[1]]}, 2]]},
        {"$dict": [[{}, 2]]},
        {"$counter": [[{"a": 1}, 2]]},
        {"$tuple": [], "$float": "nan"},
        {"$tuple": [], "a": 1},
        {"a": 1, "$tuple": []},
    ],
    ids=str,
)
def test_marks_that_nobody_writes_are_damage_in_items_and_options(value):
    """Also deep inside: each would fail when it is decoded, or be something that was never saved."""
    for place in ([value], {"a": value}, {"$tuple": [1, value]}, {"$dict": [["a", value]]}):
        item, group = (
            replace(PLAIN, value=place),
            replace((GOOD.groups or ())[0], options=replace(PLAIN, name="group 0", value=place)),
        )
        for manifest, name in (
            (replace(GOOD, items=(item,)), "name"),
            (replace(GOOD, groups=(group,)), "group 0"),
        ):
            with pytest.raises(Damaged, match=rf"for {name}\. Allowed .* one of the tags \$tensor, \$float"):
                parse(manifest.dump())


def test_every_value_that_can_be_saved_is_read_again():
    values = [
        {(1, ("a", 2.5)): {None: True}, 3: [float("inf"), float("-inf")]},
        Counter("aab"),
        {"$a": 1, "b": (1, [2, {"c": ()}])},
        {float("inf"): (), "": {}},
    ]
    for value in values:
        item = replace(PLAIN, value=encode(value, "it").value)
        (read,) = parse(replace(GOOD, items=(item,)).dump()).items
        assert decode(read.value, lambda at: None) == value  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("version", "says"),
    [
        (3, "which reads format 2. Update Colonnade to load it."),
        (1, "which reads only format 2. Load the checkpoint with the previous version of Colonnade"),
    ],
)
def test_another_format_names_who_wrote_it_and_says_what_to_do(version, says):
    for by, raw in (("9.9", changed(lambda content: content.update(colonnade="9.9"))), ("?", b'{"format": 2,')):
        with pytest.raises(CheckpointError) as error:
            parse(raw.replace(b'"format": 2', f'"format": {version}'.encode()))
        assert not isinstance(error.value, Damaged)
        assert error.value.code == "C081"
        assert str(error.value).startswith(
            f"the checkpoint has format {version}, written by Colonnade {by}; this is {__version__}, {says}"
        )


@pytest.mark.parametrize(
    ("first", "last", "pieces"),
    [
        (0, 9, [(5, 0, 3), (6, 3, 4), (7, 4, 9)]),
        (2, 4, [(5, 0, 3), (6, 3, 4)]),
        (3, 4, [(6, 3, 4)]),
        (4, 5, [(7, 4, 9)]),
        (3, 3, []),
        (9, 9, []),
    ],
)
def test_the_pieces_of_a_range(first, last, pieces):
    assert list(Cut((3, 4, 9), (5, 6, 7)).pieces(first, last)) == pieces


def test_where_rows_and_elements_lie():
    name = [file.name for file in FILES]
    box = Box((1, 1), (3, 1))
    assert list(GOOD.stored_boxes(ROWS, box)) == [
        StoredBox(name[0], "w", (3, 3), Box((0, 0), (3, 3))),
        StoredBox(name[1], "w", (1, 3), Box((3, 0), (1, 3))),
    ]
    (only,) = GOOD.stored_boxes(ROWS, Box((2, 0), (1, 3)))  # the last row of the first file
    assert only.file == name[0]
    assert list(GOOD.stored_boxes(SCALAR, Box((), ()))) == [StoredBox(name[0], "s", (), Box((), ()))]
    by_columns = TensorPart((2, 0), (2, 2), (1, 0), "w", 0)
    assert by_columns.length == 4
    assert list(GOOD.stored_boxes(by_columns, Box((3, 0), (1, 2)))) == [
        StoredBox(name[0], "w", (3,), Box((3, 0), (1, 1)), 1, (1, 0)),
        StoredBox(name[0], "w", (3,), Box((2, 1), (1, 1)), 2, (1, 0)),
        StoredBox(name[1], "w", (1,), Box((3, 1), (1, 1)), 0, (1, 0)),
    ]


# -- records ----------------------------------------------------------------------------------------------
# Records come back from JSON as they were, and only with values of the right types.


@dataclass(frozen=True)
class Sample:
    """A field of every kind."""

    name: str
    at: float
    sizes: tuple[int, ...]
    pairs: list[tuple[str, TensorRecord]]
    maybe: TensorPart | None = None


TENSOR = TensorRecord("w", "exp_avg", ("w", "v"), (2, 3), "F32", (TensorPart((0, 0), (2, 3), (1, 0), "k", 3),))
SAMPLE = Sample("x", 1.5, (1, 0), [("digest", TENSOR)])


def test_records_come_back():
    for sample in (SAMPLE, Sample("", 0.0, (), [], TENSOR.parts[0])):
        assert from_json(Sample, json.loads(json.dumps(to_json(sample))), "it") == sample


def test_the_name_of_a_state_is_called_slot_on_disk():
    assert list(to_json(TENSOR)) == ["label", "slot", "names", "shape", "dtype", "parts"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("name", None, "it: name is 'None', not a text"),
        ("at", True, "it: at is 'True', not a number"),
        ("at", float("inf"), "it: at is 'inf', not a number"),
        ("sizes", [1, -1], r"it: sizes is '\[1, -1\]', not a list of whole numbers"),
        ("sizes", [1 << 62], "not a list of whole numbers"),
        ("sizes", [1, 1 << 62], "not a list of whole numbers"),
        ("sizes", [1, True], r"it: sizes is '\[1, True\]', not a list of whole numbers"),
        ("sizes", [1, "2"], "not a list of whole numbers"),
        ("sizes", "12", "it: sizes is '12', not a list"),
        ("pairs", {}, "it: pairs is '{}', not a list"),
        ("pairs", [["digest", 7]], r"it: pairs\[0\]\[1\] is a int, not an object"),
        ("pairs", [["digest", {"label": 3}]], r"it: pairs\[0\]\[1\]: label is '3', not a text"),
        ("maybe", [], "it: maybe is a list, not an object"),
    ],
)
def test_a_value_of_another_type_is_damage_with_its_place(key, value, message):
    with pytest.raises(Damaged, match=message):
        from_json(Sample, {**json.loads(json.dumps(to_json(SAMPLE))), key: value}, "it")
