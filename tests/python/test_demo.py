# SPDX-License-Identifier: Apache-2.0
"""The demo: where its text comes from, how it is packed, that documents stay apart, and a short run from end to end."""

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import segscatter
import torch

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"


@pytest.fixture
def demo(monkeypatch):
    """Imports a module of the demo, which is a folder that Python runs and not an installed package."""
    monkeypatch.syspath_prepend(str(DEMO))
    names = {path.stem for path in DEMO.glob("*.py")}
    yield importlib.import_module
    for name in names & set(sys.modules):
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(DEMO)):
            del sys.modules[name]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return path


def test_finds_files_of_matching_names_outside_skipped_folders(demo, tmp_path):
    corpus = demo("corpus")
    wanted = [write(tmp_path / "one" / "a.py", b"a"), write(tmp_path / "one" / "deep" / "b.py", b"b")]
    wanted.append(write(tmp_path / "two" / "c.pyi", b"c"))
    write(tmp_path / "one" / "test" / "d.py", b"d")
    write(tmp_path / "one" / "e.pyc", b"e")
    roots = (tmp_path / "two", tmp_path / "one", tmp_path / "one", tmp_path / "missing")
    source = corpus.Source("python", roots, ("*.py", "*.pyi"), frozenset({"test"}))
    assert corpus.find_files(source) == sorted(wanted)


@pytest.mark.parametrize(
    ("text", "documents"),
    [
        (b"", []),
        (b"short", [b"short"]),
        (
            b"a\n\nb\n\nlonger text\n\nend",
            [b"a\n\nb\n\n", b"longer text\n\n", b"end"],
        ),  # a alone is too short
        (b"line one\nline two\nline three\n", [b"line one\nline two\n", b"line three\n"]),
        (b"x" * 45, [b"x" * 20, b"x" * 20, b"x" * 5]),
    ],
)
def test_splits_at_blank_lines_then_line_ends_then_anywhere(demo, text, documents):
    assert demo("corpus").split(text, min_bytes=4, max_bytes=20) == documents


def test_split_loses_nothing_and_keeps_its_bounds(demo):
    corpus = demo("corpus")
    text = b"\n".join(bytes([97 + n % 26]) * (n * 37 % 90) for n in range(500))
    documents = corpus.split(text)
    assert b"".join(documents) == text
    assert all(0 < len(document) <= corpus.MAX_DOCUMENT_BYTES for document in documents)
    assert all(len(document) >= corpus.MIN_DOCUMENT_BYTES for document in documents[:-1])


def test_documents_depend_on_the_seed_only_and_come_once(demo, tmp_path):
    corpus = demo("corpus")
    for n in range(40):
        write(tmp_path / f"{n}.md", f"text {n} ".encode() * 100)
        write(tmp_path / f"{n}.copy.md", f"text {n} ".encode() * 100)
    write(tmp_path / "binary.md", b"\0" * 5000)
    source = corpus.Source("prose", (tmp_path,), ("*.md",))
    documents = corpus.load_documents(source, seed=1)
    assert len(documents) == len(set(documents)) == 40
    assert documents == corpus.load_documents(source, seed=1)
    assert documents != corpus.load_documents(source, seed=2)
    assert sorted(documents) == sorted(corpus.load_documents(source, seed=2))
    assert len(corpus.load_documents(source, seed=1, max_bytes=20_000)) < 40


def test_says_what_is_missing(demo, tmp_path):
    corpus = demo("corpus")
    write(tmp_path / "little.csv", b"1,2\n")
    source = corpus.Source("data", (tmp_path,), ("*.csv",))
    with pytest.raises(RuntimeError, match=r"'data': 4 bytes, wanted 16384.*\*\.csv in .*" + re.escape(str(tmp_path))):
        corpus.load_documents(source, seed=0)


def test_every_channel_is_found_here(demo):
    corpus = demo("corpus")
    sources = corpus.installed_sources()
    assert [source.channel for source in sources] == ["python", "cpp", "prose", "data"]
    assert all(corpus.load_documents(source, seed=0, max_bytes=100_000) for source in sources)


def test_packs_documents_in_order_without_loss(demo):
    packing = demo("packing")
    texts = [bytes([n + 1]) * (n * 7 % 19 + 1) for n in range(60)]
    documents = [packing.Document(f"channel {n % 3}", text) for n, text in enumerate(texts)]
    unpacked = []
    for row in packing.pack(iter(documents), 24):
        offsets = row.cu_seqlens.tolist()
        assert row.cu_seqlens.dtype == torch.int32
        assert row.tokens.shape == row.loss_mask.shape == (24,)
        assert offsets[0] == 0
        assert len(offsets) == len(row.channels) + 1
        for channel, begin, end in zip(row.channels, offsets, offsets[1:], strict=False):
            unpacked.append(packing.Document(channel, bytes(row.tokens[begin:end].tolist())))
            assert row.loss_mask[begin:end].tolist() == [False] + [True] * (end - begin - 1)
        assert not row.loss_mask[offsets[-1] :].any()
        assert not row.tokens[offsets[-1] :].any()
    assert unpacked == documents


