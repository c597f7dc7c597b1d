# SPDX-License-Identifier: Apache-2.0
"""ChannelRegistry: vocabulary rules, encoding, hashing; the native encoder against the plain one and a plain oracle."""

import concurrent.futures
import enum
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from segscatter import ChannelRegistry
from segscatter import channels as channels_module

NAMES = ["code", "math", "web"]


@pytest.fixture(params=["native", "python"])
def encoder(request, monkeypatch):
    """Runs a test with the native encoder and without it."""
    if request.param == "python":
        monkeypatch.setattr(channels_module, "_C", None)
    elif channels_module._C is None:
        pytest.fail("segscatter._C is not built: only the slow encoder could be tested")
    return request.param


def test_slots_are_names_then_none_then_other():
    registry = ChannelRegistry(NAMES, none="nothing", other="rest")
    assert registry.names == ("code", "math", "web", "nothing", "rest")
    assert registry.num_groups == len(registry) == 5
    assert (registry.none, registry.other, registry.grow) == ("nothing", "rest", False)


def test_encode_gives_int32_on_the_host(encoder):
    registry = ChannelRegistry(NAMES)
    ids = registry.encode(["math", None, "zzz", "code", "web", "None", "other"])
    assert ids.dtype == torch.int32
    assert ids.device.type == "cpu"
    assert ids.tolist() == [1, 3, 4, 0, 2, 3, 4]
    assert registry.unseen == 1  # "zzz"; naming the reserved slots is no surprise
    assert registry.encode(list(registry.names)).tolist() == list(range(5))


def test_encode_takes_any_iterable(encoder):
    registry = ChannelRegistry(NAMES)
    assert registry.encode(()).shape == (0,)
    assert registry.encode(("web",)).tolist() == [2]
    assert registry.encode(name for name in ["web", "code"]).tolist() == [2, 0]


def test_encode_pads_with_minus_one(encoder):
    registry = ChannelRegistry(NAMES)
    assert registry.encode(["web", "code"], length=5).tolist() == [2, 0, -1, -1, -1]
    assert registry.encode([], length=2).tolist() == [-1, -1]
    assert registry.encode(["web"], length=1).tolist() == [2]
    with pytest.raises(ValueError, match="2 channel names for 1 segments"):
        registry.encode(["web", "code"], length=1)


def test_names_are_compared_after_str(encoder):
    class Source:
        def __str__(self):
            return "web"

    registry = ChannelRegistry([1, "math", Source()])
    assert registry.names[:3] == ("1", "math", "web")
    assert registry.encode([1, "1", Source(), True, 2.5]).tolist() == [0, 0, 2, 4, 4]
    assert registry.unseen == 2


def test_names_in_other_scripts_and_broken_unicode(encoder):
    names = ["数学", "código", "🧮", "\ud800lone", "", "a\0b"]
    registry = ChannelRegistry(names)
    assert registry.encode([*names, "a", "数"]).tolist() == [0, 1, 2, 3, 4, 5, 7, 7]
    assert len(registry.stable_hash) == 32


@pytest.mark.parametrize("seed", range(6))
def test_encode_against_a_plain_dictionary(encoder, seed):
    rng = random.Random(seed)
    alphabet = "ab/é" if seed % 2 else "abcdefgh0123456789_-"
    names = list({"".join(rng.choices(alphabet, k=rng.randrange(40))) for _ in range(rng.choice([1, 7, 500]))})
    registry = ChannelRegistry(names, none="<none>", other="<other>")
    slots = {name: slot for slot, name in enumerate(names)}
    texts, expected, unseen = [], [], 0
    for _ in range(2000):
        kind = rng.random()
        if kind < 0.1:
            text, slot = None, len(names)
        elif kind < 0.3:
            text = "".join(rng.choices(alphabet, k=rng.randrange(12)))
            slot = slots.get(text, len(names) + 1)
            unseen += text not in slots
        else:
            text = rng.choice(names)
            slot = slots[text]
            text = text[:1] + text[1:] if rng.random() < 0.5 else text  # often another object with the same text
        texts.append(text)
        expected.append(slot)
    assert registry.encode(texts).tolist() == expected
    assert registry.unseen == unseen


