"""Config: attribute access at every depth, freezing, copies, pickles, printing back; and load_config."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colonnade.config import Config, load_config
from colonnade.config.config import compared_texts, text_of
from colonnade.errors import ConfigError

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.binary(max_size=8)
)
KEYS = st.sampled_from(["lr", "lambda", "dict", "float", "globals", "a b", "_x", "ﬁ", "x1", "self", "é"]) | (
    st.text(min_size=1, max_size=6).filter(lambda key: not key.startswith("__"))
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS | st.sets(st.integers(), max_size=3) | st.frozensets(st.integers(), max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)
CONFIGS = st.dictionaries(KEYS, VALUES, max_size=5)


def executed(text: str) -> dict[str, Any]:
    """The names that a config file of this text leaves."""
    names: dict[str, Any] = {}
    exec(compile(text, "printed", "exec"), names)
    return {key: value for key, value in names.items() if key != "__builtins__"}


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types: 1, 1.0 and True differ; so do a list and a tuple."""
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        kind = list if isinstance(one, list) else tuple
        return isinstance(other, kind) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@pytest.fixture
def config() -> Config:
    return Config(
        BATCH_SIZE=8,
        parallel={"tensor": {"size": 2, "mode": "1d"}},
        handlers=[{"type": "A"}, [{"type": "B"}]],
        pair=(1, {"x": 2}),
        names={"a", "b"},
    )


def test_keys_are_attributes_at_every_depth(config: Config) -> None:
    assert config.parallel.tensor.size == 2
    assert config.handlers[0].type == "A"
    assert config.handlers[1][0].type == "B"
    assert config.pair[1].x == 2
    config.parallel.tensor.size = 4
    config.extra = {"deep": [{"y": 1}]}
    assert config["parallel"]["tensor"]["size"] == 4
    assert config.extra.deep[0].y == 1
    del config.extra
    assert "extra" not in config


def test_missing_attribute_names_the_nearest_key(config: Config) -> None:
    with pytest.raises(AttributeError, match=r"no key 'BATCH_SZIE'. Did you mean 'BATCH_SIZE'\?"):
        _ = config.BATCH_SZIE
    with pytest.raises(AttributeError, match=r"no key 'qqqq'\. Keys: BATCH_SIZE, parallel, handlers"):
        _ = config.qqqq
    with pytest.raises(AttributeError, match="BATCH_SIZE"):
        del config.BATCH_SZIE
    assert not hasattr(config, "qqqq")
    assert getattr(config, "qqqq", 3) == 3


def test_missing_item_is_a_key_error_and_get_has_a_default(config: Config) -> None:
    with pytest.raises(KeyError, match="nothing"):
        _ = config["nothing"]
    assert config.get("nothing", 7) == 7
    assert config.get("nothing") is None


def test_names_of_methods_are_reached_as_items() -> None:
    config = Config({"items": 3, "update": 4})
    assert config["items"] == 3
    assert list(config.items()) == [("items", 3), ("update", 4)]
    with pytest.raises(AttributeError, match=r"config\['values'\] = "):
        setattr(config, "values", 5)  # noqa: B010


def test_update_returns_self_and_wraps(config: Config) -> None:
    assert config.update({"a": {"x": 1}}, b=[{"y": 2}]) is config
    assert (config.a.x, config.b[0].y) == (1, 2)
    assert config.setdefault("c", {"z": 3}).z == 3
    assert config.setdefault("c", None).z == 3
    config |= {"d": {"w": 4}}
    assert config.d.w == 4
    joined = config | {"e": {"v": 5}}
    assert joined.e.v == 5
    assert "e" not in config
    assert config.pop("d").w == 4
    assert config.pop("d", "gone") == "gone"


def test_what_goes_in_is_copied() -> None:
    mine: dict[str, Any] = {"inner": {"x": 1}, "items": [1]}
    config = Config(mine)
    mine["inner"]["x"] = 2
    mine["items"].append(2)
    assert config == {"inner": {"x": 1}, "items": [1]}


@pytest.mark.parametrize("duplicate", [Config.copy, copy.copy, copy.deepcopy])
def test_copies_are_configs_of_their_own(config: Config, duplicate: Any) -> None:
    config.freeze()
    other = duplicate(config)
    assert type(other) is Config
    assert other == config
    other.parallel.tensor.size = 9
    other.handlers.append({"type": "C"})
    other.handlers[0].type = "Z"
    assert config.parallel.tensor.size == 2
    assert config.handlers == [{"type": "A"}, [{"type": "B"}]]


def test_deep_copy_copies_what_a_copy_shares() -> None:
    config = Config(shared=bytearray(b"a"))
    config.again = config.shared
    shallow, deep = config.copy(), copy.deepcopy(config)
    assert shallow.shared is config.shared
    assert deep.shared is not config.shared
    assert deep.shared is deep.again


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_and_stays_as_frozen_as_it_was(config: Config, protocol: int) -> None:
    thawed = pickle.loads(pickle.dumps(config, protocol))
    assert type(thawed) is Config
    assert thawed == config
    thawed.parallel.tensor.size = 3
    frozen = pickle.loads(pickle.dumps(config.freeze(), protocol))
    assert frozen == config
    with pytest.raises(ConfigError):
        frozen.parallel.tensor.size = 3
    with pytest.raises(ConfigError):
        frozen.handlers[1].append(1)


