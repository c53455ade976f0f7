import hashlib
import itertools
from pathlib import Path

import pytest
import torch

from scion_telemetry.demo import data as demo_data
from scion_telemetry.demo.data import batches, load_corpus, validation_batches

COUNT = torch.arange(200, dtype=torch.uint8)
"""Text in which every byte names its own position."""


def write_sources(root: Path, count: int, size: int = 100) -> None:
    for index in range(count):
        folder = root / ("b" if index % 2 else "a")
        folder.mkdir(exist_ok=True)
        (folder / f"m{index:03}.py").write_bytes(bytes([index]) * size)


def test_standard_library_fills_both_texts_from_different_files() -> None:
    corpus = load_corpus()
    assert len(corpus.train) == 2_000_000
    assert len(corpus.validation) == 65_536
    assert corpus.train.dtype is corpus.validation.dtype is torch.uint8
    assert not set(corpus.train_files) & set(corpus.validation_files)
    assert len(corpus.train_files) > 100
    assert len(corpus.validation_files) >= 4
    # It is Python source: the commonest bytes of any source text are these two.
    assert b"import" in bytes(corpus.train.tolist())
    assert torch.bincount(corpus.train.long()).argmax() == ord(" ")


def test_reading_again_gives_the_same_bytes_and_fingerprint() -> None:
    first, second = load_corpus(train_bytes=100_000), load_corpus(train_bytes=100_000)
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.validation, second.validation)
    assert first.fingerprint == second.fingerprint
    assert load_corpus(train_bytes=100_001).fingerprint != first.fingerprint


def test_texts_are_the_sorted_files_with_every_sixteenth_held_out(tmp_path: Path) -> None:
    write_sources(tmp_path, 40)
    corpus = load_corpus(root=tmp_path, train_bytes=250, validation_bytes=150)
    # Sorted: a/m000, a/m002, ..., a/m038, b/m001, ...; the files 0 and 16 in that order are held out.
    assert corpus.validation_files == ("a/m000.py", "a/m032.py")
    assert corpus.validation.tolist() == [0] * 100 + [32] * 50
    assert corpus.train_files == ("a/m002.py", "a/m004.py", "a/m006.py")
    assert corpus.train.tolist() == [2] * 100 + [4] * 100 + [6] * 50
    length = (250).to_bytes(8, "little")
    text = bytes(corpus.train.tolist()) + bytes(corpus.validation.tolist())
    assert corpus.fingerprint == hashlib.sha256(length + text).hexdigest()[:12]


def test_a_long_file_gives_no_more_than_an_excerpt(tmp_path: Path) -> None:
    write_sources(tmp_path, 4, size=3 * demo_data.EXCERPT)
    corpus = load_corpus(root=tmp_path, train_bytes=2 * demo_data.EXCERPT, validation_bytes=1)
    assert corpus.train_files == ("a/m002.py", "b/m001.py")


def test_tests_and_installed_packages_are_no_part_of_the_text(tmp_path: Path) -> None:
    for folder in ("test", "lib/tests", "site-packages/torch", "dist-packages", "__pycache__", "kept"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "m.py").write_text("pass\n")
    (tmp_path / "_sysconfigdata__linux.py").write_text("build = {}\n")
    (tmp_path / "notes.txt").write_text("no source\n")
    assert demo_data.source_files(tmp_path) == ["kept/m.py"]


def test_too_little_source_says_what_to_do(tmp_path: Path) -> None:
    write_sources(tmp_path, 4)
    with pytest.raises(RuntimeError, match=r"300 bytes found in 3 \.py files, 301 needed.*root="):
        load_corpus(root=tmp_path, train_bytes=301, validation_bytes=1)
    with pytest.raises(RuntimeError, match=r"python311\.zip.*0 bytes found.*lies on disk"):
        load_corpus(root=tmp_path / "python311.zip")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write_sources(tmp_path, 4)
    (tmp_path / "a" / "m002.py").unlink()
    (tmp_path / "a" / "m002.py").symlink_to(tmp_path / "gone")
    with pytest.raises(RuntimeError, match=r"'a/m002\.py' cannot be read"):
        load_corpus(root=tmp_path, train_bytes=100, validation_bytes=1)