def test_growing_registry_gives_the_next_slot(encoder):
    registry = ChannelRegistry(["first"], grow=True)
    assert registry.encode(["b", "first", None, "a", "b", None]).tolist() == [1, 0, 2, 3, 1, 2]
    assert registry.names == ("first", "b", "None", "a")
    assert registry.encode(["c", "a"]).tolist() == [4, 3]
    assert registry.names == ("first", "b", "None", "a", "c")
    assert registry.unseen == 0


def test_growing_registry_keeps_types_apart_and_says_so_once(encoder):
    registry = ChannelRegistry(grow=True)
    with pytest.warns(UserWarning, match="kept apart") as record:
        ids = registry.encode([1, "1", None, "None", True, 1.0, "1.0", 1])
    assert len(record) == 1
    assert ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 0]
    assert registry.names == ("1 (int)", "1", "None (NoneType)", "None", "True", "1.0 (float)", "1.0")
    assert len(set(registry.names)) == len(registry)


def test_growing_registry_in_several_threads(encoder):
    registry = ChannelRegistry(grow=True)
    names = [f"c{i}" for i in range(300)]

    def work(seed):
        order = random.Random(seed).sample(names, len(names))
        return dict(zip(order, registry.encode(order).tolist(), strict=True))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        first, *others = pool.map(work, range(32))
    assert all(other == first for other in others)
    assert sorted(first.values()) == list(range(300))
    assert {name: slot for slot, name in enumerate(registry.names)} == first


def test_integer_and_string_types_are_one_each(encoder):
    numpy = pytest.importorskip("numpy")
    registry = ChannelRegistry(grow=True)
    assert registry.encode([1, numpy.int64(1), numpy.int32(1)]).tolist() == [0, 0, 0]
    assert registry.encode(["a", numpy.str_("a")]).tolist() == [1, 1]


def test_unhashable_channels_do_not_break_growing(encoder):
    registry = ChannelRegistry(grow=True)
    assert registry.encode([["a"], {"b": 1}, ["a"]]).tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("names", "options", "error", "message"),
    [
        ([1, "1"], {}, ValueError, r"1 and '1' are both called '1' after str\(\)"),
        (["a", "b", "a"], {}, ValueError, "'a' and 'a' are both called 'a'"),
        (["a", None], {}, TypeError, "must not hold None.*'None'"),
        (["None"], {}, ValueError, "collides with the reserved slot none='None'"),
        (["other"], {}, ValueError, "collides with the reserved slot other='other'"),
        (["x"], {"none": "same", "other": "same"}, ValueError, "none and other must differ"),
        ("code", {}, TypeError, "single string 'code'"),
        (["a", "a"], {"grow": True}, ValueError, "names holds 'a' twice"),
    ],
)
def test_bad_vocabularies(names, options, error, message):
    with pytest.raises(error, match=message):
        ChannelRegistry(names, **options)


def test_reserved_names_can_make_room():
    registry = ChannelRegistry(["None", "other"], none="<none>", other="<other>")
    assert registry.encode(["None", "other", None, "x"]).tolist() == [0, 1, 2, 3]


def test_encode_refuses_a_single_string():
    with pytest.raises(TypeError, match="single string 'math'"):
        ChannelRegistry(NAMES).encode("math")


@pytest.mark.parametrize("grow", [False, True])
def test_pickle_keeps_the_vocabulary(encoder, grow):
    registry = ChannelRegistry(NAMES, none="-", other="+", grow=grow)
    registry.encode(["new", None, 7])
    copy = pickle.loads(pickle.dumps(registry))
    assert copy == registry
    assert copy.names == registry.names
    assert copy.stable_hash == registry.stable_hash
    texts = ["web", None, "new", 7, "unknown"]
    assert copy.encode(texts).tolist() == registry.encode(texts).tolist()


def test_equality():
    registry = ChannelRegistry(NAMES)
    assert registry == ChannelRegistry(NAMES)
    assert registry != ChannelRegistry(NAMES[::-1])
    assert registry != ChannelRegistry(NAMES, none="-")
    assert registry != ChannelRegistry(NAMES, other="-")
    assert registry != ChannelRegistry([*NAMES, "None", "other"], grow=True)
    assert registry != NAMES
    with pytest.raises(TypeError):
        hash(registry)


def test_stable_hash_depends_on_names_order_and_kind_only():
    fixed = ChannelRegistry(NAMES)
    different = [
        ChannelRegistry(NAMES[::-1]),
        ChannelRegistry(NAMES, none="-"),
        ChannelRegistry(["codem", "ath", "web"]),
        ChannelRegistry([*NAMES, "None", "other"], grow=True),
    ]
    hashes = {fixed.stable_hash, *(registry.stable_hash for registry in different)}
    assert len(hashes) == 5
    assert fixed.stable_hash == ChannelRegistry(NAMES).stable_hash