def test_opens_a_row_only_when_a_document_does_not_fit(demo):
    packing = demo("packing")
    documents = [packing.Document("c", b"x" * n) for n in (4, 6, 7, 4, 10)]
    ends = [row.cu_seqlens.tolist() for row in packing.pack(iter(documents), 10)]
    assert ends == [[0, 4, 10], [0, 7], [0, 4], [0, 10]]


@pytest.mark.parametrize("length", [0, 11])
def test_refuses_documents_that_fit_no_row(demo, length):
    packing = demo("packing")
    with pytest.raises(ValueError, match=f"1 to 10 bytes, but one has {length}"):
        next(packing.pack(iter([packing.Document("c", b"x" * length)]), 10))


def test_mixes_channels_by_weight_and_gives_every_document_before_any_again(demo):
    packing = demo("packing")
    texts = {"a": [b"1", b"2", b"3"], "b": [b"4"], "c": [b"5"]}
    weights = {"a": 0.6, "b": 0.4, "c": 0.0}
    drawn = list(islice(packing.mix(texts, weights, seed=3), 3000))
    assert drawn == list(islice(packing.mix(texts, weights, seed=3), 3000))
    of_a = [document.text for document in drawn if document.channel == "a"]
    assert 0.55 < len(of_a) / len(drawn) < 0.65
    assert {document.channel for document in drawn} == {"a", "b"}
    assert all(sorted(of_a[n : n + 3]) == texts["a"] for n in range(0, len(of_a) - 2, 3))


def test_losses_of_a_document_do_not_depend_on_what_surrounds_it(demo):
    """Each document alone at a row's start must cost what it costs in the middle of a packed row."""
    packing, model = demo("packing"), demo("model")
    torch.manual_seed(0)
    language_model = model.ByteLM(dim=16, layers=3, heads=2, window=8)
    for parameter in language_model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # blocks start as the identity, which would hide a leak
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 5, 8, 17, 2, 30, 1, 9]
    documents = [packing.Document("c", bytes(torch.randint(256, (n,), generator=generator).tolist())) for n in lengths]
    [packed] = packing.pack(iter(documents), 80)
    with torch.no_grad():
        losses = language_model.token_losses(packed.tokens, packed.cu_seqlens)
        assert losses.shape == (80,)
        for document, begin in zip(documents, packed.cu_seqlens.tolist(), strict=False):
            [alone] = packing.pack(iter([document]), 32)
            expected = language_model.token_losses(alone.tokens, alone.cu_seqlens)[1 : len(document.text)]
            torch.testing.assert_close(losses[begin + 1 : begin + len(document.text)], expected)


def test_losses_do_not_depend_on_later_tokens(demo):
    model = demo("model")
    torch.manual_seed(0)
    language_model = model.ByteLM(dim=16, layers=2, heads=2, window=8)
    for parameter in language_model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(256, (32,))
    changed = tokens.clone()
    changed[20:] = (changed[20:] + 1) % 256
    cu_seqlens = torch.tensor([0, 32], dtype=torch.int32)
    with torch.no_grad():
        before, after = (language_model.token_losses(t, cu_seqlens) for t in (tokens, changed))
    torch.testing.assert_close(before[:20], after[:20])
    assert (before[20:] - after[20:]).abs().min() > 0


needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None,
    reason="the demo's picture needs matplotlib (examples/demo/requirements.txt)",
)


@needs_matplotlib
def test_three_steps_from_end_to_end(tmp_path):
    command = [sys.executable, str(DEMO), "--quick", "--steps", "3", "--out", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    table = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.endswith("%")}
    channels = set(table) - {"all"}
    assert channels <= {"python", "cpp", "prose", "data"}
    tokens = {name: int(fields[-2].replace(",", "")) for name, fields in table.items()}
    assert tokens["all"] == sum(tokens[channel] for channel in channels)
    assert 3 * 1024 < tokens["all"] < 3 * 2048
    assert all(0 < float(fields[1]) < 10 for fields in table.values())
    assert "counts equal" in result.stdout
    assert (tmp_path / "out" / "channel_losses.png").read_bytes().startswith(b"\x89PNG")


@needs_matplotlib
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda losses, mask: (losses * 1.001, mask), "sums differ by 1.0e-03"),
        (lambda losses, mask: (losses, torch.ones_like(mask)), "the tracker counted"),
    ],
    ids=["sums", "counts"],
)
def test_exit_code_tells_of_a_tracker_that_is_wrong(demo, tmp_path, monkeypatch, capsys, fault, message):
    update = segscatter.ChannelLossTracker.update
    monkeypatch.setattr(
        segscatter.ChannelLossTracker,
        "update",
        lambda self, losses, mask, ids, **more: update(self, *fault(losses, mask), ids, **more),
    )
    monkeypatch.setenv("OMP_WAIT_POLICY", os.environ.get("OMP_WAIT_POLICY", "PASSIVE"))  # the demo sets it
    main = runpy.run_path(str(DEMO / "__main__.py"))["main"]
    assert main(["--quick", "--steps", "3", "--out", str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert "FAILED" in output
    assert message in output