@pytest.mark.parametrize("name", ["train_bytes", "validation_bytes"])
def test_sizes_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
        load_corpus(**{name: 0})


def test_a_window_is_followed_by_itself_shifted() -> None:
    for x, y in itertools.islice(batches(COUNT, batch=3, context=7), 20):
        assert x.shape == y.shape == (3, 7)
        assert x.dtype is y.dtype is torch.int64
        assert torch.equal(x, x[:, :1] + torch.arange(7))
        assert torch.equal(y, x + 1)


def test_windows_reach_both_ends_of_the_text() -> None:
    short = COUNT[:10]
    seen = {int(x[0, 0]) for x, _ in itertools.islice(batches(short, batch=1, context=7), 200)}
    assert seen == {0, 1, 2}


def test_ranks_share_out_the_windows_of_one_stream() -> None:
    whole = itertools.islice(batches(COUNT, batch=4, context=5, seed=3), 10)
    parts = [batches(COUNT, batch=2, context=5, rank=rank, world=2, seed=3) for rank in (0, 1)]
    for x, y in whole:
        (x0, y0), (x1, y1) = (next(part) for part in parts)
        assert torch.equal(x, torch.cat((x0, x1)))
        assert torch.equal(y, torch.cat((y0, y1)))
        assert not torch.equal(x0, x1)


def test_streams_are_deterministic_and_leave_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    first, second = (list(itertools.islice(batches(COUNT, batch=2, context=5, seed=1), 5)) for _ in range(2))
    other = list(itertools.islice(batches(COUNT, batch=2, context=5, seed=2), 5))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, second, strict=True))
    assert any(not torch.equal(a, b) for (a, _), (b, _) in zip(first, other, strict=True))
    assert torch.equal(before, torch.random.get_rng_state())


def test_validation_windows_are_fixed_and_disjoint() -> None:
    drawn = validation_batches(COUNT, batch=3, context=10, count=4)
    assert len(drawn) == 4
    starts = torch.cat([x[:, 0] for x, _ in drawn])
    assert starts.tolist() == [16 * index for index in range(12)]
    for (x, y), (again, _) in zip(drawn, validation_batches(COUNT, batch=3, context=10, count=4), strict=True):
        assert torch.equal(x, again)
        assert torch.equal(y, x + 1)


def test_ranks_share_out_the_validation_batches() -> None:
    whole = validation_batches(COUNT, batch=3, context=10, count=4)
    shares = [validation_batches(COUNT, batch=3, context=10, count=4, rank=rank, world=2) for rank in (0, 1)]
    assert torch.equal(torch.stack([x for x, _ in whole[0::2]]), torch.stack([x for x, _ in shares[0]]))
    assert torch.equal(torch.stack([x for x, _ in whole[1::2]]), torch.stack([x for x, _ in shares[1]]))


def test_validation_uses_the_text_to_its_end() -> None:
    drawn = validation_batches(COUNT[:61], batch=2, context=10, count=3)
    assert int(drawn[-1][1][-1, -1]) == 60
    with pytest.raises(ValueError, match="60 bytes, 61 are needed"):
        validation_batches(COUNT[:60], batch=2, context=10, count=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0, "context": 5}, "batch must be positive, got 0"),
        ({"batch": 1, "context": 0}, "context must be positive, got 0"),
        ({"batch": 1, "context": 5, "world": 0}, "world must be positive, got 0"),
        ({"batch": 1, "context": 5, "rank": 2, "world": 2}, r"rank must be in \[0, 2\), got 2"),
        ({"batch": 1, "context": 200}, "the text has 200 bytes, more than context=200"),
    ],
)
def test_bad_numbers_are_refused_before_the_first_batch(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batches(COUNT, **arguments)
    with pytest.raises(ValueError, match=message):
        validation_batches(COUNT, **arguments)


def test_validation_count_must_divide_among_the_ranks() -> None:
    with pytest.raises(ValueError, match="count must be a positive multiple of world=2, got 3"):
        validation_batches(COUNT, batch=1, context=5, count=3, world=2)