def test_stable_hash_is_the_same_in_another_python():
    code = "from segscatter import ChannelRegistry; print(ChannelRegistry(['code', 'mathé', 3]).stable_hash)"
    other = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": ":".join(p for p in sys.path if p)},
    )
    assert other.stdout.strip() == ChannelRegistry(["code", "mathé", 3]).stable_hash
    # A fixed value: the hash of a released version must not change, or mixed installations would not agree.
    assert ChannelRegistry(["code", "math", "web"]).stable_hash == "f7fc58e34324785842ff0ec41736be22"


def test_from_file(tmp_path):
    lines = tmp_path / "channels.txt"
    lines.write_text("\ufeffcode\r\n\n  math \nweb/数学\n", encoding="utf-8")
    assert ChannelRegistry.from_file(lines, other="rest").names == ("code", "math", "web/数学", "None", "rest")
    array = tmp_path / "channels.json"
    array.write_text(json.dumps(["code", 1, "web/数学"]), encoding="utf-8")
    assert ChannelRegistry.from_file(str(array)).names == ("code", "1", "web/数学", "None", "other")
    array.write_text('{"code": 1}')
    with pytest.raises(ValueError, match="JSON list of names, but holds a dict"):
        ChannelRegistry.from_file(array)
    array.write_text('["code",')
    with pytest.raises(ValueError, match="not a valid JSON list"):
        ChannelRegistry.from_file(array)
    lines.write_text("code\nmath\ncode\n")
    with pytest.raises(ValueError, match="'code' and 'code'"):
        ChannelRegistry.from_file(lines)


class ColumnDataset:
    """The part of the Hugging Face interface that is used."""

    def __init__(self, columns):
        self._columns = columns
        self.column_names = list(columns)

    def unique(self, key):
        return list(dict.fromkeys(self._columns[key]))


@pytest.mark.parametrize(
    "dataset",
    [
        [{"channel": "web"}, {"channel": None}, {"channel": "code"}, {}, {"channel": "web"}],
        iter([{"channel": "web"}, {"channel": "code"}]),
        {"channel": ["web", "code", None, "web"], "text": ["a", "b", "c", "d"]},
        ColumnDataset({"text": ["a"] * 3, "channel": ["web", None, "code"]}),
        {"train": [{"channel": "web"}], "test": ColumnDataset({"channel": ["code"]})},
    ],
    ids=["rows", "iterator", "columns", "huggingface", "splits"],
)
def test_from_dataset_sorts_what_it_finds(dataset):
    assert ChannelRegistry.from_dataset(dataset).names == ("code", "web", "None", "other")


def test_from_dataset_options_and_errors():
    assert ChannelRegistry.from_dataset([{"source": 2}, {"source": 10}], "source", none="-").names[:3] == (
        "10",
        "2",
        "-",
    )
    assert ChannelRegistry.from_dataset([]).names == ("None", "other")
    with pytest.raises(ValueError, match="no row of the dataset has the key 'channel'"):
        ChannelRegistry.from_dataset([{"source": 2}])
    with pytest.raises(ValueError, match="no column 'channel'; its columns are 'text'"):
        ChannelRegistry.from_dataset(ColumnDataset({"text": []}))
    with pytest.raises(ValueError, match="no column 'channel'; its columns are 'text'"):
        ChannelRegistry.from_dataset({"text": ["a"]})
    with pytest.raises(ValueError, match="rows of the dataset must be mappings, but one is a tuple"):
        ChannelRegistry.from_dataset([("a", "b")])
    with pytest.raises(ValueError, match="both called '1'"):
        ChannelRegistry.from_dataset([{"channel": 1}, {"channel": "1"}])


class Collator:
    def __init__(self, registry):
        self.registry = registry

    def __call__(self, rows):
        ids = self.registry.encode(rows)
        return ids, ids.is_pinned(), torch.cuda.is_initialized()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_encode_in_dataloader_workers(context):
    registry = ChannelRegistry(NAMES)
    loader = torch.utils.data.DataLoader(
        ["web", "math", None, "zzz"],
        batch_size=2,
        num_workers=1,
        collate_fn=Collator(registry),
        multiprocessing_context=context,
    )
    batches = list(loader)
    assert [ids.tolist() for ids, _, _ in batches] == [[2, 1], [3, 4]]
    assert not any(pinned or started for _, pinned, started in batches)