CHANGES = {
    "set attribute": lambda c: setattr(c, "BATCH_SIZE", 1),
    "new attribute": lambda c: setattr(c, "NEW", 1),
    "set item": lambda c: c.__setitem__("BATCH_SIZE", 1),
    "delete item": lambda c: c.__delitem__("BATCH_SIZE"),
    "delete attribute": lambda c: delattr(c, "BATCH_SIZE"),
    "update": lambda c: c.update(NEW=1),
    "in-place or": lambda c: c.__ior__({"NEW": 1}),
    "setdefault": lambda c: c.setdefault("NEW", 1),
    "pop": lambda c: c.pop("BATCH_SIZE"),
    "popitem": lambda c: c.popitem(),
    "clear": lambda c: c.clear(),
    "nested": lambda c: setattr(c.parallel.tensor, "size", 4),
    "in a list": lambda c: setattr(c.handlers[0], "type", "Z"),
    "in a list of lists": lambda c: setattr(c.handlers[1][0], "type", "Z"),
    "in a tuple": lambda c: setattr(c.pair[1], "x", 4),
    "append": lambda c: c.handlers.append(1),
    "extend": lambda c: c.handlers.extend([1]),
    "insert": lambda c: c.handlers.insert(0, 1),
    "remove": lambda c: c.handlers.remove(c.handlers[0]),
    "list pop": lambda c: c.handlers.pop(),
    "list clear": lambda c: c.handlers.clear(),
    "sort": lambda c: c.handlers.sort(key=str),
    "reverse": lambda c: c.handlers.reverse(),
    "list item": lambda c: c.handlers.__setitem__(0, 1),
    "list delete": lambda c: c.handlers.__delitem__(0),
    "list +=": lambda c: c.handlers.__iadd__([1]),
    "list *=": lambda c: c.handlers.__imul__(2),
    "inner list": lambda c: c.handlers[1].append(1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_frozen_config_refuses_every_change_and_says_what_to_do(config: Config, change: Any) -> None:
    before = config.copy()
    change(config.copy())  # the change itself is a lawful one
    config.freeze()
    with pytest.raises(
        ConfigError, match=r"frozen after launch.*before launch, or change a copy made by config.copy\(\)"
    ):
        change(config)
    assert config == before


def test_frozen_config_reads_as_before(config: Config) -> None:
    before = config.copy()
    assert config.freeze() is config
    assert config == before
    assert isinstance(config.handlers, list)
    assert isinstance(config.pair, tuple)
    assert config.names == {"a", "b"}
    assert not hasattr(config.names, "add")
    assert config.handlers[1:] + config.handlers[:1] == before.handlers[1:] + before.handlers[:1]
    assert json.loads(json.dumps(config.handlers)) == [{"type": "A"}, [{"type": "B"}]]
    assert executed(str(config)) == before
    assert config.freeze() == before


def test_dir_lists_the_keys(config: Config) -> None:
    assert {"BATCH_SIZE", "parallel", "freeze"} <= set(dir(config))


def test_from_file_reads_and_checks(tmp_path: Path) -> None:
    good = tmp_path / "good.py"
    good.write_text("parallel = dict(data=2)\n")
    assert type(Config.from_file(good)) is Config
    assert Config.from_file(str(good)).parallel.data == 2
    bad = tmp_path / "bad.py"
    bad.write_text("parallel = dict(dta=2)\n")
    with pytest.raises(ConfigError, match=r"bad\.py:1 .*Did you mean `data`\?"):
        Config.from_file(bad)


@given(st.dictionaries(st.sampled_from(["lr", "_x", "x1", "self"]), VALUES, max_size=5))
def test_text_executed_gives_the_same_config(values: dict[str, Any]) -> None:
    config = Config(values)
    assert same(executed(str(config)), values)
    assert same(eval(repr(config)), values)


def test_long_values_are_printed_over_several_lines() -> None:
    tensor = {"size": 4, "mode": "2.5d", "note": "n" * 80}
    assert str(Config(BATCH_SIZE=8, parallel={"pipeline": 2, "tensor": tensor})).splitlines() == [
        "BATCH_SIZE = 8",
        "parallel = {'pipeline': 2,",
        "            'tensor': {'size': 4,",
        "                       'mode': '2.5d',",
        f"                       'note': '{'n' * 80}'}}}}",
    ]


PYTHON = """
BATCH_SIZE = 8
x = 2
parallel = dict(
    pipeline=dict(size=1),
    tensor=dict(size=x, mode='new_mode')  # this is where you enable your new parallel mode
)
gradient_handlers = [
    dict(type='YourGradientHandler'),
]
clip_grad_norm = 1.0
"""
TOML = """
BATCH_SIZE = 8
x = 2
clip_grad_norm = 1.0
[parallel]
pipeline.size = 1
tensor = { size = 2, mode = "new_mode" }
[[gradient_handlers]]
type = "YourGradientHandler"
"""
FILE_VALUES: dict[str, Any] = {
    "BATCH_SIZE": 8,
    "x": 2,
    "parallel": {"pipeline": {"size": 1}, "tensor": {"size": 2, "mode": "new_mode"}},
    "gradient_handlers": [{"type": "YourGradientHandler"}],
    "clip_grad_norm": 1.0,
}


def test_python_toml_and_dict_give_the_same_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(PYTHON)
    (tmp_path / "train.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path)
    for source in (tmp_path / "train.py", "train.py", "./train.py", tmp_path / "train.toml", FILE_VALUES):
        config = load_config(source)
        assert type(config) is Config
        assert config == FILE_VALUES
        assert config.gradient_handlers[0].type == "YourGradientHandler"


def test_a_config_comes_back_as_itself_and_a_dict_as_a_copy() -> None:
    config = Config(FILE_VALUES)
    assert load_config(config) is config
    mine = dict(FILE_VALUES)
    load_config(mine).freeze()
    mine["x"] = 3
    assert type(mine["parallel"]) is dict


@pytest.mark.parametrize("source", [None, 3, ["train.py"], b"train.py", object])
def test_other_types_are_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match=rf"the path of a \.py or \.toml file .* not {type(source).__name__}: "):
        load_config(source)


def test_problems_have_their_lines(tmp_path: Path) -> None:
    python = tmp_path / "train.py"
    python.write_text("from base import *\nlr = 1\nparallel = dict(\n    tensro=2,\n)\ngrad_accum = 4\n")
    (tmp_path / "base.py").write_text("zero = 7\n")
    toml = tmp_path / "train.toml"
    toml.write_text("lr = 1\n[parallel]\ntensro = 2\n[parallel.tensor]\nmode = '1d'\n")
    with pytest.raises(ConfigError) as caught:
        load_config(python)
    rows = str(caught.value).splitlines()
    assert rows[0] == f"colonnade: 3 problems in {python}"
    assert rows[1].startswith("  train.py    zero = 7   must be 0, 1, 2 or 3")
    assert rows[2] == "  train.py:4  parallel.tensro = 2   unknown key. Did you mean `tensor`?"
    assert rows[3].startswith("  train.py:6  grad_accum = 4   is not read")
    with pytest.raises(ConfigError) as caught:
        load_config(toml)
    assert str(caught.value).splitlines() == [
        f"colonnade: 2 problems in {toml}",
        "  train.toml:3  parallel.tensro = 2   unknown key. Did you mean `tensor`?",
        "  train.toml:4  parallel.tensor.size   is missing; it must be an int >= 1 [C001]",
    ]


@given(st.dictionaries(st.from_regex(r"[A-Z]{3}[0-9]{3}", fullmatch=True), st.integers() | st.text()))
def test_what_is_printed_loads_again(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    file = tmp_path_factory.mktemp("printed") / "train.py"
    file.write_text(str(Config(values, **FILE_VALUES)), encoding="utf-8")
    assert load_config(file) == {**values, **FILE_VALUES}


def test_loading_imports_no_torch_and_is_quick(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PYTHON)
    (tmp_path / "train.toml").write_text(TOML)
    script = textwrap.dedent(
        """
        import sys, time
        start = time.process_time()
        from colonnade.config import load_config, parallel_sizes
        for name in ("train.py", "train.toml"):
            parallel_sizes(load_config(name).freeze())
        spent = time.process_time() - start
        heavy = {"torch", "numpy", "rich", "typer"} & set(sys.modules)
        assert not heavy, heavy
        print(spent)  # of the processor: the machine may be busy
        """
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={"PYTHONPATH": str(root), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.3


# -- compared ---------------------------------------------------------------------------------------------
# What ranks compare of their configs: all that is ours, but for keys that say otherwise.


def test_keys_of_ones_own_and_keys_that_may_differ_are_left_out() -> None:
    config = {
        "mine": 1,
        "model": {"width": 3, "num_chunks": 2},
        "fp16": {"init_scale": 8.0},
        "clip_grad_norm": None,
        "parallel": {"own": {"size": 2, "mode": None, "depth": 1}},
        "sync": {"reduce_dtype": torch.float32},
    }
    assert compared_texts(config) == {
        "model.num_chunks": "2",
        "fp16.init_scale": "8.0",
        "parallel.own.size": "2",
        "parallel.own.depth": "1",
        "sync.reduce_dtype": "torch.float32",
    }


def test_a_text_says_nothing_of_where_a_value_lies_in_memory() -> None:
    class Own:
        pass

    for make in (lambda: [Own()], lambda: {"f": lambda: None}, lambda: partial(Own().__init__)):
        one, other = make(), make()
        assert repr(one) != repr(other)
        assert text_of(one) == text_of(other)
    assert text_of({"b", "a"}) == "{'a', 'b'}"
    assert text_of((1, [2.5, None])) == "[1, [2.5, None]]"