def test_growing_registry_refuses_dataloader_workers():
    loader = torch.utils.data.DataLoader(
        ["web"], num_workers=1, collate_fn=Collator(ChannelRegistry(grow=True)), multiprocessing_context="fork"
    )
    with pytest.raises(RuntimeError, match="cannot encode in a dataloader worker"):
        list(loader)


@pytest.mark.parametrize(
    ("available", "initialized", "worker", "child", "pinned"),
    [
        (False, False, False, False, False),
        (True, False, False, False, True),
        (True, True, False, False, True),
        (True, True, False, True, True),  # a rank made by multiprocessing that has started CUDA
        (True, False, False, True, False),  # a process that may only load data: CUDA is not started there
        (True, True, True, True, False),
    ],
)
def test_where_memory_is_pinned(monkeypatch, available, initialized, worker, child, pinned):
    asked = []
    real = torch.empty

    def empty(*size, pin_memory=False, **options):
        asked.append(pin_memory)
        return real(*size, **options)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(channels_module, "get_worker_info", lambda: object() if worker else None)
    monkeypatch.setattr(channels_module.multiprocessing, "parent_process", lambda: object() if child else None)
    monkeypatch.setattr(torch, "empty", empty)
    assert ChannelRegistry(NAMES).encode(["web"]).tolist() == [2]
    assert asked == [pinned]


def test_native_encoder_checks_its_arguments():
    table = channels_module._C.NameTable()
    for slot in range(1000):
        table.insert(str(slot % 500), slot)  # a second insert takes the new id
    assert len(table) == 500
    ids = torch.empty(3, dtype=torch.int32)
    assert table.encode(["0", "499", "500"], ids.data_ptr(), -1, -1, "") == ([2], 0)
    assert ids[:2].tolist() == [500, 999]
    assert table.encode(["x", None, 5.0], ids.data_ptr(), 7, 8, "") == ([2], 1)
    assert ids[:2].tolist() == [8, 7]
    assert table.encode([499, "499", 2**63], ids.data_ptr(), 7, 8, "") == ([2], 0)
    assert ids[:2].tolist() == [999, 999]
    table.insert(b"\xff-499", 3)
    assert table.encode([-499, "-499", 499], ids.data_ptr(), -1, -1, b"\xff") == ([1, 2], 0)
    assert ids[0] == 3
    with pytest.raises(TypeError):
        table.encode("abc", ids.data_ptr(), -1, -1, "")


@pytest.mark.parametrize("grow", [False, True])
def test_integer_channels(encoder, grow):
    names = [0, 7, -7, 2**63 - 1, -(2**63), 2**63, 10**40]
    registry = ChannelRegistry(() if grow else names, grow=grow)
    assert registry.encode(names).tolist() == list(range(7))
    assert registry.encode(names[::-1]).tolist() == list(range(7))[::-1]
    if not grow:
        assert registry.encode([str(name) for name in names]).tolist() == list(range(7))
        assert registry.encode([8, 10**41]).tolist() == [8, 8]
        assert registry.unseen == 2


def test_build_info_names_the_version():
    info = channels_module._C.build_info()
    assert {"version", "compiler", "torch_version", "cuda_version", "cuda_architectures"} <= info.keys()
    assert info["version"].count(".") == 2
    assert info["cplusplus"] >= 201703


class Color(str, enum.Enum):
    RED = "red"


@pytest.mark.parametrize("native", [True, False])
def test_subclasses_of_str_go_by_their_str(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(channels_module, "_C", None)
    registry = ChannelRegistry([Color.RED, "blue"])
    assert registry.names[:2] == (str(Color.RED), "blue")
    assert registry.encode([Color.RED, "red", str(Color.RED)]).tolist() == [0, 3, 0]


def test_encode_ignores_the_default_device() -> None:
    with torch.device("meta"):
        assert ChannelRegistry(["a", "b"]).encode(["b", None, 7, object()]).device.type == "cpu"


def test_files_with_odd_lines(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("[web]\nmath\u2028x\n", encoding="utf-8")
    assert ChannelRegistry.from_file(path).names[:2] == ("[web]", "math\u2028x")
    assert ChannelRegistry.from_file(str(path).encode()).names[:1] == ("[web]",)
